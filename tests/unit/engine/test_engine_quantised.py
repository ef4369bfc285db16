"""Checkpoints with weights of 8 bits: compressed-tensors' layouts and fp8 in blocks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.memory_account import step_bytes
from engine.models.config import SCALE, AttentionConfig
from engine.models.decoder import Decoder
from engine.weights import UnsupportedModel, load_model
from kernels.quantised_linear import WIDE_BYTES
from tests.tiny import tiny_adapter, tiny_config, write_hf_dir
from tests.tiny_steps import Steps

CONFIG = replace(tiny_config(), hidden_size=128, intermediate_size=384, attention=AttentionConfig(4, 2, 64))
LINEAR = "_proj.weight"


def compressed(num_bits: int = 8, strategy: str = "channel", **weights: Any) -> dict[str, Any]:
    said = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": strategy} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": said, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
LAYOUTS = {
    "int8 by channel": (compressed(), torch.int8, "channel", SCALE),
    "int8 by tensor": (compressed(strategy="tensor"), torch.int8, "tensor", SCALE),
    "fp8 by channel": (compressed(type="float") | {"format": "float-quantized"}, torch.float8_e4m3fn, "channel", SCALE),
    "fp8 by block": (FP8_BLOCKS, torch.float8_e4m3fn, "block", "_scale_inv"),
}


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of 128 × 128."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return padded.view(rows, 128, columns, 128).amax((1, 3))


def quantise(weight: torch.Tensor, kind: torch.dtype, strategy: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ data, scales as checkpoints keep them, and the weight that both stand for; written apart from the product."""
    most = 127.0 if kind == torch.int8 else 448.0
    if strategy == "block":
        scales = blocks_of(weight) / most
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    else:
        scales = wide = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()) / most
    data = weight / wide
    data = data.round().clamp(-127, 127).to(kind) if kind == torch.int8 else data.to(kind)
    return data, scales if strategy != "tensor" else scales.reshape(1), data.float() * wide


def write(path: Path, layout: str, ignore: str = "") -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the weights that it stands for."""
    said, kind, strategy, suffix = LAYOUTS[layout]
    quantised, plain = write_hf_dir(path / "quantised", config=CONFIG), write_hf_dir(path / "plain", config=CONFIG)
    weights = load_file(plain / "model.safetensors")
    stored, wide = dict(weights), dict(weights)
    for name in weights:
        if name.endswith(LINEAR) and not (ignore and ignore in name):
            stored[name], stored[name + suffix], wide[name] = quantise(weights[name], kind, strategy)
            stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    save_file(wide, plain / "model.safetensors")
    say(quantised, said)
    return quantised, plain


def say(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_8_bits_is_the_model_that_it_stands_for(tmp_path: Path, layout: str):
    quantised, plain = write(tmp_path, layout)

    loaded, expected = (load_model(path, torch.float32).weights for path in (quantised, plain))

    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_stay_at_8_bits_give_the_logits_of_the_wide_ones_with_and_without_an_adapter(tmp_path, layout):
    quantised, plain = write(tmp_path, layout)
    loaded = load_model(quantised, torch.float32, keep_quantised=True)
    adapter = tiny_adapter(1, config=CONFIG)
    prompts = [(list(range(5, 40)), -1), (list(range(40, 47)), 0), ([7, 9, 11], -1)]

    found, expected = (
        Steps(Decoder(CONFIG, weights), [adapter]).prefill(prompts)
        for weights in (loaded.weights, load_model(plain, torch.float32).weights)
    )

    num_kept = sum(tensor.itemsize == 1 for tensor in loaded.weights.values())
    assert num_kept == 7 * CONFIG.num_layers
    for own, wide in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wide, rtol=0, atol=1e-3)


def test_a_step_has_memory_for_multiplied_out_weights_only_where_some_are_of_8_bits(tmp_path: Path):
    config = EngineConfig(block_size=16, num_blocks=1)
    models = [load_model(path, torch.float32, keep_quantised=True) for path in write(tmp_path, "int8 by channel")]

    quantised, plain = (step_bytes(Decoder(loaded.config, loaded.weights), config) for loaded in models)

    assert quantised - plain == 2 * WIDE_BYTES


def test_what_is_fused_with_a_wide_weight_is_multiplied_out(tmp_path: Path):
    quantised, plain = write(tmp_path, "int8 by channel", ignore="k_proj")

    loaded = load_model(quantised, torch.float32, keep_quantised=True).weights

    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(loaded[name], load_model(plain, torch.float32).weights[name])
    assert loaded["model.layers.0.self_attn.o_proj.weight"].dtype == torch.int8


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "gptq", "bits": 8}, "gptq"),
        (compressed(num_bits=4), "num_bits 4"),
        (compressed(symmetric=False), "symmetric"),
        (compressed(strategy="group"), "strategy 'group'"),
        (compressed() | {"format": "pack-quantized"}, "pack-quantized"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (FP8_BLOCKS | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (FP8_BLOCKS | {"fmt": "e5m2"}, "e5m2"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, said: dict[str, Any], named: str):
    directory = write_hf_dir(tmp_path / "m", config=CONFIG)
    say(directory, said)

    with pytest.raises(UnsupportedModel, match=named):
        load_model(directory, torch.float32)


@pytest.mark.parametrize("fault", ["missing", "misshapen", "infinite"])
def test_scales_that_cannot_be_right_are_refused_by_name(tmp_path: Path, fault: str):
    directory, _ = write(tmp_path, "int8 by channel")
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(directory / "model.safetensors")
    scales = weights.pop(name + SCALE)
    if fault != "missing":
        weights[name + SCALE] = scales[1:] if fault == "misshapen" else scales / 0.0
    save_file(weights, directory / "model.safetensors")

    with pytest.raises(UnsupportedModel, match=name):
        load_model(directory, torch.float32)
