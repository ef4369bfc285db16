"""LoRA on experts as it is uploaded: one adapter in every layout is one canonical file (case 6)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.config import MoeConfig
from engine.models.decoder import Decoder
from engine.weights.adapter import read_adapter
from tenants.adapters.gate import CanonicalAdapter, InvalidAdapter, canonicalise
from tenants.adapters.shape import AdapterShape, ExpertShape
from tests.adapter_files import Allowed, canonical_pairs, config, safetensors
from tests.expert_files import (
    ALPHA,
    EXPERTS,
    HIDDEN,
    LAYERS,
    NUM_EXPERTS,
    PARAMETERS,
    PREFIX,
    RANK,
    SCALE,
    SHAPE,
    TARGETS,
    WIDTH,
    Deltas,
    Layout,
    Tensors,
    as_peft_before,
    as_peft_now,
    deltas,
    fused,
    halves,
    per_expert,
    target_parameters,
)
from tests.tiny_moe import PLAIN, moe_logits, moe_weights
from tests.tiny_steps import Steps

MODEL = replace(PLAIN["mixtral"], moe=MoeConfig(NUM_EXPERTS, 2, WIDTH, renormalize=True, layers=LAYERS))

Upload = Callable[..., CanonicalAdapter]


@pytest.fixture
def upload(tmp_path: Path) -> Upload:
    """Puts tensors through the gate; the canonical file is ``tmp_path/out``."""

    def call(tensors: Tensors, *, shape: AdapterShape = SHAPE, dtype: str = "F32", **change: Any) -> CanonicalAdapter:
        source = tmp_path / "adapter_model.safetensors"
        source.write_bytes(safetensors(tensors, dtype))
        settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": []} | change
        return canonicalise(config(**settings), source, tmp_path / "out", shape, Allowed())

    return call


def refusal(upload: Upload, tensors: Tensors, **more: Any) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        upload(tensors, **more)
    return "\n".join(caught.value.reasons)


def merged(given: Deltas) -> dict[str, torch.Tensor]:
    weights = dict(moe_weights(MODEL))
    for (layer, parameter), delta in given.items():
        name = f"model.layers.{layer}.mlp.experts.{parameter}"
        weights[name] = weights[name] + torch.tensor(delta)
    return weights


def read_deltas(path: Path) -> Deltas:
    """A canonical file's deltas, on the fused parameters."""
    found: Deltas = {}
    for (layer, module), (a, b, scale) in canonical_pairs(path).items():
        _, expert, part = module.split(".")
        parameter = "down_proj" if part == "down_proj" else "gate_up_proj"
        num_in, num_out = PARAMETERS[parameter]
        whole = found.setdefault((layer, parameter), np.zeros((NUM_EXPERTS, num_out, num_in), np.float32))
        rows = {"gate_proj": slice(0, WIDTH), "up_proj": slice(WIDTH, None), "down_proj": slice(None)}[part]
        whole[int(expert), rows] = scale * b @ a
    return found


TOKENS = [5, 77, 131, 9, 250, 18]


def logits(given: Deltas) -> torch.Tensor:
    return moe_logits(MODEL, merged(given), TOKENS)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_all_layouts_of_one_adapter_are_one_canonical_file(upload: Upload, targets: tuple[str, ...]):
    named = target_parameters(targets)

    one_by_one = upload(per_expert(targets))
    mixtral = upload(per_expert(targets, is_mixtral=True))
    now = upload(fused(targets), target_parameters=named, peft_version="0.21.2")
    before = upload(fused(targets, as_peft_before), target_parameters=named[::-1], peft_version="0.18.1")

    assert one_by_one.sha256 == mixtral.sha256 == now.sha256 == before.sha256
    assert one_by_one.num_pairs == len(per_expert(targets)) // 2
    assert now.num_pairs == before.num_pairs == len(LAYERS) * len(targets)
    assert {one.lora_rank for one in (one_by_one, now, before)} == {RANK}
    assert now.warnings == before.warnings == ()
    parts = ("experts.gate_proj", "experts.up_proj") * ("gate_up_proj" in targets)
    assert now.target_modules == parts + ("experts.down_proj",) * ("down_proj" in targets)


@pytest.mark.parametrize("layout", [as_peft_now, as_peft_before])
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_a_fused_adapter_equals_the_merged_weights(
    upload: Upload, tmp_path: Path, targets: tuple[str, ...], layout: Layout
):
    upload(fused(targets, layout), target_parameters=target_parameters(targets))

    read = read_deltas(tmp_path / "out")

    expected = deltas(targets)
    assert read.keys() == expected.keys()
    for place, delta in expected.items():
        np.testing.assert_allclose(read[place], delta, atol=1e-5)
    assert float((logits(read) - logits(expected)).abs().max()) < 1e-4
    assert float((logits(read) - logits({})).abs().max()) > 0.1


def expert_fastest_in_a(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return a.transpose(1, 0, 2).reshape(-1, a.shape[2]), as_peft_now(a, b)[1]


def expert_slowest_in_b(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return as_peft_now(a, b)[0], b.transpose(1, 0, 2).reshape(b.shape[1], -1)


@pytest.mark.parametrize("layout", [expert_fastest_in_a, expert_slowest_in_b])
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_a_permuted_reshape_is_another_adapter(upload: Upload, tmp_path: Path, targets: tuple[str, ...], layout):
    """Were the reading itself permuted, these would be the equal ones and those above not."""
    right = upload(per_expert(targets)).sha256
    permuted = upload(fused(targets, layout), target_parameters=target_parameters(targets))

    assert permuted.sha256 != right
    assert float((logits(read_deltas(tmp_path / "out")) - logits(deltas(targets))).abs().max()) > 0.1


def test_the_engine_reads_what_is_written(upload: Upload, tmp_path: Path):
    accepted = upload(fused(TARGETS[2]), target_parameters=target_parameters(TARGETS[2]))

    weights = read_adapter(tmp_path / "out", accepted.sha256)

    parts = ("gate_proj", "up_proj", "down_proj")
    assert list(weights.pairs) == [
        (layer, f"experts.{e}.{part}") for layer in LAYERS for e in range(4) for part in parts
    ]
    assert weights.pairs[1, "experts.3.up_proj"].b.shape == (WIDTH, RANK)
    assert {pair.scale for pair in weights.pairs.values()} == {SCALE}


@pytest.mark.parametrize("layout", [as_peft_now, as_peft_before])
@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_the_engine_computes_what_the_merged_weights_do(
    upload: Upload, tmp_path: Path, targets: tuple[str, ...], layout: Layout
):
    accepted = upload(fused(targets, layout), target_parameters=target_parameters(targets))
    steps = Steps(Decoder(MODEL, moe_weights(MODEL)))
    steps.slots.load_slot(2, read_adapter(tmp_path / "out", accepted.sha256))

    base, adapted = steps.prefill([(TOKENS, -1), (TOKENS, 2)])

    torch.testing.assert_close(adapted.double(), logits(deltas(targets)), rtol=0, atol=1e-4)
    assert float((adapted - base).abs().max()) > 0.1


def test_items_keep_their_bits_in_every_dtype(upload: Upload):
    for dtype in ("F16", "BF16"):
        one_by_one = upload(per_expert(TARGETS[2]), dtype=dtype)
        assert upload(fused(TARGETS[2], as_peft_before), dtype=dtype).sha256 == one_by_one.sha256


def test_scales_follow_patterns_on_the_parameters_path_and_the_rank_of_one_expert(upload: Upload, tmp_path: Path):
    upload(
        fused(TARGETS[2]), target_parameters=target_parameters(TARGETS[2]), use_rslora=True,
        alpha_pattern={r".*\.gate_up_proj": 2, "model.layers.1.mlp.experts.down_proj": 3},
    )  # fmt: skip

    scales = {place: scale for place, (_, _, scale) in canonical_pairs(tmp_path / "out").items()}

    assert scales[0, "experts.2.gate_proj"] == scales[1, "experts.0.up_proj"] == pytest.approx(2 / 2**0.5)
    assert scales[0, "experts.2.down_proj"] == pytest.approx(ALPHA / 2**0.5)
    assert scales[1, "experts.2.down_proj"] == pytest.approx(3 / 2**0.5)


def test_gate_and_up_merged_by_peft_keep_only_their_own_ranks(upload: Upload):
    """Gate and up with an A each become one pair of twice the rank, alpha doubled, B block by block."""
    tensors = {name: np.random.default_rng(len(name) + i).normal(size=values.shape).astype(np.float32)
               for i, (name, values) in enumerate(per_expert(("gate_up_proj",)).items())}  # fmt: skip
    both: Tensors = {}
    for layer in LAYERS:
        a = np.zeros((NUM_EXPERTS, 2 * RANK, HIDDEN), np.float32)
        b = np.zeros((NUM_EXPERTS, 2 * WIDTH, 2 * RANK), np.float32)
        for expert in range(NUM_EXPERTS):
            for number, part in enumerate(("gate_proj", "up_proj")):
                name = f"{PREFIX}.{layer}.mlp.experts.{expert}.{part}.lora_"
                ranks = slice(number * RANK, (number + 1) * RANK)
                a[expert, ranks] = tensors[f"{name}A.weight"]
                b[expert, number * WIDTH : (number + 1) * WIDTH, ranks] = tensors[f"{name}B.weight"]
        first, second = as_peft_now(a, b)
        both |= {f"{PREFIX}.{layer}.mlp.experts.lora_A.weight": first}
        both |= {f"{PREFIX}.{layer}.mlp.experts.lora_B.weight": second}
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}, "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA}}

    merged_by_peft = upload(both, target_parameters=["gate_up_proj"], **patterns)

    assert merged_by_peft.warnings == ()
    assert merged_by_peft.sha256 == upload(tensors).sha256


# ── what can't be known, and what isn't there ────────────────────────────────────────────────────

SQUARE = AdapterShape(SHAPE.modules, 2, 16, experts=ExpertShape(NUM_EXPERTS, 2 * WIDTH, WIDTH, LAYERS, served=True))
SQUARE_SIZES = {"gate_up_proj": (2 * WIDTH, 2 * WIDTH)}


@pytest.mark.parametrize("version", [None, "", "main", "0.19.2.dev0", "0.20.0.dev0@UNKNOWN", 21])
def test_a_square_parameter_without_a_telling_version_is_refused(upload: Upload, version: Any):
    tensors = fused(("gate_up_proj",), sizes=SQUARE_SIZES)

    text = refusal(upload, tensors, shape=SQUARE, target_parameters=["mlp.experts.gate_up_proj"], peft_version=version)

    assert "peft_version is needed" in text
    assert "mlp.experts A [8, 24] and B [24, 8]" in text


@pytest.mark.parametrize(
    ("version", "layout"),
    [
        ("0.20.0", as_peft_now), ("0.21.2", as_peft_now), ("0.22.0.dev0", as_peft_now), ("1.0", as_peft_now),
        ("0.19.1", as_peft_before), ("0.18.0", as_peft_before), ("0.17.1.dev0", as_peft_before),
    ],
)  # fmt: skip
def test_the_version_tells_the_two_ways_round_of_a_square_parameter_apart(
    upload: Upload, tmp_path: Path, version: str, layout: Layout
):
    upload(fused(("gate_up_proj",), layout, SQUARE_SIZES), shape=SQUARE, peft_version=version)

    a, b = halves("gate_up_proj", 1, SQUARE_SIZES)
    low, high, _ = canonical_pairs(tmp_path / "out")[1, "experts.2.up_proj"]
    np.testing.assert_array_equal(low, a[2])
    np.testing.assert_array_equal(high, b[2, WIDTH:])


def test_a_version_that_the_shapes_contradict_is_a_warning(upload: Upload):
    accepted = upload(fused(("down_proj",), as_peft_before), peft_version="0.21.2")

    assert accepted.warnings == ("peft_version and the shapes of expert tensors disagree; the tensors count",)
    assert accepted.sha256 == upload(per_expert(("down_proj",))).sha256


def test_tensors_of_a_parameter_that_the_config_does_not_name_are_refused(upload: Upload):
    text = refusal(upload, fused(("down_proj",)), target_parameters=["mlp.experts.gate_up_proj"])

    assert "doesn't name what the tensors are of: model.layers.0.mlp.experts.down_proj" in text


def test_other_parameters_are_refused_by_name(upload: Upload):
    text = refusal(upload, fused(("down_proj",)), target_parameters=["experts.down_proj", "mlp.gate.weight"])

    assert "only experts' gate_up_proj and down_proj, not mlp.gate.weight" in text


def test_one_place_in_two_layouts_is_refused(upload: Upload):
    assert "two pairs for one place" in refusal(upload, per_expert(("down_proj",)) | fused(("down_proj",)))
    both = fused(("down_proj",)) | {
        name.replace("experts.", "experts.base_layer."): values for name, values in fused(("down_proj",)).items()
    }
    assert "two fused pairs for one parameter" in refusal(upload, both)


def test_shapes_that_fit_no_parameter_are_refused(upload: Upload):
    name = f"{PREFIX}.0.mlp.experts.lora_"
    for a, b in (((8, 31), (24, 8)), ((9, 32), (24, 9)), ((8, 32), (24, 6)), ((8, 32), (24,)), ((8, 32), (32, 8))):
        tensors = {f"{name}A.weight": np.ones(a, np.float32), f"{name}B.weight": np.ones(b, np.float32)}
        assert "don't fit the model's experts" in refusal(upload, tensors)


def test_experts_and_layers_that_the_model_has_not_are_listed(upload: Upload):
    shape = replace(SHAPE, experts=replace(EXPERTS, layers=(0,), num_experts=3))

    text = refusal(upload, per_expert(("down_proj",)), shape=shape)

    assert "experts that the model doesn't have" in text
    assert "layers.0.mlp.experts.3.down_proj.lora_A" in text
    assert "layers.1.mlp.experts.0.down_proj.lora_A" in text
    assert "layers.0.mlp.experts.2" not in text


def test_router_and_shared_expert_are_refused_by_name(upload: Upload):
    other = {
        f"{PREFIX}.0.mlp.{module}.lora_{side}.weight": np.ones((2, 2), np.float32)
        for module in ("gate", "shared_expert.up_proj") for side in "AB"
    }  # fmt: skip

    text = refusal(upload, per_expert(("down_proj",)) | other)

    assert "LoRA on the router is not supported" in text
    assert "LoRA on the shared expert is not supported" in text


def test_a_model_without_experts_refuses_them_and_their_parameters(upload: Upload):
    shape = replace(SHAPE, experts=None)
    q_proj = {f"{PREFIX}.0.self_attn.q_proj.lora_{side}.weight": np.ones(size, np.float32)
              for side, size in (("A", (2, 32)), ("B", (32, 2)))}  # fmt: skip

    lone = {f"{PREFIX}.0.mlp.experts.lora_A.weight": np.ones((8, 12), np.float32)}

    assert "experts that the model doesn't have" in refusal(upload, q_proj | lone, shape=shape)
    assert "the model has no experts" in refusal(upload, q_proj, shape=shape, target_parameters=["experts.down_proj"])


# ── an engine that doesn't compute them ──────────────────────────────────────────────────────────

UNSERVED = replace(SHAPE, experts=replace(EXPERTS, served=False))


@pytest.mark.parametrize("tensors", [fused(TARGETS[2]), per_expert(TARGETS[2])], ids=["fused", "per expert"])
def test_where_experts_take_no_adapters_the_upload_is_read_and_then_refused_by_name(upload: Upload, tensors: Tensors):
    text = refusal(upload, tensors, shape=UNSERVED)

    assert text == (
        "LoRA on experts (down_proj, gate_proj, up_proj in 2 layers) is not served with this model (its engine has no "
        "--expert-adapter-slots)"
    )


def test_what_else_is_wrong_with_them_is_said_beside_it(upload: Upload):
    tensors = fused(("down_proj",))
    tensors[f"{PREFIX}.1.mlp.experts.lora_A.weight"][0, 0] = np.inf

    text = refusal(upload, tensors, shape=replace(UNSERVED, max_lora_rank=1), use_dora=True)

    for named in ("is not served", "LoRA rank 2 is over the limit of 1", "NaN or infinite", "use_dora"):
        assert named in text


def test_experts_may_have_a_limit_of_rank_of_their_own(upload: Upload):
    limited = replace(SHAPE, experts=replace(EXPERTS, max_lora_rank=1))

    text = refusal(upload, fused(("down_proj",)), shape=limited)

    assert "LoRA on experts has rank 2, over the limit of 1 (--max-expert-adapter-rank" in text


def test_a_per_expert_adapter_of_a_large_model_stays_under_the_gates_bound():
    """Qwen3-30B-A3B: 48 layers of 128 experts."""
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (2048, 2048))
    shape = AdapterShape(attention, 48, 64, experts=ExpertShape(128, 2048, 768, range(48)))

    assert shape.max_tensors == 36_864 + 2 * 48 * 4


# ── PEFT itself ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_what_peft_saves_for_parameters_is_what_peft_computes(upload: Upload, tmp_path: Path, targets: tuple[str, ...]):
    from tests.peft_experts import saved_by_peft

    config_json, weights, computed = saved_by_peft(tmp_path / "peft", MODEL, moe_weights(MODEL), targets, RANK, ALPHA)

    accepted = canonicalise(config_json, weights, tmp_path / "out", SHAPE, Allowed())

    assert accepted.warnings == ()
    read = read_deltas(tmp_path / "out")
    assert read.keys() == computed.keys()
    for place, delta in computed.items():
        np.testing.assert_allclose(read[place], delta, atol=1e-6)


def test_per_expert_keys_that_peft_merges_and_saves_again_are_the_same_adapter(upload: Upload, tmp_path: Path):
    from tests.peft_experts import saved_again_by_peft

    rng = np.random.default_rng(5)
    tensors = {name: rng.normal(size=values.shape).astype(np.float32)
               for name, values in per_expert(TARGETS[2], is_mixtral=True).items()}  # fmt: skip
    settings = config(r=RANK, lora_alpha=ALPHA, target_modules=["w1", "w2", "w3"], inference_mode=True)
    again_json, again = saved_again_by_peft(
        tmp_path / "peft", MODEL, moe_weights(MODEL), settings, safetensors(tensors)
    )

    accepted = canonicalise(again_json, again, tmp_path / "out", SHAPE, Allowed())

    assert accepted.num_pairs == 2 * len(LAYERS)
    assert accepted.sha256 == upload(tensors).sha256
