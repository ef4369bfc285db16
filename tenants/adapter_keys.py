"""Names of an upload's tensors → (layer, module, side), or why not.

Accepted, for every adaptable module of every layer: a prefix of ``base_model.model.model.`` (PEFT on a causal
model), ``base_model.model.`` (PEFT on the inner model), ``model.`` or nothing; then ``layers.N.``, the module's
path, ``lora_A`` or ``lora_B``, perhaps an adapter's name, ``weight``.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from tenants.adapter_header import TensorEntry
from tenants.adapter_json import clip_all

PATHS = {  # in the order of the canonical file
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_MODULES = {path: module for module, path in PATHS.items()}

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>[a-z0-9_.]+?))"
    r"\.lora_(?P<side>[AB])(?:\.(?P<adapter>[A-Za-z0-9_]+))?\.weight"
)
_KINDS = (  # first match names the refusal
    (re.compile(r"lora_magnitude_vector"), "DoRA magnitudes (use_dora)"),
    (re.compile(r"lora_[AB]\.(?:\w+\.)?bias$"), "biases of LoRA layers (lora_bias)"),
    (re.compile(r"trainable_tokens_"), "trained token embeddings (trainable_token_indices)"),
    (re.compile(r"lora_E\b"), "AdaLoRA"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA on the embedding"),
    (re.compile(r"(?:^|\.)(?:lm_head|embed_tokens)\.lora_[AB]\b"), "LoRA on the embedding or lm_head"),
    (re.compile(r"\.experts\..*lora_[AB]\b"), "LoRA on experts"),
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
    def rank(self) -> int:
        return self.halves["A"].shape[0]


@dataclass(slots=True)
class Binding:
    """Complete pairs in canonical order; ``reasons`` speak against the upload."""

    pairs: list[Pair]
    reasons: list[str]


def bind(entries: list[TensorEntry], modules: Collection[str], num_layers: int) -> Binding:
    """Every tensor finds its place, or is named in a reason: nothing is left out in silence."""
    pairs: dict[tuple[int, str], Pair] = {}
    refused: dict[str, list[str]] = {}
    adapters: set[str] = set()
    for entry in entries:
        match = _KEY.fullmatch(entry.name)
        module = _MODULES.get(match["module"]) if match else None
        if match is None or module is None or module not in modules or int(match["layer"]) >= num_layers:
            refused.setdefault(_kind(entry.name), []).append(entry.name)
            continue
        pair = pairs.setdefault((int(match["layer"]), module), Pair(int(match["layer"]), module, match["path"]))
        if match["side"] in pair.halves:
            refused.setdefault("two tensors for one place", []).append(entry.name)
        pair.halves[match["side"]] = entry
        adapters.add(match["adapter"] or "")
    reasons = [f"{kind}: {clip_all(names)}" for kind, names in refused.items()]
    if len(adapters) > 1:
        reasons.append(f"tensors of several adapters in one file: {clip_all(sorted(adapters))}")
    return _complete(pairs, reasons)


def _complete(pairs: dict[tuple[int, str], Pair], reasons: list[str]) -> Binding:
    half = [pair for pair in pairs.values() if len(pair.halves) < 2]
    if half:
        names = sorted(entry.name for pair in half for entry in pair.halves.values())
        reasons.append(f"half pairs (lora_A without lora_B or the other way round): {clip_all(names)}")
    order = list(PATHS)
    whole = [pair for pair in pairs.values() if len(pair.halves) == 2]
    whole.sort(key=lambda pair: (pair.layer, order.index(pair.module)))
    if not whole and not reasons:
        reasons.append("no LoRA pair in the file")
    return Binding(whole, reasons)


def _kind(name: str) -> str:
    for form, kind in _KINDS:
        if form.search(name):
            return f"{kind} are not supported" if kind.endswith("s") else f"{kind} is not supported"
    return "keys that match no module of the model"
