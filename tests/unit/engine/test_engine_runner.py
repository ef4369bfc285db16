"""engine/runner: one forward a step; tokens and scores for those that want them, in the order of the plan."""

import random

import pytest
import torch

from engine.config import EngineConfig
from engine.models.decoder import Decoder
from engine.runner import SCORE_ROWS, Runner
from engine.scheduler import Chunk
from tests.tiny import tiny_adapter, tiny_config, tiny_weights
from tests.tiny_steps import Steps, adapter_weights, make_plan, make_sequence

CONFIG = EngineConfig(block_size=4, num_blocks=256, context_tokens=512, adapter_slots=4, max_lora_rank=16)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_config(), tiny_weights())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 300), k=length)


def test_results_stand_in_the_order_of_the_plan(decoder: Decoder):
    prompts = [prompt_of(9), prompt_of(30), prompt_of(2)]
    chunks = [
        Chunk(make_sequence(tokens, list(range(20 * index, 20 * index + 20))), 0, len(tokens), index != 1, False)
        for index, tokens in enumerate(prompts)
    ]

    results = Runner(decoder, CONFIG).launch(make_plan(chunks)).results()

    expected = [int(Steps(decoder).prefill([(tokens, -1)])[0][-1].argmax()) for tokens in prompts]
    assert [result.token_id for result in results] == [expected[0], -1, expected[2]]
    assert all(result.logprobs is None and result.scores == () for result in results)


@pytest.mark.parametrize("num", [1, 8])
def test_a_step_makes_the_same_products_for_any_number_of_sequences(decoder: Decoder, num: int):
    runner = Runner(decoder, CONFIG)
    sequences = [make_sequence(prompt_of(5, index), [2 * index, 2 * index + 1]) for index in range(num)]
    runner.launch(make_plan([Chunk(sequence, 0, 4, False, False) for sequence in sequences]))
    before = runner.num_linear_calls

    runner.launch(make_plan([Chunk(sequence, 4, 1, True, False) for sequence in sequences]))

    assert runner.num_linear_calls - before == 4 * 2 + 1  # qkv, o, gate_up, down of two layers, and the head


@pytest.mark.parametrize("chunk_size", [7, 40, 200])
def test_prompt_scores_are_the_log_probabilities_of_the_next_tokens(decoder: Decoder, chunk_size: int):
    """Over chunks, over more rows than are scored at a time, up to the last prompt token and no further."""
    prompt, output = prompt_of(2 * SCORE_ROWS + 11), [5, 6]
    sequence = make_sequence(prompt + output, list(range(60)), num_prompt_tokens=len(prompt), prompt_logprobs=1)
    runner, total = Runner(decoder, CONFIG), len(prompt) + len(output)
    scores = []

    for first in range(0, total, chunk_size):
        size = min(chunk_size, total - first)
        plan = make_plan([Chunk(sequence, first, size, False, first < len(prompt) - 1)])
        (result,) = runner.launch(plan).results()
        scores += result.scores

    logprobs = Steps(decoder).prefill([(prompt, -1)])[0].log_softmax(-1)
    assert [score.token_id for score in scores] == prompt[1:]
    assert [score.logprob for score in scores] == [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
    assert [score.top[0][0] for score in scores] == logprobs[:-1].argmax(-1).tolist()


def test_logprobs_are_of_the_sampled_token(decoder: Decoder):
    tokens = prompt_of(12)
    sequence = make_sequence(tokens, [0, 1, 2], logprobs=3)

    (result,) = Runner(decoder, CONFIG).launch(make_plan([Chunk(sequence, 0, 12, True, False)])).results()

    logprobs = Steps(decoder).prefill([(tokens, -1)])[0][-1].log_softmax(-1)
    assert result.logprobs is not None
    assert (result.logprobs.token_id, result.logprobs.logprob) == (result.token_id, float(logprobs[result.token_id]))
    assert len(result.logprobs.top) == 3


def test_slots_are_loaded_and_cleared(decoder: Decoder):
    runner, tokens = Runner(decoder, CONFIG), prompt_of(10)
    adapter = tiny_adapter(1, rank=4)

    def logprob(slot: int) -> float:
        sequence = make_sequence(tokens, [0, 1, 2], slot, prompt_logprobs=0)
        (result,) = runner.launch(make_plan([Chunk(sequence, 0, 10, False, True)])).results()
        return result.scores[-1].logprob

    base = logprob(-1)
    runner.load_slot(2, adapter_weights(adapter))
    adapted = logprob(2)
    runner.clear_slot(2)

    with_adapter = Steps(decoder, [adapter]).prefill([(tokens, 0)])[0].log_softmax(-1)
    assert adapted == float(with_adapter[8, tokens[9]])
    assert logprob(2) == base != adapted


def test_the_runner_says_what_the_engine_must_know(decoder: Decoder):
    info = Runner(decoder, CONFIG).model_info

    assert (info.vocab_size, info.eos_token_ids) == (300, (2,))


def test_a_pool_full_of_nan_changes_no_result(decoder: Decoder):
    """What earlier requests left in the pool is not seen."""
    tokens = prompt_of(21)

    def scores(runner: Runner) -> tuple:
        sequence = make_sequence(tokens, [9, 3, 77, 12, 50, 8], prompt_logprobs=0)
        return runner.launch(make_plan([Chunk(sequence, 0, 21, True, True)])).results()[0].scores

    runner = Runner(decoder, CONFIG)
    for cache in (*runner.kv.keys, *runner.kv.values):
        cache.fill_(float("nan"))

    assert scores(runner) == scores(Runner(decoder, CONFIG))
    assert not torch.tensor([score.logprob for score in scores(runner)]).isnan().any()
