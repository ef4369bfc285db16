"""The lists of pieces that tell the GPU what to attend to."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels import tiles
from kernels.paged_attention import (
    DecodeShape,
    PrefixGroup,
    captured_plan,
    fill_plan,
    may_group,
    pays,
    plan_attention,
    plan_numbers,
)
from kernels.paged_attention.work import AttentionWork, Launch

CPU = torch.device("cpu")
ROWS = {
    "shipped": {},
    "short chunks": {"split_work": [{"min_chunk": 64, "max_chunk": 128, "target_items": 1}]},
    "by target": {"split_work": [{"min_chunk": 64, "max_chunk": 1 << 20, "target_items": 300}]},
}


@pytest.fixture(params=ROWS.values(), ids=ROWS, autouse=True)
def rows(request, monkeypatch):
    table = {**tiles._table("default"), **request.param}
    monkeypatch.setattr(tiles, "_table", lambda _: table)


def shape_of(num_sequences: int, **changes: object) -> DecodeShape:
    return dataclasses.replace(DecodeShape(num_sequences, 40_000, 16, 32, 8, CPU), **changes)


def lengths_of(num_sequences: int, most: int = 40_000, least: int = 1, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(least, most, num_sequences, endpoint=True).tolist()


def captured(lengths: list[int], shape: DecodeShape, groups: tuple[PrefixGroup, ...] = ()) -> AttentionWork:
    memory = torch.full((plan_numbers(shape),), 2**30, dtype=torch.int32)
    fill_plan(memory.numpy(), lengths, shape, groups)
    return captured_plan(memory, torch.zeros(shape.num_sequences, 2500, dtype=torch.int32), shape).work


def eager(
    lengths: list[int], groups: tuple[PrefixGroup, ...] = (), window: int | None = None, num_heads: int = 32
) -> AttentionWork:
    starts, tables = list(range(len(lengths) + 1)), torch.zeros(len(lengths), 2500, dtype=torch.int64)
    sizes = {"block_size": 16, "num_heads": num_heads, "num_kv_heads": 8, "sliding_window": window}
    return plan_attention(tables, starts, lengths, **sizes, groups=groups).work


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_a_captured_step_has_the_pieces_of_the_same_step_without_capture(count, window):
    lengths = lengths_of(count)

    one, other = captured(lengths, shape_of(count, sliding_window=window)), eager(lengths, window=window)

    assert torch.equal(one.launches[0].items[: int(one.launches[0].count)], other.launches[0].items)
    assert torch.equal(one.merges[: len(other.merges)], other.merges)
    assert not one.merges[len(other.merges) :, 2].any()
    assert one.num_partials >= other.num_partials


def test_groups_have_the_same_pieces_too():
    lengths = lengths_of(64, least=5000)
    groups = (PrefixGroup(tuple(range(0, 64, 3)), 4096), PrefixGroup((1, 4, 7, 8), 1600))

    one, other = captured(lengths, shape_of(64, has_groups=True), groups), eager(lengths, groups)

    for mine, theirs in zip(one.launches, other.launches, strict=True):
        assert torch.equal(mine.items[: int(mine.count)], theirs.items)
    assert torch.equal(one.members[:26], other.members)
    assert torch.equal(one.merges[: len(other.merges)], other.merges)


@pytest.mark.parametrize("count", [1, 3, 17, 64, 256])
@pytest.mark.parametrize("with_groups", [False, True])
def test_the_lists_fit_into_their_memory_however_long_the_sequences_are(count, with_groups):
    shape = shape_of(count, has_groups=with_groups)
    pairs = tuple(PrefixGroup((first, first + 1), 39_984) for first in range(0, count - 1, 2))
    for lengths in ([40_000] * count, lengths_of(count, least=39_990), [39_999] * count):
        captured(lengths, shape, pairs if with_groups else ())


@pytest.mark.parametrize("heads", [1, 3, 4, 9])
def test_every_row_finds_each_of_its_keys_once_in_the_pieces_that_it_merges(heads):
    lengths = lengths_of(120, most=9000, least=3000)
    groups = (PrefixGroup(tuple(range(0, 117, 3)), 2992), PrefixGroup((4, 5, 7), 1600))

    work = eager(lengths, groups, num_heads=8 * heads)

    keys_of: dict[tuple[int, int, int], tuple[int, int]] = {}  # partial row (or none), sequence, row → its keys
    members = work.members.tolist()
    for launch in work.launches:
        for sequence, first_row, last_row, first, last, partial, *_ in launch.items.tolist():
            for row in range(first_row, min(first_row + launch.block_m, last_row if launch.is_group else heads)):
                owner = members[sequence + row // heads] if launch.is_group else sequence
                place = partial + row - first_row if partial >= 0 else -1
                assert (place, owner, row % heads) not in keys_of
                keys_of[place, owner, row % heads] = (first, last)
    places = [place for place, *_ in keys_of if place >= 0]
    assert len(set(places)) == len(places)
    assert max(places) < work.num_partials
    merges = {merge[0]: merge for merge in work.merges.tolist()}
    for sequence, length in enumerate(lengths):
        for row in range(heads):
            spans = [keys_of[place, sequence, row] for place in _merged(merges.get(sequence), row, heads)]
            assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
            assert spans[-1][1] == length


def _merged(merge: list[int] | None, row: int, heads: int) -> list[int]:
    """Places of the partial results of a row, in the order of merging."""
    if merge is None:
        return [-1]
    _, _, _, own_first, own_count, group_first, group_stride, group_count = merge
    shared = [group_first + chunk * group_stride + row for chunk in range(group_count)]
    return shared + [own_first + chunk * heads + row for chunk in range(own_count)]


def test_a_length_that_does_not_fit_is_refused():
    with pytest.raises(AssertionError):
        captured([40_001], shape_of(1))
    with pytest.raises(AssertionError):
        captured([1, 1], shape_of(1))


def test_partial_results_of_long_groups_take_no_more_than_a_bounded_number_of_chunks():
    whole = PrefixGroup(tuple(range(64)), 39_936)

    work = captured([39_999] * 64, shape_of(64, has_groups=True), (whole,))

    items = real_items(work.launches[0])
    assert len(items) == 4 * 32  # of 16 members each
    assert work.num_partials == shape_of(64, has_groups=True).most_partials
    assert int(items[:, 5].max()) < 64 * 4 * 32


def real_items(launch: Launch) -> torch.Tensor:
    assert launch.count is not None
    return launch.items[: int(launch.count)]


def test_a_row_beside_groups_has_the_pieces_that_it_has_without_them():
    lengths, shape = lengths_of(64, least=5000), shape_of(64, has_groups=True)
    alone = [0, 5, 63]
    group = PrefixGroup(tuple(index for index in range(64) if index not in alone), 4096)

    pieces = [
        [item[:5] for item in real_items(work.launches[1]).tolist() if item[0] in alone]
        for work in (captured(lengths, shape, (group,)), captured(lengths, shape))
    ]

    assert pieces[0] == pieces[1]


def test_heads_that_do_not_fit_into_a_program_and_windows_have_no_groups():
    assert all(may_group(*heads, None) for heads in ((32, 32), (32, 8), (28, 4), (9, 3), (64, 1)))
    assert not may_group(71, 1, None)
    assert not may_group(32, 8, 4096)


def test_groups_pay_by_all_that_they_spare_together():
    groups = (PrefixGroup(tuple(range(9)), 1024), PrefixGroup(tuple(range(9, 18)), 1024))

    assert pays(groups, 4096)
    assert not pays(groups[:1], 4096)
    assert not pays((), 1 << 40)


def fixed(spans: list[tuple[int, int]], window: int | None = None) -> AttentionWork:
    """Spans (first position, end), a sequence each."""
    starts = np.cumsum([0, *(end - first for first, end in spans)]).tolist()
    tables = torch.zeros(len(spans), 2500, dtype=torch.int64)
    sizes = {"block_size": 16, "num_heads": 32, "num_kv_heads": 8, "sliding_window": window}
    plan = plan_attention(tables, starts, [end for _, end in spans], **sizes)
    return dataclasses.replace(plan, is_fixed=True).work


def keys_by_row(work: AttentionWork, spans: list[tuple[int, int]], sequence: int) -> dict[int, list[tuple[int, int]]]:
    """Position → the spans of keys that its row goes through, as far as it sees them."""
    (launch,) = work.launches
    found: dict[int, list[tuple[int, int]]] = {}
    for owner, first_row, num_rows, first, last, *_ in launch.items.tolist():
        for row in range(first_row, first_row + num_rows) if owner == sequence else ():
            position = spans[sequence][0] + row // 4
            seen = (first, min(last, position + 1))
            if seen[0] < seen[1]:
                found.setdefault(position, [])
                found[position] = sorted({*found[position], seen})
    return found


def test_a_fixed_plan_cuts_the_keys_of_a_row_by_its_position_only():
    whole = keys_by_row(fixed([(0, 3000)]), [(0, 3000)], 0)
    assert whole[2500] == [(0, 1024), (1024, 2048), (2048, 2501)]

    for spans in ([(2000, 2300)], [(5, 6), (1020, 1030), (0, 600)], [(2999, 3000)] * 9):
        work = fixed(spans)
        assert {launch.block_m for launch in work.launches} == {64}
        assert all(launch.is_split for launch in work.launches)
        for sequence in range(len(spans)):
            found = keys_by_row(work, spans, sequence)
            assert found == {position: whole[position] for position in range(*spans[sequence])}
