"""Tiny random models with experts: the sizes of tests.tiny, 8 experts of width 12 (no two sizes tie), top-2.

``moe_logits`` is their oracle: loops over tokens and experts in plain torch that share no line with engine/ or
kernels/ beyond what tests.oracle has for attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.config import ModelConfig, MoeConfig
from tests import oracle
from tests.families import family_weights
from tests.tiny import Adapter, hf_config, merged, tiny_adapter, tiny_config

EXPERTS, WIDTH, SHARED_WIDTH = 8, 12, 20
_MIXTRAL = MoeConfig(EXPERTS, 2, WIDTH, renormalize=True, layers=(0, 1))
_QWEN = MoeConfig(EXPERTS, 3, WIDTH, renormalize=False, layers=(1,), shared_intermediate_size=SHARED_WIDTH)

_TINY = tiny_config()

PLAIN: dict[str, ModelConfig] = {  # what tests.oracle knows the attention of
    "mixtral": replace(_TINY, family="mixtral", moe=_MIXTRAL),
    "qwen2_moe": replace(_TINY, family="qwen2_moe", moe=_QWEN),
}
MOE: dict[str, ModelConfig] = PLAIN | {
    "qwen3_moe": replace(
        _TINY, family="qwen3_moe", moe=replace(_QWEN, shared_intermediate_size=0),
        attention=replace(_TINY.attention, head_norms=True),
    ),
    "olmoe": replace(
        _TINY, family="olmoe", moe=replace(_MIXTRAL, renormalize=False),
        attention=replace(_TINY.attention, whole_norms=True),
    ),
}  # fmt: skip


def moe_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights as the decoder takes them: experts fused."""
    moe = config.moe
    assert moe is not None
    weights = family_weights(replace(config, moe=None), seed, dtype)
    draw = torch.Generator().manual_seed(500 + seed)

    def normal(*shape: int, gain: float = 1.5) -> Tensor:
        return (torch.randn(*shape, generator=draw) * gain / shape[-1] ** 0.5).to(dtype)

    hidden, inner, shared = config.hidden_size, moe.intermediate_size, moe.shared_intermediate_size
    for layer in moe.layers:
        prefix = f"model.layers.{layer}.mlp"
        for name in ("gate", "up", "down"):
            del weights[f"{prefix}.{name}_proj.weight"]
        weights[f"{prefix}.gate.weight"] = normal(moe.num_experts, hidden)
        weights[f"{prefix}.experts.gate_up_proj"] = normal(moe.num_experts, 2 * inner, hidden)
        weights[f"{prefix}.experts.down_proj"] = normal(moe.num_experts, hidden, inner, gain=3.0)
        if shared:
            for name in ("gate", "up"):
                weights[f"{prefix}.shared_expert.{name}_proj.weight"] = normal(shared, hidden)
            weights[f"{prefix}.shared_expert.down_proj.weight"] = normal(hidden, shared)
            weights[f"{prefix}.shared_expert_gate.weight"] = normal(1, hidden)
    return weights


def moe_adapters(config: ModelConfig) -> dict[str, Adapter]:
    """Of attention's modules, of experts, of both."""
    return {
        "a": tiny_adapter(1, rank=4, modules=("q_proj", "k_proj", "v_proj", "o_proj"), config=config),
        "b": tiny_adapter(2, rank={"q_proj": 4, "v_proj": 8}, modules=("q_proj", "v_proj"), config=config)
        | expert_adapter(config, 12, rank=3, parts=("gate_proj", "up_proj", "down_proj")),
        "c": expert_adapter(config, 13, rank=16, parts=("down_proj",), experts=(0, 3, 7)),
        "d": tiny_adapter(4, rank=2, modules=("q_proj", "k_proj", "o_proj"), layers=(1,), config=config)
        | expert_adapter(config, 14, rank=9, parts=("up_proj",), experts=range(6)),
    }


def expert_adapter(
    config: ModelConfig, seed: int, *, rank: int, parts: Iterable[str], experts: Iterable[int] = range(EXPERTS)
) -> Adapter:
    """Random pairs of some experts in all layers that have them."""
    moe = config.moe
    assert moe is not None
    draw = torch.Generator().manual_seed(20_000 + seed)
    hidden, width = config.hidden_size, moe.intermediate_size
    adapter: Adapter = {}
    for layer in moe.layers:
        for part in parts:
            num_in, num_out = (width, hidden) if part == "down_proj" else (hidden, width)
            for expert in experts:
                a = torch.randn(rank, num_in, generator=draw) / num_in**0.5
                b = torch.randn(num_out, rank, generator=draw) / rank**0.5
                adapter[layer, f"experts.{expert}.{part}"] = (a, b, 2.0)
    return adapter


def moe_merged(weights: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """As ``merged``, with pairs of experts: expert e's part of the fused weight grows by scale · B · A."""
    out = merged(weights, {place: pair for place, pair in adapter.items() if not place[1].startswith("experts.")})
    for (layer, module), (a, b, scale) in adapter.items():
        if module.startswith("experts."):
            _, expert, part = module.split(".")
            name = f"model.layers.{layer}.mlp.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
            first = len(b) if part == "up_proj" else 0
            out[name] = out[name].clone()
            rows = out[name][int(expert), first : first + len(b)]
            rows.copy_(rows.double() + scale * b.double() @ a.double())
    return out


def moe_logits(config: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Of all positions, [T, V], in float64."""
    moe = config.moe
    assert moe is not None

    def mlp(part: dict[str, Tensor], x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in part:
            return oracle.gated_mlp(part, x)
        return torch.stack([_one_token(moe, part, row) for row in x])

    wide = {name: weight.double() for name, weight in weights.items()}
    return oracle.logits(hf_config(config), wide, tokens, mlp)


def _one_token(moe: MoeConfig, part: dict[str, Tensor], x: Tensor) -> Tensor:
    shares = torch.softmax(part["mlp.gate.weight"] @ x, -1).tolist()
    best = sorted(range(moe.num_experts), key=lambda expert: -shares[expert])[: moe.top_k]
    whole = sum(shares[expert] for expert in best) if moe.renormalize else 1.0
    out = torch.zeros_like(x)
    for expert in best:
        gate, up = (part["mlp.experts.gate_up_proj"][expert] @ x).chunk(2)
        out += shares[expert] / whole * (part["mlp.experts.down_proj"][expert] @ (functional.silu(gate) * up))
    if moe.shared_intermediate_size:
        shared = {name.replace("mlp.shared_expert.", "mlp."): weight for name, weight in part.items()}
        out += torch.sigmoid(part["mlp.shared_expert_gate.weight"] @ x) * oracle.gated_mlp(shared, x[None])[0]
    return out
