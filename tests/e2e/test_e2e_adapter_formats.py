"""PEFT adapters as people write them, over HTTP, held against merged weights (cases 1, 2, 3, 7; 6 where not served)."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracle
from tests.adapter_calls import generate, prompt_of, upload
from tests.served import Served
from tests.tiny import Adapter, hf_config, merged, tiny_adapter, tiny_config, tiny_weights, write_peft_dir

CONFIG, WEIGHTS = hf_config(tiny_config()), tiny_weights()
PROMPT = prompt_of(20, seed=4)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def http(tiny: Served) -> httpx.Client:
    """The public port, with the key of a tenant of this file's own."""
    with tiny.http(tiny.new_tenant("formats")) as client:
        yield client


def logprobs_of(adapter: Adapter) -> list[float]:
    """Of 16 greedy tokens from the merged weights."""
    return oracle.greedy(CONFIG, merged(WEIGHTS, adapter), PROMPT, 16)[1]


def check_equals_merged(http: httpx.Client, name: str, adapter: Adapter) -> None:
    """Same greedy tokens' log-probabilities as the merged weights, and others than the base's."""
    answered = generate(http, name, PROMPT)

    assert answered[2] == pytest.approx(logprobs_of(adapter), abs=1e-4)
    assert answered != generate(http, "tiny", PROMPT)


def scaled(adapter: Adapter, scale: float) -> Adapter:
    return {place: (a, b, scale) for place, (a, b, _) in adapter.items()}


def refused(http: httpx.Client, path: Path) -> str:
    """422 with reasons; neither a model nor an adapter afterwards, and the base still answers."""
    answer = upload(http, "refused", path)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_adapter"), answer.text
    assert answer.json()["error"]["reasons"]
    assert http.get("/adapters/refused").status_code == 404
    assert "refused" not in {model["id"] for model in http.get("/models").json()["data"]}
    assert len(generate(http, "tiny", PROMPT)[1]) == 16
    return answer.json()["error"]["message"]


def rewrite(path: Path, change: dict[str, torch.Tensor], **settings: Any) -> Path:
    """More tensors and other settings in a PEFT folder."""
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    save_file({**load_file(weights), **change}, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return path


# ── case 1 ───────────────────────────────────────────────────────────────────────────────────────


def test_rank_stabilised_scale_and_plain_scale_equal_their_own_merged_weights(http: httpx.Client, tmp_path: Path):
    adapter = tiny_adapter(21, rank=16)
    for name, use_rslora, scale in (("stable", True, 4.0), ("plain", False, 1.0)):
        settings = {"r": 16, "lora_alpha": 16, "use_rslora": use_rslora, "alpha_pattern": {}}
        path = write_peft_dir(tmp_path / name, adapter, extra_config=settings)
        assert upload(http, name, path).status_code == 201
        check_equals_merged(http, name, scaled(adapter, scale))

    assert generate(http, "stable", PROMPT) != generate(http, "plain", PROMPT)


def test_patterns_give_each_module_its_own_rank_and_alpha(http: httpx.Client, tmp_path: Path):
    adapter = tiny_adapter(22, rank={"q_proj": 8, "v_proj": 4, "up_proj": 2}, modules=("q_proj", "v_proj", "up_proj"))
    settings = {
        "r": 4, "lora_alpha": 4, "rank_pattern": {"q_proj": 8, r".*\.mlp\..*": 2},
        "alpha_pattern": {"^model.layers.1.self_attn.q_proj$": 24, "self_attn.q_proj": 16, "up_proj": 1},
    }  # fmt: skip
    answer = upload(http, "patterns", write_peft_dir(tmp_path, adapter, extra_config=settings))

    assert (answer.status_code, answer.json()["warnings"], answer.json()["lora_rank"]) == (201, [], 8)
    scales = {(0, "q_proj"): 2.0, (1, "q_proj"): 3.0, "v_proj": 1.0, "up_proj": 0.5}
    check_equals_merged(
        http, "patterns", {(layer, module): (a, b, scales.get((layer, module), scales.get(module)))
                           for (layer, module), (a, b, _) in adapter.items()},
    )  # fmt: skip


# ── case 2 ───────────────────────────────────────────────────────────────────────────────────────

PREFIXES = {
    "base_model.model.model.": True,  # PEFT on a causal model
    "base_model.model.": True,  # PEFT on the inner model
    "model.": True,
    "": True,
    "base_model.model.model.model.": False,
    "base_model.model.language_model.model.": False,
    "base_model.": False,
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_is_mapped_by_the_rule_or_refused_with_the_keys(http: httpx.Client, tmp_path: Path, prefix: str):
    adapter = tiny_adapter(23, rank=4)
    path = write_peft_dir(tmp_path, adapter)
    weights = path / "adapter_model.safetensors"
    keys = {name.replace("base_model.model.model.", prefix): tensor for name, tensor in load_file(weights).items()}
    save_file(keys, weights)

    if PREFIXES[prefix]:
        answer = upload(http, "prefixed", path)
        assert (answer.status_code, answer.json()["num_pairs_bound"]) == (201, len(adapter))
        check_equals_merged(http, "prefixed", adapter)
    else:
        assert f"{prefix}layers.0.self_attn.q_proj.lora_A.weight" in refused(http, path)


def test_keys_of_a_layer_that_is_not_there_are_listed(http: httpx.Client, tmp_path: Path):
    path = write_peft_dir(tmp_path, tiny_adapter(23, rank=4))
    weights = path / "adapter_model.safetensors"
    save_file({name.replace("layers.1.", "layers.99."): value for name, value in load_file(weights).items()}, weights)

    message = refused(http, path)

    assert "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight" in message
    assert "layers.0." not in message


# ── case 3 ───────────────────────────────────────────────────────────────────────────────────────

HEAD, EMBEDDING = torch.ones(300, 32), torch.ones(300, 32)
KINDS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "saved modules": (
        {"base_model.model.lm_head.weight": HEAD, "base_model.model.model.embed_tokens.weight": EMBEDDING},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        "modules_to_save",
    ),
    "a base layer": ({"base_model.model.lm_head.base_layer.weight": HEAD}, {}, "full weights"),
    "low rank on head and embedding": (
        {
            "base_model.model.lm_head.lora_A.weight": torch.ones(4, 32),
            "base_model.model.lm_head.lora_B.weight": torch.ones(300, 4),
            "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 300),
            "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(32, 4),
        },
        {},
        "LoRA on the embedding or lm_head",
    ),
    "DoRA": ({}, {"use_dora": True}, "use_dora"),
    "biases": ({}, {"bias": "all"}, "bias"),
    "transposed weights": ({}, {"fan_in_fan_out": True}, "fan_in_fan_out"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_served_is_refused_at_upload_by_name(http: httpx.Client, tmp_path: Path, kind: str):
    tensors, settings, named = KINDS[kind]

    assert named in refused(http, rewrite(write_peft_dir(tmp_path, tiny_adapter(24)), tensors, **settings))


def test_all_kinds_at_once_are_all_named(http: httpx.Client, tmp_path: Path):
    path = write_peft_dir(tmp_path, tiny_adapter(24, rank=17))
    for tensors, settings, _ in KINDS.values():
        rewrite(path, tensors, **settings)

    message = refused(http, path)

    for named in [named for _, _, named in KINDS.values()] + ["LoRA rank 17 is over the limit of 16"]:
        assert named in message


@pytest.mark.parametrize("empty", [[], None])
def test_no_saved_modules_are_as_if_absent(http: httpx.Client, tmp_path: Path, empty: Any):
    adapter = tiny_adapter(24)
    path = write_peft_dir(tmp_path, adapter, extra_config={"modules_to_save": empty})

    assert upload(http, "nothing-saved", path).status_code == 201
    check_equals_merged(http, "nothing-saved", adapter)


# ── case 6, where experts take no adapters ───────────────────────────────────────────────────────


def test_expert_tensors_for_a_model_without_experts_are_refused_by_name(http: httpx.Client, tmp_path: Path):
    fused = {
        f"base_model.model.model.layers.0.mlp.experts.lora_{side}.weight": torch.tensor(np.ones(shape, np.float32))
        for side, shape in (("A", (8, 32)), ("B", (24, 8)))
    }
    path = rewrite(write_peft_dir(tmp_path, tiny_adapter(25)), fused, target_parameters=["mlp.experts.gate_up_proj"])

    message = refused(http, path)

    assert "LoRA on experts that the model doesn't have" in message
    assert "target_parameters: the model has no experts" in message


# ── case 7 ───────────────────────────────────────────────────────────────────────────────────────

PARTIAL: dict[str, Adapter] = {
    "q+v": tiny_adapter(31, modules=("q_proj", "v_proj")),
    "q+k+o": tiny_adapter(32, modules=("q_proj", "k_proj", "o_proj")),
    "gate": tiny_adapter(33, modules=("gate_proj",)),
    "q4+v8": tiny_adapter(34, rank={"q_proj": 4, "v_proj": 8}, modules=("q_proj", "v_proj")),
    "one layer": tiny_adapter(35, layers=(1,)),
    "attention of one, MLP of the other": (
        tiny_adapter(36, modules=ATTENTION, layers=(0,))
        | tiny_adapter(37, modules=("up_proj", "down_proj"), layers=(1,))
    ),
}


@pytest.mark.parametrize("part", PARTIAL)
def test_a_part_of_a_packed_projection_equals_its_merged_weights(http: httpx.Client, tmp_path: Path, part: str):
    answer = upload(http, "partial", write_peft_dir(tmp_path, PARTIAL[part]))

    assert (answer.status_code, answer.json()["num_pairs_bound"]) == (201, len(PARTIAL[part]))
    check_equals_merged(http, "partial", PARTIAL[part])
