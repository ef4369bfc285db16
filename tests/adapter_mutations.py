"""What happens to adapters on their way: what is usual and changes nothing or little, what isn't supported or is
wrong, and what nobody does by mistake. Each changes a ``Draft`` in place."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.adapter_drafts import Draft

Change = Callable[[random.Random, Draft], None]
PREFIX = "base_model.model.model."


def _rename(draft: Draft, old: str, new: str, name: str | None = None) -> None:
    """In every key, or in one; the order stays."""
    draft.tensors = {
        (key.replace(old, new, 1) if name in (None, key) else key): tensor for key, tensor in draft.tensors.items()
    }


def _paths(draft: Draft) -> list[str]:
    return sorted({key.split(".lora_")[0].removeprefix("base_model.model.") for key in draft.tensors})


def _one(rng: random.Random, draft: Draft) -> tuple[str, np.ndarray]:
    """A tensor's name, and a copy of its values that is in its place."""
    name = rng.choice(list(draft.tensors))
    dtype, values = draft.tensors[name]
    draft.tensors[name] = dtype, values.copy()
    return name, draft.tensors[name][1]


MEANINGLESS: tuple[dict[str, Any], ...] = (
    {"modules_to_save": []}, {"bias": None}, {"layers_to_transform": [0, 1]}, {"future_key": None}, {"revision": "x"},
    {"base_model_name_or_path": "org/other"}, {"lora_dropout": 0.1, "inference_mode": False}, {"use_dora": None},
    {"init_lora_weights": "gaussian"}, {"exclude_modules": ["lm_head"]}, {"eva_config": {"rho": 2}},
)  # fmt: skip


# ── usual ────────────────────────────────────────────────────────────────────────────────────────


def alpha(rng: random.Random, draft: Draft) -> None:
    draft.config["lora_alpha"] = rng.choice([1, 4, 16, 32.0, 0.5, 7.25])


def rank_stabilised(rng: random.Random, draft: Draft) -> None:
    draft.config["use_rslora"] = rng.random() < 0.8


def pattern(rng: random.Random, draft: Draft) -> None:
    """A path, a suffix of one, or one with gaps; the rank that it names is often wrong, which is a warning."""
    path = rng.choice(_paths(draft))
    parts = path.split(".")
    forms = [path, f"^{path}$", parts[-1], ".".join(parts[-2:]), rf".*\.{parts[-1]}", path.replace(".", r"\.")]
    forms += [f"{'.'.join(parts[:3])}.*", f"layers.{rng.randrange(12)}..*", "lm_head", f"{parts[0]}.*.{parts[-1]}"]
    key, value = rng.choice([("rank_pattern", rng.randint(1, 16)), ("alpha_pattern", rng.choice([1, 2.5, 24]))])
    draft.config[key] = {**draft.config.get(key, {}), rng.choice(forms): value}


def prefix(rng: random.Random, draft: Draft) -> None:
    _rename(draft, PREFIX, rng.choice(["base_model.model.", "model.", ""]))


def adapter_name(rng: random.Random, draft: Draft) -> None:
    draft.tensors = {key.replace(".weight", ".default.weight"): tensor for key, tensor in draft.tensors.items()}


def order(rng: random.Random, draft: Draft) -> None:
    items = list(draft.tensors.items())
    rng.shuffle(items)
    draft.tensors = dict(items)


def dtype(rng: random.Random, draft: Draft) -> None:
    chosen, share = rng.choice(["F16", "BF16"]), rng.choice([1.0, 0.5])
    for name, (old, values) in draft.tensors.items():
        draft.tensors[name] = (chosen if rng.random() < share else old), values


def targets(rng: random.Random, draft: Draft) -> None:
    draft.config["target_modules"] = rng.choice(["all-linear", r".*(q|v)_proj$", _paths(draft), ["lm_head"], [], None])


def metadata(rng: random.Random, draft: Draft) -> None:
    draft.metadata = rng.choice([None, {}, {"format": "pt", "note": "x" * 100}, {"format": "np"}])


def other_keys(rng: random.Random, draft: Draft) -> None:
    draft.config |= rng.choice(MEANINGLESS)


def values(rng: random.Random, draft: Draft) -> None:
    _, chosen = _one(rng, draft)
    chosen *= rng.choice([-1.0, 0.5, 0.0])


USUAL: tuple[Change, ...] = (
    alpha, rank_stabilised, pattern, pattern, prefix, adapter_name, order, dtype, targets, metadata, other_keys, values,
)  # fmt: skip


# ── not supported, or wrong ──────────────────────────────────────────────────────────────────────

UNSUPPORTED: tuple[dict[str, Any], ...] = (
    {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"fan_in_fan_out": True},
    {"peft_type": "LOHA"}, {"lora_bias": True}, {"layer_replication": [[0, 2]]}, {"init_lora_weights": "pissa"},
    {"task_type": "SEQ_CLS"},
    {"trainable_token_indices": [1]}, {"use_qalora": True}, {"future_key": 7}, {"rank_pattern": {"(q|k)_proj": 4}},
    {"alpha_pattern": {r"layers\.\d+": 4}}, {"loftq_config": {"bits": 4}}, {"target_parameters": ["mlp.gate.weight"]},
    {"alora_invocation_tokens": [3]}, {"arrow_config": {"top_k": 2}}, {"megatron_config": {"a": 1}},
)  # fmt: skip
EXTRA = {
    "base_model.model.lm_head.weight": (300, 32),
    "base_model.model.model.embed_tokens.weight": (300, 32),
    "base_model.model.lm_head.lora_A.weight": (4, 32),
    "base_model.model.model.embed_tokens.lora_embedding_A": (4, 300),
    f"{PREFIX}layers.0.self_attn.q_proj.lora_magnitude_vector": (32,),
    f"{PREFIX}layers.0.self_attn.q_proj.lora_B.bias": (32,),
    f"{PREFIX}layers.0.input_layernorm.weight": (32,),
    f"{PREFIX}layers.99.self_attn.q_proj.lora_A.weight": (4, 32),
    f"{PREFIX}layers.0.mlp.gate.lora_A.weight": (4, 32),
    f"{PREFIX}layers.0.mlp.experts.7.up_proj.lora_A.weight": (4, 32),
}


def unsupported(rng: random.Random, draft: Draft) -> None:
    draft.config |= rng.choice(UNSUPPORTED)


def extra_tensor(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(list(EXTRA))
    draft.tensors[name] = "F32", np.ones(EXTRA[name], np.float32)


def half_gone(rng: random.Random, draft: Draft) -> None:
    if len(draft.tensors) > 1:
        del draft.tensors[rng.choice(list(draft.tensors))]


def pair_gone(rng: random.Random, draft: Draft) -> None:
    stem = rng.choice(list(draft.tensors)).split(".lora_")[0] + ".lora_"
    if not all(name.startswith(stem) for name in draft.tensors):
        draft.tensors = {name: tensor for name, tensor in draft.tensors.items() if not name.startswith(stem)}


def other_prefix(rng: random.Random, draft: Draft) -> None:
    _rename(draft, PREFIX, rng.choice([f"{PREFIX}model.", "base_model.model.language_model.model.", "transformer.h."]))


def other_module(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(list(draft.tensors))
    pairs = [("self_attn.", "attn."), ("_proj", "_project"), ("layers.", "layers.1"), ("lora_A", "lora_B")]
    _rename(draft, *rng.choice(pairs), name)


def placed_twice(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(list(draft.tensors))
    draft.tensors[name.replace(PREFIX, "model.", 1)] = draft.tensors[name]


def other_shape(rng: random.Random, draft: Draft) -> None:
    name, chosen = _one(rng, draft)
    changed = rng.choice([chosen.T, chosen[:-1], chosen[None], chosen.reshape(-1), chosen[..., :-1], chosen[..., ::-1]])
    if changed.size:
        draft.tensors[name] = draft.tensors[name][0], np.ascontiguousarray(changed)


def large_rank(rng: random.Random, draft: Draft) -> None:
    stem = rng.choice(list(draft.tensors)).split(".lora_")[0]
    for side, axis in (("A", 0), ("B", 1)):
        for name in [name for name in draft.tensors if name.startswith(f"{stem}.lora_{side}")]:
            dtype, chosen = draft.tensors[name]
            if chosen.ndim == 2:
                draft.tensors[name] = dtype, np.concatenate([chosen] * 20, axis)


CHANGES: tuple[Change, ...] = (
    unsupported, unsupported, extra_tensor, half_gone, pair_gone, other_prefix, other_module, placed_twice, other_shape,
    large_rank,
)  # fmt: skip


# ── hostile ──────────────────────────────────────────────────────────────────────────────────────

NAMES = ("../../etc/passwd", "/absolute", "a\0b", "", "x" * 300, "base_model..lora_A.weight", "ü.lora_A.weight", "a b",
         "$(touch x)", "layers.0\n.lora_A", "__metadata__x", "%2e%2e%2f")  # fmt: skip
NUMBERS = (0, -1, 1e300, 2**70, True, "8", None, [], 1e-300, 0.1)


def hostile_name(rng: random.Random, draft: Draft) -> None:
    draft.tensors[rng.choice(NAMES)] = draft.tensors[rng.choice(list(draft.tensors))]


def not_finite(rng: random.Random, draft: Draft) -> None:
    _, chosen = _one(rng, draft)
    chosen.flat[rng.randrange(chosen.size)] = rng.choice([np.nan, np.inf, -np.inf])


def enormous(rng: random.Random, draft: Draft) -> None:
    _, chosen = _one(rng, draft)
    chosen.flat[rng.randrange(chosen.size)] = rng.choice([1e30, 6e4, 1e5])


def all_zero(rng: random.Random, draft: Draft) -> None:
    draft.tensors = {name: (dtype, chosen * 0) for name, (dtype, chosen) in draft.tensors.items()}


def hostile_number(rng: random.Random, draft: Draft) -> None:
    draft.config[rng.choice(["r", "lora_alpha", "use_rslora", "peft_type", "target_modules"])] = rng.choice(NUMBERS)


def hostile_pattern(rng: random.Random, draft: Draft) -> None:
    pattern = rng.choice(["(a+)+$", "(.*a){30}", ".*a" * 80 + "b", "q" * 300, "[", "(?R)", "a|b", ".*" * 100])
    draft.config[rng.choice(["rank_pattern", "alpha_pattern"])] = {pattern: rng.choice([4, *NUMBERS])}


def hostile_metadata(rng: random.Random, draft: Draft) -> None:
    draft.metadata = rng.choice([[], {"a": 1}, {"a": {"b": "c"}}, "text", {"x": "a" * (2 << 20)}, 7])


ODDITIES: tuple[Change, ...] = (
    hostile_name, not_finite, enormous, all_zero, hostile_number, hostile_pattern, hostile_metadata,
)  # fmt: skip
