"""Which metrics and labels a PromQL expression names: read conservatively, without evaluating anything."""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(\[[^\]]*\]|[\d.]+[a-z]*)|([A-Za-z_:][\w:]*)|(\S)""")
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}


@dataclass
class Names:
    """``selected``: metric → labels in its selectors; ``grouped``: labels that results are grouped or joined by."""

    selected: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


def names_of(expr: str) -> Names:
    """Of an expression whose Grafana variables may stand in strings and in ranges."""
    tokens = [match.group(0) for match in _TOKEN.finditer(expr)]
    names, position = Names(), 0
    while position < len(tokens):
        token = tokens[position]
        following = tokens[position + 1] if position + 1 < len(tokens) else ""
        position += 1
        if not re.match(r"[A-Za-z_:]", token) or token.lower() in _WORDS:
            continue
        if token in _GROUPING:
            if following == "(":
                position = _labels(tokens, position + 1, ")", names.grouped)
        elif following == "{":
            position = _labels(tokens, position + 1, "}", names.selected.setdefault(token, set()))
        elif following != "(" and not (following in _GROUPING and position < len(tokens) - 1 and _is_aggregate(token)):
            names.selected.setdefault(token, set())
    return names


def _is_aggregate(token: str) -> bool:
    return token in ("sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile", "stddev", "group")


def _labels(tokens: list[str], position: int, end: str, into: set[str]) -> int:
    """Label names up to ``end``; the position behind it."""
    while tokens[position] != end:
        if re.match(r"[A-Za-z_]", tokens[position]):
            into.add(tokens[position])
        position += 1
    return position + 1
