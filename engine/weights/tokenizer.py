"""TokenizerCards: from the metadata of a GGUF file, or from the files of a Hugging Face directory."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.weights.errors import UnsupportedModel, read_json
from engine.wire import TokenizerCard

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every \\p{N} alone first, then the GPT-2 rule on what lies between (llama.cpp's rule of that name)."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


PRE_TOKENIZERS = {"smollm": _smollm, "gpt-2": _byte_level}  # by tokenizer.ggml.pre


def card_from_gguf(metadata: dict[str, Any]) -> TokenizerCard:
    """Byte-level BPE from ``tokenizer.*`` metadata. Raises UnsupportedModel for any other kind, by its name."""
    tokens: list[str] = _required(metadata, "tokenizer.ggml.tokens")
    return TokenizerCard(
        tokenizer_json=_byte_level_bpe(metadata, tokens).to_str(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        tokens=_named_tokens(metadata, tokens),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    kind, rule = _required(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') is supported")
    if rule not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {rule!r}; supported are {', '.join(PRE_TOKENIZERS)}")
    merges = [_merge(text) for text in _required(metadata, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UnsupportedModel("tokenizer.ggml.tokens names a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", ())
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    return tokenizer


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _added(tokens: list[str], types: Any, kind: int, *, special: bool) -> list[AddedToken]:
    pairs = zip(tokens, types, strict=False)  # a file without types has no added tokens
    return [AddedToken(token, special=special, normalized=False) for token, each in pairs if each == kind]


def _named_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = dict(zip(_NAMED_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True))
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}


def _required(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise UnsupportedModel(f"the GGUF metadata has no {key}")
    return metadata[key]


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
