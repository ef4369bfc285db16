"""Experts in the engine on a GPU, made of what stands in gpu_engine_checks: against plain torch in fp32, and their
captured steps against the launches that they hold."""

import random
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.gpu.runner import CudaRunner
from engine.models.config import ModelConfig, expert_sizes
from engine.weights.adapter import AdapterWeights, LoraPair
from ops.bench import gpu_engine_checks as checks
from ops.bench.random_model import random_config

NUM_STEPS = 40
CLOSE = 0.1  # of logits of routers, in bf16 and fp32


class PlainExperts:
    """Layers of experts in fp32 for ``plain_logits``, each token's as the engine chose them: [layers][T, K]. Where two
    are nearly as good, bf16 may choose another than fp32; nothing else may it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        chosen: Sequence[Tensor],
        adapter: AdapterWeights | None = None,
    ) -> None:
        assert config.moe is not None
        self._moe, self._weights, self._adapter = config.moe, weights, adapter
        self._chosen = dict(zip(config.moe.layers, chosen, strict=True))

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        prefix, ids = f"model.layers.{layer}.mlp", self._chosen[layer].long()
        logits = x @ self._weights[f"{prefix}.gate.weight"].float().T
        worst, best = logits.gather(1, ids).amin(1), logits.sort(1, descending=True).values[:, self._moe.top_k - 1]
        assert (worst > best - CLOSE).all(), f"layer {layer}: experts that are not the best"
        shares = logits.softmax(-1).gather(1, ids)
        shares = shares / shares.sum(-1, keepdim=True) if self._moe.renormalize else shares
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            gate_up, down = self._merged(layer, expert)
            gate, up = (x[rows] @ gate_up.T).chunk(2, -1)
            out.index_add_(0, rows, shares[rows, choices, None] * ((F.silu(gate) * up) @ down.T))
        return out

    def _merged(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """gate over up, and down, each with what the adapter adds to it."""
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [*self._weights[f"{prefix}.gate_up_proj"][expert].float().chunk(2)]
        parts.append(self._weights[f"{prefix}.down_proj"][expert].float())
        for number, name in enumerate(("gate", "up", "down")):
            pair = self._adapter and self._adapter.pairs.get((layer, f"experts.{expert}.{name}_proj"))
            if pair:
                a, b = (half.to(parts[number].device).float() for half in (pair.a, pair.b))
                parts[number] = parts[number] + pair.scale * b @ a
        return torch.cat(parts[:2]), parts[2]


def check_logits_with_experts_are_those_of_the_reference(name: str = "tiny_moe", num_tokens: int = 24) -> dict:
    """As the check of dense models; the experts of each token are read where captured steps leave them."""
    runner, weights = checks.make_runner(name, 6)
    return _compared(runner, weights, name, num_tokens, [None] * 6)


def check_adapters_on_experts_give_the_logits_of_merged_weights(name: str = "tiny_moe", num_tokens: int = 24) -> dict:
    runner, weights, adapters = runner_with_experts(name)
    return _compared(runner, weights, name, num_tokens, adapters)


def runner_with_experts(
    name: str, *, has_graphs: bool = True
) -> tuple[CudaRunner, dict[str, Tensor], list[AdapterWeights | None]]:
    """As ``make_runner`` of six slots, the first three with adapters on experts too."""
    runner, weights = checks.make_runner(name, 6, has_graphs=has_graphs, expert_slots=3)
    found: list[AdapterWeights | None] = [None] * 6
    for slot in range(3):
        found[slot] = own = on_experts(random_config(name), slot)
        runner.load_slot(slot, runner.prepare(own))
    return runner, weights, found


def on_experts(config: ModelConfig, seed: int) -> AdapterWeights:
    """The adapter of ``make_runner`` and pairs of some experts, of ranks up to 16."""
    assert config.moe is not None
    draw, pairs = torch.Generator().manual_seed(50 + seed), dict(checks.adapter(config, seed).pairs)
    for layer in config.moe.layers:
        for module, (num_in, num_out) in expert_sizes(config).items():
            for expert in range(seed % 2, config.moe.num_experts, 1 + seed):
                rank = (3, 8, 16)[(expert + seed) % 3]
                a, b = torch.randn(rank, num_in, generator=draw), torch.randn(num_out, rank, generator=draw)
                place = layer, module.replace("experts.", f"experts.{expert}.")
                pairs[place] = LoraPair(a * num_in**-0.5, b * 0.3 * rank**-0.5, 1.0)
    return AdapterWeights(pairs, sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values()))


def check_adapters_on_experts_replayed_are_those_launched(name: str = "tiny_moe") -> dict[str, int]:
    """The same steps by graphs and kernel by kernel, adapters drawn anew in each; some steps have none on experts."""
    runners = [runner_with_experts(name, has_graphs=has_graphs)[0] for has_graphs in (True, False)]
    draw = random.Random(3)

    def slots_of(step: int) -> list[int]:
        return [draw.randrange((-1, 3, 0)[step % 3], 6) for _ in range(checks.NUM_ROWS)]

    checks.take_same_steps(random_config(name), runners, slots_of, NUM_STEPS)
    return {"steps": NUM_STEPS}


def check_a_base_row_has_the_same_bits_beside_adapters_on_experts(name: str = "tiny_moe") -> dict[str, int]:
    """Rows 0 … 3 have none; rows 4 … 7 none either, plain ones, or such on experts. Prompts and decodes."""
    runner, _, _ = runner_with_experts(name)
    found = []
    for others in ([-1] * 4, [3, 4, 5, 3], [0, 1, 2, 0]):
        rows = checks.Rows(random_config(name), [20] * checks.NUM_ROWS, logprobs=20)
        rows.use([-1] * 4 + others)
        results = []
        for _ in range(4):
            plan = rows.plan()
            results.append(runner.launch(plan).results())
            rows.take(plan, results[-1])
        found.append(results)
    assert all([step[:4] for step in other] == [step[:4] for step in found[0]] for other in found[1:])
    assert found[0] != found[1] != found[2]
    return {}


def _compared(
    runner: CudaRunner,
    weights: Mapping[str, Tensor],
    name: str,
    num_tokens: int,
    adapters: Sequence[AdapterWeights | None],
) -> dict:
    """``adapters``: on experts, by slot."""
    config, model = random_config(name), runner._model
    rows = checks.Rows(config, [5 + 9 * number for number in range(checks.NUM_ROWS)], logprobs=20)
    slots = [-1, 0, 1, 2, 3, 4, 5, -1]
    rows.use(slots)
    told: list[list] = [[] for _ in slots]
    chosen: list[list[Tensor]] = [[] for _ in slots]  # of a step, [layers, tokens of the row, K]
    for _ in range(num_tokens):
        plan = rows.plan()
        results = runner.launch(plan).results()
        of_step = torch.stack([mlp.chosen[: plan.num_tokens] for mlp in model._expert_mlps()])
        for row, part in enumerate(of_step.split([chunk.num_tokens for chunk in plan.chunks], 1)):
            chosen[row].append(part)
            told[row].append(results[row].logprobs)
        rows.take(plan, results)
    experts = [
        PlainExperts(config, weights, list(torch.cat(parts, 1)), adapters[slot] if slot >= 0 else None)
        for parts, slot in zip(chosen, slots, strict=True)
    ]
    return checks.compare(config, weights, rows, told, experts)


def check_experts_of_replayed_steps_are_those_of_launched_ones(name: str = "tiny_moe") -> dict[str, int]:
    """Tokens, log-probabilities, what each sequence is to pay, and the counts of every expert: only tokens count."""
    config = random_config(name)
    assert config.moe is not None
    runners = [checks.make_runner(name, 6, has_graphs=has_graphs)[0] for has_graphs in (True, False)]
    assert not any(sum(map(sum, runner._model.expert_tokens())) for runner in runners), "captures were counted"
    lengths = [34 + 4 * number for number in range(checks.NUM_ROWS)]  # 384 in all, a size of the graphs
    both = [checks.Rows(config, lengths, logprobs=3) for _ in runners]
    num_tokens = sum(lengths) + (NUM_STEPS - 1) * checks.NUM_ROWS
    for rows in both:
        rows.use([-1, 0, 1, 2, 3, 4, 5, -1])
    for step in range(NUM_STEPS):
        found = []
        for runner, rows in zip(runners, both, strict=True):
            plan = rows.plan()
            handle = runner.launch(plan)
            results, parts = handle.results(), handle.expert_parts()
            assert parts is not None
            found.append((results, parts.tolist()))
            rows.take(plan, results)
        assert found[0] == found[1], f"step {step}"
    counts = [runner._model.expert_tokens() for runner in runners]
    assert counts[0] == counts[1]
    assert [sum(layer) for layer in counts[0]] == [num_tokens * config.moe.top_k] * len(config.moe.layers)
    return {"tokens": num_tokens}


def check_steps_that_are_filled_up_count_their_tokens_only(name: str = "tiny_moe") -> dict[str, int]:
    """Seven decodes in a graph of eight, 201 tokens in one of 256."""
    runner, _ = checks.make_runner(name, 0)
    config = random_config(name)
    assert config.moe is not None
    rows, num_tokens = checks.Rows(config, [15] * 3 + [39] * 4), 0
    for _ in range(5):
        plan = rows.plan()
        rows.take(plan, runner.launch(plan).results())
        num_tokens += plan.num_tokens
    counts = runner._model.expert_tokens()
    assert [sum(layer) for layer in counts] == [num_tokens * config.moe.top_k] * len(config.moe.layers)
    return {"tokens": num_tokens}
