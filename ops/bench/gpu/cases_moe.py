"""The experts of a layer from the router's logits on: routing, order, both products, sums. Beside what vLLM's
fused_experts took on an H200 (2026-11-29, without its routing), and what the weights of the experts in use, read once,
take at least."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import ExpertWeights, RoutingRule, combine, grouped_linear, grouped_silu_mul, plan_experts, route
from ops.bench.gpu.cases import DEVICE, Built, Case, error, random
from ops.bench.gpu.timing import num_sets

RULE = RoutingRule(softmax_first=True, renormalize=True)
SAMPLED = 16  # tokens that are computed again in fp32


@dataclass(frozen=True)
class Shape:
    """Of one layer. ``figures``: by tokens, the peer's µs, what must be and what we want."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    figures: dict[int, tuple[float | None, float | None, float | None]]

    @property
    def expert_bytes(self) -> float:
        return 6.0 * self.hidden * self.inner


QWEN = Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, {
    1: (31.3, 31, 24), 4: (79.9, None, None), 16: (198, 200, 192), 32: (271, None, None), 64: (296, 300, 290),
    128: (300, None, None), 256: (326, 335, 305), 512: (332, None, None), 1024: (389, 400, 345), 2048: (500, 510, 420),
    4096: (829, 840, 630),
})  # fmt: skip
MIXTRAL = Shape("Mixtral", 8, 2, 4096, 14336, {
    1: (180, None, None), 16: (644, None, None), 64: (662, 690, 660), 256: (722, None, None),
    1024: (1662, 1700, 1250), 4096: (5522, 5600, 4800),
})  # fmt: skip
SKEWED: dict[int, float] = {  # tokens of Qwen's experts, asked for as by Zipf: the peer's µs
    1: 31.4, 16: 149, 64: 261, 256: 350, 1024: 421, 4096: 860,
}  # fmt: skip


class Layer:
    """One layer's weights, made at the first use and kept for all cases of its shape."""

    _made: ClassVar["dict[str, Layer]"] = {}

    def __init__(self, shape: Shape) -> None:
        self.gate_up = ExpertWeights(random(shape.num_experts, 2 * shape.inner, shape.hidden) * shape.hidden**-0.5)
        self.down = ExpertWeights(random(shape.num_experts, shape.hidden, shape.inner) * shape.inner**-0.5)

    @classmethod
    def of(cls, shape: Shape) -> "Layer":
        if shape.name not in cls._made:
            cls._made.clear()  # two do not fit beside each other in every process that warms
            cls._made[shape.name] = cls(shape)
        return cls._made[shape.name]


def computed(layer: Layer, x: Tensor, logits: Tensor, top_k: int) -> Tensor:
    topk_ids, topk_weights = route(logits, top_k, RULE)
    plan = plan_experts(topk_ids, layer.gate_up.num_experts)
    inner = grouped_silu_mul(x, layer.gate_up, plan)
    return combine(grouped_linear(inner, layer.down, plan), topk_weights, plan)


def by_hand(layer: Layer, x: Tensor, logits: Tensor, top_k: int) -> Tensor:
    """In fp32, an expert of a token at a time."""
    weights, ids = logits.float().softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, device=x.device)
    gate_up, down = layer.gate_up.weight(), layer.down.weight()
    for token, chosen in enumerate(ids.tolist()):
        for choice, expert in enumerate(chosen):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            out[token] += weights[token, choice] * (down[expert].float() @ (F.silu(gate) * up))
    return out


def experts(shape: Shape, num_tokens: int, *, is_skewed: bool = False) -> Built:
    """Sets of tokens that go to other experts, so that few tokens find no weights in the cache."""
    layer = Layer.of(shape)
    favour = -1.0 * torch.arange(1, shape.num_experts + 1, device=DEVICE).log() if is_skewed else 0.0
    favour = favour[torch.randperm(shape.num_experts, device=DEVICE)] if isinstance(favour, Tensor) else favour
    count = num_sets(active(shape, num_tokens) * shape.expert_bytes, 24)
    sets = []
    for _ in range(count):
        noise = torch.rand(num_tokens, shape.num_experts, device=DEVICE).clamp_min(1e-9)
        sets.append((random(num_tokens, shape.hidden), (favour - (-noise.log()).log()).bfloat16()))  # Gumbel's

    def verify() -> float:
        x, logits = sets[0]
        some = torch.linspace(0, num_tokens - 1, min(num_tokens, SAMPLED), device=DEVICE).long()
        out = computed(layer, x, logits, shape.top_k)[some]
        return error(out, by_hand(layer, x[some], logits[some], shape.top_k))

    return Built([lambda x=x, logits=logits: computed(layer, x, logits, shape.top_k) for x, logits in sets], verify)


def active(shape: Shape, num_tokens: int) -> float:
    """Experts that so many tokens wake, each its choices of all of them evenly."""
    return shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** num_tokens)


def active_by_zipf(shape: Shape, num_tokens: int) -> float:
    """As ``experts`` draws them: K experts a token by Zipf's law without repetition; drawn once, on the host."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.rand(num_tokens, shape.num_experts, generator=draw).clamp_min(1e-9)
    logits = -torch.arange(1, shape.num_experts + 1).log() - (-noise.log()).log()
    return float(len(logits.topk(shape.top_k).indices.unique()))


def _case(shape: Shape, num_tokens: int, *, is_skewed: bool = False) -> Case:
    woken = active_by_zipf(shape, num_tokens) if is_skewed else active(shape, num_tokens)
    pairs = num_tokens * shape.top_k
    between = 4.0 * pairs * (shape.inner + shape.hidden)  # written once, read once
    num_bytes = woken * shape.expert_bytes + 4.0 * num_tokens * shape.hidden + between
    flops = pairs * shape.expert_bytes
    name = f"{shape.name} T={num_tokens}{' skewed' if is_skewed else ''}"
    figures = (SKEWED[num_tokens], None, None) if is_skewed else shape.figures[num_tokens]
    build = lambda: experts(shape, num_tokens, is_skewed=is_skewed)  # noqa: E731
    return Case("moe", name, build, num_bytes, flops, 5, *figures)


def moe_cases() -> list[Case]:
    return [
        *(_case(QWEN, num_tokens) for num_tokens in QWEN.figures),
        *(_case(QWEN, num_tokens, is_skewed=True) for num_tokens in SKEWED),
        *(_case(MIXTRAL, num_tokens) for num_tokens in MIXTRAL.figures),
    ]
