"""Sums of usage by minute, hour and day (UTC), written in the transaction that books: always what the ledger holds."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import add, attrgetter

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import add_up, insert_new
from tenants.money import limbs
from tenants.settled import Booked
from tenants.tables import UsageRollup, UsageSeries
from tenants.usage.cover import WIDTHS_S

DIMENSIONS = (
    *("tenant_id", "key_id", "model", "base_model", "adapter_version_id"),
    *("flow_class", "rate_card_id"),
)
SUMMED_METERS = ("input_uncached_tokens", "input_cached_tokens", "output_tokens", "requests")
SUMS = (
    *SUMMED_METERS,
    *(f"{meter}_{limb}" for meter in SUMMED_METERS for limb in ("quotient", "remainder")),
    "gpu_ns",
)
KEY = ("series_id", "width_s", "start_s")
_SERIES = ("series_id", *DIMENSIONS)
_PLACE = {meter: number for number, meter in enumerate(SUMMED_METERS)}
_NS = 10**9
_dimensions_of = attrgetter(*DIMENSIONS)

_Rows = dict[tuple[str, int, int], list[int]]  # KEY → SUMS


async def add_booked(session: AsyncSession, booked: Sequence[Booked]) -> None:
    """Adds what was just booked to its minutes, hours and days. Each record must come once."""
    series: dict[str, tuple[str, ...]] = {}
    rows: _Rows = {}
    for each in booked:
        dimensions = _dimensions_of(each.request.context)
        name = series_id(*dimensions)
        series[name] = dimensions
        _add(rows, name, each.request.finished_unix_ns // _NS, _sums_of(each))
    await _write(session, series, rows)


@lru_cache(1 << 14)
def series_id(*dimensions: str) -> str:
    """96 bits of a hash of DIMENSIONS' values, each with its length before it."""
    fields = map(str.encode, dimensions)
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hashlib.sha256(b"tenora-series\x01" + message).hexdigest()[:24]


def _sums_of(booked: Booked) -> list[int]:
    sums = [0] * len(SUMS)
    sums[-1] = booked.request.gpu_ns
    for charge in booked.charges:
        place = _PLACE[charge.meter]
        limb = len(SUMMED_METERS) + 2 * place
        sums[place] += charge.quantity
        quotient, remainder = limbs(charge.amount_picousd)
        sums[limb] += quotient
        sums[limb + 1] += remainder
    return sums


def _add(rows: _Rows, name: str, second: int, sums: Iterable[int]) -> None:
    for width_s in WIDTHS_S:
        key = (name, width_s, second // width_s * width_s)
        known = rows.get(key)
        rows[key] = list(sums) if known is None else list(map(add, known, sums))


async def _write(session: AsyncSession, series: dict[str, tuple[str, ...]], rows: _Rows) -> None:
    """In key order: two gateways never wait for each other in a circle."""
    names = sorted((name, *dimensions) for name, dimensions in series.items())
    await insert_new(session, UsageSeries, _SERIES, names)
    await add_up(session, UsageRollup, KEY, SUMS, sorted((*key, *sums) for key, sums in rows.items()))
