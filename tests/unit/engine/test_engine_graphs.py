"""engine/gpu: sizes of steps, the numbers of a step in flat memory, and what of the block tables is sent."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.gpu.decode_graphs import BlockTables, Layout, Step, graph_bytes, graph_kinds, resolve
from engine.gpu.shapes import form_of, in_one_shape, shapes_of
from engine.models.lora_slots import ExpertSlots, LoraSlots
from engine.scheduler import Chunk
from engine.sequence import PENDING, Sequence
from kernels.paged_attention import DecodeShape, PrefixGroup
from kernels.paged_attention.work import Launch
from tests.tiny import tiny_adapter, tiny_config
from tests.tiny_moe import MOE, expert_adapter
from tests.tiny_steps import adapter_weights, make_sequence

CPU = torch.device("cpu")
EMPTY_SLOT = 9


def decode(seq_id: int, tokens: list[int], blocks: list[int], slot: int = -1) -> Chunk:
    sequence = make_sequence(tokens, blocks, slot)
    sequence.seq_id = seq_id
    return Chunk(sequence, len(tokens) - 1, 1, samples=True, scores=False)


def filled(chunks: list[Chunk], ahead: dict[int, int]) -> tuple[Layout, list[np.ndarray]]:
    layout = Layout(DecodeShape(4, 64, 4, 4, 2, CPU))
    numbers = np.full(layout.length, 77, dtype=np.int32)
    parts = [numbers[place] for place in layout.places]
    layout.fill(parts, Step(chunks, ahead), EMPTY_SLOT, with_lora=True)
    return layout, parts


def test_a_step_stands_in_memory_and_what_is_left_over_reads_and_writes_nothing():
    chunks = [decode(1, [5, 6, 7], [3], slot=2), decode(2, [1, 2, 3, 4, PENDING], [8, 6])]

    _, (tokens, positions, mapping, count, *_) = filled(chunks, {2: 5})

    assert count.tolist() == [2]
    assert tokens.tolist() == [7, ~5, 0, 0]
    assert positions.tolist() == [2, 4, 0, 0]
    assert mapping.tolist() == [3 * 4 + 2, 6 * 4, -1, -1]


def test_a_batch_over_the_memory_sees_the_step_that_stands_there():
    layout = Layout(DecodeShape(4, 64, 4, 4, 2, CPU))
    memory = torch.full((layout.length,), 77, dtype=torch.int32)
    tables = torch.zeros(4, 16, dtype=torch.int32)
    batch = layout.batch(memory, tables, EMPTY_SLOT, 16)

    parts = [memory.numpy()[place] for place in layout.places]
    layout.fill(parts, Step([decode(1, [5, 6, 7], [3], slot=2)], {}), EMPTY_SLOT, with_lora=True)

    assert batch.token_ids.tolist() == [7, 0, 0, 0]
    assert batch.num_tokens.tolist() == [1]
    assert batch.attention.work.contexts.tolist() == [3, 0, 0, 0]


def rows(tables: BlockTables, *chunks: Chunk) -> list[list[int]]:
    tables.update(chunks)
    return [tables.tables[row, : len(chunk.sequence.block_table)].tolist() for row, chunk in enumerate(chunks)]


def test_block_tables_follow_sequences_that_grow_move_up_and_come_back():
    tables = BlockTables(3, 8, CPU)
    first, second = decode(1, [1] * 9, [4, 5, 6]), decode(2, [1] * 5, [9, 7])
    assert rows(tables, first, second) == [[4, 5, 6], [9, 7]]

    second.sequence.block_table.append(2)
    assert rows(tables, first, second) == [[4, 5, 6], [9, 7, 2]]
    assert rows(tables, second) == [[9, 7, 2]]

    back = give_way(second.sequence, [1, 3, 0])
    assert rows(tables, back) == [[1, 3, 0]]


def give_way(sequence: Sequence, blocks: list[int]) -> Chunk:
    """Preempted and admitted again, in other blocks."""
    sequence.num_preemptions += 1
    sequence.block_table = blocks
    return Chunk(sequence, 4, 1, samples=True, scores=False)


def test_only_new_blocks_are_sent():
    tables = BlockTables(2, 8, CPU)
    chunk = decode(1, [1] * 9, [4, 5])
    tables.update([chunk])
    tables.tables.fill_(-1)

    chunk.sequence.block_table.append(6)
    tables.update([chunk])

    assert tables.tables[0, :3].tolist() == [-1, -1, 6]


def test_a_step_with_groups_stands_in_memory_as_one_without_does():
    layout = Layout(DecodeShape(8, 1024, 16, 4, 2, CPU, has_groups=True))
    chunks = [decode(row, [1] * (600 + row), [*range(37), 100 + row, 200 + row]) for row in range(5)]
    memory = torch.full((layout.length,), 77, dtype=torch.int32)
    batch = layout.batch(memory, torch.zeros(8, 64, dtype=torch.int32), EMPTY_SLOT, 0)
    parts = [memory.numpy()[place] for place in layout.places]

    layout.fill(parts, Step(chunks, {}, [PrefixGroup((0, 1, 2, 4), 592)]), EMPTY_SLOT, with_lora=False)

    of_groups, own = (launch.items[: real_items(launch)] for launch in batch.attention.work.launches)
    assert batch.attention.work.members[:4].tolist() == [0, 1, 2, 4]
    assert of_groups[:, 4].max() == 592
    assert own[:, 0].unique().tolist() == [0, 1, 2, 3, 4]

    layout.fill(parts, Step((), {}), EMPTY_SLOT, with_lora=False)

    assert batch.attention.work.contexts.tolist() == [0] * 8
    assert [real_items(launch) for launch in batch.attention.work.launches] == [0, 0]


def real_items(launch: Launch) -> int:
    assert launch.count is not None
    return int(launch.count)


def config(**sizes: Any) -> EngineConfig:
    return EngineConfig(**{"max_running": 64, "adapter_slots": 4, "max_lora_rank": 64, **sizes})


def grouped(**sizes: Any) -> list[tuple[int, int]]:
    return [(kind.size, kind.rank) for kind in graph_kinds(tiny_config(), config(**sizes)) if kind.has_groups]


def test_graphs_with_groups_are_for_larger_steps_without_adapters_and_with_those_of_any_rank():
    assert grouped() == [(size, rank) for size in (8, 16, 24, 32, 48, 64) for rank in (0, 64)]
    assert grouped(adapter_slots=0, max_running=16) == [(8, 0), (16, 0)]
    assert grouped(max_running=4) == grouped(deterministic=True) == []


def test_steps_with_adapters_on_experts_have_graphs_of_their_own_for_adapters_of_any_rank():
    sizes = {"expert_adapter_slots": 2, "max_expert_rank": 128}
    plain, kinds = (set(graph_kinds(MOE["mixtral"], config(**some))) for some in ({}, sizes))

    assert plain < kinds
    assert kinds - plain == {kind._replace(has_experts=True) for kind in plain if kind.rank == 64}
    assert shapes_of(config(**sizes)).forms == ((0, False), (16, False), (32, False), (64, False), (64, True))
    assert shapes_of(config(deterministic=True, **sizes)).forms == ((0, False), (64, True))


def test_a_step_is_computed_in_the_smallest_form_that_serves_its_adapters():
    model, like = MOE["qwen2_moe"], torch.zeros(1)
    slots = LoraSlots(model, 3, 64, like, True, ExpertSlots(2, 128))
    of_attention = tiny_adapter(1, rank=17, modules=("q_proj",), config=model)
    on_experts = expert_adapter(model, 2, rank=100, parts=("up_proj",))
    slots.load_slot(1, adapter_weights(on_experts))
    slots.load_slot(2, adapter_weights(of_attention))
    forms = shapes_of(config(expert_adapter_slots=2, max_expert_rank=128)).forms

    assert form_of(slots, forms, [-1, 0]) == (0, False)
    assert form_of(slots, forms, [-1, 2]) == (32, False)
    assert form_of(slots, forms, [1, 2]) == form_of(slots, forms, [1, -1]) == (64, True)
    slots.clear_slot(1)
    assert form_of(slots, forms, [1]) == (0, False)


def test_heads_that_do_not_fit_into_a_program_are_not_captured():
    attention = replace(tiny_config().attention, num_heads=71, num_kv_heads=1)
    model = replace(tiny_config(), attention=attention)

    assert graph_kinds(model, config()) == ()
    assert graph_bytes(model, config(), CPU) == 0
    assert graph_kinds(replace(model, attention=replace(attention, num_heads=64)), config()) != ()


def test_a_window_has_graphs_but_none_with_groups():
    model = replace(tiny_config(), attention=replace(tiny_config().attention, sliding_window=100))

    assert {kind.has_groups for kind in graph_kinds(model, config())} == {False}


def test_graphs_are_reckoned_with_the_partial_results_of_groups():
    few, more = (graph_bytes(tiny_config(), config(deterministic=alone), CPU) for alone in (True, False))

    assert more > few + 12 * (6 << 20)


def test_the_token_that_the_step_ahead_draws_is_found_and_nothing_else_of_a_step_changes():
    layout = Layout(DecodeShape(4, 64, 4, 4, 2, CPU))
    memory = torch.zeros(layout.length, dtype=torch.int32)
    batch = layout.batch(memory, torch.zeros(4, 16, dtype=torch.int32), EMPTY_SLOT, 16)
    layout.fill([memory.numpy()[place] for place in layout.places], Step([decode(1, [5, PENDING], [3])], {1: 2}),
                EMPTY_SLOT, with_lora=False)  # fmt: skip

    known = resolve(batch, torch.tensor([11, 12, 13]))

    assert known.token_ids.tolist() == [13, 0, 0, 0]
    assert known == replace(batch, token_ids=known.token_ids)


def test_graphs_are_reckoned_with_what_experts_hand_each_other():
    dense, moe = replace(MOE["mixtral"], moe=None), MOE["mixtral"]
    most = shapes_of(config()).tokens[-1]

    more = graph_bytes(moe, config(), CPU) - graph_bytes(dense, config(), CPU)

    graphs = len(graph_kinds(moe, config())) * (6 << 20)  # as much again as without
    assert more == graphs + most * moe.moe.top_k * (moe.moe.intermediate_size + moe.hidden_size) * 4


def test_an_engine_has_a_graph_for_each_kind_of_step():
    shapes = shapes_of(EngineConfig(max_running=20, max_lora_rank=40))

    assert shapes.decodes == (1, 2, 4, 8, 16, 24)
    assert shapes.ranks == (0, 16, 32, 64)
    assert shapes.head_rows == 0
    assert not shapes.is_fixed


@pytest.mark.parametrize(
    ("max_running", "max_step_tokens", "size", "lowered"),
    [(64, 8192, 1024, 1024), (20, 30, 64, 30), (100, 128, 128, 128), (300, 256, 512, 256), (4096, 8192, 1024, 1024)],
)
def test_a_deterministic_engine_has_one_shape_that_holds_every_step(max_running, max_step_tokens, size, lowered):
    sizes = EngineConfig(max_running=max_running, max_step_tokens=max_step_tokens, deterministic=True)

    config = in_one_shape(sizes)
    shapes = shapes_of(config)

    assert config.max_step_tokens == lowered
    assert config.max_sequences <= size
    assert (shapes.decodes, shapes.tokens, shapes.head_rows, shapes.is_fixed) == ((), (size,), size, True)
    assert shapes_of(sizes) == shapes


@pytest.mark.parametrize(("slots", "rank", "expected"), [(8, 40, (0, 64)), (8, 16, (0, 16)), (0, 40, (0,))])
def test_a_deterministic_engine_takes_one_form_of_lora_for_adapters_of_all_ranks(slots, rank, expected):
    assert shapes_of(EngineConfig(adapter_slots=slots, max_lora_rank=rank, deterministic=True)).ranks == expected
