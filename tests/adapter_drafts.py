"""Uploads before they are bytes: the sound ones that mutants come from."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.expert_files import LAYERS, TARGETS, as_peft_before, as_peft_now, fused, per_expert, target_parameters
from tests.tiny import peft_config, tiny_adapter, weight_name

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Draft:
    """``tensors``: name → (dtype, values). ``has_experts``: it is for the model with experts."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, np.ndarray]]
    has_experts: bool = False
    metadata: Any = field(default_factory=lambda: {"format": "pt"})


def dense_draft(rng: random.Random) -> Draft:
    """A subset of modules and layers, one rank, as PEFT writes it."""
    modules = tuple(sorted(rng.sample(MODULES, rng.randint(1, 7)), key=MODULES.index))
    layers = rng.choice([(0, 1), (0, 1), (0,), (1,)])
    adapter = tiny_adapter(rng.randrange(50), rank=rng.choice([1, 2, 4, 8, 16]), modules=modules, layers=layers)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for (layer, module), (a, b, _) in adapter.items():
        key = "base_model.model." + weight_name(layer, module).removesuffix(".weight")
        tensors |= {f"{key}.lora_A.weight": ("F32", a.numpy()), f"{key}.lora_B.weight": ("F32", b.numpy())}
    return Draft(peft_config(adapter), tensors)


def expert_draft(rng: random.Random) -> Draft:
    """All experts, in one of the layouts; sometimes of one layer only."""
    targets = rng.choice(TARGETS)
    layout = rng.choice(["per expert", "mixtral", "now", "before"])
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": True}
    if layout in ("now", "before"):
        tensors = fused(targets, as_peft_now if layout == "now" else as_peft_before)
        config |= {"target_parameters": target_parameters(targets), "target_modules": []}
        config |= {"peft_version": rng.choice(["0.20.0", "0.21.2"] if layout == "now" else ["0.18.1", "0.19.0"])}
    else:
        tensors = per_expert(targets, is_mixtral=layout == "mixtral")
    if rng.random() < 0.3:
        layer = rng.choice(LAYERS)
        tensors = {name: values for name, values in tensors.items() if f"layers.{layer}." in name}
    return Draft(config, {name: ("F32", values) for name, values in tensors.items()}, has_experts=True)
