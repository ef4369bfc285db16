"""Is what the engine computes on a GPU right? Checks for tests/gpu and for the bench, which runs them before it times.

    python3 -m ops.bench.gpu_engine_checks [NAME…]

The reference is plain torch in fp32, written apart from the engine and its kernels.
"""

import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs

from engine.config import EngineConfig
from engine.gpu.runner import CudaRunner
from engine.models.attention import inverse_frequencies
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.scheduler import Chunk, ChunkResult, StepPlan
from engine.sequence import Request
from engine.sequence import Sequence as Choice
from engine.weights.adapter import AdapterWeights
from engine.wire import Flow, SamplingParams, Submit
from kernels.ahead import Job, rehearsal
from ops.bench import gpu_engine_bits
from ops.bench.agreement import agreement, mean_differences, stacked
from ops.bench.gpu.changes import other_rows
from ops.bench.loaded_engine import Bench
from ops.bench.random_model import of_8_bits, random_adapter, random_config, random_weights

NUM_ROWS = 8
NUM_STEPS = 210
BLOCKS = 64  # of each row
Experts = Callable[[int, Tensor], Tensor]  # layer, x [T, H] → [T, H]


def plain_logits(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ids: Sequence[int],
    adapter: AdapterWeights | None = None,
    experts: Experts | None = None,
) -> Tensor:
    """Logits [T, V] fp32 of every position: a Llama or Qwen3 in fp32, each matrix with its adapter added. ``experts``:
    of a model with them in each layer."""
    device = weights["model.embed_tokens.weight"].device
    attention = config.attention
    angles = torch.outer(
        torch.arange(len(ids), device=device), inverse_frequencies(config.rope, attention.head_dim).to(device)
    )
    turn = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def product(x: Tensor, layer: int, parent: str, module: str) -> Tensor:
        y = x @ weights[f"model.layers.{layer}.{parent}.{module}.weight"].float().T
        pair = adapter.pairs.get((layer, module)) if adapter else None
        if pair is None:
            return y
        return y + x @ pair.a.to(device).float().T @ pair.b.to(device).float().T * pair.scale

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name].float(), config.rms_norm_eps)

    def turned(heads: Tensor) -> Tensor:
        low, high = heads.chunk(2, -1)
        return heads * turn[0] + torch.cat((-high, low), -1) * turn[1]

    x = weights["model.embed_tokens.weight"][list(ids)].float()
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            product(normed, layer, "self_attn", f"{name}_proj").unflatten(-1, (-1, attention.head_dim))
            for name in "qkv"
        )
        if attention.head_norms:
            q, k = norm(q, f"{prefix}.self_attn.q_norm.weight"), norm(k, f"{prefix}.self_attn.k_norm.weight")
        q, k, v = (part.transpose(0, 1)[None] for part in (turned(q), turned(k), v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + product(seen, layer, "self_attn", "o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        if experts is not None:
            x = x + experts(layer, normed)
            continue
        inner = F.silu(product(normed, layer, "mlp", "gate_proj")) * product(normed, layer, "mlp", "up_proj")
        x = x + product(inner, layer, "mlp", "down_proj")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].float().T


class Rows:
    """Sequences by hand, in blocks of their own, for runners without an engine. Row i has slot ``slots[i]``."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], **sampling) -> None:
        draw = random.Random(7)
        self.choices = []
        for number, length in enumerate(lengths):
            params = SamplingParams(**{"max_tokens": 10_000, "temperature": 0.0, "ignore_eos": True, **sampling})
            request = Request(Submit(f"r{number}", [], params, Flow("f"), b"", 10_000), 0)
            prompt = [draw.randrange(config.vocab_size) for _ in range(length)]
            choice = Choice(number, request, 0, prompt, seed=number)
            choice.block_table = list(range(number * BLOCKS, (number + 1) * BLOCKS))
            self.choices.append(choice)

    def use(self, slots: Sequence[int]) -> None:
        for choice, slot in zip(self.choices, slots, strict=True):
            choice.adapter_slot = slot

    def plan(self) -> StepPlan:
        """All that is known and not computed."""
        chunks = []
        for choice in self.choices:
            start = choice.num_computed_tokens
            chunks.append(Chunk(choice, start, len(choice.token_ids) - start, samples=True, scores=False))
        return StepPlan(tuple(chunks), (), sum(chunk.num_tokens for chunk in chunks))

    def take(self, plan: StepPlan, results: Sequence[ChunkResult]) -> None:
        for chunk, result in zip(plan.chunks, results, strict=True):
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.token_ids.append(result.token_id)


def sizes(num_slots: int, most_ranks: int = 16, num_rows: int = NUM_ROWS, expert_slots: int = 0) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_rows * BLOCKS,
        context_tokens=1024,
        max_step_tokens=4096,
        max_running=num_rows,
        adapter_slots=num_slots,
        max_lora_rank=most_ranks,
        expert_adapter_slots=expert_slots,
    )


def make_runner(
    name: str, num_slots: int, num_rows: int = NUM_ROWS, *, has_graphs: bool = True, expert_slots: int = 0
) -> tuple[CudaRunner, dict[str, Tensor]]:
    """A runner over random bf16 weights (NAME-int8 and its like: of 8 bits) and the wide weights; slot i with a random
    adapter of seed i and of rank 4, 8, 16, in turn, none on experts (``expert_slots``: which might)."""
    device = torch.device("cuda")
    config = random_config(name)
    stored, weights = of_8_bits(name, random_weights(config, device, torch.bfloat16))
    engine = sizes(num_slots, num_rows=num_rows, expert_slots=expert_slots)
    runner = CudaRunner(Decoder(config, stored), engine, has_graphs=has_graphs)
    runner.warm()
    runner.capture()
    for slot in range(num_slots):
        runner.load_slot(slot, runner.prepare(adapter(config, slot)))
    return runner, weights


def adapter(config: ModelConfig, seed: int) -> AdapterWeights:
    return random_adapter(config, (4, 8, 16)[seed % 3], seed, torch.device("cuda"))


def check_logits_are_those_of_the_reference(name: str = "tiny", num_tokens: int = 24) -> dict[str, float]:
    """Teacher-forced, bf16 against fp32: the tokens of eight rows, two without an adapter, prefilled and decoded."""
    runner, weights = make_runner(name, 6)
    config = random_config(name)
    rows = Rows(config, [5 + 9 * number for number in range(NUM_ROWS)], logprobs=20)
    slots = [-1, 0, 1, 2, 3, 4, 5, -1]
    rows.use(slots)
    told: list[list] = [[] for _ in slots]
    for _ in range(num_tokens):
        plan = rows.plan()
        results = runner.launch(plan).results()
        rows.take(plan, results)
        for row, result in zip(told, results, strict=True):
            row.append(result.logprobs)
    return compare(config, weights, rows, told, [None] * NUM_ROWS)


def compare(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    rows: Rows,
    told: Sequence[Sequence[Any]],
    experts: Sequence[Experts | None],
) -> dict[str, float]:
    """``told``: of each row's tokens the log-probabilities. Against the reference, row by row."""
    ids, found, drawn, expected = [], [], [], []
    for choice, row, of_row in zip(rows.choices, told, experts, strict=True):
        lora = None if choice.adapter_slot < 0 else adapter(config, choice.adapter_slot)
        logits = plain_logits(config, weights, choice.token_ids[:-1], lora, of_row)[choice.num_prompt_tokens - 1 :]
        expected.append(list(logits.log_softmax(-1).cpu()))
        drawn.append([torch.tensor(one.token_id) for one in row])
        ids.append([torch.tensor([token for token, _ in one.top]) for one in row])
        found.append([torch.tensor([value for _, value in one.top]) for one in row])
    reference = stacked(expected)
    return agreement(stacked(drawn), mean_differences(stacked(ids), stacked(found), reference), reference).check()


def check_weights_of_8_bits_give_the_logits_of_the_wide_ones() -> dict[str, float]:
    found = {}
    for kind in ("int8", "fp8", "block"):
        figures = check_logits_are_those_of_the_reference(f"tiny-{kind}")
        found |= {f"{kind} {name}": value for name, value in figures.items()}
    return found


def take_same_steps(
    config: ModelConfig, runners: Sequence[CudaRunner], slots_of: Callable[[int], list[int]], num_steps: int
) -> Rows:
    """By each runner, the rows' slots in a step as ``slots_of`` says: bit for bit → the first one's rows."""
    lengths = [34 + 4 * number for number in range(NUM_ROWS)]  # 384 in all, a size of the graphs: nothing is filled up
    of_each = [Rows(config, lengths, logprobs=3) for _ in runners]
    for step in range(num_steps):
        slots, results = slots_of(step), []
        for runner, rows in zip(runners, of_each, strict=True):
            rows.use(slots)
            plan = rows.plan()
            results.append(runner.launch(plan).results())
            rows.take(plan, results[-1])
        assert all(found == results[0] for found in results), f"step {step}"
    return of_each[0]


def check_replay_equals_launching_with_changing_adapters(name: str = "tiny") -> dict[str, float]:
    """The same steps by graphs and kernel by kernel, the adapter of each row drawn anew in each."""
    runners = [make_runner(name, 6, has_graphs=has_graphs)[0] for has_graphs in (True, False)]
    draw = random.Random(3)

    def slots_of(step: int) -> list[int]:
        return [draw.randrange(-1, 6) for _ in range(NUM_ROWS)] if step % 5 else [-1] * NUM_ROWS

    rows = take_same_steps(random_config(name), runners, slots_of, NUM_STEPS)
    distinct = {token for choice in rows.choices for token in choice.token_ids}
    return {"steps": NUM_STEPS, "distinct_tokens": len(distinct)}


def check_a_base_row_has_the_same_bits_beside_adapters(name: str = "tiny") -> dict[str, float]:
    """Rows 0 … 3 without an adapter, in steps where rows 4 … 7 have some and where they have none."""
    runner, _ = make_runner(name, 6)
    found = []
    for slots in ([-1] * 8, [-1, -1, -1, -1, 0, 2, 2, 5]):
        rows = Rows(random_config(name), [20] * NUM_ROWS, logprobs=20)
        rows.use([-1] * 8)
        plan = rows.plan()
        rows.take(plan, runner.launch(plan).results())
        rows.use(slots)
        found.append(runner.launch(rows.plan()).results())
    assert found[0][:4] == found[1][:4]
    assert found[0][4:] != found[1][4:]
    return {}


def check_a_step_in_the_air_feeds_the_next(name: str = "tiny") -> dict[str, float]:
    """Tokens that the host has not seen yet give what they give when it has."""
    runner, _ = make_runner(name, 6)
    config = random_config(name)
    waited, fed = (Rows(config, [10 + number for number in range(NUM_ROWS)]) for _ in range(2))
    for rows in (waited, fed):
        rows.use([0, 1, 2, 3, 4, 5, -1, -1])
    for _ in range(30):
        plan = waited.plan()
        waited.take(plan, runner.launch(plan).results())
    handles = []
    for _ in range(30):
        plan = fed.plan()
        handles.append(runner.launch(plan))
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.token_ids.append(-1)
    tokens = [[result.token_id for result in handle.results()] for handle in handles]
    for number, choice in enumerate(waited.choices):
        assert choice.token_ids[choice.num_prompt_tokens :] == [row[number] for row in tokens]
    return {}


def check_ops_are_timed_on_the_device_and_steps_by_hand_by_op(name: str = "tiny") -> dict[str, float]:
    """Events inside what the host saw; a replayed graph is one op, what is launched by hand is told apart. What being
    timed costs a step, told as milliseconds."""
    found: dict[str, float] = {}
    for has_graphs in (True, False):
        runner, _ = make_runner(name, 0, has_graphs=has_graphs)
        counters = runner.device_counters
        rows = Rows(random_config(name), [33] * NUM_ROWS)
        for way, every in (("first", 1 << 30), ("plain", 1 << 30), ("timed", 1)):
            runner.time_ops(every)
            begin = time.perf_counter()
            for _ in range(20):
                plan = rows.plan()
                rows.take(plan, runner.launch(plan).results())
            found[f"graphs {has_graphs} {way} ms"] = (time.perf_counter() - begin) * 1e3 / 20
        spent = dict(counters.op_ns)
        assert ("graph" in spent) is has_graphs, spent
        assert has_graphs or {"linear", "attention", "norm", "head"} <= spent.keys(), spent
        assert 0 < sum(spent.values()) < found[f"graphs {has_graphs} timed ms"] * 20 * 1e6, spent
        found |= {f"graphs {has_graphs} {op} us a step": ns / 19e3 for op, ns in spent.items()}
    return found


def check_products_in_parts_keep_what_rows_and_adapters_are_promised() -> dict[str, float]:
    """Where the tables leave the tiny model's products whole."""
    with other_rows({"linear_parts": {"parts": 2}}):
        check_a_base_row_has_the_same_bits_beside_adapters()
        check_replay_equals_launching_with_changing_adapters()
        return check_logits_are_those_of_the_reference("tiny")


def check_what_is_added_on_its_way_keeps_what_rows_and_adapters_are_promised() -> dict[str, float]:
    """With heads that have norms of their own, and without."""
    for name in ("tiny_qwen", "tiny"):
        check_a_base_row_has_the_same_bits_beside_adapters(name)
    check_replay_equals_launching_with_changing_adapters("tiny_qwen")
    return check_logits_are_those_of_the_reference("tiny_qwen")


def check_no_step_launches_what_was_not_rehearsed() -> dict[str, float]:
    """Prompts of all sizes, some too large for a graph, and decodes of all kinds between them."""
    bench = Bench("tiny", torch.device("cuda"), 8, small=True, max_step_tokens=4096, context_tokens=8192)
    assert isinstance(bench.runner, CudaRunner)
    rehearsed: set[Job] = set()
    launched: set[Job] = set()
    with rehearsal(rehearsed.add):
        bench.runner.rehearse()
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **noted: launched.add(
        (fn.module, fn.name, noted["compile"]["specialization_data"])
    )
    draw = random.Random(1)
    for number in range(60):
        sampling = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1} if number % 3 else {"logprobs": 3}
        bench.add(draw.choice((draw.randrange(1, 20), draw.randrange(20, 4000))), 30, f"a{number % 8}", **sampling)
    bench.drain()
    knobs.runtime.jit_post_compile_hook = None
    assert launched <= rehearsed, launched - rehearsed
    return {"rehearsed": len(rehearsed), "launched": len(launched)}


def all_checks() -> dict[str, Callable[[], object]]:
    """By name: these, and those of the files beside."""
    from ops.bench import gpu_moe_checks, gpu_prefix_checks  # made of what stands here

    known = {**globals(), **vars(gpu_engine_bits), **vars(gpu_prefix_checks), **vars(gpu_moe_checks)}
    return {name: check for name, check in known.items() if name.startswith("check_")}


def run_checks(names: Sequence[str] = ()) -> dict[str, object]:
    """Each check's figures, or why it failed."""
    found: dict[str, object] = {}
    checks = all_checks()
    for name in names or checks:
        begin = time.perf_counter()
        try:
            found[name] = checks[name]()
        except Exception:
            found[name] = "FAILED " + traceback.format_exc()[-1800:]
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {found[name]}", flush=True)
    return found


if __name__ == "__main__":
    failed = [result for result in run_checks(sys.argv[1:]).values() if isinstance(result, str)]
    sys.exit(bool(failed))
