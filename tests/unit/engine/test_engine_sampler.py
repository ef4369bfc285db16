"""The sampler against brute force: filters, penalties, seeds, and rows that know nothing of each other."""

import math

import pytest
import torch

from engine import wire
from engine.gpu.sampler import DeviceSampler, score
from engine.sampler import Sampler, uniform
from engine.sequence import Request, Sequence

torch.set_num_threads(1)
EOS = 2


class OnDevice:
    """The device's sampler with the reference's interface, on a CPU."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._sampler = DeviceSampler(eos_token_ids, torch.device("cpu"))

    def sample(self, logits: torch.Tensor, rows) -> list:
        tokens = self._sampler.sample(logits, rows)
        wanted = [each.sampling.logprobs for each in rows]
        return [
            (int(token), score(logits[[index]], token[None], wanted[index]).read()[0] if wanted[index] >= 0 else None)
            for index, token in enumerate(tokens)
        ]

    def score(self, logits: torch.Tensor, targets: list[int], num_top: int) -> tuple:
        return tuple(score(logits, torch.tensor(targets, dtype=torch.int64), num_top).read())


SAMPLER: Sampler | OnDevice = Sampler((EOS,))


@pytest.fixture(autouse=True, params=[Sampler, OnDevice], ids=["reference", "device"])
def _every_sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "SAMPLER", request.param((EOS,)))


def row(
    *, prompt: tuple[int, ...] = (5, 6), output: tuple[int, ...] = (), seed: int = 0, **sampling: object
) -> Sequence:
    params = wire.SamplingParams(max_tokens=64, **sampling)  # type: ignore[arg-type]
    submit = wire.Submit("r", [wire.pack_ids(prompt)], params, wire.Flow("f"), b"", 64)
    sequence = Sequence(0, Request(submit, 0), 0, list(prompt), seed)
    sequence.token_ids.extend(output)
    return sequence


def pick(logits: torch.Tensor, *rows: Sequence) -> list[int]:
    return [token for token, _ in SAMPLER.sample(logits, rows)]


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def filtered(logits: list[float], *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The distribution that the filters leave, by hand: min-p, then top-k, then top-p, then one sum."""
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    order = [index for index in order if weights[index] >= min_p * max(weights)]
    order = order[:top_k] if top_k else order
    total, kept, mass = sum(weights[index] for index in order), [], 0.0
    for index in order:
        if mass / total >= top_p:
            break
        kept.append(index)
        mass += weights[index]
    return [weights[index] / mass if index in kept else 0.0 for index in range(len(weights))]


# ── greedy ───────────────────────────────────────────────────────────────────────────────────────


def test_greedy_takes_the_highest_logit_and_of_equal_ones_the_lowest_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -1.0, -0.5, -9.0]])

    assert pick(logits, *[row(temperature=0.0)] * 3) == [1, 0, 2]


def test_ties_go_to_the_lowest_id_in_a_large_vocabulary_too():
    logits = torch.zeros(2, 49152)
    logits[0, [700, 40000, 41000]] = 1.0

    assert pick(logits, row(temperature=0.0), row(temperature=0.0)) == [700, 0]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-9}])
def test_settings_that_leave_one_token_are_greedy(sampling: dict):
    logits = random_logits(1)

    assert pick(logits, row(**sampling)) == [int(logits.argmax())]


def test_sampling_leaves_the_logits_as_they_were():
    logits = random_logits(2)
    before = logits.clone()

    SAMPLER.sample(logits, [row(repetition_penalty=2.0, logit_bias={1: 5.0}), row(min_tokens=3, logprobs=2)])

    assert torch.equal(logits, before)


# ── bad rows ─────────────────────────────────────────────────────────────────────────────────────

BAD = {
    "all NaN": (torch.full((50,), math.nan), 0),
    "one NaN": (torch.arange(50.0).index_fill(0, torch.tensor([49]), math.nan), 48),
    "all -inf": (torch.full((50,), -math.inf), 0),
    "one +inf": (torch.zeros(50).index_fill(0, torch.tensor([7]), math.inf), 7),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_bad_row_gives_a_fixed_token_and_its_neighbours_do_not_notice(kind: str, sampling: dict):
    bad, expected = BAD[kind]
    logits = torch.stack([random_logits(1)[0], bad, random_logits(1, seed=1)[0]])
    neighbours = [row(seed=3, logprobs=3), row(seed=4, top_k=9, repetition_penalty=1.3)]
    alone = [SAMPLER.sample(logits[[index]], [each])[0] for index, each in ((0, neighbours[0]), (2, neighbours[1]))]

    first, middle, last = SAMPLER.sample(logits, [neighbours[0], row(logprobs=3, **sampling), neighbours[1]])

    assert [first, last] == alone
    assert middle[0] == expected


# ── distributions ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.7, "temperature": 1.3},
        {"min_p": 0.05, "top_p": 0.6, "temperature": 2.0},
        {"min_p": 0.02, "top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_filtered_softmax_says(sampling: dict):
    logits = [1.5, -0.5, 2.0, 0.3, 0.3, -2.0, 1.0, 0.0, 1.5, -1.0]
    expected = filtered(logits, **sampling)
    num_draws = 1000
    counts = [0] * len(logits)
    for token in pick(torch.tensor([logits] * num_draws), *[row(seed=seed, **sampling) for seed in range(num_draws)]):
        counts[token] += 1

    assert [index for index, count in enumerate(counts) if count and not expected[index]] == []
    kept = [(count, share * num_draws) for count, share in zip(counts, expected, strict=True) if share]
    chi_square = sum((count - wanted) ** 2 / wanted for count, wanted in kept)
    assert chi_square < 30  # 9 degrees of freedom: P(χ² > 30) = 4e-4, and the seeds are fixed


@pytest.mark.parametrize("sampling", [{"top_k": 300}, {"top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.01}], ids=str)
def test_filters_keep_the_right_set_of_a_large_vocabulary(sampling: dict):
    logits = random_logits(1, vocab=6000)
    expected = filtered(logits[0].double().tolist(), **sampling)
    allowed = {index for index, share in enumerate(expected) if share}

    drawn = set(pick(logits.expand(150, -1), *[row(seed=seed, **sampling) for seed in range(150)]))

    assert 50 < len(allowed) < 6000
    assert drawn <= allowed
    assert max(expected) < 0.5 or int(logits.argmax()) in drawn


def test_top_k_keeps_exactly_k_of_equal_logits_the_lowest_ids():
    drawn = set(pick(torch.zeros(300, 40), *[row(seed=seed, top_k=3) for seed in range(300)]))

    assert drawn == {0, 1, 2}


def test_a_top_k_over_the_vocabulary_is_no_filter():
    logits = random_logits(1)

    assert all(pick(logits, row(seed=seed, top_k=1000)) == pick(logits, row(seed=seed, top_k=50)) for seed in range(20))


def test_a_masked_token_is_never_drawn():
    logits = torch.zeros(200, 4)
    logits[:, 1] = -math.inf

    for sampling in ({}, {"top_k": 3}, {"top_p": 0.99}):
        assert set(pick(logits, *[row(seed=seed, **sampling) for seed in range(200)])) == {0, 2, 3}


# ── seeds ────────────────────────────────────────────────────────────────────────────────────────


def test_a_draw_depends_on_seed_and_output_position_only():
    logits = random_logits(1)

    def draw(**change: object) -> list[int]:
        return [pick(logits, row(output=(9,) * n, **{"seed": 11, **change}))[0] for n in range(40)]  # type: ignore[arg-type]

    assert draw() == draw(prompt=(1, 2, 3, 4, 5, 6, 7))
    assert draw() != draw(seed=12)
    assert len(set(draw())) > 3


def test_uniform_numbers_are_even_and_differ_in_both_arguments():
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]

    assert len(set(numbers)) == 4000
    assert all(0.0 <= number < 1.0 for number in numbers)
    tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
    assert sum((count - 400) ** 2 / 400 for count in tenths) < 30


def test_negative_and_64_bit_seeds_are_seeds():
    assert len({uniform(seed, 0) for seed in (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1)}) == 6


# ── rows are independent ─────────────────────────────────────────────────────────────────────────

MIXED = [
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "logprobs": 5},
    {"seed": 3, "top_k": 7, "repetition_penalty": 1.2},
    {"seed": 4, "temperature": 0.5, "presence_penalty": 1.0, "output": (3, 3, 4), "logprobs": 0},
    {"seed": 5, "min_p": 0.05, "frequency_penalty": 0.7, "output": (8, 8)},
    {"seed": 6, "min_tokens": 4, "stop_token_ids": (7,), "logit_bias": {7: 50.0}},
    {"seed": 7, "temperature": 1.5},
]


def test_a_row_gives_the_same_alone_in_any_company_and_in_any_order():
    rows = [row(**settings) for settings in MIXED]  # type: ignore[arg-type]
    logits = random_logits(len(rows), vocab=3000)
    alone = [SAMPLER.sample(logits[[index]], [each])[0] for index, each in enumerate(rows)]
    generator = torch.Generator().manual_seed(0)

    for _ in range(20):
        order = torch.randperm(len(rows), generator=generator).tolist()[: 1 + int(torch.randint(8, (1,)))]
        together = SAMPLER.sample(logits[order], [rows[index] for index in order])
        assert together == [alone[index] for index in order]


# ── penalties, bias, masks ───────────────────────────────────────────────────────────────────────


def test_frequency_and_presence_count_output_tokens_only():
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.5]])
    greedy = {"temperature": 0.0, "prompt": (1, 1, 1)}

    assert pick(logits, row(frequency_penalty=2.0, **greedy)) == [1]
    assert pick(logits, row(frequency_penalty=0.2, output=(1,), **greedy)) == [2]
    assert pick(logits, row(frequency_penalty=0.05, output=(1,), **greedy)) == [1]
    assert pick(logits, row(frequency_penalty=0.05, output=(1, 1, 1), **greedy)) == [2]
    assert pick(logits, row(presence_penalty=0.05, output=(1, 1, 1), **greedy)) == [1]
    assert pick(logits, row(presence_penalty=0.6, output=(1, 2), **greedy)) == [3]
    assert pick(logits, row(presence_penalty=-2.0, output=(0,), **greedy)) == [0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.5]])
    greedy = {"temperature": 0.0, "repetition_penalty": 2.0}

    assert pick(logits, row(prompt=(0,), **greedy)) == [1]
    assert pick(logits, row(prompt=(0,), output=(1,), **greedy)) == [0]
    assert pick(torch.tensor([[-1.0, -1.5]]), row(prompt=(0,), **greedy)) == [1]
    assert pick(torch.tensor([[-1.0, -2.5]]), row(prompt=(0, 0, 0), **greedy)) == [0]


def test_bias_is_added_before_everything_else():
    logits = random_logits(1)

    assert pick(logits, row(temperature=0.0, logit_bias={33: 100.0})) == [33]
    assert pick(logits, row(temperature=0.0, logit_bias={int(logits.argmax()): -100.0})) != [int(logits.argmax())]
    assert {pick(logits, row(seed=seed, logit_bias={33: 100.0}))[0] for seed in range(20)} == {33}


def test_end_and_stop_tokens_wait_for_min_tokens_even_against_a_bias():
    logits = torch.zeros(1, 6)
    settings = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4,), "logit_bias": {EOS: 100.0, 4: 99.0}}

    assert pick(logits, row(**settings)) == [0]
    assert pick(logits, row(output=(1,), **settings)) == [0]
    assert pick(logits, row(output=(1, 1), **settings)) == [EOS]


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


def test_log_probabilities_are_of_the_raw_logits():
    logits = random_logits(1)
    raw = logits[0].log_softmax(dim=-1)
    shaped = row(temperature=0.0, logit_bias={33: 100.0}, repetition_penalty=3.0, logprobs=4)

    ((token, logprobs),) = SAMPLER.sample(logits, [shaped])

    assert logprobs is not None
    assert (token, logprobs.token_id) == (33, 33)
    assert logprobs.logprob == float(raw[33])
    best = raw.topk(4)
    assert logprobs.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_log_probabilities_come_only_where_they_are_wanted():
    results = SAMPLER.sample(random_logits(3), [row(logprobs=-1), row(logprobs=0), row(logprobs=2)])

    assert [None if logprobs is None else len(logprobs.top) for _, logprobs in results] == [None, 0, 2]


def test_alternatives_of_equal_probability_stand_in_the_order_of_their_ids():
    ((_, logprobs),) = SAMPLER.sample(torch.zeros(1, 30), [row(temperature=0.0, logprobs=3)])

    assert logprobs is not None
    assert [token for token, _ in logprobs.top] == [0, 1, 2]


def test_scores_are_of_the_given_targets():
    logits = random_logits(3)
    raw = logits.log_softmax(dim=-1)

    scores = SAMPLER.score(logits, [4, 0, 49], 2)

    assert [score.token_id for score in scores] == [4, 0, 49]
    assert [score.logprob for score in scores] == [float(raw[index, t]) for index, t in enumerate([4, 0, 49])]
    assert [score.top[0][0] for score in scores] == raw.argmax(dim=-1).tolist()
    assert all(len(score.top) == 2 for score in scores)
    assert SAMPLER.score(logits[:1], [4], 0)[0].top == ()


def test_no_rows_give_no_tokens():
    assert SAMPLER.sample(torch.zeros(0, 5), []) == []
    assert SAMPLER.score(torch.zeros(0, 5), [], 1) == ()


def test_both_samplers_draw_the_same_tokens_from_the_same_numbers():
    logits = random_logits(200, vocab=500)
    settings = [{}, {"top_k": 9}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9, "temperature": 0.6}]
    rows = [row(seed=seed, **settings[seed % 4]) for seed in range(200)]  # type: ignore[arg-type]

    expected = [token for token, _ in Sampler((EOS,)).sample(logits, rows)]

    assert [token for token, _ in OnDevice((EOS,)).sample(logits, rows)] == expected
