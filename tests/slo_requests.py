"""Booked requests for tests of SLOs, and the same judged apart: by their facts, in other words than the product's."""

import uuid
from collections.abc import Iterable

from tenants.database import Database
from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.settled import SettledRequest
from tenants.slo.objectives import Objective
from tenants.slo.repository import ObjectiveRepository
from tenants.slo.sums import SloFold

MS = 10**6
SECOND = 10**9
NOON_S = 1_900_000_800  # 2030-03-17 20:00 UTC: a whole hour
CARD = RateCard("rc_1", 1, 0, default_prices())


def booked(number: int = 1, outcome: int = 200, at_s: float = NOON_S, **facts) -> SettledRequest:
    """A streamed request of 11 tokens that was answered: first token after 100 ms, the others 10 ms apart."""
    names = ("tenant_id", "model", "base_model", "flow_class", "attempt", "streamed", "num_choices")
    context = {
        "tenant_id": "ten_a",
        "key_id": "key_1",
        "request_id": str(uuid.UUID(int=number)),
        "attempt": 0,
        "base_model": "smollm2",
        "model": "smollm2",
        "adapter_version_id": "",
        "flow_class": "standard",
        "rate_card_id": "rc_1",
        "admitted_unix_ns": int(at_s * SECOND) - SECOND,
        "streamed": True,
        "num_choices": 1,
    } | {name: facts.pop(name) for name in names if name in facts}
    values = {
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 11,
        "queue_ns": 20 * MS,
        "prefill_ns": 80 * MS,
        "decode_ns": 100 * MS,
        "post_ns": 2 * MS,
        "network_ns": 3 * MS,
        "first_token_ns": 100 * MS,
        "gpu_ns": 50 * MS,
        "finished_unix_ns": int(at_s * SECOND),
    } | facts
    return SettledRequest(RequestContext(**context), outcome, **values)


def objective(sli: str = "ttft", threshold_ms: int = 500, target: float = 0.95, **changes) -> Objective:
    fields = {
        "version_id": f"slo_{sli}",
        "tenant_id": "ten_a",
        "model": "*",
        "flow_class": "*",
        "sli": sli,
        "version": 1,
        "effective_unix_ns": 0,
        "threshold_ns": 0 if sli == "availability" else threshold_ms * MS,
        "target_ppm": round(target * 10**6),
        "window_days": 30,
        "name": sli,
    } | changes
    return Objective(**fields)


async def promise(database: Database, *objectives: Objective) -> None:
    async with database.transaction() as session:
        ObjectiveRepository(session).add(objectives, 0)


async def post(database: Database, *requests: SettledRequest, fold: SloFold | None = None) -> int:
    async with database.transaction() as session:
        return await Ledger((fold or SloFold(),)).post(session, requests, {"rc_1": CARD})


async def post_in_batches(database: Database, requests: Iterable[SettledRequest], sizes: Iterable[int]) -> None:
    rest = list(requests)
    for size in sizes:
        batch, rest = rest[:size], rest[size:]
        if batch:
            await post(database, *batch)
    if rest:
        await post(database, *rest)
