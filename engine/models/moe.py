"""The MLP of a layer with experts: router, fused experts, and a shared expert where a family has one.

Weights under ``model.layers.N.mlp.``: ``gate.weight`` [E, H] (the router), ``experts.gate_up_proj`` [E, 2I, H] and
``experts.down_proj`` [E, H, I]; ``shared_expert.{gate,up,down}_proj.weight`` and ``shared_expert_gate.weight`` [1, H].
``engine/weights/experts.py`` brings what checkpoints hold into these names. Adapters may have pairs for single experts,
none for routers and shared experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.models.config import EXPERT, ModelConfig, MoeConfig
from engine.models.linear import Linear, LoraStep
from engine.models.mlp import GatedMlp
from kernels.linear import LinearWeight, linear
from kernels.moe import (
    ExpertPlan,
    ExpertWeights,
    RoutingRule,
    combine,
    grouped_gate_up,
    grouped_linear,
    grouped_silu_mul,
    plan_experts,
    route,
)
from kernels.moe.adapters import adapters_of_pairs
from kernels.silu_mul import silu_mul
from kernels.tiles import power_of_2

_GATE_UP = (f"{EXPERT}gate_proj", f"{EXPERT}up_proj")
_DOWN = (f"{EXPERT}down_proj",)
Weights = Mapping[str, Tensor]


class SharedExpert:
    """sigmoid(gate · x) · mlp(x): what every token gets beside its own experts."""

    def __init__(self, mlp: GatedMlp, gate: Tensor) -> None:
        self.mlp = mlp
        self.gate = LinearWeight(gate)

    def __call__(self, x: Tensor, lora: LoraStep) -> Tensor:
        return linear(x, self.gate).sigmoid() * self.mlp(x, lora)


class MoeMlp:
    """Each token through the experts of its choice. ``num_tokens_of`` [E] int64 counts them: tokens of steps, not what
    fills up a captured one or a kernel's tile. ``chosen`` [≥ T, K] int32: the experts of the last step's tokens, and
    behind them anything."""

    def __init__(
        self, layer: int, moe: MoeConfig, router: Tensor, experts: tuple[Tensor, Tensor], shared: SharedExpert | None
    ) -> None:
        self.layer = layer
        self.top_k = moe.top_k
        self.rule = RoutingRule(softmax_first=True, renormalize=moe.renormalize)
        self.router = LinearWeight(router)
        self.gate_up, self.down = map(ExpertWeights, experts)
        self.shared = shared
        self.num_tokens_of = torch.zeros(moe.num_experts, dtype=torch.int64, device=router.device)
        self.chosen = torch.zeros(0, moe.top_k, dtype=torch.int32, device=router.device)
        self._keeps_choices = False
        self.num_calls = 0

    def __call__(self, x: Tensor, lora: LoraStep) -> Tensor:
        """x [T, H] → [T, H]."""
        self.num_calls += 1
        kept = self.chosen[: len(x)] if self._keeps_choices else None
        topk_ids, topk_weights = route(linear(x, self.router), self.top_k, self.rule, kept)
        if kept is None:
            self.chosen = topk_ids
        plan = plan_experts(topk_ids, self.gate_up.num_experts, self.num_tokens_of, lora.num_tokens)
        y = combine(self._of_pairs(x, plan, lora), topk_weights, plan)
        return y if self.shared is None else y + self.shared(x, lora)

    def _of_pairs(self, x: Tensor, plan: ExpertPlan, lora: LoraStep) -> Tensor:
        """What each pair's expert answers, with its token's adapter, [T·K, H] in the order of the plan."""
        gate_up, down = lora.expert_slices(self.layer, _GATE_UP), lora.expert_slices(self.layer, _DOWN)
        if lora.plan is None or not (gate_up or down):
            return grouped_linear(grouped_silu_mul(x, self.gate_up, plan), self.down, plan)
        adapters = adapters_of_pairs(plan, lora.plan, lora.slots.experts.number)
        inner = grouped_gate_up(x, self.gate_up, plan)
        adapters.add_of_tokens(inner, x, gate_up)
        inner = silu_mul(inner)
        y = grouped_linear(inner, self.down, plan)
        adapters.add_of_pairs(y, inner, down)
        return y

    def keep_choices(self, chosen: Tensor) -> None:
        """In this memory [most rows of a step, K] int32 from now on."""
        self.chosen = chosen
        self._keeps_choices = True

    def onto(self, residual: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """What ``residual`` lacks then, [T, H]."""
        return self(x, lora)

    def linears(self) -> "tuple[Linear | MoeMlp, ...]":
        return (self,) if self.shared is None else (self, *self.shared.mlp.linears())


def expert_uses(chosen: Tensor, owners: Tensor, num_owners: int, num_experts: int) -> Tensor:
    """chosen [L, T, K]: of each layer, integers; owners [T]: whose each token is, 0 ≤ owner < N → [N, L · E] bool:
    whether one of an owner's tokens was sent to a layer's expert."""
    num_all = len(chosen) * num_experts
    first = torch.arange(0, num_all, num_experts, device=owners.device)  # of each layer
    places = chosen + first[:, None, None] + (owners * num_all)[None, :, None]
    uses = torch.zeros(num_owners * num_all, dtype=torch.bool, device=owners.device)
    uses.index_fill_(0, places.flatten(), True)
    return uses.view(num_owners, num_all)


def shared_evenly(uses: Tensor) -> Tensor:
    """uses [N, things] bool → [N] fp64: of each thing that one uses, 1 / its users, summed over things."""
    return uses.double() @ (1 / uses.sum(0).clamp_min(1).double())


def token_numbers(config: ModelConfig, max_expert_rank: int = 0) -> tuple[int, int]:
    """What one token's experts take of a step's memory: numbers that a layer's pairs hand each other, and ids of all
    layers' choices. (0, 0) without experts. ``max_expert_rank``: of adapters on them, 0: there are none."""
    moe = config.moe
    if moe is None:
        return 0, 0
    of_pair = moe.intermediate_size + config.hidden_size
    if max_expert_rank:  # gate and up before silu; low ranks in fp32 of both, in parts, and segments
        of_pair += 2 * moe.intermediate_size + 2 * 2 * max(16, power_of_2(max_expert_rank)) + 16
    return moe.top_k * of_pair, moe.top_k * len(moe.layers)


def moe_mlp(config: ModelConfig, weights: Weights, layer: int) -> MoeMlp | GatedMlp:
    """The MLP of one layer of a MoE model: experts, or dense in the layers between."""
    prefix = f"model.layers.{layer}.mlp"
    moe = config.moe
    assert moe is not None, config.family
    if layer not in moe.layers:
        return _without_adapters(weights, prefix, layer)
    shared = None
    if moe.shared_intermediate_size:
        mlp = _without_adapters(weights, f"{prefix}.shared_expert", layer)
        shared = SharedExpert(mlp, weights[f"{prefix}.shared_expert_gate.weight"])
    experts = weights[f"{prefix}.experts.gate_up_proj"], weights[f"{prefix}.experts.down_proj"]
    return MoeMlp(layer, moe, weights[f"{prefix}.gate.weight"], experts, shared)


def _without_adapters(weights: Weights, prefix: str, layer: int) -> GatedMlp:
    """A dense MLP that is in some layers only, or beside experts: no module of ``module_sizes``, hence no LoRA."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return GatedMlp(Linear(layer, (), [gate, up], []), Linear(layer, (), [down], []))
