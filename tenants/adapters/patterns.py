"""rank_pattern and alpha_pattern of PEFT: which module a pattern names, without running an uploader's regex.

PEFT tries ``(.*\\.)?(PATTERN)$`` on a module's path, patterns in the order written. We take literal suffixes and
the simple forms: ``.*``, ``\\.``, a leading ``^``, a trailing ``$``, and a bare dot, which is any character (PEFT
writes module paths unescaped). Patterns without ``.*`` are looked up, all of one form at once; in the others what
is left between ``.*`` has a fixed length and its leftmost place is the best one, so that matching never goes back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

MAX_PATTERN_CHARS = 256
MAX_TRIED = 128  # forms and pieces that each path is held against

_SIMPLE = re.compile(r"\^?(?:[A-Za-z0-9_\-]|\\[.\-]|\.\*?)+\$?")
_CHAR = re.compile(r"\\?.", re.DOTALL)
_GAP = re.compile(r"(?<!\\)\.\*")


def is_simple(pattern: str) -> bool:
    return len(pattern) <= MAX_PATTERN_CHARS and _SIMPLE.fullmatch(pattern) is not None


def are_few(patterns: Iterable[str]) -> bool:
    """Whether simple patterns are so alike that a path is held against MAX_TRIED things at most."""
    return Patterns(list(patterns)).num_tried <= MAX_TRIED


@dataclass(frozen=True, slots=True)
class _Form:
    """Patterns of one length with their bare dots in the same places; ``spans`` are the texts between these."""

    is_whole: bool
    num_chars: int
    spans: tuple[tuple[int, int], ...]

    def cut(self, path: str) -> str | None:
        """The path's end as a pattern of this form that matches it is written; None where none can begin."""
        start = len(path) - self.num_chars
        if start < 0 or (start > 0 and (self.is_whole or path[start - 1] != ".")):
            return None
        return "\0".join(path[start + first : start + last] for first, last in self.spans)


@dataclass(frozen=True, slots=True)
class _Gapped:
    """A pattern with ``.*``: its first piece begins the path (or, without ``^``, any part of it), its last ends it."""

    index: int
    is_whole: bool
    pieces: tuple[re.Pattern[str], ...]
    last_chars: int

    def matches(self, path: str) -> bool:
        first, *middle, last = self.pieces
        starts = [0] if self.is_whole else _starts(path)
        found = next((found for start in starts if (found := first.match(path, start))), None)
        for piece in middle:
            found = found and piece.search(path, found.end())
        end = len(path) - self.last_chars
        return found is not None and end >= found.end() and last.match(path, end) is not None


@dataclass(slots=True)
class Patterns:
    """Patterns in order. ``find`` gives the first one that matches a path; ``unused`` those that never were it."""

    patterns: list[str]
    _forms: dict[_Form, dict[str | None, int]] = field(default_factory=dict)
    _gapped: list[_Gapped] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for index, pattern in enumerate(self.patterns):
            assert is_simple(pattern), "checked by the config gate"
            is_whole = pattern.startswith("^")
            pieces = [_CHAR.findall(piece) for piece in _GAP.split(pattern.removeprefix("^").removesuffix("$"))]
            if len(pieces) == 1:
                form, text = _form(pieces[0], is_whole)
                self._forms.setdefault(form, {}).setdefault(text, index)
            else:
                compiled = tuple(re.compile("".join(_expression(char) for char in piece)) for piece in pieces)
                self._gapped.append(_Gapped(index, is_whole, compiled, len(pieces[-1])))

    @property
    def num_tried(self) -> int:
        return len(self._forms) + sum(len(each.pieces) for each in self._gapped)

    def find(self, path: str) -> str | None:
        """The pattern that PEFT would take for the module at ``path`` ("model.layers.0.self_attn.q_proj")."""
        matches = [
            index for form, texts in self._forms.items() if (index := texts.get(form.cut(path) or "")) is not None
        ]
        matches += [each.index for each in self._gapped if each.matches(path)][:1]
        if not matches:
            return None
        self._used.add(min(matches))
        return self.patterns[min(matches)]

    def unused(self) -> list[str]:
        return [pattern for index, pattern in enumerate(self.patterns) if index not in self._used]


def _form(chars: list[str], is_whole: bool) -> tuple[_Form, str]:
    """The form of a pattern without gaps, and its text: the pieces between bare dots."""
    edges = [-1, *(at for at, char in enumerate(chars) if char == "."), len(chars)]
    spans = tuple((before + 1, after) for before, after in pairwise(edges))
    literal = [char.removeprefix("\\") for char in chars]
    return _Form(is_whole, len(chars), spans), "\0".join("".join(literal[first:last]) for first, last in spans)


def _expression(char: str) -> str:
    """One character, perhaps escaped, of a fixed-length expression of our own making."""
    return char if char == "." else re.escape(char.removeprefix("\\"))


def _starts(path: str) -> list[int]:
    """Where a part of a dotted path begins."""
    return [0, *(dot.end() for dot in re.finditer(r"\.", path))]
