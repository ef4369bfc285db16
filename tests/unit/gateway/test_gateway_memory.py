"""What keeps a gateway small: what it does not import, and how a tokenizer is loaded."""

import asyncio
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.weights.gguf import GgufFile
from engine.weights.gguf_tokenizer import card_from_gguf
from gateway.call import Call, call_of, named
from gateway.text.tokenizer_file import load_tokenizer
from ops.default_model import DEFAULT_GGUF

ROOT = Path(__file__).parents[3]
UNWANTED = {
    "rich": "httpx's command line",
    "pygments": "httpx's command line",
    "psutil": "for tests; OpenTelemetry's SDK looks for it",
    "opentelemetry": "only with a collector: the exporter's thread imports it",
    "numpy": "adapters are checked in a process of their own",
    "llguidance": "grammars are checked in a process of their own",
    "alembic": "the supervisor migrates",
    "asyncpg": "only with PostgreSQL",
    "litestar.cli": "the framework's command line",
    "gateway.commands": "ours",
    "gateway.serve.supervisor": "another process",
}
TEXTS = ("plain words, twice plain", " It's 2024\n\n", "ünï ☂ 日本語", "a<|end|>b <think> c", "")


def test_a_gateway_imports_nothing_that_it_has_no_use_for():
    probe = "import gateway.main, sys; print(*sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr
    assert {name: why for name, why in UNWANTED.items() if name in run.stdout.splitlines()} == {}


def test_what_was_left_out_at_the_start_is_there_for_who_imports_it_later():
    probe = "import gateway.main, httpx._main, opentelemetry.sdk.metrics, opentelemetry.sdk.trace.export"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr


def byte_pairs(**options) -> Tokenizer:
    """A small byte-level vocabulary with merges; its added tokens are partly in it."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("p", "l"), ("a", "i"), ("pl", "ai"), ("plai", "n"), ("Ġ", "w"), ("t", "w")]
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    vocab |= {"<|end|>": len(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<think>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<|start|> $A", None, [("<|start|>", len(vocab))])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "ab": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")], **options))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def with_merges_as_text(text: str) -> str:
    """As older files have them."""
    file = json.loads(text)
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    return json.dumps(file)


CASES = {
    "byte pairs": byte_pairs().to_str(),
    "merges ignored": byte_pairs(ignore_merges=True).to_str(),
    "affixes": byte_pairs(continuing_subword_prefix="", end_of_word_suffix="", dropout=None).to_str(),
    "merges as text": with_merges_as_text(byte_pairs().to_str()),
    "sentence pieces": sentence_pieces().to_str(),
    "words": words().to_str(),
}


def assert_alike(tokenizer_json: str):
    ours, theirs = load_tokenizer(tokenizer_json), Tokenizer.from_str(tokenizer_json)

    assert ours.to_str() == theirs.to_str()
    for text in TEXTS:
        for special in (False, True):
            ours.encode_special_tokens = theirs.encode_special_tokens = special
            assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


@pytest.mark.parametrize("case", CASES)
def test_a_tokenizer_is_what_its_library_makes_of_the_file(case: str):
    assert_alike(CASES[case])


def test_the_default_models_tokenizer_is_what_its_library_makes_of_it():
    if not DEFAULT_GGUF.is_file():
        pytest.skip("the default model isn't there")
    assert_alike(card_from_gguf(GgufFile(DEFAULT_GGUF).metadata).tokenizer_json)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"model": {"type": "BPE"}}', '{"model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}']
)
def test_a_file_that_is_none_is_refused_as_its_library_refuses_it(text: str):
    with pytest.raises(Exception) as theirs:
        Tokenizer.from_str(text)
    with pytest.raises(type(theirs.value)):
        load_tokenizer(text)


def test_an_answered_call_is_freed_without_a_collector():
    async def app(scope, receive, send):
        await call_of(scope).over(receive, send).answer(b"{}")

    async def nothing(*_):
        return None

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(named(app)({"type": "http", "headers": []}, nothing, nothing))
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, Call)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()

    assert not left
