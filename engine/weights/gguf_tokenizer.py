"""TokenizerCards from the metadata of GGUF files: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

The rules that cut a text before BPE have names in ``tokenizer.ggml.pre``; what they mean is written in the
tokenizer.json of the models that they are named after, and in llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.weights.errors import UnsupportedModel
from engine.wire import TokenizerCard

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # of tokenizer.ggml.token_type
_SPACE = "▁"  # how SentencePiece writes it
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every \\p{N} alone first, then the GPT-2 rule on what lies between."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


@dataclass(frozen=True, slots=True)
class Rule:
    """How a byte-level model's text is cut. ``whole_words``: a piece that is a token needs no merges.

    ``composed``: text goes through Unicode's NFC first. ``adds_bos``: where the file does not say.
    """

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    composed: bool = False
    adds_bos: bool = False


_LLAMA_3_RULE = Rule(lambda: _cut_by(_LLAMA_3), whole_words=True, adds_bos=True)
RULES = {  # by tokenizer.ggml.pre
    "gpt-2": Rule(_gpt_2),
    "smollm": Rule(_smollm),
    "llama-bpe": _LLAMA_3_RULE,
    "llama3": _LLAMA_3_RULE,
    "llama-v3": _LLAMA_3_RULE,
    "qwen2": Rule(lambda: _cut_by(_QWEN_2), composed=True),
    "tekken": Rule(lambda: _cut_by(_TEKKEN), whole_words=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id, their types ([] = all normal) and the ids that the metadata names."""

    tokens: list[str]
    types: list[int]
    named: dict[str, str]

    def of_type(self, *kinds: int) -> list[str]:
        if not self.types:
            return self.tokens if _NORMAL in kinds else []
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def card_from_gguf(metadata: dict[str, Any]) -> TokenizerCard:
    """From ``tokenizer.*`` metadata. Raises UnsupportedModel for another kind or rule, by its name."""
    kind = _required(metadata, "tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedModel(f"tokenizer.ggml.model is {kind!r}; supported are {', '.join(_KINDS)}")
    vocabulary = _vocabulary(metadata, _DEFAULT_IDS.get(kind, {}))
    tokenizer, adds_bos = _KINDS[kind](metadata, vocabulary)
    tokenizer.add_special_tokens(_added(vocabulary.of_type(_CONTROL, _UNKNOWN), special=True))
    tokenizer.add_tokens(_added(vocabulary.of_type(_USER_DEFINED), special=False))
    return TokenizerCard(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        tokens=vocabulary.named,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _byte_level_bpe(metadata: dict[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in RULES:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(RULES)}")
    rule = RULES[name]
    merges = [_merge(text) for text in _required(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=rule.whole_words))
    if rule.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.cut()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _sentencepiece_bpe(metadata: dict[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """The two neighbours whose union has the best score are merged first; what is no token falls back to bytes."""
    for feature in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if _says(metadata.get(f"tokenizer.ggml.{feature}", False)):
            raise UnsupportedModel(f"tokenizer.ggml.{feature}")
    scores = [float(score) for score in _required(metadata, "tokenizer.ggml.scores")]
    if len(scores) != len(vocabulary.tokens):
        raise UnsupportedModel("tokenizer.ggml.scores are not as many as the tokens")
    ids = vocabulary.ids()
    model = models.BPE(
        vocab=ids,
        merges=_merges_by_score(vocabulary.of_type(_NORMAL), ids, scores),
        unk_token=vocabulary.named.get("unk_token"),
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(_BYTE)),
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    return tokenizer, True


def _says(value: Any) -> bool:
    return bool(len(value)) if hasattr(value, "__len__") else bool(value)


def _merges_by_score(pieces: list[str], ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others; a better piece first."""
    normal = set(pieces)
    ranked = sorted(pieces, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    cuts = ((piece[:at], piece[at:]) for piece in ranked for at in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in normal and right in normal]


_KINDS: dict[str, Callable[[dict[str, Any], _Vocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}
_DEFAULT_IDS = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}


def _vocabulary(metadata: dict[str, Any], default_ids: dict[str, int]) -> _Vocabulary:
    tokens: list[str] = _required(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise UnsupportedModel("tokenizer.ggml.tokens names a token twice")
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
    if types and len(types) != len(tokens):
        raise UnsupportedModel("tokenizer.ggml.token_type is not as long as the tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", default_ids.get(key)) for name, key in keys.items()}
    named = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
    return _Vocabulary(tokens, types, named)


def _added(tokens: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _required(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise UnsupportedModel(f"the GGUF metadata has no {key}")
    return metadata[key]
