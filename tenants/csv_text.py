"""CSV that a spreadsheet shows and does not run."""

import csv
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A head line and the rows, as RFC 4180 has it. Text that begins like a formula gets an apostrophe before it;
    numbers don't. None is an empty cell, true and false are words."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(cell, columns))
    for row in rows:
        assert len(row) == len(columns), "a row has one cell a column"
        writer.writerow(map(cell, row))
    return out.getvalue()


def cell(value: object) -> str:
    """As it stands in the file, before quoting."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return f"{value:f}"
    text = str(value)
    return text if isinstance(value, int | float) or not text.startswith(_FORMULA) else f"'{text}"
