"""Charts as inline SVG, without a script or a style: they show on a screen, on paper, and where both are forbidden."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tenants.page import escape

_WIDTH, _HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 26, 26
_INK, _SOFT, _LINE = "#1a1d21", "#5c6570", "#d9dee3"
_COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7e22ce", "#0e7490")
_BAD = "#b91c1c"
_ROW = 20
_NAMES = 150  # of bars


@dataclass(frozen=True, slots=True)
class Line:
    """``values`` belong to the chart's places; None is a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class LineChart:
    """``low`` and ``high`` bound what is shown; ``labels`` are (place, text) under it."""

    title: str
    lines: Sequence[Line]
    low: float
    high: float
    labels: Sequence[tuple[int, str]]
    number: Callable[[float], str]
    num_places: int = field(default=1)

    def svg(self) -> str:
        parts = [*self._grid(), *self._below(), *(part for each in enumerate(self.lines) for part in self._line(*each))]
        if not any(value is not None for line in self.lines for value in line.values):
            parts.append(_text(_WIDTH / 2, _HEIGHT / 2, "No data", "middle"))
        return _document(self.title, _HEIGHT, parts)

    def _x(self, place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / max(1, self.num_places)

    def _y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, share))

    def _grid(self) -> list[str]:
        parts = []
        for step in range(3):
            value = self.low + (self.high - self.low) * step / 2
            y = self._y(value)
            parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_LINE}"/>')
            parts.append(_text(_LEFT - 6, y + 4, self.number(value), "end"))
        return parts

    def _below(self) -> list[str]:
        return [_text(self._x(place), _HEIGHT - 8, text, "middle") for place, text in self.labels]

    def _line(self, number: int, line: Line) -> list[str]:
        colour = _COLOURS[number % len(_COLOURS)]
        parts = [_text(_LEFT + 100 * number, 14, line.name, "start", colour)]
        known = [(place, value) for place, value in enumerate(line.values) if value is not None]
        for _, run in groupby(enumerate(known), lambda each: each[1][0] - each[0]):
            points = [(self._x(place), self._y(value)) for _, (place, value) in run]
            if len(points) == 1:
                parts.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5" fill="{colour}"/>')
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
        scale = (_WIDTH - _NAMES - 60) / most
        height = _ROW * max(1, len(self.bars)) + 10
        if not self.bars:
            return _document(self.title, height, [_text(_WIDTH / 2, 20, "No data", "middle")])
        x = _NAMES + self.limit * scale
        line = f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" stroke="{_BAD}" stroke-dasharray="3 3"/>'
        bars = (part for number, bar in enumerate(self.bars) for part in self._bar(number, scale, *bar))
        return _document(self.title, height, [line, *bars])

    def _bar(self, number: int, scale: float, name: str, value: float | None, text: str) -> list[str]:
        y = 4 + _ROW * number
        length = (value or 0.0) * scale
        colour = _BAD if (value or 0.0) > self.limit else _COLOURS[0]
        return [
            _text(_NAMES - 6, y + 13, _cut(name), "end"),
            f'<rect x="{_NAMES}" y="{y + 3}" width="{length:.1f}" height="12" fill="{colour}"/>',
            _text(_NAMES + length + 5, y + 13, text, "start", _INK),
        ]


def _document(title: str, height: int, parts: Sequence[str]) -> str:
    """An image with a name, for who hears it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">'
    return "\n".join((head, f"<title>{escape(title)}</title>", *parts, "</svg>"))


def _text(x: float, y: float, text: str, anchor: str, colour: str = _SOFT) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="12" font-family="sans-serif" fill="{colour}">{escape(text)}</text>'


def _cut(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"
