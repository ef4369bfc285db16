"""Weights of experts: from the names of checkpoints to the fused ones that ``engine/models/moe.py`` takes."""

import torch

from engine.models.config import ModelConfig, MoeConfig
from engine.weights.errors import UnsupportedModel

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Weights = dict[str, torch.Tensor]


def fuse(config: ModelConfig, weights: Weights) -> None:
    """Renames and stacks in place, a layer at a time: one matrix an expert becomes [E, 2I, H] and [E, H, I].

    What is fused already stays as it is. Raises UnsupportedModel for experts that are not of one shape; a missing
    tensor is left for the check of all names.
    """
    if config.moe is None:
        return
    for layer in config.moe.layers:
        prefix = f"model.layers.{layer}"
        _rename_mixtral(weights, prefix, config.moe.num_experts)
        _fuse_layer(weights, f"{prefix}.mlp.experts", config.moe.num_experts)


def _rename_mixtral(weights: Weights, prefix: str, num_experts: int) -> None:
    old, new = f"{prefix}.block_sparse_moe", f"{prefix}.mlp"
    names = {f"{old}.gate.weight": f"{new}.gate.weight"}
    for expert in range(num_experts):
        for module, short in _MIXTRAL.items():
            names[f"{old}.experts.{expert}.{short}.weight"] = f"{new}.experts.{expert}.{module}.weight"
    for before, after in names.items():
        if before in weights:
            weights[after] = weights.pop(before)


def _fuse_layer(weights: Weights, prefix: str, num_experts: int) -> None:
    gate, up, down = ([f"{prefix}.{expert}.{module}.weight" for expert in range(num_experts)] for module in _MIXTRAL)
    if any(name not in weights for name in (*gate, *up, *down)):
        return
    shapes = {(weights[name].shape, weights[name].T.shape) for name in (*gate, *up)}
    shapes |= {(weights[name].T.shape, weights[name].shape) for name in down}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{prefix}: experts of different shapes")
    pairs = zip(gate, up, strict=True)
    weights[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([weights[g], weights[u]]) for g, u in pairs])
    weights[f"{prefix}.down_proj"] = torch.stack([weights[name] for name in down])
    for name in (*gate, *up, *down):
        del weights[name]


def expert_shapes(moe: MoeConfig, hidden_size: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's MLP with experts; ``prefix`` ends with ``.mlp``."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.gate.weight": (moe.num_experts, hidden_size),
        f"{prefix}.experts.gate_up_proj": (moe.num_experts, 2 * moe.intermediate_size, hidden_size),
        f"{prefix}.experts.down_proj": (moe.num_experts, hidden_size, moe.intermediate_size),
    }
    if moe.shared_intermediate_size:
        shapes |= mlp_shapes(hidden_size, moe.shared_intermediate_size, f"{prefix}.shared_expert")
        shapes[f"{prefix}.shared_expert_gate.weight"] = (1, hidden_size)
    return shapes


def mlp_shapes(hidden_size: int, intermediate_size: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a dense MLP under ``prefix``."""
    inner, outer = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    return {f"{prefix}.{name}_proj.weight": shape for name, shape in (("gate", inner), ("up", inner), ("down", outer))}
