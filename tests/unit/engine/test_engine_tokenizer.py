"""TokenizerCards: the real pre-tokenizer rule of the default model, and the files of a directory as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors

from engine.weights.errors import UnsupportedModel
from engine.weights.gguf import GgufFile
from engine.weights.gguf_tokenizer import card_from_gguf
from engine.weights.tokenizer import card_from_directory
from engine.wire import TokenizerCard
from ops.default_model import DEFAULT_GGUF


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    if not DEFAULT_GGUF.is_file():
        pytest.skip("the default model isn't there")
    return GgufFile(DEFAULT_GGUF).metadata


@pytest.fixture(scope="module")
def card(metadata: dict[str, Any]) -> TokenizerCard:
    return card_from_gguf(metadata)


@pytest.fixture(scope="module")
def tokenizer(card: TokenizerCard) -> Tokenizer:
    return Tokenizer.from_str(card.tokenizer_json)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  5", ["a", "ĠĠ", "5"]),
        ("a 5", ["a", "Ġ", "5"]),
        ("\n\n5", ["ĊĊ", "5"]),
        ("\t\t7", ["ĉĉ", "7"]),
        ("2024", ["2", "0", "2", "4"]),
        ("v1.5x", ["v", "1", ".", "5", "x"]),
        ("a  b", ["a", "Ġ", "Ġb"]),
        ("it's", ["it", "'s"]),
        ("²³", ["Â²", "Â³"]),  # \p{No} is a digit to this rule too
    ],
)
def test_digits_stand_alone_before_the_byte_level_rule_sees_the_whitespace(
    tokenizer: Tokenizer, text: str, pieces: list[str]
):
    assert tokenizer.encode(text).tokens == pieces


def test_the_digits_rule_makes_a_difference_to_byte_level_alone(metadata: dict[str, Any], tokenizer: Tokenizer):
    byte_level = Tokenizer.from_str(card_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).tokenizer_json)

    assert byte_level.encode("a  5").tokens == ["a", "Ġ", "Ġ", "5"]
    assert byte_level.encode("a  5").ids != tokenizer.encode("a  5").ids
    assert byte_level.encode("plain words").ids == tokenizer.encode("plain words").ids


@pytest.mark.parametrize(("text", "num_tokens"), [("北京欢迎你", 11), ("😀", 3), ("👩‍👩‍👧", 13), ("  lead", 2)])
def test_cjk_emoji_and_runs_of_blanks_have_the_models_number_of_tokens(
    tokenizer: Tokenizer, text: str, num_tokens: int
):
    assert len(tokenizer.encode(text).ids) == num_tokens


def test_any_text_comes_back_from_its_ids(tokenizer: Tokenizer):
    gaps = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}  # the model's vocabulary has no token for these control bytes
    text = "".join(chr(code) for code in [*range(0x250), 0x301, 0x627, 0x200D, 0x4E00, 0x1F600, 0x10FFFF])
    text = "".join(char for char in text if ord(char) not in gaps) + "\r\n \t x  y\n\n\n1"

    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_can_be_encoded_as_ordinary_text(card: TokenizerCard):
    tokenizer = Tokenizer.from_str(card.tokenizer_json)

    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    tokenizer.encode_special_tokens = True
    assert set(tokenizer.encode("<|im_end|>").ids) & {0, 1, 2} == set()


def test_the_card_names_the_tokens_and_the_template_of_the_model(card: TokenizerCard):
    assert card.tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert card.add_bos is False
    assert "messages" in card.chat_template


SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>", "<tool>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 3,
}


def test_user_defined_tokens_are_whole_but_not_special():
    card = card_from_gguf(SMALL)
    tokenizer = Tokenizer.from_str(card.tokenizer_json)

    assert tokenizer.encode("ab<tool>a<end>").ids == [2, 4, 0, 3]
    assert tokenizer.decode([2, 4, 3], skip_special_tokens=True) == "ab<tool>"
    assert card.add_bos is True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.tokens": ["a", "b", "ab", "a"]}, "twice"),
    ],
)
def test_another_kind_of_tokenizer_is_refused_by_name(change: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModel, match=named):
        card_from_gguf(SMALL | change)


# ── directories ──────────────────────────────────────────────────────────────────────────────────


def directory(path: Path, config: dict[str, Any] | None = None, *, adds_bos: bool = False) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_tokenizer_json_is_taken_as_it_is(tmp_path: Path):
    path = directory(tmp_path)

    assert card_from_directory(path).tokenizer_json == (path / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", "{{ messages }}"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, ""),
    ],
)
def test_the_template_of_the_config_is_a_text_or_the_default_of_several(tmp_path: Path, template: Any, expected: str):
    assert card_from_directory(directory(tmp_path, {"chat_template": template})).chat_template == expected


def test_a_template_file_wins_over_the_config(tmp_path: Path):
    path = directory(tmp_path, {"chat_template": "old"})
    (path / "chat_template.jinja").write_text("new")

    assert card_from_directory(path).chat_template == "new"


def test_named_tokens_are_texts_or_objects(tmp_path: Path):
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}

    assert card_from_directory(directory(tmp_path, config)).tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("adds_bos", "flag", "expected"), [
    (True, None, True), (False, None, False), (True, False, False), (False, True, True),
])  # fmt: skip
def test_a_prompt_begins_with_bos_when_the_config_or_else_the_post_processor_says_so(
    tmp_path: Path, adds_bos: bool, flag: bool | None, expected: bool
):
    config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})

    assert card_from_directory(directory(tmp_path, config, adds_bos=adds_bos)).add_bos is expected
