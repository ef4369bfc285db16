"""engine/gpu/shared_prefixes: which decodes read their beginning together, and that it is found once."""

import random
from collections import Counter
from typing import Any

import pytest
from arithmetic_peer import Driver, make_engine, submit

from engine.config import EngineConfig
from engine.flight import Computed
from engine.gpu.shared_prefixes import SharedPrefixes, num_common
from engine.models.config import from_hf
from engine.scheduler import Chunk, StepPlan
from engine.sequence import Sequence
from kernels.paged_attention import MIN_TOKENS, PrefixGroup
from kernels.paged_attention.groups import MIN_SPARED_BYTES
from tests.tiny_steps import make_sequence

BLOCK = 16
LEAST = MIN_TOKENS // BLOCK
HUGE = 1 << 30  # bytes of a token: any group pays
SYSTEM, OTHER = list(range(100, 160)), list(range(200, 260))


def model(**changes: Any):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    common = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 99, "rms_norm_eps": 1e-5}
    return from_hf({**sizes, **common, "max_position_embeddings": 8192, "hidden_act": "silu", **changes})


def finder(token_bytes: int = HUGE, config: EngineConfig | None = None, **changes: Any) -> SharedPrefixes:
    return SharedPrefixes(model(**changes), config or EngineConfig(block_size=BLOCK), token_bytes)


class Batch:
    """Decodes by hand: each has a beginning and blocks of its own behind it."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._number = 1000

    def add(self, *beginnings: list[int], own: int = 3) -> "Batch":
        for beginning in beginnings:
            blocks = [*beginning, *range(self._number, self._number + own)]
            sequence = make_sequence([1] * (len(blocks) * BLOCK - 3), blocks)
            sequence.seq_id = self._number
            self._number += 100
            self.sequences.append(sequence)
        return self

    def plan(self, *, is_next: bool = False) -> StepPlan:
        chunks = tuple(Chunk(one, len(one.token_ids) - 1, 1, samples=True, scores=False) for one in self.sequences)
        return StepPlan(chunks, (), len(chunks), is_next=is_next)


def told(groups: tuple[PrefixGroup, ...]) -> dict[tuple[int, ...], int]:
    """Members → shared blocks."""
    return {group.members: group.num_tokens // BLOCK for group in groups}


def test_decodes_with_the_same_first_blocks_are_a_group_with_all_they_have_in_common():
    batch = Batch().add(SYSTEM, OTHER, SYSTEM, [7], SYSTEM, OTHER, OTHER, SYSTEM, OTHER, SYSTEM)

    assert told(finder().groups(batch.plan())) == {(0, 2, 4, 7, 9): 60, (1, 5, 6, 8): 60}


def test_too_few_members_too_few_tokens_and_too_small_a_step_make_no_group():
    assert finder().groups(Batch().add(*[SYSTEM] * 3, *[[7]] * 5).plan()) == ()
    assert finder().groups(Batch().add(*[SYSTEM[: LEAST - 1]] * 8).plan()) == ()
    assert finder().groups(Batch().add(*[SYSTEM] * 7).plan()) == ()
    assert finder().groups(Batch().add(*[SYSTEM] * 8).plan()) != ()


def test_a_group_that_spares_less_than_its_launch_costs_is_none():
    spared = 7 * len(SYSTEM) * BLOCK
    enough = -(-MIN_SPARED_BYTES // spared)

    assert finder(enough).groups(Batch().add(*[SYSTEM] * 8).plan()) != ()
    assert finder(enough - 1).groups(Batch().add(*[SYSTEM] * 8).plan()) == ()


def test_one_that_shares_less_does_not_make_the_others_share_less():
    long, short = SYSTEM, SYSTEM[: LEAST + 2]

    found = finder().groups(Batch().add(short, *[long] * 8, short, short).plan())

    assert told(found) == {tuple(range(1, 9)): 60}


def test_two_groups_may_have_the_same_first_blocks():
    one, two = [*SYSTEM[:40], *range(300, 340)], [*SYSTEM[:40], *range(400, 430)]

    found = finder().groups(Batch().add(one, *[two] * 20, *[one] * 7).plan())

    assert told(found) == {(0, *range(21, 28)): 80, tuple(range(1, 21)): 70}


def test_what_the_rest_shares_is_found_when_the_one_that_came_first_has_gone():
    finding, batch = finder(), Batch().add(SYSTEM[:40])
    batch.add(*[SYSTEM] * 8)
    finding.groups(batch.plan())

    del batch.sequences[0]

    assert told(finding.groups(batch.plan())) == {tuple(range(8)): 60}


def test_who_joins_leaves_or_comes_back_in_other_blocks_changes_the_group():
    finding, batch = finder(), Batch().add(*[SYSTEM] * 9)
    assert told(finding.groups(batch.plan())) == {tuple(range(9)): 60}

    del batch.sequences[3]
    assert told(finding.groups(batch.plan())) == {tuple(range(8)): 60}

    batch.add([5], SYSTEM)
    assert told(finding.groups(batch.plan())) == {(*range(8), 9): 60}

    batch.sequences[2].num_preemptions += 1
    batch.sequences[2].block_table = list(range(9000, 9070))
    assert told(finding.groups(batch.plan())) == {(0, 1, *range(3, 8), 9): 60}


def test_steps_of_the_same_decodes_look_at_no_table():
    finding, batch = finder(), Batch().add(*[SYSTEM] * 8)
    found = finding.groups(batch.plan())

    for sequence in batch.sequences:
        sequence.block_table = []

    assert finding.groups(batch.plan(is_next=True)) is found


def test_parts_of_prompts_are_in_no_group():
    batch = Batch().add(*[SYSTEM] * 9)
    chunks = list(batch.plan().chunks)
    chunks[4] = Chunk(batch.sequences[4], 900, 1, samples=False, scores=False)
    chunks[5] = Chunk(batch.sequences[5], 900, 30, samples=True, scores=False)

    found = finder().groups(StepPlan(tuple(chunks), (), 38))

    assert told(found) == {(0, 1, 2, 3, 6, 7, 8): 60}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 71, "num_key_value_heads": 1, "head_dim": 4},
        {"model_type": "mistral", "sliding_window": 4096},
    ],
)
def test_models_whose_attention_cannot_be_grouped_have_no_groups(changes: dict[str, Any]):
    assert finder(**changes).groups(Batch().add(*[SYSTEM] * 8).plan()) == ()


def test_where_bits_must_not_depend_on_others_there_are_no_groups():
    config = EngineConfig(block_size=BLOCK, deterministic=True)

    assert finder(config=config).groups(Batch().add(*[SYSTEM] * 8).plan()) == ()


def test_members_of_a_group_have_the_same_blocks_through_random_comings_and_goings():
    draw, finding, batch = random.Random(5), finder(), Batch()
    texts = [[*SYSTEM[: draw.randrange(30, 60)], *range(500 + 100 * kind, 560 + 100 * kind)] for kind in range(5)]
    num_grouped = 0
    for _ in range(300):
        if draw.random() < 0.55:
            text = draw.choice(texts)
            batch.add(text[: draw.randrange(20, len(text))])
        elif batch.sequences:
            batch.sequences.pop(draw.randrange(len(batch.sequences)))
        found = finding.groups(batch.plan())
        seen = [member for group in found for member in group.members]
        assert len(set(seen)) == len(seen)
        num_grouped += len(seen)
        for group in found:
            tables = {tuple(batch.sequences[row].block_table[: group.num_tokens // BLOCK]) for row in group.members}
            assert len(tables) == 1
            assert all(group.num_tokens < len(batch.sequences[row].token_ids) for row in group.members)
            assert group.num_tokens >= MIN_TOKENS
    assert num_grouped > 1500


def test_sequences_of_two_namespaces_with_the_same_text_are_two_groups(monkeypatch: pytest.MonkeyPatch):
    prompt = [1 + number % 50 for number in range(MIN_TOKENS + 40)]
    engine, runner = make_engine(num_blocks=2048, block_size=BLOCK, context_tokens=1024, max_step_tokens=2048)
    driver, finding, launch = Driver(engine), finder(config=runner.config), runner.launch
    seen: Counter[tuple[bytes, ...]] = Counter()

    def watched(plan: StepPlan) -> Computed:
        for group in finding.groups(plan):
            members = [plan.chunks[row].sequence for row in group.members]
            seen[tuple({sequence.request.submit.cache_namespace for sequence in members})] += 1
        return launch(plan)

    monkeypatch.setattr(runner, "launch", watched)
    for number in range(20):
        name = b"tenant %d" % (number % 2)
        driver.add(submit(f"r{number}", [*prompt, number], 40, cache_namespace=name, ignore_eos=True))
        driver.step()
    driver.run()

    assert seen.keys() == {(b"tenant 0",), (b"tenant 1",)}
    assert min(seen.values()) > 20


@pytest.mark.parametrize("count", [0, 1, 5, 63, 64])
def test_tables_have_in_common_what_both_begin_with(count: int):
    one = list(range(64))

    assert num_common(one, [*one[:count], *range(900, 930)]) == count
    assert num_common([*one[:count], *range(900, 930)], one) == count
