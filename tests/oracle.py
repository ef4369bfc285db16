"""The oracle: a Llama forward in plain torch that shares no line with engine/ or kernels/.

No KV cache, no batch, no kernels: the whole sequence again for every token, in float64 where asked. What the
engine says must agree with this, with adapters merged into the weights by a plain matmul.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

Weights = dict[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [heads, T, D]: rotary embedding by halves."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gated_mlp(part: Weights, x: torch.Tensor) -> torch.Tensor:
    """x [T, H] → [T, H]; ``part`` is one layer's weights."""
    gate, up = x @ part["mlp.gate_proj.weight"].T, x @ part["mlp.up_proj.weight"].T
    return (functional.silu(gate) * up) @ part["mlp.down_proj.weight"].T


Mlp = Callable[[Weights, torch.Tensor], torch.Tensor]


def logits(config, weights: Weights, ids: list[int], mlp: Mlp = gated_mlp) -> torch.Tensor:
    """All positions' logits [T, V]. ``config`` has Hugging Face's field names as attributes or keys."""
    get = config.get if isinstance(config, dict) else lambda name: getattr(config, name)
    heads, kv_heads, eps = get("num_attention_heads"), get("num_key_value_heads"), get("rms_norm_eps")
    theta = get("rope_theta")
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    mask = torch.full((len(ids), len(ids)), float("-inf"), dtype=x.dtype).triu(1)
    for layer in range(get("num_hidden_layers")):
        part = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = _norm(x, part["input_layernorm.weight"], eps)
        q, k, v = (h @ part[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q = _rotate(q.view(len(ids), heads, -1).transpose(0, 1), theta)
        k = _rotate(k.view(len(ids), kv_heads, -1).transpose(0, 1), theta).repeat_interleave(heads // kv_heads, 0)
        v = v.view(len(ids), kv_heads, -1).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        scores = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + mask, -1)
        attended = (scores @ v).transpose(0, 1).reshape(len(ids), -1)
        x = x + attended @ part["self_attn.o_proj.weight"].T
        h = _norm(x, part["post_attention_layernorm.weight"], eps)
        x = x + mlp(part, h)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(x, weights["model.norm.weight"], eps) @ head.T


def greedy(config, weights: Weights, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """``num_tokens`` greedy tokens and the log-probability of each."""
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        row = torch.log_softmax(logits(config, weights, ids)[-1], -1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
    return ids[len(prompt) :], logprobs


def prompt_logprobs(config, weights: Weights, ids: list[int]) -> list[float]:
    """The log-probability of each token of ``ids`` but the first."""
    rows = torch.log_softmax(logits(config, weights, ids), -1)
    return [float(rows[position - 1, ids[position]]) for position in range(1, len(ids))]
