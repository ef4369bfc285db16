"""Which values a field of a struct may have, where they can be listed: for whoever sent another one."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect


def literals_at(kind: type, path: str) -> tuple[str, ...]:
    """Of the field at ``path`` (as msgspec writes it, without its `$.`: messages[0].role); () where it has no such."""
    return _literals(kind, tuple(re.sub(r"\[[^\]]*\]", "", path).split(".")))


@functools.cache  # milliseconds, and there are no more places than fields
def _literals(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    types = [inspect.type_info(kind)]
    for name in names:
        fields = [field for each in _parts(types) for field in getattr(each, "fields", ())]
        types = [field.type for field in fields if field.encode_name == name]
    return tuple(str(value) for each in _parts(types) for value in getattr(each, "values", ()))


def _parts(types: list[Any]) -> Iterator[Any]:
    """What may stand there: each of a union, and a list's items."""
    for each in types:
        match each:
            case inspect.UnionType():
                yield from _parts(list(each.types))
            case inspect.ListType():
                yield from _parts([each.item_type])
            case inspect.Metadata():
                yield from _parts([each.type])
            case _:
                yield each
