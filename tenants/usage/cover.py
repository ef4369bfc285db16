"""Which sums make an interval: the fewest whole days, hours and minutes (UTC), and what is left at its edges."""

from dataclasses import dataclass

WIDTHS_S = (86_400, 3600, 60)
RAW = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """[start_s, end_s) in Unix seconds: whole units of ``width_s``, or RAW: no whole minute in it."""

    width_s: int
    start_s: int
    end_s: int


def cover(start_s: int, end_s: int, widths_s: tuple[int, ...] = WIDTHS_S) -> list[Piece]:
    """Pieces that follow each other from start to end, each of the widest units that fit there."""
    if start_s >= end_s:
        return []
    if not widths_s:
        return [Piece(RAW, start_s, end_s)]
    width_s, *finer = widths_s
    first, last = -(-start_s // width_s) * width_s, end_s // width_s * width_s
    if first >= last:
        return cover(start_s, end_s, tuple(finer))
    return [
        *cover(start_s, first, tuple(finer)),
        Piece(width_s, first, last),
        *cover(last, end_s, tuple(finer)),
    ]
