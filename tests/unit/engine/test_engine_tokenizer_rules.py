"""Tokenizers of GGUF files give the ids of their model's own rule: digits, runs of blanks, code, CJK, emoji.

Byte-level models against a plain BPE over llama.cpp's expressions (src/llama-vocab.cpp), cut by the ``regex``
package; SentencePiece models against the ``sentencepiece`` library itself.
"""

import io
import itertools
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer

from engine.weights.errors import UnsupportedModel
from engine.weights.gguf import GgufFile
from engine.weights.gguf_tokenizer import RULES, card_from_gguf
from engine.wire import TokenizerCard
from gateway.text.tokenizer import ModelTokenizer
from ops.default_model import DEFAULT_GGUF

CORPUS = [
    "Plain words, and more of them; it's what they'LL've said I'm sure. DON'T!",
    "2024 12345 3.14159 1,000,000 v1.5x 0x7f ²³ ½ ٣٤٥ 第12章",
    "a  5   b    c\n\n5\t\t7 \r\n\r\n x  \n  y\n\n\n  z   ",
    "   leading and trailing   ",
    "def f(x, *, y=None):\n    if x >= 10 and not y:\n\treturn {'a': [1, 2], \"b\": x**2}  # why?\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // ok\nhttps://example.org/a?b=c&d=%20",
    "北京欢迎你。日本語のテキスト、한국어 문장입니다. ไทย العربية עברית हिन्दी",
    "😀 👩‍👩‍👧 🇩🇪 e\u0301 é ﬁ Ångström naïve café ΑΒΓ ПриветМир camelCaseWORDSHere HTTPServerError JSONParser",
    "<|im_start|>user<|im_end|> <s> </s> [INST] <unk>",
    "_under_ --dash-- ...!!! ??? /path/to//file\\n @user #tag $5.00 50%",
    "",
    " ",
    "x",
]
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPRESSIONS = {  # applied one after the other to the pieces that the former leaves
    "gpt-2": [GPT_2],
    "smollm": [r"\p{N}", GPT_2],
    "llama-bpe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST],
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST],
    "tekken": [TEKKEN],
}


def alphabet() -> dict[int, str]:
    """GPT-2's bytes_to_unicode."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class PlainBpe:
    """Byte-level BPE as the paper has it: merge the neighbours of the lowest rank until none are left."""

    def __init__(self, metadata: dict[str, Any], rule: str) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.rule = rule
        self.bytes = alphabet()

    def encode(self, text: str) -> list[int]:
        pieces = [unicodedata.normalize("NFC", text) if self.rule == "qwen2" else text]
        for expression in EXPRESSIONS[self.rule]:
            pieces = [part for piece in pieces for part in self._cut(expression, piece)]
        return [token for piece in pieces for token in self._merge(piece)]

    def _cut(self, expression: str, text: str) -> list[str]:
        parts, at = [], 0
        for match in regex.finditer(expression, text):
            parts += [text[at : match.start()], match[0]]
            at = match.end()
        return [part for part in [*parts, text[at:]] if part]

    def _merge(self, piece: str) -> list[int]:
        symbols = [self.bytes[byte] for byte in piece.encode()]
        if self.rule in ("llama-bpe", "tekken") and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(symbols)]
            best = min(ranks)
            if best == len(self.ranks):
                break
            at = ranks.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    if not DEFAULT_GGUF.is_file():
        pytest.skip("the default model isn't there")
    found = dict(GgufFile(DEFAULT_GGUF).metadata)
    # this vocabulary has every digit alone: numbers as tokens tell the rules apart
    merges = ["1 2", "2 0", "12 3", "20 2", "202 4", "1 0", "10 0"]
    found["tokenizer.ggml.merges"] = [*found["tokenizer.ggml.merges"], *merges]
    numbers = [merge.replace(" ", "") for merge in merges]
    found["tokenizer.ggml.tokens"] = [*found["tokenizer.ggml.tokens"], *numbers]
    found["tokenizer.ggml.token_type"] = [*found["tokenizer.ggml.token_type"], *[1] * len(numbers)]
    return found


@pytest.fixture(scope="module", params=EXPRESSIONS)
def byte_level(request: pytest.FixtureRequest, metadata: dict[str, Any]) -> tuple[PlainBpe, TokenizerCard]:
    changed = metadata | {"tokenizer.ggml.pre": request.param}
    return PlainBpe(metadata, request.param), card_from_gguf(changed)


def random_texts(count: int) -> list[str]:
    """Strings of what the rules treat apart."""
    rng = random.Random(4)
    bits = [
        "a",
        "B",
        "'s",
        "'LL",
        "1",
        "23",
        "2024",
        "٣",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        ".",
        "//",
        "é",
        "e\u0301",
        "北",
        "ß",
        "😀",
        "ǅ",
    ]
    return ["".join(rng.choices(bits, k=rng.randrange(1, 14))) for _ in range(count)]


def test_byte_level_ids_are_those_of_the_models_own_rule(byte_level: tuple[PlainBpe, TokenizerCard]):
    plain, card = byte_level
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    tokenizer.encode_special_tokens = True

    for text in CORPUS + random_texts(1500):
        assert tokenizer.encode(text, add_special_tokens=False).ids == plain.encode(text), repr(text)


def test_the_rules_differ_on_the_corpus(metadata: dict[str, Any]):
    peers = {rule: PlainBpe(metadata, rule) for rule in EXPRESSIONS}
    ids = {rule: tuple(tuple(peer.encode(text)) for text in CORPUS) for rule, peer in peers.items()}

    assert len(set(ids.values())) == len(ids)


def test_every_rule_that_is_served_is_tested():
    assert set(RULES) - {"llama3", "llama-v3"} == set(EXPRESSIONS)
    assert RULES["llama3"] == RULES["llama-v3"] == RULES["llama-bpe"]


def test_bos_comes_first_where_the_rule_or_the_file_says_so(metadata: dict[str, Any]):
    unsaid = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}

    def adds(rule: str, **more: Any) -> bool:
        return card_from_gguf(unsaid | {"tokenizer.ggml.pre": rule} | more).add_bos

    assert [adds(rule) for rule in ("llama-bpe", "tekken", "qwen2", "smollm")] == [True, True, False, False]
    assert adds("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}) is False


# ── SentencePiece ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=[True, False], ids=["space-before", "none-before"])
def trained(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model of Llama 2's kind: BPE, byte fallback, digits alone, no normalisation."""
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_engine_*.py"))]
    lines = [line for text in [*CORPUS[:9], *sources] for line in text.split("\n") if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=1200, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, num_threads=1,
        add_dummy_prefix=request.param, allow_whitespace_only_pieces=True, character_coverage=0.995,
        minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def spm_metadata(trained: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """As llama.cpp's converter writes it (convert_hf_to_gguf.py, _create_vocab_sentencepiece)."""
    ids = range(trained.vocab_size())

    def kind(i: int) -> int:
        return 2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": trained.encode("x", out_type=str)[0].startswith("▁"),
    }


def test_sentencepiece_ids_are_those_of_the_library(
    trained: sentencepiece.SentencePieceProcessor, spm_metadata: dict[str, Any]
):
    tokenizer = Tokenizer.from_str(card_from_gguf(spm_metadata).tokenizer_json)
    tokenizer.encode_special_tokens = True

    for text in CORPUS + random_texts(1500):
        assert tokenizer.encode(text, add_special_tokens=False).ids == trained.encode(text), repr(text)


def test_sentencepiece_text_comes_back_whole_and_piece_by_piece(
    trained: sentencepiece.SentencePieceProcessor, spm_metadata: dict[str, Any]
):
    """The gateway's side: byte fallback, also of cut-off characters and of ids that no text has."""
    tokenizer = ModelTokenizer(card_from_gguf(spm_metadata), trained.vocab_size())

    def streamed(ids: list[int]) -> str:
        decoder = tokenizer.decoder()
        return "".join([decoder.feed(token) for token in ids]) + decoder.finish()

    for text in CORPUS + random_texts(200):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert streamed(ids) == text
    rng, first_piece = random.Random(8), 3 + 256
    for _ in range(300):
        ids = rng.choices(range(first_piece, trained.vocab_size()), k=40)
        assert streamed(ids) == tokenizer.decode(ids)


def test_bytes_that_are_no_text_cost_no_text_around_them(
    trained: sentencepiece.SentencePieceProcessor, spm_metadata: dict[str, Any]
):
    tokenizer = ModelTokenizer(card_from_gguf(spm_metadata), trained.vocab_size())
    word = next(i for i in range(259, trained.vocab_size()) if trained.id_to_piece(i)[1:].isalpha()
                and trained.id_to_piece(i)[0] == "▁")  # fmt: skip
    written = trained.id_to_piece(word).replace("▁", " ")

    for junk in ([0x80], [0xF0, 0x9F], [0x80] * 20, [0xC3] * 9, [0xF0, 0x9F, 0x98], [0xFF, 0x41, 0xFF]):
        decoder = tokenizer.decoder()
        ids = [word, *(3 + byte for byte in junk), word, word]
        text = "".join([decoder.feed(token) for token in ids]) + decoder.finish()
        assert text.lstrip().startswith(written[1:])
        assert text.endswith(written * 2), junk
        assert "\ufffd" in text


def test_sentencepiece_models_begin_with_bos_and_name_their_tokens(spm_metadata: dict[str, Any]):
    card = card_from_gguf(spm_metadata)

    assert card.add_bos is True
    assert card.tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_control_tokens_and_bytes_cannot_be_typed(spm_metadata: dict[str, Any]):
    tokenizer = ModelTokenizer(card_from_gguf(spm_metadata), len(spm_metadata["tokenizer.ggml.tokens"]))

    ids = tokenizer.encode("<s></s><unk> <0x41>")

    assert not any(tokenizer.is_control(token) for token in ids)
    assert spm_metadata["tokenizer.ggml.tokens"].index("<0x41>") not in ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ],
)
def test_another_normalisation_or_broken_lists_are_refused_by_name(
    spm_metadata: dict[str, Any], change: dict, named: str
):
    with pytest.raises(UnsupportedModel, match=named):
        card_from_gguf(spm_metadata | change)
