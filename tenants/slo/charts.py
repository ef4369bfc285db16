"""Charts as inline SVG, without a script or a style: they show on a screen, on paper, and where both are forbidden.

They are as wide as the page; the page's style sheet makes their text larger on a phone, for which there is room.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tenants.page import escape

_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 36, 30
_INK, _SOFT, _LINE = "#1a1d21", "#5c6570", "#d9dee3"
_COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7e22ce", "#0e7490")
_BAD = "#b91c1c"
_DOT = 2.5
_NAME = 140  # of a line, in the legend
_ROW, _HEAD = 22, 24  # of bars
_NAMES, _NUMBERS = 236, 70  # room before and behind bars
_NICE = (1, 2, 2.5, 5, 10)
_MOST_TICKS = 5
_MOST_LETTERS = 24  # of a bar's name: no wider than its room on a phone


@dataclass(frozen=True, slots=True)
class Line:
    """``values`` belong to the chart's places; None is a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class LineChart:
    """``low`` and ``high`` are within what is shown, which ends at round numbers; ``labels`` are (place, text) under
    it; ``number`` writes a value with its unit."""

    title: str
    lines: Sequence[Line]
    low: float
    high: float
    labels: Sequence[tuple[int, str]]
    number: Callable[[float], str]
    num_places: int = field(default=1)

    def svg(self) -> str:
        marks = ticks(self.low, self.high)
        lines = [part for each in enumerate(self.lines) for part in self._line(marks, *each)]
        parts = [*self._grid(marks), *self._below(), *lines]
        if not any(value is not None for line in self.lines for value in line.values):
            parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2 + 4, "No data", "middle"))
        return _document(self.title, _HEIGHT, parts)

    def _x(self, place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / max(1, self.num_places)

    def _grid(self, marks: Sequence[float]) -> list[str]:
        parts = []
        for value in marks:
            y = _y(marks, value)
            parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_LINE}"/>')
            parts.append(_text(_LEFT - 8, y + 4, self.number(value), "end"))
        return parts

    def _below(self) -> list[str]:
        return [_text(self._x(place), _HEIGHT - 8, text, "middle") for place, text in self.labels]

    def _line(self, marks: Sequence[float], number: int, line: Line) -> list[str]:
        colour = _COLOURS[number % len(_COLOURS)]
        parts = [_text(_LEFT + _NAME * number, 16, line.name, "start", colour)]
        known = [(place, value) for place, value in enumerate(line.values) if value is not None]
        for _, run in groupby(enumerate(known), lambda each: each[1][0] - each[0]):
            points = [(self._x(place), _y(marks, value)) for _, (place, value) in run]
            if len(points) == 1:
                parts.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="{_DOT}" fill="{colour}"/>')
            else:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        return parts


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars from 0; one that is over ``limit`` stands out. ``bars`` are (name, value or None, text)."""

    title: str
    bars: Sequence[tuple[str, float | None, str]]
    limit: float

    def svg(self) -> str:
        most = max([self.limit * 1.2, *(value for _, value, _ in self.bars if value is not None)])
        scale = (_WIDTH - _NAMES - _NUMBERS) / most
        height = _HEAD + _ROW * max(1, len(self.bars)) + 6
        if not self.bars:
            return _document(self.title, height, [_text(_WIDTH / 2, _HEAD + 4, "No data", "middle")])
        x = _NAMES + self.limit * scale
        line = (
            f'<line x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{height}" stroke="{_BAD}" stroke-dasharray="3 3"/>'
        )
        bars = (part for number, bar in enumerate(self.bars) for part in self._bar(number, scale, *bar))
        return _document(self.title, height, [_text(x, 15, f"{self.limit:g}", "middle", _BAD), line, *bars])

    def _bar(self, number: int, scale: float, name: str, value: float | None, text: str) -> list[str]:
        y = _HEAD + _ROW * number
        length = (value or 0.0) * scale
        colour = _BAD if (value or 0.0) > self.limit else _COLOURS[0]
        return [
            _text(_NAMES - 8, y + 15, _cut(name), "end"),
            f'<rect x="{_NAMES}" y="{y + 4}" width="{length:.1f}" height="14" fill="{colour}"/>',
            _text(_NAMES + length + 6, y + 15, text, "start", _INK),
        ]


def ticks(low: float, high: float) -> list[float]:
    """Two to five round numbers, evenly apart, of which the first is not above ``low`` and the last not below
    ``high``."""
    high = high if high > low else low + (abs(low) or 1.0)
    magnitude = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    for nice in (factor * scale for scale in (magnitude, 10 * magnitude) for factor in _NICE):
        first, last = math.floor(round(low / nice, 6)), math.ceil(round(high / nice, 6))
        if last - first < _MOST_TICKS:
            return [number * nice for number in range(first, last + 1)]
    raise AssertionError("a step of the span itself is one of them")


def _y(marks: Sequence[float], value: float) -> float:
    share = (value - marks[0]) / (marks[-1] - marks[0])
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def _document(title: str, height: int, parts: Sequence[str]) -> str:
    """An image with a name, for who hears it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">'
    return "\n".join((head, f"<title>{escape(title)}</title>", *parts, "</svg>"))


def _text(x: float, y: float, text: str, anchor: str, colour: str = _SOFT) -> str:
    """Its white edge keeps it legible where it crosses a line."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" paint-order="stroke" stroke="#fff" stroke-width="3"'
    return f'<text {place} font-size="12" font-family="sans-serif" fill="{colour}">{escape(text)}</text>'


def _cut(name: str) -> str:
    """Without its middle when it is long: what tells bars apart stands at both ends."""
    if len(name) <= _MOST_LETTERS:
        return name
    tail = _MOST_LETTERS // 2
    return f"{name[: _MOST_LETTERS - tail - 1]}…{name[-tail:]}"
