"""The experts of a layer from the router's logits on: routing, order, both products, sums. Beside what vLLM's
fused_experts took on an H200 (2026-11-29, without its routing), and what the weights of the experts in use, read once,
take at least."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import (
    ExpertWeights,
    RoutingRule,
    combine,
    grouped_gate_up,
    grouped_linear,
    grouped_silu_mul,
    plan_experts,
    route,
)
from kernels.moe.adapters import CutPairs
from kernels.moe.triton_pairs import cut_pairs
from kernels.sgmv import LoraSlice
from kernels.silu_mul import silu_mul
from ops.bench.gpu.cases import DEVICE, Built, Case, error, random
from ops.bench.gpu.timing import num_sets

NUM_ADAPTERS, RANK = 8, 16
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


class Adapters:
    """Of rank 16 on all experts, ``NUM_ADAPTERS`` of them, as slots hold them."""

    _made: ClassVar["dict[str, Adapters]"] = {}

    def __init__(self, shape: Shape) -> None:
        sizes = (shape.hidden, shape.inner, 0), (shape.hidden, shape.inner, shape.inner), (shape.inner, shape.hidden, 0)
        *self.gate_up, down = (self._part(shape.num_experts, *size) for size in sizes)
        self.down = [down]

    @staticmethod
    def _part(num_experts: int, size_in: int, size_out: int, start: int) -> LoraSlice:
        number = NUM_ADAPTERS * num_experts
        a, b = random(number, RANK, size_in) * size_in**-0.5, random(number, RANK, size_out) * 0.3
        ranks = torch.full((number,), RANK, dtype=torch.int32, device=DEVICE)
        return LoraSlice(a, b, (RANK,) * number, start, ranks)

    @classmethod
    def of(cls, shape: Shape) -> "Adapters":
        if shape.name not in cls._made:
            cls._made[shape.name] = cls(shape)
        return cls._made[shape.name]


def computed_with_adapters(layer: Layer, adapters: Adapters, x: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
    topk_ids, topk_weights = route(logits, QWEN.top_k, RULE)
    plan = plan_experts(topk_ids, layer.gate_up.num_experts)
    pairs = CutPairs(*cut_pairs(plan, slots, NUM_ADAPTERS))
    both = grouped_gate_up(x, layer.gate_up, plan)
    pairs.add_of_tokens(both, x, adapters.gate_up)
    inner = silu_mul(both)
    y = grouped_linear(inner, layer.down, plan)
    pairs.add_of_pairs(y, inner, adapters.down)
    return combine(y, topk_weights, plan)


def with_adapters(num_tokens: int) -> Built:
    """Each adapter's tokens one behind the other, as chunks stand in a step."""
    layer, adapters = Layer.of(QWEN), Adapters.of(QWEN)
    slots = (torch.arange(num_tokens, device=DEVICE) * NUM_ADAPTERS // num_tokens).int()
    count = num_sets(active(QWEN, num_tokens) * QWEN.expert_bytes, 24)
    sets = [(random(num_tokens, QWEN.hidden), random(num_tokens, QWEN.num_experts)) for _ in range(count)]

    def verify() -> float:
        """One adapter at a time changes nothing."""
        x, logits = sets[0]
        out = computed_with_adapters(layer, adapters, x, logits, slots)
        alone = torch.where(slots == 3, slots, -1)
        own = computed_with_adapters(layer, adapters, x, logits, alone)[slots == 3]
        return error(out[slots == 3], own.double())

    return Built([lambda x=x, y=y: computed_with_adapters(layer, adapters, x, y, slots) for x, y in sets], verify)


def _adapters_case(num_tokens: int) -> Case:
    """Beside the same step without adapters: the A and B of every (adapter, expert) in use, once."""
    of_one = num_tokens / NUM_ADAPTERS
    in_use = NUM_ADAPTERS * QWEN.num_experts * (1 - (1 - QWEN.top_k / QWEN.num_experts) ** of_one)
    pairs, plain = num_tokens * QWEN.top_k, _case(QWEN, num_tokens)
    num_bytes = plain.num_bytes + in_use * 6.0 * RANK * (QWEN.hidden + QWEN.inner)
    flops = plain.flops + pairs * 6.0 * RANK * (QWEN.hidden + QWEN.inner)
    name = f"{QWEN.name} T={num_tokens} adapters"
    return Case("moe", name, lambda: with_adapters(num_tokens), num_bytes, flops, 11)


def moe_cases() -> list[Case]:
    return [
        *(_adapters_case(num_tokens) for num_tokens in (16, 64, 256, 1024)),
        *(_case(QWEN, num_tokens) for num_tokens in QWEN.figures),
        *(_case(QWEN, num_tokens, is_skewed=True) for num_tokens in SKEWED),
        *(_case(MIXTRAL, num_tokens) for num_tokens in MIXTRAL.figures),
    ]
