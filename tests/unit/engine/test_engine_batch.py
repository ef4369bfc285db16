"""engine/batch: a plan as flat tensors."""

import torch

from engine.batch import build_batch
from engine.scheduler import Chunk
from engine.sequence import PENDING
from tests.tiny import tiny_config
from tests.tiny_steps import make_plan, make_sequence

ATTENTION = tiny_config().attention
CPU = torch.device("cpu")


def test_chunks_stand_one_behind_the_other():
    prefill = make_sequence(list(range(100, 110)), [7, 2, 5], slot=3)
    decode = make_sequence(list(range(200, 206)), [1, 9])
    plan = make_plan([Chunk(prefill, 3, 5, False, False), Chunk(decode, 5, 1, True, False)])

    batch = build_batch(plan, 4, ATTENTION, CPU)

    assert batch.token_ids.tolist() == [103, 104, 105, 106, 107, 205]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 5]
    assert batch.slot_mapping.tolist() == [7 * 4 + 3, 8, 9, 10, 11, 9 * 4 + 1]
    assert batch.lora is not None
    assert batch.lora.rows_of_slot == {3: [0, 1, 2, 3, 4]}
    assert batch.attention.query_starts == [0, 5, 6]
    assert batch.attention.context_lens == [8, 6]
    assert batch.attention.block_tables[0, :3].tolist() == [7, 2, 5]
    assert batch.attention.block_tables[1, :2].tolist() == [1, 9]
    assert batch.logits_rows.tolist() == [5]


def test_only_sampling_chunks_have_a_logits_row():
    sequences = [make_sequence(list(range(8)), [index, index + 4]) for index in range(3)]
    samples = (True, False, True)
    plan = make_plan([Chunk(s, 0, 8, wanted, False) for s, wanted in zip(sequences, samples, strict=True)])

    assert build_batch(plan, 4, ATTENTION, CPU).logits_rows.tolist() == [7, 23]


def test_a_step_without_adapters_plans_no_lora():
    sequence = make_sequence([4, 5, 6], [0])

    assert build_batch(make_plan([Chunk(sequence, 0, 3, True, False)]), 4, ATTENTION, CPU).lora is None


def test_a_token_that_is_still_in_the_air_stands_for_the_row_that_draws_it():
    known, waiting = make_sequence([4, 5, 6], [0]), make_sequence([7, 8, PENDING], [1])
    waiting.seq_id = 9
    plan = make_plan([Chunk(known, 0, 3, True, False), Chunk(waiting, 1, 2, True, False)])

    assert build_batch(plan, 4, ATTENTION, CPU, ahead={9: 5}).token_ids.tolist() == [4, 5, 6, 8, ~5]
