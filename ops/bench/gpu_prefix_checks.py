"""Decodes that read a shared beginning together: checks for the engine on a GPU (gpu_engine_checks runs them).

The tiny model is too small for groups to pay; here they are taken whatever they spare.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.engine import Engine
from engine.gpu.runner import CudaRunner
from engine.scheduler import ChunkResult, StepPlan
from engine.wire import Flow, SamplingParams, Submit, TokenLogprobs, pack_ids, unpack_ids
from ops.bench import gpu_engine_checks as common
from ops.bench.agreement import Agreement, agreement, mean_differences
from ops.bench.random_model import random_config

NUM_ROWS = 16  # a size of the graphs, so that nothing is filled up
SHARED = 592  # tokens, 37 blocks
FIRST, SECOND, ALONE = range(6), range(6, 11), range(11, NUM_ROWS)  # two groups with the same text, and the others
SLOTS = [0] * 6 + [1] * 5 + [-1, 2, 3, 4, 5]


@contextmanager
def without_groups(runner: CudaRunner) -> Iterator[None]:
    runner._prefixes.groups = lambda plan: ()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del runner._prefixes.groups


def group_whatever_it_spares(runner: CudaRunner) -> None:
    """From now on."""
    runner._prefixes._token_bytes = 1 << 40


class SharingRows(common.Rows):
    """Rows 0 and 6 are the first with their beginning; ``take_place`` puts a newcomer into a row."""

    def __init__(self, name: str) -> None:
        self.config = random_config(name)
        alone = [200 + 90 * number for number in range(len(ALONE))]  # long, so that no graph holds the prompts' steps
        super().__init__(
            self.config, [SHARED + 3 + 7 * row for row in range(len(FIRST) + len(SECOND))] + alone, logprobs=3
        )
        self.use(SLOTS)
        self.text = self.choices[0].token_ids[:SHARED]
        for group in (FIRST, SECOND):
            for row in group:
                self._share(row, group[0])

    def _share(self, row: int, first: int) -> None:
        choice, count = self.choices[row], SHARED // 16
        choice.token_ids[:SHARED] = self.text
        if row != first:
            choice.block_table[:count] = self.choices[first].block_table[:count]
            choice.num_computed_tokens = SHARED

    def first_plan(self) -> StepPlan:
        """Of those whose beginning the others share."""
        chunks = [self.plan().chunks[group[0]] for group in (FIRST, SECOND)]
        return StepPlan(tuple(chunks), (), sum(chunk.num_tokens for chunk in chunks))

    def take_place(self, row: int, num_tokens: int, group: range | None = None) -> None:
        """Somebody else, with so many tokens to compute, of their own or behind a group's beginning."""
        lengths = [1] * row + [num_tokens + (SHARED if group else 0)]
        choice = common.Rows(self.config, lengths, logprobs=3).choices[row]
        choice.seq_id = 1000 + row
        self.choices[row] = choice
        if group:
            self._share(row, group[0])


def check_groups_are_the_same_replayed_launched_and_repeated(name: str = "tiny") -> dict[str, float]:
    """Steps with groups by graphs and kernel by kernel, bit for bit, while a member leaves and one joins; the rows that
    are in no group as they are without groups; one step twenty times."""
    replayed, launched, plain = (
        common.make_runner(name, 6, NUM_ROWS, has_graphs=has_graphs)[0] for has_graphs in (True, False, True)
    )
    for runner in (replayed, launched):
        group_whatever_it_spares(runner)
    three = [(runner, SharingRows(name)) for runner in (replayed, launched, plain)]
    found: list[list[ChunkResult]] = []
    with without_groups(plain):
        for runner, rows in three:
            plan = rows.first_plan()
            rows.take(plan, runner.launch(plan).results())
        for step in range(60):
            found = []
            for runner, rows in three:
                if step == 20:
                    rows.take_place(3, 17)  # with 15 decodes 32 tokens, a size of the graphs
                if step == 40:
                    rows.take_place(12, 49, SECOND)  # 64
                rows.use([-1] * NUM_ROWS if step in (20, 40) else SLOTS)  # launched, prompts take another form of LoRA
                plan = rows.plan()
                found.append(list(runner.launch(plan).results()))
                rows.take(plan, found[-1])
            assert found[0] == found[1], f"step {step}"
            others = [row for row in ALONE if row != 12]
            assert [found[0][row] for row in others] == [found[2][row] for row in others], f"alone in step {step}"
    plan = three[0][1].plan()
    again = [replayed.launch(plan).results() for _ in range(20)]
    assert all(one == again[0] for one in again), "replays differ"
    counts = [runner.device_counters.num_grouped for runner, _ in three]
    assert counts == [628 + 20 * 11, 628, 0], counts  # 2 × 19 steps of 11 members, 21 of 10
    return {"grouped": counts[0]}


def check_groups_give_the_logits_of_the_reference(name: str = "tiny") -> dict[str, float]:
    """Through the engine and its prefix cache: two namespaces with the same text, others with texts of their own; they
    come and end at different steps. Teacher-forced against plain fp32, as without groups."""
    runner, weights = common.make_runner(name, 0, 32)
    group_whatever_it_spares(runner)
    found = {}
    for way in ("grouped", "plain"):
        engine = Engine(common.sizes(0, num_rows=32), runner)
        before = runner.device_counters.num_grouped
        if way == "plain":
            with without_groups(runner):
                told = _answers(engine, name)
        else:
            told = _answers(engine, name)
        found[f"{way} decodes in groups"] = float(runner.device_counters.num_grouped - before)
        figures = _against_reference(name, weights, told).check()
        found |= {f"{way} {figure}": value for figure, value in figures.items()}
    assert found["grouped decodes in groups"] > 200, found
    assert found["plain decodes in groups"] == 0, found
    return found


Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]  # by request: its prompt, its tokens


def _answers(engine: Engine, name: str) -> Answers:
    """Of 24 requests: eight in each of two namespaces, two a step, behind the first; eight alone."""
    vocab, shared = random_config(name).vocab_size, [3 * place * place + 5 for place in range(SHARED)]
    told: Answers = {}
    for number in range(24):
        kind = number % 3
        own = [(7 * number + 11 * place) % vocab for place in range(4 + number)]
        prompt = own if kind == 2 else [token % vocab for token in shared] + own
        params = SamplingParams(max_tokens=20 + 2 * number, temperature=0.0, ignore_eos=True, logprobs=20)
        namespace = f"{kind} {number if kind == 2 else 0}".encode()
        engine.add(Submit(f"r{number}", [pack_ids(prompt)], params, Flow("f"), namespace, params.max_tokens))
        told[f"r{number}"] = prompt, []
        for _ in range(2 if number < 3 else number % 2):  # the first of each is computed before the others come
            _take(engine, told)
    while engine.has_work:
        _take(engine, told)
    return told


def _take(engine: Engine, told: Answers) -> None:
    for delta in engine.step().deltas:
        assert len(delta.logprobs) == len(unpack_ids(delta.token_ids))
        told[delta.request_id][1].extend(delta.logprobs)


def _against_reference(name: str, weights: dict[str, Tensor], told: Answers) -> Agreement:
    drawn, differences, expected = [], [], []
    for prompt, tokens in told.values():
        ids = prompt + [token.token_id for token in tokens]
        logits = common.plain_logits(random_config(name), weights, ids[:-1])[len(prompt) - 1 :]
        best = torch.tensor([[[one for one, _ in token.top]] for token in tokens])
        found = torch.tensor([[[value for _, value in token.top]] for token in tokens])
        expected.append(logits.log_softmax(-1).cpu()[:, None])
        differences.append(mean_differences(best, found, expected[-1]))
        drawn.append(torch.tensor([[token.token_id] for token in tokens]))
    return agreement(torch.cat(drawn), torch.cat(differences), torch.cat(expected))
