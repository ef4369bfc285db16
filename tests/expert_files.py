"""One adapter on all experts of a small model, in every layout that PEFT has given such files."""

from collections.abc import Callable

import numpy as np

from tenants.adapters.shape import AdapterShape, ExpertShape

NUM_EXPERTS, RANK, HIDDEN, WIDTH, LAYERS = 4, 2, 32, 12, (0, 1)
EXPERTS = ExpertShape(NUM_EXPERTS, HIDDEN, WIDTH, LAYERS, served=True)
SHAPE = AdapterShape({"q_proj": (32, 32)}, num_layers=2, max_lora_rank=16, experts=EXPERTS)
PREFIX = "base_model.model.model.layers"
PARAMETERS = {"gate_up_proj": (HIDDEN, 2 * WIDTH), "down_proj": (WIDTH, HIDDEN)}
TARGETS = [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")]
ALPHA = 8
SCALE = ALPHA / RANK

Tensors = dict[str, np.ndarray]
Deltas = dict[tuple[int, str], np.ndarray]  # (layer, parameter) → [E, out, in], the scale in it


def halves(parameter: str, layer: int, sizes: dict[str, tuple[int, int]] = PARAMETERS) -> tuple[np.ndarray, np.ndarray]:
    """A [E, r, in] and B [E, out, r] of a parameter's experts; gate and up share their A, as in a fused pair."""
    num_in, num_out = sizes[parameter]
    rng = np.random.default_rng([layer, num_in])
    a = rng.normal(size=(NUM_EXPERTS, RANK, num_in)).astype(np.float32)
    return a / num_in**0.5, rng.normal(size=(NUM_EXPERTS, num_out, RANK)).astype(np.float32)


def deltas(targets: tuple[str, ...]) -> Deltas:
    return {(layer, name): SCALE * np.matmul(*halves(name, layer)[::-1]) for layer in LAYERS for name in targets}


def per_expert(targets: tuple[str, ...], *, is_mixtral: bool = False) -> Tensors:
    parent, names = "mlp", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
    if is_mixtral:
        parent, names = "block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors: Tensors = {}
    for layer in LAYERS:
        for parameter in targets:
            a, b = halves(parameter, layer)
            parts = {"down_proj": b}
            if parameter == "gate_up_proj":
                parts = {"gate_proj": b[:, :WIDTH], "up_proj": b[:, WIDTH:]}
            for expert in range(NUM_EXPERTS):
                for part, high in parts.items():
                    name = f"{PREFIX}.{layer}.{parent}.experts.{expert}.{names[part]}.lora_"
                    tensors |= {f"{name}A.weight": a[expert], f"{name}B.weight": high[expert]}
    return tensors


def as_peft_now(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A [E·r, in], the expert slowest; B [out, E·r], the expert fastest."""
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def as_peft_before(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Before 0.20: A [E·r, out] and B [in, E·r]; an expert's delta is (B·A) transposed."""
    return as_peft_now(b.transpose(0, 2, 1), a.transpose(0, 2, 1))


Layout = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def fused(targets: tuple[str, ...], layout: Layout = as_peft_now, sizes: dict[str, tuple[int, int]] = PARAMETERS):
    tensors: Tensors = {}
    for layer in LAYERS:
        for parameter in targets:
            inner = ".base_layer" if parameter == "gate_up_proj" and len(targets) == 2 else ""
            first, second = layout(*halves(parameter, layer, sizes))
            name = f"{PREFIX}.{layer}.mlp.experts{inner}.lora_"
            tensors |= {f"{name}A.weight": first, f"{name}B.weight": second}
    return tensors


def target_parameters(targets: tuple[str, ...]) -> list[str]:
    return [f"mlp.experts.{name}" for name in targets]
