"""The upload gate: what is taken, at which scale, and what is refused with which words."""

import hashlib
import json
import os
import pickle
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenants.adapters.gate import CanonicalAdapter, InvalidAdapter, canonicalise
from tenants.adapters.header import BadHeader, read_header
from tenants.adapters.patterns import Patterns, is_simple
from tenants.adapters.shape import AdapterShape
from tests.adapter_files import Allowed, config, container, encode, listed, safetensors, scales

ROOT = Path(__file__).parents[3]
MODULES = {
    "q_proj": (32, 32),
    "k_proj": (32, 16),
    "v_proj": (32, 16),
    "o_proj": (32, 32),
    "gate_proj": (32, 64),
    "up_proj": (32, 64),
    "down_proj": (64, 32),
}
SHAPE = AdapterShape(MODULES, num_layers=2, max_lora_rank=64, served_models=frozenset({"tiny"}))
PREFIX = "base_model.model.model."


# ── making uploads ───────────────────────────────────────────────────────────────────────────────


def path_of(module: str) -> str:
    return f"mlp.{module}" if module in ("gate_proj", "up_proj", "down_proj") else f"self_attn.{module}"


def pair(layer: int, module: str, rank: int = 4, prefix: str = PREFIX, seed: int = 0) -> dict[str, np.ndarray]:
    in_size, out_size = MODULES.get(module, (32, 32))
    rng = np.random.default_rng([seed, layer, len(module)])
    name = f"{prefix}layers.{layer}.{path_of(module)}"
    return {
        f"{name}.lora_A.weight": rng.normal(size=(rank, in_size)).astype(np.float32),
        f"{name}.lora_B.weight": rng.normal(size=(out_size, rank)).astype(np.float32),
    }


def pairs(*modules: str, rank: int = 4, prefix: str = PREFIX, seed: int = 0) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for layer in range(2):
        for module in modules:
            tensors |= pair(layer, module, rank, prefix, seed)
    return tensors


Upload = Callable[..., CanonicalAdapter]


@pytest.fixture
def upload(tmp_path: Path) -> Upload:
    """Puts an upload through the gate; the canonical file is ``tmp_path/out``."""

    def call(
        weights: bytes | dict[str, np.ndarray], settings: bytes = config(), *, shape=SHAPE, limits=None
    ) -> CanonicalAdapter:
        source = tmp_path / "adapter_model.safetensors"
        source.write_bytes(weights if isinstance(weights, bytes) else safetensors(weights))
        return canonicalise(settings, source, tmp_path / "out", shape, limits or Allowed())

    return call


def refusal(upload: Upload, weights: bytes | dict[str, np.ndarray], settings: bytes = config(), **more: Any) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        upload(weights, settings, **more)
    assert caught.value.reasons
    return "\n".join(caught.value.reasons)


# ── the canonical file ───────────────────────────────────────────────────────────────────────────


def test_an_accepted_upload_reports_as_many_pairs_as_the_file_holds(upload: Upload, tmp_path: Path):
    accepted = upload(pairs("v_proj", "q_proj", "down_proj"))

    assert accepted.num_pairs == 6
    assert accepted.target_modules == ("q_proj", "v_proj", "down_proj")
    assert accepted.lora_rank == 4
    assert accepted.warnings == ()
    assert [entry[:3] for entry in listed(tmp_path / "out")] == [
        [layer, module, 4] for layer in range(2) for module in ("q_proj", "v_proj", "down_proj")
    ]


def test_the_hash_and_size_are_those_of_the_canonical_file(upload: Upload, tmp_path: Path):
    accepted = upload(pairs("q_proj"))
    content = (tmp_path / "out").read_bytes()

    assert accepted.sha256 == hashlib.sha256(content).hexdigest()
    assert accepted.size_bytes == len(content)
    assert struct.unpack_from("<Q", content)[0] % 8 == 0


def test_equal_content_has_one_hash_whatever_the_order_the_prefix_and_the_config_say(upload: Upload):
    tensors = pairs("q_proj", "v_proj")
    first = upload(tensors).sha256

    assert upload(dict(reversed(tensors.items()))).sha256 == first
    assert upload(pairs("q_proj", "v_proj", prefix="")).sha256 == first
    assert upload(tensors, config(lora_dropout=0.3, target_modules=["x"], revision="main")).sha256 == first
    assert upload(tensors, config(use_rslora=True, lora_alpha=4)).sha256 == first  # the same scale: 4/√4 = 8/4


def test_another_scale_number_or_dtype_is_another_hash(upload: Upload):
    tensors = pairs("q_proj")
    other = {name: values.copy() for name, values in tensors.items()}
    next(iter(other.values()))[0, 0] += 1

    hashes = {
        upload(tensors).sha256,
        upload(other).sha256,
        upload(tensors, config(lora_alpha=9)).sha256,
        upload(safetensors(tensors, "BF16")).sha256,
        upload(safetensors(tensors, "F16")).sha256,
        upload(pair(0, "q_proj")).sha256,
        upload(pair(1, "q_proj")).sha256,
    }

    assert len(hashes) == 7


def test_tensor_bytes_are_copied_as_they_came(upload: Upload, tmp_path: Path):
    tensors = pair(1, "k_proj")
    upload(safetensors(tensors, "BF16"))

    expected = b"".join(encode(values, "BF16") for values in tensors.values())
    assert (tmp_path / "out").read_bytes().endswith(expected)


@pytest.mark.parametrize("name", ["pirate", "support"])
def test_the_demo_adapters_pass_the_gate(name: str, tmp_path: Path):
    sizes = {"q_proj": (576, 576), "k_proj": (576, 192), "v_proj": (576, 192), "o_proj": (576, 576)}
    shape = AdapterShape(sizes, 30, 64, frozenset({"SmolLM2-135M-Instruct"}))
    folder = ROOT / "gateway" / "demo" / name
    settings = (folder / "adapter_config.json").read_bytes()

    accepted = canonicalise(settings, folder / "adapter_model.safetensors", tmp_path / "out", shape, Allowed())

    assert accepted.num_pairs == {"pirate": 60, "support": 120}[name]
    assert accepted.warnings == ()
    assert set(scales(tmp_path / "out").values()) == {2.0}


def test_memory_stays_bounded_for_a_large_file(tmp_path: Path):
    shape = AdapterShape({"q_proj": (262_144, 32)}, 2, 64)
    weights = tmp_path / "w"
    name = f"{PREFIX}layers.0.self_attn.q_proj.lora_"
    weights.write_bytes(
        safetensors({f"{name}A.weight": np.ones((64, 262_144)), f"{name}B.weight": np.ones((32, 64))}, "F16")
    )

    tracemalloc.start()
    accepted = canonicalise(config(), weights, tmp_path / "out", shape, Allowed(64, 1 << 30))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert accepted.size_bytes > 32 << 20
    assert peak_bytes < 12 << 20


# ── case 1: scale ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("use_rslora", "scale"), [(True, 4.0), (False, 1.0)])
def test_the_scale_is_alpha_over_rank_or_over_its_root_when_rank_stabilised(
    upload: Upload, tmp_path: Path, use_rslora: bool, scale: float
):
    upload(pairs("q_proj", rank=16), config(r=16, lora_alpha=16, use_rslora=use_rslora))

    assert set(scales(tmp_path / "out").values()) == {scale}


def test_the_rank_comes_from_the_tensor_and_a_config_that_differs_is_a_warning(upload: Upload, tmp_path: Path):
    accepted = upload(pairs("q_proj", rank=8), config(r=4, lora_alpha=16))

    assert set(scales(tmp_path / "out").values()) == {2.0}
    assert accepted.warnings == ("the config says rank 4 where tensors have 8; the tensors count",)


def test_missing_rank_and_alpha_are_pefts_defaults(upload: Upload, tmp_path: Path):
    upload(pairs("q_proj", rank=8), b'{"peft_type": "LORA", "init_lora_weights": true}')

    assert set(scales(tmp_path / "out").values()) == {1.0}


def test_another_base_model_name_is_a_warning(upload: Upload):
    assert upload(pairs("q_proj"), config(base_model_name_or_path="org/Tiny")).warnings == ()
    assert "org/other" in upload(pairs("q_proj"), config(base_model_name_or_path="org/other")).warnings[0]


# ── patterns ─────────────────────────────────────────────────────────────────────────────────────

Q0, Q10 = "model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("q_proj", Q0, True),
        ("proj", Q0, False),  # a suffix begins at a dot
        ("self_attn.q_proj", Q0, True),
        (r"self_attn\.q_proj", Q0, True),
        ("layers.0.self_attn.q_proj", Q10, False),
        ("model.layers.0.self_attn.q_proj", Q0, True),
        ("^model.layers.0.self_attn.q_proj", Q0, True),
        ("^layers.0.self_attn.q_proj", Q0, False),
        ("q_proj$", Q0, True),
        (r".*\.q_proj", Q0, True),
        (r".*q_proj$", Q0, True),
        (r".*\.0\..*", Q0, True),
        (r".*\.0\..*", Q10, False),
        (r"^model\.layers\.0\..*", Q0, True),
        (r"layers\.0\..*q_proj", Q0, True),
        (r"layers\.0\..*q_proj", Q10, False),
        (r".*v_proj.*", Q0, False),
        ("q_proj.*q_proj", Q0, False),  # texts may not overlap
        (r".*self.*attn.*q.*", Q0, True),
        ("self.attn.q.proj", Q0, True),  # a bare dot is any character
        (r"self\.attn.q.proj", Q0, False),
        ("layers.1..*", Q10, True),
        (r"layers\.1\..*", Q10, False),
        ("", Q0, False),
    ],
)
def test_patterns_match_as_peft_matches_them(pattern: str, path: str, matches: bool):
    assert is_simple(pattern) is bool(pattern)
    if pattern:
        assert (Patterns([pattern]).find(path) is not None) is matches


TOKENS = ("model", "layers", "0", "1", "10", "self_attn", "q_proj", "experts", "up_proj", "_", ".", r"\.", ".*", "a")
PATHS = [
    f"{prefix}layers.{layer}.{module}"
    for prefix in ("model.", "") for layer in (0, 1, 10, 110)
    for module in ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.gate_up_proj", "mlp.experts.1.up_proj")
]  # fmt: skip


def random_pattern(rng: random.Random) -> str:
    """A piece of a path that was changed in one place, or tokens in a row."""
    if rng.random() < 0.5:
        return "".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 6)))
    path = rng.choice(PATHS)
    pattern = path[rng.randrange(len(path)) :]
    first = rng.randrange(len(pattern))
    last = rng.randrange(first, len(pattern) + 1)
    return rng.choice(["", "^"]) + pattern[:first] + rng.choice(TOKENS) + pattern[last:] + rng.choice(["", "$"])


def test_random_patterns_find_what_pefts_expressions_find():
    rng, num_found = random.Random(0), 0
    for _ in range(5000):
        patterns = list(dict.fromkeys(filter(is_simple, (random_pattern(rng) for _ in range(3)))))
        path = rng.choice(PATHS)
        expected = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", path)), None)
        assert Patterns(patterns).find(path) == expected, (patterns, path)
        num_found += expected is not None

    assert num_found > 300


def test_thousands_of_whole_paths_are_looked_up_and_many_different_forms_are_refused(upload: Upload):
    paths = {f"model.layers.{layer}.{path_of(module)}": 4 for layer in range(1000) for module in MODULES}
    forms = {"." * index + "b": 4 for index in range(129)}
    gaps = {f"a{index}" + ".*b" * 40: 4 for index in range(4)}

    assert upload(pairs("q_proj"), config(alpha_pattern=paths)).num_pairs == 2
    for patterns in (forms, gaps):
        text = refusal(upload, pairs("q_proj"), config(alpha_pattern=patterns, rank_pattern=patterns))
        assert "alpha_pattern: patterns of too many different forms" in text
        assert "rank_pattern: patterns of too many different forms" in text


def test_the_first_pattern_in_the_order_written_counts():
    assert Patterns([r".*\.q_proj", "q_proj"]).find(Q0) == r".*\.q_proj"
    assert Patterns(["q_proj", r".*\.q_proj"]).find(Q0) == "q_proj"
    assert Patterns(["self_attn.q_proj", "q_proj"]).find(Q0) == "self_attn.q_proj"


def test_hostile_wildcards_cost_no_time_to_speak_of():
    path = "a" * 120
    patterns = Patterns([".*a" * 80 + "b", "a.*" * 80 + "b"])

    assert patterns.find(path) is None  # a backtracking matcher wouldn't come back


def test_alpha_and_rank_patterns_give_modules_their_own_scale(upload: Upload, tmp_path: Path):
    tensors = pairs("q_proj", rank=8) | pairs("v_proj", "gate_proj")
    patterns = {"alpha_pattern": {"q_proj": 32, r".*\.1\.mlp\..*": 2}, "rank_pattern": {"q_proj": 8}}

    accepted = upload(tensors, config(**patterns))

    assert accepted.warnings == ()
    assert accepted.lora_rank == 8
    assert scales(tmp_path / "out") == {
        (0, "q_proj"): 4.0, (0, "v_proj"): 2.0, (0, "gate_proj"): 2.0,
        (1, "q_proj"): 4.0, (1, "v_proj"): 2.0, (1, "gate_proj"): 0.5,
    }  # fmt: skip


def test_an_unused_pattern_is_a_warning(upload: Upload):
    accepted = upload(pairs("q_proj"), config(alpha_pattern={"k_proj": 2}, rank_pattern={"layers.7.x": 2}))

    assert accepted.warnings == (
        "rank_pattern: no module matches layers.7.x",
        "alpha_pattern: no module matches k_proj",
    )


@pytest.mark.parametrize(
    "pattern", ["(q|k)_proj", r"layers\.\d+\.x", "[qk]_proj", "q+", "q?", "a{3}", "q_proj|x", r"\w"]
)
def test_any_other_regex_is_refused_by_name(upload: Upload, pattern: str):
    text = refusal(upload, pairs("q_proj"), config(alpha_pattern={pattern: 2}))

    assert text.startswith("alpha_pattern: only literal suffixes")
    assert pattern.replace("\\", "\\\\") in text


# ── targets: what the config says of the places ──────────────────────────────────────────────────

FULL_PATHS = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r"(a+)+$"},
        {"target_modules": FULL_PATHS},
        {"target_modules": ["q_proj"], "exclude_modules": "k_proj"},
        {"target_modules": []},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": []},
    ],
    ids=str,
)
def test_targets_in_every_form_leave_the_binding_to_the_tensors(upload: Upload, change: dict):
    accepted = upload(pairs("q_proj"), config(**change))

    assert (accepted.num_pairs, accepted.warnings) == (2, ())


def test_targets_and_tensors_that_disagree_are_a_warning(upload: Upload):
    assert upload(pairs("q_proj"), config(target_modules=["q_proj", "lm_head"])).warnings == (
        "target_modules: the file has nothing of lm_head",
    )
    assert upload(pairs("q_proj", "v_proj"), config(target_modules=FULL_PATHS)).warnings == (
        "target_modules doesn't name v_proj; the tensors count",
    )
    assert upload(pairs("q_proj"), config(layers_to_transform=1)).warnings == ("layers_to_transform doesn't name 0",)
    assert upload(pair(1, "q_proj"), config(layers_to_transform=[1])).warnings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", 7),
        ("target_modules", ["q_proj", None]),
        ("target_modules", {"q_proj": 1}),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [True]),
        ("target_parameters", "mlp.experts"),
        ("target_parameters", [1]),
    ],
)
def test_targets_of_another_type_are_refused_by_name(upload: Upload, key: str, value: Any):
    assert f"{key}: " in refusal(upload, pairs("q_proj"), config(**{key: value}))


# ── case 2: keys ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.", "model.", ""])
def test_documented_prefixes_bind_to_the_same_places(upload: Upload, tmp_path: Path, prefix: str):
    expected = upload(pairs("q_proj", "up_proj")).sha256

    assert upload(pairs("q_proj", "up_proj", prefix=prefix)).sha256 == expected


@pytest.mark.parametrize(
    "prefix", ["base_model.model.model.model.", "base_model.model.language_model.model.", "base_model.", "x."]
)
def test_a_prefix_with_a_part_too_many_is_refused_and_the_keys_listed(upload: Upload, tmp_path: Path, prefix: str):
    text = refusal(upload, pairs("q_proj", prefix=prefix))

    assert "keys that match no module" in text
    assert f"{prefix}layers.1.self_attn.q_proj.lora_A.weight" in text
    assert not (tmp_path / "out").exists()


def test_an_adapters_name_inside_the_keys_is_no_matter(upload: Upload):
    tensors = pairs("q_proj")
    named = {name.replace(".weight", ".default.weight"): values for name, values in tensors.items()}

    assert upload(named).sha256 == upload(tensors).sha256


def test_two_adapters_in_one_file_are_refused(upload: Upload):
    first, second = pair(0, "q_proj"), pair(1, "q_proj")
    named = {name.replace(".weight", ".a.weight"): values for name, values in first.items()}
    named |= {name.replace(".weight", ".b.weight"): values for name, values in second.items()}

    assert "several adapters" in refusal(upload, named)


def test_unknown_layers_and_modules_are_listed_beside_the_good_ones(upload: Upload):
    tensors = pair(0, "q_proj") | pair(99, "q_proj") | pair(0, "router")

    text = refusal(upload, tensors)

    assert "layers.99.self_attn.q_proj.lora_A.weight" in text
    assert "layers.0.self_attn.router.lora_B.weight" in text
    assert "layers.0.self_attn.q_proj" not in text


def test_layer_numbers_have_one_spelling(upload: Upload):
    tensors = {name.replace("layers.1", "layers.01"): values for name, values in pair(1, "q_proj").items()}

    assert "layers.01" in refusal(upload, tensors)


def test_two_spellings_of_one_place_are_refused(upload: Upload):
    assert "two tensors for one place" in refusal(upload, pair(0, "q_proj") | pair(0, "q_proj", prefix="model."))


# ── case 3: full weights and other kinds ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("base_model.model.lm_head.weight", (40, 32), "full weights (modules_to_save)"),
        ("base_model.model.model.embed_tokens.weight", (40, 32), "full weights (modules_to_save)"),
        ("base_model.model.lm_head.base_layer.weight", (40, 32), "full weights (modules_to_save)"),
        ("base_model.model.lm_head.lora_A.weight", (4, 32), "LoRA on the embedding or lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 40), "LoRA on the embedding"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_magnitude_vector", (32,), "use_dora"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_B.bias", (32,), "lora_bias"),
        (f"{PREFIX}layers.0.self_attn.q_proj.lora_E", (4, 1), "AdaLoRA"),
        (f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta", (4, 32), "trainable_token_indices"),
        (f"{PREFIX}layers.0.mlp.experts.0.w1.lora_A.weight", (4, 32), "LoRA on experts"),
        (f"{PREFIX}layers.0.mlp.experts.base_layer.lora_A.weight", (4, 32), "LoRA on experts"),
        (f"{PREFIX}layers.0.input_layernorm.weight", (32,), "full weights (modules_to_save)"),
    ],
)
def test_what_is_more_than_low_rank_pairs_is_refused_by_its_kind(
    upload: Upload, name: str, shape: tuple[int, ...], named: str
):
    text = refusal(upload, pairs("q_proj") | {name: np.ones(shape, np.float32)})

    assert named in text
    assert name in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head", "embed_tokens"]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("use_qalora", True),
        ("use_bdlora", {"a": 1}),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("corda_config", {"a": 1}),
        ("kasa_config", {"a": 1}),
        ("lora_ga_config", {"a": 1}),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_config", {"a": 1}),
        ("monteclora_config", {"a": 1}),
        ("velora_config", {"a": 1}),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", 1),
        ("task_type", "SEQ_CLS"),
        ("lora_alpha", 0),
        ("lora_alpha", -1),
        ("lora_alpha", "8"),
        ("lora_alpha", 1e300),
        ("lora_alpha", None),
        ("r", None),
        ("r", 0),
        ("r", True),
        ("use_rslora", "yes"),
        ("rank_pattern", [1]),
        ("alpha_pattern", {"q_proj": "x"}),
        ("a_key_of_the_future", True),
        ("another_future_key", 0),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_the_keys_name(upload: Upload, key: str, value: Any):
    assert key in refusal(upload, pairs("q_proj"), config(**{key: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"modules_to_save": []},
        {"modules_to_save": None},
        {"bias": None},
        {"use_rslora": None, "rank_pattern": None, "target_modules": None, "target_parameters": None},
        {"a_key_of_the_future": None},
        {"another": False},
        {"loftq_config": {}},
        {"target_parameters": []},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"target_modules": r".*(q|v)_proj$"},
        {"qalora_group_size": 16, "megatron_core": "megatron.core", "peft_version": "0.21.2"},
    ],
    ids=str,
)
def test_empty_and_training_only_keys_change_nothing(upload: Upload, change: dict):
    assert upload(pairs("q_proj"), config(**change)).num_pairs == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "adapter_config.json"),
        (b"[]", "not an object"),
        (b"\xff{}", "utf-8"),
        (b'{"r": 4, "r": 8}', "duplicate key r"),
        (b'{"r": NaN}', "NaN"),
        (b'{"lora_alpha": Infinity}', "Infinity"),
        (b'{"r": ' + b"9" * 5000 + b"}", "adapter_config.json"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"x": "' + b"a" * (1 << 20) + b'"}', "bytes"),
    ],
)
def test_a_hostile_config_is_refused(upload: Upload, text: bytes, named: str):
    assert named in refusal(upload, pairs("q_proj"), text)


# ── case 4: limits ───────────────────────────────────────────────────────────────────────────────


def test_a_rank_over_the_limit_is_refused_naming_rank_and_limit_and_the_next_upload_works(upload: Upload):
    text = refusal(upload, pairs("q_proj", rank=64), config(r=64))

    assert "rank 64" in text
    assert "limit of 16" in text
    assert upload(pairs("q_proj", rank=8)).num_pairs == 2
    assert upload(pairs("q_proj", rank=16)).lora_rank == 16


def test_the_lower_of_the_models_and_the_tenants_rank_limit_counts(upload: Upload):
    shape = AdapterShape(MODULES, 2, max_lora_rank=8)

    assert "limit of 8" in refusal(upload, pairs("q_proj", rank=16), shape=shape, limits=Allowed(64))


def test_a_rank_over_the_limit_is_said_beside_all_else(upload: Upload):
    text = refusal(upload, pairs("q_proj", rank=17) | pair(9, "k_proj"), config(r=17, use_dora=True))

    for named in ("LoRA rank 17 is over the limit of 16", "use_dora", "layers.9"):
        assert named in text


def test_a_file_over_the_tenants_bytes_is_refused_unread(upload: Upload):
    assert "1000 are allowed" in refusal(upload, pairs("q_proj"), limits=Allowed(max_adapter_bytes=1000))


def test_all_reasons_come_at_once(upload: Upload):
    tensors = pairs("q_proj") | pair(9, "q_proj") | {"base_model.model.lm_head.weight": np.ones((4, 4), np.float32)}
    next(iter(tensors.values()))[0, 0] = np.nan
    del tensors[f"{PREFIX}layers.1.self_attn.q_proj.lora_B.weight"]

    text = refusal(upload, tensors, config(use_dora=True, bias="all", future=1))

    for named in ("use_dora", "bias", "future", "layers.9", "full weights", "half pairs", "NaN"):
        assert named in text


# ── case 7: partial ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("q_proj", "k_proj", "o_proj"), ("gate_proj",)])
def test_any_subset_of_modules_and_layers_is_taken(upload: Upload, modules: tuple[str, ...]):
    assert upload(pairs(*modules)).target_modules == modules
    assert upload(pair(1, modules[0])).num_pairs == 1


def test_pairs_of_different_ranks_keep_their_own(upload: Upload, tmp_path: Path):
    accepted = upload(pair(0, "q_proj", rank=4) | pair(0, "v_proj", rank=8), config(rank_pattern={"v_proj": 8}))

    assert accepted.lora_rank == 8
    assert [entry[2] for entry in listed(tmp_path / "out")] == [4, 8]


def test_half_a_pair_and_shapes_that_do_not_fit_are_refused_by_name(upload: Upload):
    name = f"{PREFIX}layers.0.self_attn.q_proj.lora_"
    good = pair(0, "q_proj")

    assert f"{name}A.weight" in refusal(upload, {f"{name}A.weight": good[f"{name}A.weight"]})
    for half, shape in (
        ("A", (4, 31)),
        ("A", (5, 32)),
        ("B", (31, 4)),
        ("B", (4, 32)),
        ("A", (4, 32, 1)),
        ("B", (32,)),
    ):
        text = refusal(upload, good | {f"{name}{half}.weight": np.ones(shape, np.float32)})
        assert "shapes that don't fit" in text


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(upload: Upload, dtype: str, bad: float):
    tensors = pairs("q_proj")
    name = f"{PREFIX}layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][31, 3] = bad

    text = refusal(upload, safetensors(tensors, dtype))

    assert f"NaN or infinite: {name}" in text


@pytest.mark.parametrize(("dtype", "bits"), [("F32", 0x7FA00000), ("F16", 0x7D00), ("BF16", 0x7FA0)])
def test_a_signalling_nan_is_one_too(upload: Upload, dtype: str, bits: int):
    content = bytearray(safetensors(pair(0, "q_proj"), dtype))
    size = 4 if dtype == "F32" else 2
    content[-size:] = bits.to_bytes(size, "little")

    assert "NaN or infinite" in refusal(upload, bytes(content))


def test_an_enormous_value_is_refused(upload: Upload):
    tensors = pairs("q_proj")
    tensors[f"{PREFIX}layers.1.self_attn.q_proj.lora_B.weight"][0, 0] = 1e30

    assert "in magnitude" in refusal(upload, tensors)


def test_a_product_beyond_measure_is_refused_and_names_its_module(upload: Upload):
    tensors = pairs("q_proj")
    for side in "AB":
        tensors[f"{PREFIX}layers.1.self_attn.q_proj.lora_{side}.weight"] *= 300

    text = refusal(upload, tensors)

    assert text == "scale · ‖B‖ · ‖A‖ is over 1e+06 at model.layers.1.self_attn.q_proj"
    assert "is over 1e+06 at" in refusal(upload, pairs("q_proj"), config(lora_alpha=65_536))
    assert "lora_alpha: 65537 is out of range" in refusal(upload, pairs("q_proj"), config(lora_alpha=65_537))


def test_an_adapter_that_would_change_nothing_is_refused(upload: Upload):
    tensors = pairs("q_proj")
    untrained = {name: values * (0 if "lora_B" in name else 1) for name, values in tensors.items()}
    trained = untrained | {name: values for name, values in pair(0, "q_proj").items() if "lora_B" in name}

    assert "would change nothing" in refusal(upload, untrained)
    assert upload(trained).num_pairs == 2


# ── case 8: hostile files ────────────────────────────────────────────────────────────────────────

A = f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight"
F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


class Marker:
    def __reduce__(self):
        return os.mkdir, ("marker",)


HOSTILE = {
    "empty file": b"",
    "no tensors": container({}),
    "pickle": pickle.dumps(Marker()) + bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
    "duplicate keys": container(b'{"a":%s,"a":%s}' % ((json.dumps(F4).encode(),) * 2), bytes(4)),
    "duplicate keys, two ranges": container(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "duplicate field": container(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "overlap": container({"a": F4, "b": F4}, bytes(4)),
    "hole": container({"a": F4 | {"data_offsets": [4, 8]}}, bytes(8)),
    "hole between": container({"a": F4, "b": F4 | {"data_offsets": [8, 12]}}, bytes(12)),
    "trailing bytes": container({"a": F4}, bytes(4) + b"PK\x03\x04"),
    "too short": container({"a": F4}, bytes(3)),
    "shape and bytes differ": container({"a": F4 | {"shape": [2]}}, bytes(4)),
    "overflowing shape": container({"a": F4 | {"shape": [2**61, 2**61]}}, bytes(4)),
    "more than 64 bits": container({"a": F4 | {"shape": [2**65]}}, bytes(4)),
    "zero size": container({"a": {"dtype": "F32", "shape": [0, 2**61], "data_offsets": [0, 0]}}),
    "negative size": container({"a": F4 | {"shape": [-1]}}, bytes(4)),
    "negative offset": container({"a": F4 | {"data_offsets": [-4, 0]}}, bytes(4)),
    "no dimensions": container({"a": F4 | {"shape": []}}, bytes(4)),
    "five dimensions": container({"a": F4 | {"shape": [1] * 5}}, bytes(4)),
    "boolean size": container({"a": F4 | {"shape": [True]}}, bytes(4)),
    "float size": container({"a": F4 | {"shape": [1.0]}}, bytes(4)),
    "text size": container({"a": F4 | {"shape": ["1"]}}, bytes(4)),
    "three offsets": container({"a": F4 | {"data_offsets": [0, 4, 4]}}, bytes(4)),
    "extra field": container({"a": F4 | {"x": 1}}, bytes(4)),
    "missing field": container({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "entry is no object": container({"a": [1]}, bytes(4)),
    "header length 2^63": container({"a": F4}, bytes(4), length=2**63),
    "header length over the file": container({"a": F4}, bytes(4), length=1000),
    "header length 0": container(b"", bytes(4)),
    "path as name": container({"../../etc/passwd": F4}, bytes(4)),
    "control characters in a name": container({"a\0\n\u202e": F4}, bytes(4)),
    "empty name": container({"": F4}, bytes(4)),
    "long name": container({"a" * 300: F4}, bytes(4)),
    "name ending in a newline": container({"a\n": F4}, bytes(4)),
    "deep metadata": container(b'{"__metadata__":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "metadata of numbers": container({"__metadata__": {"a": 1}, "a": F4}, bytes(4)),
    "metadata is a list": container({"__metadata__": [], "a": F4}, bytes(4)),
    "unknown dtype": container({"a": F4 | {"dtype": "F13"}}, bytes(4)),
    "integer dtype": container({"a": F4 | {"dtype": "I32"}}, bytes(4)),
    "dtype is a list": container({"a": F4 | {"dtype": ["F32"]}}, bytes(4)),
    "many empty tensors": container({f"w{i}": F4 | {"shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}),
    "large metadata": container({"__metadata__": {"x": "a" * (2 << 20)}}),
    "broken JSON": container(b'{"a":', bytes(4)),
    "header is a list": container(b"[]", bytes(4)),
    "header begins with a blank": container(b' {"a":{}}', bytes(4)),
    "NaN in the header": container(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "header is no UTF-8": container(b'{"\xff\xfe":1}', bytes(4)),
    "surrogate in a name": container(b'{"\\ud800":1}', bytes(4)),
    "unbalanced brackets in a string": container(b'{"a]]]]{{{{":' + json.dumps(F4).encode() + b"}", bytes(4)),
    "endless string": container(b'{"' + b"\\" * 100_001, bytes(4)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_and_leaves_nothing(upload: Upload, kind: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    text = refusal(upload, HOSTILE[kind], limits=Allowed(max_adapter_bytes=1 << 30))

    assert len(text) < 4000
    assert text.isprintable() or "\n" in text
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_model.safetensors"]


def test_more_tensors_than_the_model_has_places_are_refused_and_named(upload: Upload):
    dora = {f"{PREFIX}layers.{layer}.{path_of(module)}.lora_magnitude_vector": np.ones(32, np.float32)
            for layer in range(2) for module in MODULES}  # fmt: skip
    head = {"base_model.model.lm_head.weight": np.ones((40, 32), np.float32)}

    text = refusal(upload, pairs(*MODULES) | dora | head, config(r=5), limits=Allowed(max_adapter_rank=3))

    for named in ("43 tensors, the model can take 28", "use_dora", "modules_to_save", "LoRA rank 4 is over"):
        assert named in text


def test_far_more_tensors_than_the_model_has_places_are_refused_unread(upload: Upload):
    tensors = {f"w{index}": np.full(1, np.nan, np.float32) for index in range(2 * 28 + 17)}

    assert refusal(upload, tensors) == "safetensors: 73 tensors, the model can take 28"


def test_the_header_may_be_as_long_as_the_model_has_tensors(tmp_path: Path):
    """1 MiB, or 256 bytes a tensor where there may be more."""
    path = tmp_path / "w"
    path.write_bytes(container({"__metadata__": {"x": "a" * (1 << 20)}, "a": F4}, bytes(4)))

    with path.open("rb") as file, pytest.raises(BadHeader, match="over the limit of 1048576 bytes"):
        read_header(file, path.stat().st_size, max_tensors=4096)
    with path.open("rb") as file:
        assert len(read_header(file, path.stat().st_size, max_tensors=4200)) == 1


def test_a_symbolic_link_and_a_folder_are_not_read(tmp_path: Path):
    real = tmp_path / "real"
    real.write_bytes(safetensors(pairs("q_proj")))
    link, folder, pipe = tmp_path / "link", tmp_path / "folder", tmp_path / "pipe"
    link.symlink_to(real)
    folder.mkdir()
    os.mkfifo(pipe)

    for path in (link, folder, pipe, tmp_path / "none"):
        with pytest.raises(InvalidAdapter):
            canonicalise(config(), path, tmp_path / "out", SHAPE, Allowed())
    assert not (tmp_path / "out").exists()


def test_the_canonical_file_is_not_written_through_a_link(tmp_path: Path):
    source, victim, out = tmp_path / "in", tmp_path / "victim", tmp_path / "out"
    source.write_bytes(safetensors(pairs("q_proj")))
    victim.write_bytes(b"precious")
    out.symlink_to(victim)

    with pytest.raises(OSError):
        canonicalise(config(), source, out, SHAPE, Allowed())
    assert victim.read_bytes() == b"precious"


def test_random_damage_never_gets_past_the_gate_as_anything_but_a_whole_adapter(upload: Upload, tmp_path: Path):
    good = safetensors(pairs("q_proj", "v_proj"))
    header_bytes = 8 + struct.unpack_from("<Q", good)[0]
    rng = np.random.default_rng(0)

    for _ in range(300):
        damaged = bytearray(good)
        for at in rng.integers(0, header_bytes, 3):
            damaged[at] = int(rng.integers(256))
        try:
            accepted = upload(bytes(damaged))
        except InvalidAdapter:
            continue
        assert accepted.num_pairs == len(listed(tmp_path / "out")) == 4
