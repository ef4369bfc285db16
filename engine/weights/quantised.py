"""Weights of 8 bits in Hugging Face directories: compressed-tensors' int8 and fp8, and fp8 in blocks of 128 × 128.

Activations stay as they are, whatever a checkpoint says of them: what is read is weights and their scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.config import SCALE
from engine.weights.errors import UnsupportedModel
from kernels.quantised_linear import BLOCK, KINDS, QuantisedWeight, dequantised

Weights = dict[str, torch.Tensor]

FUSED = (  # what the decoder multiplies in one go
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
OF_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
_COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized")
_BLOCKS = [BLOCK, BLOCK]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a directory holds weights of 8 bits. ``suffix``: what a weight's name becomes the name of its scales by."""

    suffix: str


def layout_of(config: dict[str, Any]) -> Layout | None:
    """What ``config.json`` says of its weights; None: they are not quantised. Raises UnsupportedModel by name."""
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method")
    if method == "fp8":
        return _fp8(said)
    if method != "compressed-tensors":
        raise UnsupportedModel(f"quantization_config: quant_method {method!r}")
    _expect(said.get("format"), _COMPRESSED, "format")
    _expect(said.get("kv_cache_scheme"), (None,), "kv_cache_scheme")
    for group in said.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        _expect(weights.get("num_bits"), (8,), "num_bits")
        _expect(weights.get("symmetric", True), (True,), "symmetric")
        _expect(weights.get("strategy"), ("channel", "tensor", "block"), "strategy")
        _expect(weights.get("block_structure") or _BLOCKS, (_BLOCKS,), "block_structure")
    return Layout(SCALE)


def settle(weights: Weights, layout: Layout, dtype: torch.dtype, *, keep: bool) -> None:
    """In place: every weight of 8 bits gets its scales under its name with SCALE, or is multiplied out to ``dtype``:
    all of them unless ``keep``, and otherwise those that the decoder does not multiply in 8 bits (experts, the head,
    modules that are fused with one of another kind). Raises UnsupportedModel."""
    names = [name for name, tensor in weights.items() if tensor.dtype in KINDS]
    found = {name: _take(weights, name, layout) for name in names}
    kept = set(_multiplied(found)) if keep else set()
    for name, weight in found.items():
        if name in kept:
            weights[name], weights[name + SCALE] = weight.data, weight.scales
        else:
            weights[name] = dequantised(weight).to(dtype)


def _fp8(said: dict[str, Any]) -> Layout:
    _expect(said.get("fmt", "e4m3"), ("e4m3",), "fmt")
    _expect(said.get("weight_block_size") or _BLOCKS, (_BLOCKS,), "weight_block_size")
    return Layout("_scale_inv" if said.get("weight_block_size") else SCALE)


def _expect(value: Any, known: tuple[Any, ...], name: str) -> None:
    if value not in known:
        raise UnsupportedModel(f"quantization_config: {name} {value!r}")


def _take(weights: Weights, name: str, layout: Layout) -> QuantisedWeight:
    data, scales = weights[name], weights.pop(name + layout.suffix, None)
    if scales is None:
        raise UnsupportedModel(f"{name} has no scales ({name}{layout.suffix})")
    if data.dim() != 2 or not scales.isfinite().all():
        raise UnsupportedModel(f"{name}: its shape, or a scale that is no number")
    size_out, size_in = data.shape
    blocks = (-(-size_out // BLOCK), -(-size_in // BLOCK))
    if tuple(scales.shape) == blocks:
        pass
    elif scales.numel() == 1:
        scales = scales.reshape(1).expand(size_out)
    elif tuple(scales.shape) in ((size_out,), (size_out, 1)):
        scales = scales.reshape(size_out)
    else:
        raise UnsupportedModel(f"{name}{layout.suffix} has shape {tuple(scales.shape)}")
    return QuantisedWeight(data.contiguous(), scales.contiguous())


def _multiplied(found: dict[str, QuantisedWeight]) -> Iterator[str]:
    """The names of weights that the decoder takes in 8 bits: with all that they are fused with, of one kind, and whole
    blocks of scales."""
    for name in found:
        layer = ".".join(name.split(".")[:3])  # model.layers.N
        for parent, modules in FUSED:
            names = [f"{layer}.{parent}.{module}.weight" for module in modules]
            if name not in names or not all(one in found for one in names):
                continue
            weights = [found[one] for one in names]
            is_one_kind = len({(weight.data.dtype, weight.is_blocked) for weight in weights}) == 1
            if is_one_kind and not (weights[0].is_blocked and any(len(one.data) % BLOCK for one in weights[:-1])):
                yield name
