"""From booked records to sums by minute: exact counts against the objectives, and the samples as histograms.

Everything is added in the transaction that books the records, so that the sums hold exactly what the ledger holds.
A request is counted once: of two dispatches the first, lost one is nobody's business when there is a second.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field
from sqlalchemy import event, tuple_
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import add_up, insert_new, put
from tenants.ledger import OUTCOME_LOST, Booked
from tenants.slo.histogram import Histogram
from tenants.slo.objectives import Objectives, minute_of
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.verdict import Verdict, judge
from tenants.tables import LatencyMinute, RequestRecord, SloMinute

ALL = "all"
_KEY = ("tenant_id", "minute_s", "model", "flow_class")
_COUNT_KEY = (*_KEY, "sli", "version_id")
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"
_encode = msgspec.msgpack.Encoder().encode

CountResult = Callable[[str, str, str, bool], None]  # base model, class, SLI, good


class Minute(Struct, array_like=True):
    """What is kept of a minute beside its counts. ``histograms`` by measure, ``excluded`` by reason."""

    histograms: dict[str, Histogram] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        if verdict.excluded:
            self.excluded[verdict.excluded] = self.excluded.get(verdict.excluded, 0) + 1
        for measure, value in verdict.samples.items():
            self._of(measure).add(value)

    def merge(self, other: "Minute") -> None:
        for measure, histogram in other.histograms.items():
            self._of(measure).merge(histogram)
        for reason, count in other.excluded.items():
            self.excluded[reason] = self.excluded.get(reason, 0) + count

    def _of(self, measure: str) -> Histogram:
        return self.histograms.setdefault(measure, Histogram())


decode_minute = msgspec.msgpack.Decoder(Minute).decode


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
        await _add_samples(session, judged)
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
    for each in booked:
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


async def _add_counts(session: AsyncSession, judged: Iterable[_Judged]) -> None:
    counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for each in judged:
        verdict = each.verdict
        results = chain(verdict.results.items(), () if verdict.excluded else ((ALL, ("", verdict.met)),))
        for sli, (version_id, good) in results:
            count = counts[(*each.place, sli, version_id)]
            count[0] += each.sign
            count[1] += each.sign * good
    rows = [(*key, *count) for key, count in sorted(counts.items())]
    await add_up(session, SloMinute, _COUNT_KEY, ("valid", "good"), rows)


async def _add_samples(session: AsyncSession, judged: Iterable[_Judged]) -> None:
    """Lost dispatches have no samples, so that there is nothing to take back."""
    new: dict[Place, Minute] = defaultdict(Minute)
    for each in judged:
        if each.verdict.samples or each.verdict.excluded:
            new[each.place].add(each.verdict)
    if not new:
        return
    places = sorted(new)
    await insert_new(session, LatencyMinute, (*_KEY, "sums"), [(*place, _encode(Minute())) for place in places])
    for place, sums in await _locked(session, places):
        new[place].merge(decode_minute(sums))
    await put(session, LatencyMinute, _KEY, ("sums",), [(*place, _encode(new[place])) for place in places])


async def _locked(session: AsyncSession, places: Sequence[Place]) -> list[tuple[Place, bytes]]:
    """The rows as they are, nobody else's until the commit; in the order of keys."""
    keys: list[Any] = [col(getattr(LatencyMinute, name)) for name in _KEY]
    query = select(*keys, col(LatencyMinute.sums)).where(tuple_(*keys).in_(places)).order_by(*keys).with_for_update()  # pyright: ignore[reportCallIssue]
    return [(Place(*row[:-1]), row[-1]) for row in await session.exec(query)]
