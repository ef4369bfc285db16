"""What an accepted upload must come to, worked out from its own bytes by other means than ours.

The safetensors library reads it, patterns are the expressions that PEFT takes them for, deltas are matrix products.
"""

import json
import re
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from tests import oracle
from tests.expert_files import NUM_EXPERTS, PARAMETERS, WIDTH
from tests.tiny import hf_config, tiny_config, tiny_weights, weight_name

Deltas = dict[tuple[int, str], Tensor]  # (layer, module) → ΔW [out, in] in float64

_PLACE = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp|block_sparse_moe)\.(.+)$")
_EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_CONFIG, _WEIGHTS = hf_config(tiny_config()), {name: weight.double() for name, weight in tiny_weights().items()}


def expected_deltas(config_json: bytes, weights: bytes) -> Deltas:
    """Of every linear that the adapter touches."""
    config = json.loads(config_json)
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in load(weights).items()}
    deltas: Deltas = {}
    for name, a in tensors.items():
        if ".lora_A" not in name:
            continue
        b, path = tensors[name.replace(".lora_A", ".lora_B")], name.split(".lora_A")[0]
        place = _PLACE.search(path)
        assert place is not None, name
        layer, module = int(place[1]), place[2].removesuffix(".base_layer")
        if module == "experts":
            deltas |= _of_all_experts(config, layer, path.removesuffix(".base_layer"), a.double(), b.double())
        else:
            parent, _, last = module.rpartition(".")
            module = ".".join(filter(None, (parent, _EXPERT_NAMES.get(last, last))))
            deltas[layer, module] = _scale(config, path, len(a)) * b.double() @ a.double()
    return deltas


def num_pairs(weights: bytes) -> int:
    return sum(".lora_A" in name for name in load(weights))


def merged_logprobs(deltas: Deltas, tokens: list[int]) -> Tensor:
    """Of all positions, from the dense tiny model with the deltas in its weights; float64."""
    weights = dict(_WEIGHTS)
    for (layer, module), delta in deltas.items():
        weights[weight_name(layer, module)] = weights[weight_name(layer, module)] + delta
    return torch.log_softmax(oracle.logits(_CONFIG, weights, tokens), -1)


def _of_all_experts(config: dict[str, Any], layer: int, path: str, a: Tensor, b: Tensor) -> Deltas:
    """The parameter and the way round by the sizes, which are all different here."""
    for parameter, (num_in, num_out) in PARAMETERS.items():
        scale = _scale(config, f"{path}.{parameter}", len(a) // NUM_EXPERTS)
        low, high = a.reshape(NUM_EXPERTS, -1, a.shape[1]), b.reshape(len(b), -1, NUM_EXPERTS)
        if (a.shape[1], len(b)) == (num_in, num_out):
            whole = scale * torch.einsum("ore,eri->eoi", high, low)
        elif (a.shape[1], len(b)) == (num_out, num_in):
            whole = scale * torch.einsum("ore,eri->eio", high, low)
        else:
            continue
        parts = {"down_proj": whole}
        if parameter == "gate_up_proj":
            parts = {"gate_proj": whole[:, :WIDTH], "up_proj": whole[:, WIDTH:]}
        return {(layer, f"experts.{e}.{part}"): of[e] for part, of in parts.items() for e in range(NUM_EXPERTS)}
    raise AssertionError(f"{path}: {a.shape}, {b.shape}")


def _scale(config: dict[str, Any], path: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)  # as PEFT looks them up
    alpha = config.get("lora_alpha", 8) if key is None else patterns[key]
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
