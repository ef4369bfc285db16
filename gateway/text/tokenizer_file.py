"""A tokenizer.json → a Tokenizer that takes no more memory than its vocabulary.

Tokenizer.from_str first makes a tree of the whole file: what it frees of that lies between what stays, and half of the
memory is holes. A byte-pair vocabulary, which is nearly all of a file, is therefore handed over by itself, to a
tokenizer that was made of the rest.
"""

import json

import msgspec
from msgspec import Raw, Struct
from tokenizers import Tokenizer, models

_OPTIONS = (  # of models.BPE, under the names that files have for them
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip


class _Kind(Struct):
    type: str = ""


class _AddedToken(Struct):
    content: str
    id: int


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """As ``Tokenizer.from_str`` makes it. Raises what that raises for a file that is none."""
    try:
        parts = msgspec.json.decode(tokenizer_json, type=dict[str, Raw])
        if msgspec.json.decode(parts["model"], type=_Kind).type != "BPE":
            return Tokenizer.from_str(tokenizer_json)
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_AddedToken])
        model = _byte_pairs(parts["model"])
    except (msgspec.MsgspecError, KeyError):
        return Tokenizer.from_str(tokenizer_json)
    # an added token's id is that of the vocabulary, or else counted on from its end: here all find theirs in it
    small = {"type": "BPE", "vocab": {token.content: token.id for token in added}, "merges": []}
    parts["model"] = Raw(msgspec.json.encode(small))
    tokenizer = Tokenizer.from_str(msgspec.json.encode(parts).decode())
    tokenizer.model = model
    return tokenizer


def _byte_pairs(part: Raw) -> models.BPE:
    """Raises KeyError where the vocabulary is missing."""
    file = json.loads(bytes(part))  # msgspec would keep hundreds of the keys, and the memory around them
    options = {name: file[name] for name in _OPTIONS if file.get(name) is not None}
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in file["merges"]]
    return models.BPE(file["vocab"], merges, **options)  # pyright: ignore[reportArgumentType] (pairs)
