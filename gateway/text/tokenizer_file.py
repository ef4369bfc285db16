"""A tokenizer.json → a Tokenizer that takes no more memory than its vocabulary.

Tokenizer.from_str first makes a tree of the whole file: what it frees of that lies between what stays, and half of the
memory is holes. A byte-pair vocabulary, which is nearly all of a file, is therefore handed over by itself, to a
tokenizer that was made of the rest.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct
from tokenizers import Tokenizer, models


class _Kind(Struct):
    type: str = ""


class _AddedToken(Struct):
    content: str
    id: int


class _Bpe(Struct, omit_defaults=True):
    """Field by field what ``models.BPE`` takes."""

    vocab: dict[str, int]
    merges: list[tuple[str, str] | str]
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """As ``Tokenizer.from_str`` makes it. Raises what that raises for a file that is none."""
    try:
        parts = msgspec.json.decode(tokenizer_json, type=dict[str, Raw])
        if msgspec.json.decode(parts["model"], type=_Kind).type != "BPE":
            return Tokenizer.from_str(tokenizer_json)
        model = msgspec.json.decode(parts["model"], type=_Bpe)
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_AddedToken])
    except (msgspec.MsgspecError, KeyError):
        return Tokenizer.from_str(tokenizer_json)
    # an added token's id is that of the vocabulary, or else counted on from its end: here all find theirs in it
    small = {"type": "BPE", "vocab": {token.content: token.id for token in added}, "merges": []}
    parts["model"] = Raw(msgspec.json.encode(small))
    tokenizer = Tokenizer.from_str(msgspec.json.encode(parts).decode())
    tokenizer.model = models.BPE(**_arguments(model))
    return tokenizer


def _arguments(model: _Bpe) -> dict[str, Any]:
    given = {name: value for name in model.__struct_fields__ if (value := getattr(model, name)) is not None}
    return given | {"merges": [tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in model.merges]}
