"""Grammars: what is drawn stands in the mask, the end of a grammar ends the choice, and what costs too much is cut."""

import json
import math
import random
import subprocess
import sys

import msgspec
import pytest
import torch

from engine import wire
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidGrammar, InvalidRequest
from engine.grammar import MAX_MASK_NS, Compiler, Matcher, is_allowed
from engine.models.decoder import Decoder
from engine.runner import Runner
from engine.sampler import Sampler
from engine.sequence import Request, Sequence
from engine.wire.framing import Frames, frame
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

EOS = 2
TOKENIZER = tiny_tokenizer()
DIGITS = 'start: "<" /[0-9]{2,6}/ ">"'
WORDS = "start: /[a-z ]+/"
COMPILER = Compiler(TOKENIZER.to_str(), 300, (EOS,))


def one_id(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text, add_special_tokens=False).ids
    return token_id


def test_a_mask_holds_what_may_follow_and_eos_only_where_the_grammar_may_end():
    matcher = COMPILER.compile("start: /[0-9]{2}[0-9]*/").matcher()

    for count, digit in enumerate("123"):
        assert is_allowed(matcher.mask(), one_id(digit))
        assert not is_allowed(matcher.mask(), one_id("x"))
        assert is_allowed(matcher.mask(), EOS) == (count >= 2)
        matcher.advance(one_id(digit))

    assert (matcher.ended, matcher.failure) == (False, "")
    matcher.mask()
    matcher.advance(EOS)
    assert matcher.ended


def test_a_grammar_that_nothing_may_follow_has_ended_without_eos():
    matcher = COMPILER.compile('start: "ab"').matcher()

    for letter in "ab":
        assert not matcher.ended
        matcher.mask()
        matcher.advance(one_id(letter))

    assert matcher.ended


def test_a_token_outside_the_mask_is_our_bug():
    matcher = COMPILER.compile(DIGITS).matcher()
    matcher.mask()

    with pytest.raises(AssertionError, match="doesn't allow"):
        matcher.advance(one_id("x"))


def test_matchers_of_one_grammar_know_nothing_of_each_other():
    grammar = COMPILER.compile('start: "a" "b" | "b" "a"')
    first, second = grammar.matcher(), grammar.matcher()

    first.mask()
    first.advance(one_id("a"))

    assert not is_allowed(first.mask(), one_id("a"))
    assert is_allowed(second.mask(), one_id("a"))


def schema(**fields: object) -> str:
    return json.dumps({"grammars": [{"json_schema": fields}]})


REFUSED = {
    "no grammar": ("nonsense", ""),
    "broken lark": ("start: (", ""),
    "an endless reference": (schema(**{"$ref": "#"}), ""),
    "a remote reference": (schema(**{"$ref": "https://example.com/x.json"}), "does not fetch"),
    "a file": (schema(**{"$ref": "file:///etc/passwd"}), "does not fetch"),
    "a keyword without a grammar": (schema(uniqueItems=True, type="array"), "uniqueItems"),
    "what nothing satisfies": (schema(type="object", properties={"a": False}, required=["a"]), "nsatisfiable"),
    "a look-ahead": (schema(type="string", pattern="(?=a)b"), "look-around"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_a_short_reason(name: str):
    text, words = REFUSED[name]
    with pytest.raises(InvalidGrammar) as caught:
        COMPILER.compile(text)

    assert words in str(caught.value)
    assert 0 < len(str(caught.value)) <= 300


def test_a_vocabulary_that_takes_no_grammar_is_a_refusal_and_no_crash():
    with pytest.raises(InvalidGrammar, match="vocabulary"):
        Compiler("{}", 300, (EOS,)).compile(DIGITS)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────


def slow_compiler(each_ns: int) -> Compiler:
    """Every reading of its clock is ``each_ns`` later."""
    times = iter(range(0, 1 << 62, each_ns))
    return Compiler(TOKENIZER.to_str(), 300, (EOS,), clock=lambda: next(times))


@pytest.mark.parametrize(("each_ns", "failure"), [(MAX_MASK_NS, ""), (MAX_MASK_NS + 1, "slow_mask")])
def test_a_mask_slower_than_5_ms_is_the_end_of_its_choice_and_counted(each_ns: int, failure: str):
    compiler = slow_compiler(each_ns)
    matcher = compiler.compile(DIGITS).matcher()
    matcher.mask()  # was computed with the grammar
    matcher.advance(one_id("<"))

    mask = matcher.mask()

    assert (matcher.failure, bool(mask), matcher.ended) == (failure, not failure, False)
    assert compiler.num_cut[failure] == bool(failure)
    assert (compiler.num_masks, compiler.mask_ns) == (1, each_ns)


def test_a_grammar_that_grows_too_large_while_it_runs_fails_its_choice():
    matcher = COMPILER.compile(schema(type="string", pattern="^.*a.{500}$")).matcher()
    draw, letters = random.Random(1), [one_id(letter) for letter in "ab"]
    matcher.mask()
    matcher.advance(one_id('"'))

    for _ in range(2000):
        if matcher.failure or not matcher.mask():
            break
        matcher.advance(draw.choice(letters))

    assert matcher.failure in ("too_complex", "slow_mask")


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────


def row(matcher: Matcher | None, seed: int = 0, **sampling: object) -> Sequence:
    params = wire.SamplingParams(max_tokens=64, **sampling)  # type: ignore[arg-type]
    submit = wire.Submit("r", [wire.pack_ids([5])], params, wire.Flow("f"), b"", 64)
    sequence = Sequence(0, Request(submit, 0), 0, [5], seed)
    sequence.matcher = matcher
    return sequence


HOSTILE_LOGITS = {
    "ordinary ones": lambda: torch.randn(300),
    "none but NaN": lambda: torch.full((300,), math.nan),
    "none at all": lambda: torch.full((300,), -math.inf),
    "an infinite one outside": lambda: torch.zeros(300).index_fill(0, torch.tensor([one_id("x")]), math.inf),
}
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"top_p": 0.5, "top_k": 7},
    {"min_p": 0.3},
    {"temperature": 0.0, "logit_bias": {one_id("x"): 100.0, one_id("7"): -100.0}},
    {"min_tokens": 50, "temperature": 0.7},
    {"repetition_penalty": 9.0, "frequency_penalty": 2.0},
)


@pytest.mark.parametrize("name", HOSTILE_LOGITS)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_whatever_the_logits_every_drawn_token_is_of_the_mask(name: str, way: int):
    torch.manual_seed(way)
    sampler = Sampler((EOS,))
    sequence = row(COMPILER.compile(DIGITS).matcher(), seed=way, **WAYS[way])
    matcher = sequence.matcher
    assert matcher is not None

    while not matcher.ended:
        ((token, _),) = sampler.sample(HOSTILE_LOGITS[name]()[None], [sequence])
        assert is_allowed(matcher.mask(), token)
        sequence.token_ids.append(token)
        matcher.advance(token)

    assert not matcher.failure
    assert len(sequence.output_ids) <= 9


def test_min_tokens_keeps_eos_away_only_while_something_else_may_follow():
    matcher = COMPILER.compile("start: /[0-9]{1,3}/").matcher()
    sequence = row(matcher, min_tokens=60, temperature=0.0)
    likes_eos = torch.zeros(1, 300)
    likes_eos[0, EOS] = 50.0

    while not matcher.ended:
        ((token, _),) = Sampler((EOS,)).sample(likes_eos, [sequence])
        sequence.token_ids.append(token)
        matcher.advance(token)

    assert len([token for token in sequence.output_ids if token != EOS]) == 3


def test_rows_without_a_grammar_draw_what_they_draw_alone():
    torch.manual_seed(3)
    logits = torch.randn(3, 300)
    plain = [row(None, seed=1), row(None, seed=2, top_k=5)]
    alone = [Sampler((EOS,)).sample(logits[i : i + 1], [plain[i]])[0][0] for i in range(2)]

    mixed = Sampler((EOS,)).sample(logits, [*plain, row(COMPILER.compile(DIGITS).matcher())])

    assert [token for token, _ in mixed[:2]] == alone


# ── the engine ───────────────────────────────────────────────────────────────────────────────────


def make_engine(**sizes: int) -> Engine:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 512, "context_tokens": 512, **sizes})
    return Engine(config, Runner(Decoder(tiny_config(), tiny_weights()), config))


def submit(name: str, grammar: str, num_choices: int = 1, prompt: tuple[int, ...] = (5, 6, 7), **sampling):
    params = wire.SamplingParams(**{"max_tokens": 40, "seed": 7, "grammar": grammar, **sampling})
    return wire.Submit(name, [wire.pack_ids(prompt)], params, wire.Flow("f"), b"n", params.max_tokens, num_choices)


def run(
    engine: Engine, *submits: wire.Submit, compiler: Compiler = COMPILER
) -> dict[tuple[str, int], list[wire.Delta]]:
    deltas: dict[tuple[str, int], list[wire.Delta]] = {}
    for each in submits:
        text = each.sampling.grammar
        engine.add(each, compiler.compile(text) if text else None)
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas.setdefault((delta.request_id, delta.choice), []).append(delta)
        engine.check_invariants()
    return deltas


def text_of(deltas: list[wire.Delta]) -> str:
    ids = [i for d in deltas for i in wire.unpack_ids(d.token_ids) if i != d.stop_token_id]
    return TOKENIZER.decode(ids)


def test_choices_of_a_request_each_follow_the_grammar_to_its_end():
    outcome = run(make_engine(), submit("r", DIGITS, num_choices=6))

    texts = [text_of(outcome["r", choice]) for choice in range(6)]
    assert all(text[0] == "<" and text[-1] == ">" and text[1:-1].isdigit() for text in texts)
    assert len(set(texts)) > 1
    last = [outcome["r", choice][-1] for choice in range(6)]
    assert {(delta.finish_reason, delta.stop_token_id) for delta in last} == {("stop", -1)}  # ">" is text


def test_the_eos_that_ends_a_grammar_is_no_text_and_ends_it_whatever_ignore_eos_says():
    outcome = run(make_engine(), submit("r", "start: /[0-9]{1,3}/", ignore_eos=True, logit_bias={EOS: 60.0}))

    assert text_of(outcome["r", 0]).isdigit()
    assert (outcome["r", 0][-1].finish_reason, outcome["r", 0][-1].stop_token_id) == ("stop", EOS)


def test_max_tokens_cuts_a_grammar_with_length():
    outcome = run(make_engine(), submit("r", WORDS, max_tokens=5, min_tokens=5))

    assert outcome["r", 0][-1].finish_reason == "length"
    assert len(outcome["r", 0]) == 5


def test_preempted_choices_say_what_they_say_undisturbed():
    submits = [submit(f"r{i}", WORDS, prompt=(5 + i, 6, 7), seed=i, min_tokens=30) for i in range(4)]
    alone = [text_of(run(make_engine(), each)[each.request_id, 0]) for each in submits]
    narrow = make_engine(num_blocks=16)

    together = run(narrow, *submits)

    assert narrow.scheduler.num_preemptions > 0
    assert [text_of(together[each.request_id, 0]) for each in submits] == alone


def test_a_choice_without_a_grammar_keeps_its_tokens_beside_those_with_one():
    plain = msgspec.structs.replace(submit("p", ""), request_id="p")
    alone = run(make_engine(), plain)["p", 0]

    beside = run(make_engine(), plain, submit("r", DIGITS, 3))["p", 0]

    assert [delta.token_ids for delta in beside] == [delta.token_ids for delta in alone]


def test_a_grammar_that_costs_too_much_ends_its_choice_with_length_and_nobody_elses():
    engine = make_engine()
    engine.add(submit("good", WORDS, max_tokens=12, min_tokens=12), COMPILER.compile(WORDS))

    outcome = run(engine, submit("slow", DIGITS, 2), compiler=slow_compiler(MAX_MASK_NS + 1))

    for choice in range(2):  # the first mask is compiled with the grammar; before the second token it ends
        assert [delta.finish_reason for delta in outcome["slow", choice]] == ["", "length"]
    assert len(outcome["good", 0]) == 12


def test_the_engine_takes_a_grammar_compiled_or_not_at_all():
    for each, grammar in ((submit("r", DIGITS), None), (submit("r", ""), COMPILER.compile(DIGITS))):
        with pytest.raises(InvalidRequest):
            make_engine().add(each, grammar)


# ── the worker ───────────────────────────────────────────────────────────────────────────────────


class WorkerProcess:
    """``python -m engine.grammar.worker`` over its pipes."""

    def __init__(self, card: tuple) -> None:
        command = [sys.executable, "-m", "engine.grammar.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._frames = Frames()
        self.ready = self.ask(card)

    def ask(self, question: object) -> str | None:
        """Its answer; None when it ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(frame(msgspec.msgpack.encode(question)))
        while data := self.process.stdout.read(1 << 16):
            for body in self._frames.feed(data):
                return msgspec.msgpack.decode(body, type=str)
        return None

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


def test_the_worker_answers_each_grammar_and_ends_with_its_input():
    worker = WorkerProcess((TOKENIZER.to_str(), 300, (EOS,)))

    answers = [worker.ready, worker.ask(DIGITS), worker.ask("start: ("), worker.ask(WORDS)]

    assert [bool(answer) for answer in answers] == [False, False, True, False]
    assert worker.end() == 0


def test_a_grammar_without_bounds_ends_the_worker_and_nothing_else():
    worker = WorkerProcess((TOKENIZER.to_str(), 300, (EOS,)))

    assert worker.ask(schema(type="integer", multipleOf=99_999_999)) is None
    assert worker.end() < 0
