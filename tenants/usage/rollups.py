"""Sums of usage by minute, hour and day (UTC), written in the transaction that books: always what the ledger holds."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import add, attrgetter

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import absent, add_up, insert_new
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

_NOTHING = (0,) * (len(SUMS) - 1)

_Rows = dict[tuple[str, int, int], tuple[int, ...]]  # KEY → SUMS


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


def _sums_of(booked: Booked) -> tuple[int, ...]:
    if not booked.charges:
        return *_NOTHING, booked.request.gpu_ns
    sums = [*_NOTHING, booked.request.gpu_ns]
    for charge in booked.charges:
        place = _PLACE[charge.meter]
        limb = len(SUMMED_METERS) + 2 * place
        sums[place] = charge.quantity
        sums[limb : limb + 2] = limbs(charge.amount_picousd)
    return tuple(sums)


def _add(rows: _Rows, name: str, second: int, sums: tuple[int, ...]) -> None:
    for width_s in WIDTHS_S:
        key = (name, width_s, second // width_s * width_s)
        known = rows.get(key)
        rows[key] = sums if known is None else tuple(map(add, known, sums))


async def _write(session: AsyncSession, series: dict[str, tuple[str, ...]], rows: _Rows) -> None:
    """In key order: two gateways never wait for each other in a circle. Nearly all series are there already: to ask
    which are not is cheaper than to insert all in vain."""
    new = await absent(session, UsageSeries, "series_id", list(series))
    await insert_new(session, UsageSeries, _SERIES, [(name, *series[name]) for name in sorted(new)])
    await add_up(session, UsageRollup, KEY, SUMS, sorted((*key, *sums) for key, sums in rows.items()))
