"""Names of an upload's tensors → (layer, module, side), or why not.

Accepted: a prefix of ``base_model.model.model.`` (PEFT on a causal model), ``base_model.model.`` (PEFT on the inner
model), ``model.`` or nothing; then ``layers.N.``, the module's path, ``lora_A`` or ``lora_B``, perhaps an adapter's
name, ``weight``. Paths are those of every layer's linears (PATHS), of one expert's (``mlp.experts.E.gate_proj``;
Mixtral's ``block_sparse_moe.experts.E.w1``), and of fused experts (``mlp.experts``, ``mlp.experts.base_layer``).
"""

import re
from dataclasses import dataclass, field

from tenants.adapters.bounded_json import clip_all
from tenants.adapters.header import TensorEntry
from tenants.adapters.shape import PARTS, AdapterShape, expert_module

PATHS = {  # in the order of the canonical file
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
FUSED = ("experts.base_layer", "experts")  # PEFT's wrapped parameters of one module, the inner and the outer one
_MODULES = {path: module for module, path in PATHS.items()}
_PARTS = {part: part for part in PARTS} | {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>[a-z0-9_.]+?))"
    r"\.lora_(?P<side>[AB])(?:\.(?P<adapter>[A-Za-z0-9_]+))?\.weight"
)
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+)")
_FUSED = re.compile(r"(?:mlp|block_sparse_moe)\.(experts(?:\.base_layer)?)")
_KINDS = (  # first match names the refusal
    (re.compile(r"lora_magnitude_vector"), "DoRA magnitudes (use_dora)"),
    (re.compile(r"lora_[AB]\.(?:\w+\.)?bias$"), "biases of LoRA layers (lora_bias)"),
    (re.compile(r"trainable_tokens_"), "trained token embeddings (trainable_token_indices)"),
    (re.compile(r"lora_E\b"), "AdaLoRA"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA on the embedding"),
    (re.compile(r"(?:^|\.)(?:lm_head|embed_tokens)\.lora_[AB]\b"), "LoRA on the embedding or lm_head"),
    (re.compile(r"\.(?:mlp|block_sparse_moe)\.gate\.lora_[AB]\b"), "LoRA on the router"),
    (re.compile(r"\.shared_expert(?:_gate)?\..*lora_[AB]\b|\.shared_expert_gate\.lora_"), "LoRA on the shared expert"),
    (re.compile(r"\.experts\b.*lora_[AB]\b"), "LoRA on experts that the model doesn't have"),
    (re.compile(r"^(?!.*lora_)"), "full weights (modules_to_save)"),
)


@dataclass(slots=True)
class Pair:
    """Both halves of a module of a layer. ``path`` is the module's in the uploader's model."""

    layer: int
    module: str
    path: str
    halves: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def lora_rank(self) -> int:
        return self.halves["A"].shape[0]

    @property
    def num_experts(self) -> int:
        """That share its tensors."""
        return 1


@dataclass(slots=True)
class Binding:
    """Complete pairs, those of fused experts apart; ``reasons`` speak against the upload."""

    pairs: list[Pair]
    fused: list[Pair]
    reasons: list[str]


def bind(entries: list[TensorEntry], shape: AdapterShape) -> Binding:
    """Every tensor finds its place, or is named in a reason: nothing is left out in silence."""
    pairs: dict[tuple[int, str], Pair] = {}
    refused: dict[str, list[str]] = {}
    adapters: set[str] = set()
    for entry in entries:
        match = _KEY.fullmatch(entry.name)
        layer, module = (int(match["layer"]), _module(match["module"])) if match else (-1, "")
        if match is None or not _has(shape, layer, module):
            refused.setdefault(_kind(entry.name), []).append(entry.name)
            continue
        pair = pairs.setdefault((layer, module), Pair(layer, module, match["path"]))
        if match["side"] in pair.halves:
            refused.setdefault("two tensors for one place", []).append(entry.name)
        pair.halves[match["side"]] = entry
        adapters.add(match["adapter"] or "")
    reasons = [f"{kind}: {clip_all(names)}" for kind, names in refused.items()]
    if len(adapters) > 1:
        reasons.append(f"tensors of several adapters in one file: {clip_all(sorted(adapters))}")
    return _complete(list(pairs.values()), reasons)


def canonical_order(layer: int, module: str) -> tuple[int, ...]:
    """By layer; in a layer the linears of PATHS, then expert by expert."""
    if module in PATHS:
        return layer, 0, 0, list(PATHS).index(module)
    _, expert, part = module.split(".")
    return layer, 1, int(expert), PARTS.index(part)


def _module(path: str) -> str:
    """The canonical name of a path within a layer, one of FUSED, or nothing."""
    if expert := _EXPERT.fullmatch(path):
        return expert_module(int(expert[1]), _PARTS[expert[2]]) if expert[2] in _PARTS else ""
    if fused := _FUSED.fullmatch(path):
        return fused[1]
    return _MODULES.get(path, "")


def _has(shape: AdapterShape, layer: int, module: str) -> bool:
    if module in PATHS:
        return module in shape.modules and layer < shape.num_layers
    experts = shape.experts
    if experts is None or not module or layer not in experts.layers:
        return False
    return module in FUSED or int(module.split(".")[1]) < experts.num_experts


def _complete(pairs: list[Pair], reasons: list[str]) -> Binding:
    half = [pair for pair in pairs if len(pair.halves) < 2]
    if half:
        names = sorted(entry.name for pair in half for entry in pair.halves.values())
        reasons.append(f"half pairs (lora_A without lora_B or the other way round): {clip_all(names)}")
    whole = [pair for pair in pairs if len(pair.halves) == 2]
    if not whole and not reasons:
        reasons.append("no LoRA pair in the file")
    plain = [pair for pair in whole if pair.module not in FUSED]
    return Binding(plain, [pair for pair in whole if pair.module in FUSED], reasons)


def _kind(name: str) -> str:
    for form, kind in _KINDS:
        if form.search(name):
            return f"{kind} {'are' if kind.split(' ')[0].endswith('s') else 'is'} not supported"
    return "keys that match no module of the model"
