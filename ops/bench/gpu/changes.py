"""What a variant changes while it is built and timed: rows of the tables."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels import tiles

Rows = dict[str, dict[str, int] | list[dict[str, int]]]  # of a kernel: one for all sizes, or a table


@contextmanager
def other_rows(rows: Rows) -> Iterator[None]:
    """These rows in the place of the tables'."""
    original, given = tiles._table, {kernel: row if isinstance(row, list) else [row] for kernel, row in rows.items()}
    tiles._table = lambda gpu: {**original(gpu), **given}
    try:
        yield
    finally:
        tiles._table = original
