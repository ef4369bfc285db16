"""rank_pattern and alpha_pattern of PEFT: which module a pattern names, without running an uploader's regex.

PEFT tries ``(.*\\.)?(PATTERN)$`` on a module's path, patterns in the order written. We take literal suffixes and
the simple forms: ``.*``, ``\\.``, a leading ``^``, a trailing ``$``; a bare dot means a dot (PEFT writes module
paths unescaped). What is left between ``.*`` is plain text whose leftmost place is the best one, so that matching
never goes back.
"""

import re
from dataclasses import dataclass, field

MAX_PATTERN_CHARS = 256
_SIMPLE = re.compile(r"\^?(?:[A-Za-z0-9_\-]|\\[.\-]|\.\*?)+\$?")
_GAP = re.compile(r"(?<!\\)\.\*")


def is_simple(pattern: str) -> bool:
    return len(pattern) <= MAX_PATTERN_CHARS and _SIMPLE.fullmatch(pattern) is not None


@dataclass(frozen=True, slots=True)
class _Wildcard:
    """A pattern with gaps: its first text begins the path (or, without ``^``, any part of it), its last ends it."""

    index: int
    anchored: bool
    texts: tuple[str, ...]

    def matches(self, path: str) -> bool:
        first, *middle, last = self.texts
        starts = [0] if self.anchored else _starts(path)
        start = next((start for start in starts if path.startswith(first, start)), None)
        if start is None:
            return False
        at = start + len(first)
        for text in middle:
            found = path.find(text, at)
            if found < 0:
                return False
            at = found + len(text)
        return len(path) - len(last) >= at and path.endswith(last)


@dataclass(slots=True)
class Patterns:
    """Patterns in order. ``find`` gives the first one that matches a path; ``unused`` those that never were it."""

    patterns: list[str]
    _suffixes: dict[str, int] = field(default_factory=dict)
    _whole: dict[str, int] = field(default_factory=dict)
    _wildcards: list[_Wildcard] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for index, pattern in enumerate(self.patterns):
            assert is_simple(pattern), "checked by the config gate"
            anchored = pattern.startswith("^")
            pieces = _GAP.split(pattern.removeprefix("^").removesuffix("$"))
            texts = [piece.replace("\\", "") for piece in pieces]
            if len(texts) > 1:
                self._wildcards.append(_Wildcard(index, anchored, tuple(texts)))
            else:
                (self._whole if anchored else self._suffixes).setdefault(texts[0], index)

    def find(self, path: str) -> str | None:
        """The pattern that PEFT would take for the module at ``path`` ("model.layers.0.self_attn.q_proj")."""
        matches = [self._suffixes[path[start:]] for start in _starts(path) if path[start:] in self._suffixes]
        matches += [self._whole[path]] if path in self._whole else []
        matches += [each.index for each in self._wildcards if each.matches(path)][:1]
        if not matches:
            return None
        self._used.add(min(matches))
        return self.patterns[min(matches)]

    def unused(self) -> list[str]:
        return [pattern for index, pattern in enumerate(self.patterns) if index not in self._used]


def _starts(path: str) -> list[int]:
    """Where a part of a dotted path begins."""
    return [0, *(dot.end() for dot in re.finditer(r"\.", path))]
