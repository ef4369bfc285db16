"""From booked records to sums: of an objective's version by minute, of a model and class by minute, quarter and day.

Everything is added in the transaction that books the records, so that the sums hold exactly what the ledger holds.
A request is counted once: of two dispatches the first, lost one is nobody's business when there is a second.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sqlalchemy import event
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import put, taken
from tenants.settled import OUTCOME_LOST, Booked
from tenants.slo.histogram import histogram_of
from tenants.slo.minutes import HOUR_S, NO_MINUTES, Minutes, added, encode_minutes
from tenants.slo.objectives import MINUTE_S, Objectives, minute_of
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.service import WIDTHS_S, ServiceSums, decode_sums, encode_sums
from tenants.slo.verdict import Verdict, judge
from tenants.tables import ObjectiveHour, RequestRecord, ServiceSum

_SUM_KEY = ("tenant_id", "width_s", "start_s", "model", "flow_class")
_HOUR_KEY = ("tenant_id", "hour_s", "version_id")
_NO_HOUR = {"minutes": NO_MINUTES, "valid": 0, "good": 0}
_NOTHING = encode_sums(ServiceSums())
_AT_ONCE = 16  # records or sums: about a millisecond
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"

_T = TypeVar("_T")
CountResult = Callable[[str, str, str, bool], None]  # base model, class, SLI, good


class Place(NamedTuple):
    """Whose minute it is. ``model`` is what the caller asked for, without a version."""

    tenant_id: str
    minute_s: int
    model: str
    flow_class: str


@dataclass(frozen=True, slots=True)
class _Judged:
    """``sign`` -1 takes back what was counted of a dispatch that another one followed."""

    place: Place
    base_model: str
    verdict: Verdict
    sign: int = 1


class SloFold:
    """A fold of the Ledger. ``count`` is told of each result once its transaction is committed."""

    def __init__(self, count: CountResult | None = None) -> None:
        self._count = count

    async def fold(self, session: AsyncSession, booked: Sequence[Booked]) -> None:
        if not booked:
            return
        judged = await _judged(session, booked)
        await _add_counts(session, judged)
        await _add_sums(session, await _sums_of(judged))
        if self._count is not None:
            await self._tell(session, judged, self._count)

    @staticmethod
    async def _tell(session: AsyncSession, judged: list[_Judged], count: CountResult) -> None:
        def told(_: object) -> None:
            for each in judged:
                if each.sign > 0:
                    for sli, (_version, good) in each.verdict.results.items():
                        count(each.base_model, each.place.flow_class, sli, good)

        event.listen(session.sync_session, "after_commit", told, once=True)


def model_name(model: str) -> str:
    """What a request's model is counted as: NAME of NAME@VERSION."""
    return model.partition("@")[0]


# ── judging ──────────────────────────────────────────────────────────────────────────────────────


async def _judged(session: AsyncSession, booked: Sequence[Booked]) -> list[_Judged]:
    objectives = await ObjectiveRepository(session).of({each.request.context.tenant_id for each in booked})
    other = await _other_dispatches(session, booked)
    judged = []
    async for each in _a_few_at_once(booked):
        context = each.request.context
        attempts = other.get(context.request_id, {})
        followed = each.request.outcome == OUTCOME_LOST and any(number > context.attempt for number in attempts)
        if not followed:
            judged.append(_judge(each.request, context, objectives))
    return judged + _taken_back(booked, other, objectives)


def _judge(facts, names, objectives: Objectives, sign: int = 1) -> _Judged:
    """``names`` are a context's, or a receipt's own."""
    place = Place(names.tenant_id, minute_of(facts.finished_unix_ns), model_name(names.model), names.flow_class)
    in_force = objectives.in_force(
        names.tenant_id, (place.model, names.base_model), names.flow_class, place.minute_s * 10**9
    )
    return _Judged(place, names.base_model, judge(facts, names.streamed, names.num_choices, in_force), sign)


async def _other_dispatches(session: AsyncSession, booked: Sequence[Booked]) -> dict[str, dict[int, RequestRecord]]:
    """Of requests that were sent twice, what the ledger has by now: request id → attempt → receipt. These are few:
    whoever asks waits for others that book the same request, so that of two one sees the other."""
    ids = sorted(
        {
            each.request.context.request_id
            for each in booked
            if each.request.outcome == OUTCOME_LOST or each.request.context.attempt
        }
    )
    if not ids:
        return {}
    connection = await session.connection()
    if connection.dialect.name == "postgresql":
        for request_id in ids:
            await connection.exec_driver_sql(_LOCK, (request_id,))
    rows = await session.exec(select(RequestRecord).where(col(RequestRecord.request_id).in_(ids)))
    found: dict[str, dict[int, RequestRecord]] = defaultdict(dict)
    for row in rows:
        found[row.request_id][row.attempt] = row
    return found


def _taken_back(
    booked: Sequence[Booked], other: dict[str, dict[int, RequestRecord]], objectives: Objectives
) -> list[_Judged]:
    """Lost dispatches that an earlier transaction counted and this one knows a later dispatch of."""
    now = {(each.request.context.request_id, each.request.context.attempt) for each in booked}
    counted_before = (
        receipt
        for request_id, attempt in now
        for number, receipt in other.get(request_id, {}).items()
        if number < attempt and receipt.outcome == OUTCOME_LOST and (request_id, number) not in now
    )
    return [_judge(receipt, receipt, objectives, sign=-1) for receipt in counted_before]


# ── adding ───────────────────────────────────────────────────────────────────────────────────────


async def _add_counts(session: AsyncSession, judged: Sequence[_Judged]) -> None:
    counts: dict[tuple[str, int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    async for each in _a_few_at_once(judged):
        hour_s, minute = each.place.minute_s // HOUR_S * HOUR_S, each.place.minute_s % HOUR_S // MINUTE_S
        for version_id, good in each.verdict.results.values():
            if version_id:
                count = counts[each.place.tenant_id, hour_s, version_id][minute]
                count[0] += each.sign
                count[1] += each.sign * good
    keys = sorted(counts)
    known = await taken(session, ObjectiveHour, _HOUR_KEY, keys, _NO_HOUR)
    rows = [(*key, *_hour(added(known.get(key, NO_MINUTES), counts[key]))) async for key in _a_few_at_once(keys)]
    await put(session, ObjectiveHour, _HOUR_KEY, ("valid", "good", "minutes"), rows)


def _hour(minutes: Minutes) -> tuple[int, int, bytes]:
    counts = minutes.values()
    return sum(valid for valid, _ in counts), sum(good for _, good in counts), encode_minutes(minutes)


async def _sums_of(judged: Sequence[_Judged]) -> dict[Place, ServiceSums]:
    """Lost dispatches have no samples, so that there is nothing to take back."""
    found: dict[Place, ServiceSums] = defaultdict(ServiceSums)
    samples: dict[Place, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    async for each in _a_few_at_once(judged):
        found[each.place].count(each.verdict, each.sign)
        of_place = samples[each.place]
        for measure, value in each.verdict.samples.items():
            of_place[measure].append(value)
    async for place, by_measure in _a_few_at_once(list(samples.items())):
        found[place].histograms = {measure: histogram_of(values) for measure, values in by_measure.items()}
    return found


async def _add_sums(session: AsyncSession, new: Mapping[Place, ServiceSums]) -> None:
    parts: dict[tuple, list[ServiceSums]] = defaultdict(list)
    for place, sums in new.items():
        for width_s in WIDTHS_S:
            start_s = place.minute_s // width_s * width_s
            parts[place.tenant_id, width_s, start_s, place.model, place.flow_class].append(sums)
    keys = sorted(parts)
    known = await taken(session, ServiceSum, _SUM_KEY, keys, {"sums": _NOTHING})
    rows = [(*key, _together(known.get(key, _NOTHING), parts[key])) async for key in _a_few_at_once(keys)]
    await put(session, ServiceSum, _SUM_KEY, ("sums",), rows)


async def _a_few_at_once(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Each in its turn; streams have theirs in between, however many records were booked."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


def _together(known: bytes, parts: Sequence[ServiceSums]) -> bytes:
    """``known`` and the parts, which stay as they are."""
    if known == _NOTHING and len(parts) == 1:
        return encode_sums(parts[0])
    whole = decode_sums(known)
    for part in parts:
        whole.merge(part)
    return encode_sums(whole)
