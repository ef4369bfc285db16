"""Exact sums of BIGINT amounts in SQL, on SQLite and PostgreSQL.

SQLite's SUM overflows at 2⁶³ and its NUMERIC is a float: so quotients and remainders by 10⁹ are summed apart
and put together as Python integers.
"""

from typing import Any

from sqlalchemy import BigInteger, func, type_coerce
from sqlalchemy.sql.elements import ColumnElement

_SPLIT = 10**9


def limbs(amount: int) -> tuple[int, int]:
    """Quotient and remainder, for two columns that are added to apart; ``total`` reads them."""
    return divmod(amount, _SPLIT)


def exact_sum(column: Any, label: str) -> tuple[ColumnElement, ColumnElement]:
    """Two columns to select in place of SUM(column); read them with ``total(row, label)``."""
    plain = type_coerce(column, BigInteger)
    return (
        func.sum(plain // _SPLIT).label(f"{label}_quotient"),
        func.sum(plain % _SPLIT).label(f"{label}_remainder"),
    )


def total(row: Any, label: str) -> int:
    """The sum; 0 over no rows."""
    quotient, remainder = getattr(row, f"{label}_quotient"), getattr(row, f"{label}_remainder")
    return int(quotient or 0) * _SPLIT + int(remainder or 0)
