"""Incremental text is exact: in bytes, in stop strings, in log-probabilities (case 16)."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from engine.wire import Delta, FinishReason, TokenizerCard, TokenLogprobs, pack_ids
from gateway.text.choices import Choice, Piece, StopFinder
from gateway.text.formats import content_logprob, text_logprobs
from gateway.text.tokenizer import ModelTokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

EMOJI = "a👩‍👩‍👧‍👦🇩🇪北京é b"


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return ModelTokenizer(TokenizerCard(tiny_tokenizer().to_str(), CHAT_TEMPLATE, tokens, False), 300)


def spread(ids: list[int], rng: random.Random, finish: str = "length") -> list[Delta]:
    """The ids over deltas of one to four tokens, with a log-probability each."""
    deltas = []
    at = 0
    while at < len(ids):
        part = ids[at : at + rng.randint(1, 4)]
        at += len(part)
        scores = tuple(TokenLogprobs(i, -float(i), ((i, -float(i)),)) for i in part)
        deltas.append(Delta("r", 0, pack_ids(part), scores, finish if at >= len(ids) else ""))
    return deltas


def run(choice: Choice, deltas: list[Delta]) -> list[Piece]:
    return [choice.take(delta) for delta in deltas]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_joined_deltas_of_random_bytes_equal_decoding_all_ids_at_once(tokenizer: ModelTokenizer):
    rng = random.Random(16)
    for _ in range(300):
        ids = [rng.randrange(300) for _ in range(rng.randint(1, 80))]

        pieces = run(Choice(tokenizer, (), False), spread(ids, rng))

        assert text_of(pieces) == tokenizer.decode(ids)
        assert [piece.finish_reason for piece in pieces][-1] == "length"


@pytest.mark.parametrize("text", [EMOJI, "👩‍👩‍👧‍👦", "🇩🇪", "北"])
def test_a_character_over_several_tokens_comes_whole_and_without_a_replacement(tokenizer: ModelTokenizer, text: str):
    pieces = run(Choice(tokenizer, (), False), spread(tokenizer.encode(text), random.Random(1)))

    assert text_of(pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_a_character_cut_off_by_the_last_token_is_a_replacement_at_the_end_only(tokenizer: ModelTokenizer):
    ids = tokenizer.encode("ok🙂")[:-1]

    pieces = run(Choice(tokenizer, (), False), spread(ids, random.Random(2)))

    assert text_of(pieces) == tokenizer.decode(ids) == "ok\ufffd"
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])


def test_bytes_of_log_probabilities_joined_are_the_exact_bytes(tokenizer: ModelTokenizer):
    rng = random.Random(3)
    for _ in range(100):
        ids = [rng.randrange(300) for _ in range(40)]

        pieces = run(Choice(tokenizer, (), True), spread(ids, rng))

        entries = [content_logprob(token, tokenizer) for piece in pieces for token in piece.tokens]
        assert len(entries) == len(ids)
        joined = b"".join(bytes(entry.bytes) for entry in entries)
        assert joined == b"".join(tokenizer.token_bytes(i) for i in ids)
        assert joined.decode(errors="replace") == text_of(pieces)
        assert not any("\ufffd" in entry.token for entry in entries)


def test_a_stop_string_right_behind_an_emoji_is_cut_exactly(tokenizer: ModelTokenizer):
    for seed in range(30):
        pieces = run(
            Choice(tokenizer, ("STOP",), True), spread(tokenizer.encode("hi 👩‍👩‍👧‍👦STOP more"), random.Random(seed))
        )

        assert text_of(pieces) == "hi 👩‍👩‍👧‍👦"
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
        joined = b"".join(tokenizer.token_bytes(token.token_id) for piece in pieces for token in piece.tokens)
        assert joined.decode() == "hi 👩‍👩‍👧‍👦"


def test_stop_strings_are_found_however_the_text_is_cut():
    rng = random.Random(4)
    for _ in range(500):
        text = "".join(rng.choice("abc") for _ in range(30))
        stops = tuple("".join(rng.choice("abc") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 4)))
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        finder, sent, at = StopFinder(stops), "", 0

        while at < len(text) and not finder.found:
            size = rng.randint(1, 4)
            sent += finder.feed(text[at : at + size])
            at += size
        sent += finder.flush()

        assert sent == expected


def test_only_what_may_begin_a_stop_string_is_held_back():
    finder = StopFinder(("</end>",))

    assert [finder.feed(text) for text in ("hello ", "<", "b>", "</en", "x")] == ["hello ", "", "<b>", "", "</enx"]


def test_tokens_behind_a_stop_string_are_counted_as_surplus(tokenizer: ModelTokenizer):
    choice = Choice(tokenizer, ("x",), False)

    choice.take(Delta("r", 0, pack_ids(tokenizer.encode("axbc"))))
    choice.take(Delta("r", 0, pack_ids(tokenizer.encode("de")), finish_reason="abort"))

    assert choice.surplus_tokens == 4


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_choice_that_was_cut_off_does_not_claim_to_have_ended(tokenizer: ModelTokenizer, reason: FinishReason):
    choice = Choice(tokenizer, (), False)

    piece = choice.take(Delta("r", 0, pack_ids(tokenizer.encode("ab")), finish_reason=reason))

    assert (piece.text, piece.finish_reason, choice.done) == ("ab", "", True)


def test_the_token_that_stopped_the_choice_is_counted_and_is_no_text(tokenizer: ModelTokenizer):
    ids = [*tokenizer.encode("ab"), 2]
    choice = Choice(tokenizer, (), True)

    piece = choice.take(Delta("r", 0, pack_ids(ids), tuple(TokenLogprobs(i, -1.0) for i in ids), "stop", 2))

    assert (piece.text, piece.finish_reason) == ("ab", "stop")
    assert [content_logprob(token, tokenizer).bytes for token in piece.tokens] == [[97], [98], []]


def test_an_echoed_prompt_has_no_score_for_its_first_token_and_offsets_that_do_not_fall(tokenizer: ModelTokenizer):
    prompt = tokenizer.encode("aé北")
    scores = [TokenLogprobs(i, -0.5, ((i, -0.5),)) for i in prompt[1:]]
    choice = Choice(tokenizer, ("aé",), True)

    pieces = [choice.echo(prompt, scores)]
    pieces += run(choice, spread(tokenizer.encode("🙂z"), random.Random(5)))
    logprobs = text_logprobs([token for piece in pieces for token in piece.tokens], tokenizer)

    assert text_of(pieces) == "aé北🙂z"
    assert logprobs.token_logprobs[0] is None is logprobs.top_logprobs[0]
    assert None not in logprobs.token_logprobs[1:]
    assert len(logprobs.tokens) == len(prompt) + 5
    assert all(a <= b for a, b in itertools.pairwise(logprobs.text_offset))


def test_the_chosen_token_is_among_the_alternatives_and_minus_infinity_is_a_number(tokenizer: ModelTokenizer):
    choice = Choice(tokenizer, (), True)
    scores = TokenLogprobs(100, float("-inf"), ((101, -0.1),))

    piece = choice.take(Delta("r", 0, pack_ids([100]), (scores,), "length"))
    logprobs = text_logprobs(piece.tokens, tokenizer)

    assert logprobs.token_logprobs == [-9999.0]
    assert logprobs.top_logprobs[0] == {tokenizer.token_name(101): -0.1, tokenizer.token_name(100): -9999.0}


@pytest.fixture(scope="module")
def sentencepiece() -> ModelTokenizer:
    """Not byte-level: pieces with ▁ and byte fallback, as Llama 2 has them."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁he", "llo", "▁", "w", "ö", "rld"]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return ModelTokenizer(TokenizerCard(inner.to_str(), "", {}, False), len(pieces))


def test_a_vocabulary_that_is_not_byte_level_decodes_incrementally_too(sentencepiece: ModelTokenizer):
    ids = [257, 258, 259, 260, 261, 262, *(1 + byte for byte in "🙂".encode()), 260]
    pieces = run(Choice(sentencepiece, (), False), spread(ids, random.Random(6)))

    assert text_of(pieces) == sentencepiece.decode(ids) == " hello wörld🙂w"


def test_endless_continuation_bytes_end_and_lose_nothing_behind_them(sentencepiece: ModelTokenizer):
    ids = [*[1 + 0x80] * 4000, 257]

    text = text_of(run(Choice(sentencepiece, (), False), spread(ids, random.Random(7))))

    assert text.endswith(" he")
    assert text.count("\ufffd") == 4000
