"""TokenizerCards from the files of a Hugging Face directory (those of GGUF files: ``gguf_tokenizer.py``)."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.weights.errors import UnsupportedModel, read_json
from engine.wire import TokenizerCard

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def card_from_directory(directory: Path) -> TokenizerCard:
    """``tokenizer.json`` as it is, with the template and named tokens of the files next to it.

    Raises UnsupportedModel when tokenizer.json is missing or broken.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory.name}: tokenizer.json is missing")
    tokenizer_json = path.read_text(encoding="utf-8")
    config = _tokenizer_config(directory)
    tokens = {name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)}
    return TokenizerCard(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, config),
        tokens=tokens,
        add_bos=_adds_bos(tokenizer_json, config, tokens.get("bos_token")),
    )


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _chat_template(directory: Path, config: dict[str, Any]) -> str:
    """The file wins over tokenizer_config.json's field, which is a text or a list of named texts."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        return named.get("default", "")
    return template


def _adds_bos(tokenizer_json: str, config: dict[str, Any], bos_token: str | None) -> bool:
    """``add_bos_token`` where it is written, else what tokenizer.json's post-processor does to an empty text."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModel(f"tokenizer.json can't be read: {error}") from error
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    first = tokenizer.encode("", add_special_tokens=True).ids[:1]
    return bos_token is not None and first == [tokenizer.token_to_id(bos_token)]
