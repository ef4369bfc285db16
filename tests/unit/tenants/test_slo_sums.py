"""Sums against a recount of the raw requests, in any order, on both databases."""

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import replace

import msgspec
import pytest
from sqlalchemy import text
from sqlmodel import select

import migrations
from tenants.ledger import Ledger
from tenants.slo import sums as slo_sums
from tenants.slo.histogram import merged
from tenants.slo.minutes import decode_minutes
from tenants.slo.service import WIDTHS_S, ServiceSums, decode_sums
from tenants.slo.sums import SloFold
from tenants.tables import ObjectiveHour, ServiceSum
from tests.slo_requests import CARD, MS, NOON_S, booked, objective, post, post_in_batches, promise

PROMISED = (
    objective("availability", target=0.999),
    objective("ttft", 120),
    objective("ttft", 60, model="support", version_id="slo_near"),
    objective("tpot", 11),
    objective("e2e", 250, flow_class="interactive"),
)


def traffic(seed: int, count: int = 200, tenant_id: str = "ten_a"):
    rng = random.Random(seed)
    for number in range(count):
        outcome = rng.choice([200] * 8 + [499, 499, 503, 0, 400])
        tokens = rng.choice([0, 1, 2, 11, 40])
        streamed = rng.random() < 0.7
        yield booked(
            number + seed * 10_000,
            outcome,
            at_s=NOON_S + rng.randrange(600),
            tenant_id=tenant_id,
            model=rng.choice(["smollm2", "support", "support@2"]),
            flow_class=rng.choice(["interactive", "standard"]),
            streamed=streamed,
            num_choices=rng.choice([1, 1, 1, 3]),
            output_tokens=tokens,
            first_token_ns=rng.randrange(40, 160) * MS if streamed and tokens else 0,
            queue_ns=rng.randrange(0, 80) * MS,
            prefill_ns=rng.randrange(10, 90) * MS,
            decode_ns=max(0, tokens - 1) * rng.randrange(8, 14) * MS,
        )


def test_others_have_their_turn_after_a_few_however_many_records_were_booked():
    async def body() -> None:
        turns = 0

        async def stream() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        streaming = asyncio.create_task(stream())
        assert [item async for item in slo_sums._a_few_at_once(range(10_000))] == list(range(10_000))
        streaming.cancel()
        assert turns >= 10_000 // slo_sums._AT_ONCE

    asyncio.run(body())


async def counted(database, tenant_id: str = "ten_a") -> dict[tuple, tuple[int, int]]:
    """By minute, model, class and SLI; without what was taken back."""
    found = {}
    for (start_s, *place), sums in (await sums_of(database, 60, tenant_id)).items():
        for sli, valid in sums.valid.items():
            if valid:
                found[start_s, *place, sli] = (valid, sums.good[sli])
    return found


async def counted_by_version(database, tenant_id: str = "ten_a") -> dict[tuple, tuple[int, int]]:
    """By minute and version; without what was taken back."""
    async with database.session() as session:
        rows = (await session.exec(select(ObjectiveHour).where(ObjectiveHour.tenant_id == tenant_id))).all()
    found = {}
    for row in rows:
        minutes = decode_minutes(row.minutes)
        assert (row.valid, row.good) == tuple(map(sum, zip(*minutes.values(), strict=True)))
        found |= {(row.hour_s + 60 * each, row.version_id): minutes[each] for each in minutes if minutes[each][0]}
    return found


async def sums_of(database, width_s: int, tenant_id: str = "ten_a") -> dict[tuple, ServiceSums]:
    mine = ServiceSum.tenant_id == tenant_id, ServiceSum.width_s == width_s
    async with database.session() as session:
        rows = await session.exec(select(ServiceSum).where(*mine))
        return {(row.start_s, row.model, row.flow_class): decode_sums(row.sums) for row in rows}


def recounted(requests) -> dict[tuple, tuple[int, int]]:
    """The same from the events, written apart: by minute, model, class, SLI and version."""
    valid: Counter[tuple] = Counter()
    good: Counter[tuple] = Counter()

    for each in requests:
        names = each.context
        model = names.model.split("@")[0]
        minute = each.finished_unix_ns // 10**9 // 60 * 60
        total_ms = (each.queue_ns + each.prefill_ns + each.decode_ns + each.post_ns + each.network_ns) / 1e6
        ttft_limit = 60 if model == "support" else 120
        e2e_limit = 250 if names.flow_class == "interactive" else None
        promised_by = ttft_limit if names.streamed else e2e_limit
        saw_token = names.streamed and each.first_token_ns > 0
        gave_up_early = each.outcome == 499 and not saw_token and not (promised_by and total_ms > promised_by)
        if each.outcome == 400 or gave_up_early:
            continue
        served = each.outcome == 200 or (each.outcome == 499 and saw_token)
        kept = {("availability", "slo_availability"): served}
        if each.outcome and saw_token:
            version = "slo_near" if model == "support" else "slo_ttft"
            kept["ttft", version] = each.first_token_ns / 1e6 <= ttft_limit
        if each.outcome and names.num_choices == 1 and each.output_tokens > 1:
            kept["tpot", "slo_tpot"] = each.decode_ns / 1e6 / (each.output_tokens - 1) <= 11
        if each.outcome == 200 and e2e_limit:
            kept["e2e", "slo_e2e"] = total_ms <= e2e_limit
        kept["all", ""] = each.outcome == 200 and all(kept.values())
        for (sli, version), was_good in kept.items():
            key = (minute, model, names.flow_class, sli, version)
            valid[key] += 1
            good[key] += was_good
    return {key: (valid[key], good[key]) for key in valid}


def cut(counts: dict[tuple, tuple[int, int]], *fields: int) -> dict[tuple, tuple[int, int]]:
    """By fewer of the fields of a key."""
    found: dict[tuple, tuple[int, int]] = {}
    for key, (valid, good) in counts.items():
        place = tuple(key[field] for field in fields)
        known = found.get(place, (0, 0))
        found[place] = (known[0] + valid, known[1] + good)
    return found


def by_place(requests) -> dict[tuple, tuple[int, int]]:
    return cut(recounted(requests), 0, 1, 2, 3)


def by_version(requests) -> dict[tuple, tuple[int, int]]:
    return cut({key: counts for key, counts in recounted(requests).items() if key[-1]}, 0, 4)


def test_counts_are_those_of_the_raw_requests(with_database):
    requests = list(traffic(1))

    async def body(database):
        await promise(database, *PROMISED)
        await post_in_batches(database, requests, [1, 7, 60, 3])
        return await counted(database), await counted_by_version(database)

    found, versions = with_database(body)

    assert found == by_place(requests)
    assert versions == by_version(requests)
    assert {sli for *_, sli in found} == {"availability", "ttft", "tpot", "e2e", "all"}


def test_quarters_and_days_are_the_sums_of_their_minutes(with_database):
    """Three days of it, so that there is more than one of each."""
    rng = random.Random(5)
    requests = [
        replace(each, finished_unix_ns=each.finished_unix_ns + rng.randrange(3 * 86_400) * 10**9)
        for each in traffic(5, 150)
    ]

    async def body(database):
        await promise(database, *PROMISED)
        await post_in_batches(database, requests, [1, 40, 5, 60])
        return [await sums_of(database, width_s) for width_s in (60, 900, 86_400)]

    minutes, *coarser = with_database(body)

    for width_s, found in zip((900, 86_400), coarser, strict=True):
        expected: dict[tuple, ServiceSums] = defaultdict(ServiceSums)
        for (start_s, *place), sums in minutes.items():
            expected[start_s // width_s * width_s, *place].merge(sums)
        assert 2 < len(found) < len(minutes)
        assert found == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_neither_order_nor_batches_nor_repetition_change_a_sum(with_database, seed):
    rng = random.Random(seed)
    requests = list(traffic(7, 60))
    shuffled = requests + rng.sample(requests, 20)  # some are delivered twice
    rng.shuffle(shuffled)

    async def body(database):
        await promise(database, *PROMISED)
        await post_in_batches(database, shuffled, [rng.randrange(1, 9) for _ in range(8)])
        return await counted(database), await counted_by_version(database), await sums_of(database, 60)

    found, versions, sums = with_database(body)

    assert found == by_place(requests)
    assert versions == by_version(requests)
    whole = merged(each.histograms["e2e"] for each in sums.values() if "e2e" in each.histograms)
    assert whole.count == sum(each.outcome == 200 for each in requests)
    assert whole.total == sum(
        each.queue_ns + each.prefill_ns + each.decode_ns + each.post_ns + each.network_ns
        for each in requests
        if each.outcome == 200
    )
    assert sum(each.excluded.get("caller_error", 0) for each in sums.values()) == sum(
        each.outcome == 400 for each in requests
    )


def test_another_tenants_traffic_changes_nothing(with_database):
    async def body(database):
        await promise(database, *PROMISED)
        await post(database, *traffic(3, 50))
        alone = await counted(database), await sums_of(database, 60)
        await post(database, *traffic(4, 50, "ten_b"))
        return alone, (await counted(database), await sums_of(database, 60))

    alone, together = with_database(body)

    assert alone == together


@pytest.mark.parametrize("order", [(0, 1), (1, 0), "at once"])
def test_a_request_that_lost_its_first_engine_is_counted_once(with_database, order):
    lost, answered = booked(5, outcome=0, attempt=0, at_s=NOON_S), booked(5, attempt=1, at_s=NOON_S + 90)

    async def body(database):
        if order == "at once":
            await post(database, lost, answered)
        else:
            for place in order:
                await post(database, (lost, answered)[place])
        return await counted(database)

    assert with_database(body) == {
        (NOON_S + 60, "smollm2", "standard", "availability"): (1, 1),
        (NOON_S + 60, "smollm2", "standard", "all"): (1, 1),
    }


def test_a_request_is_judged_by_the_version_of_the_minute_in_which_it_ended(with_database):
    changed = (
        objective("ttft", 200, version_id="v1"),
        objective("ttft", 50, version_id="v2", version=2, effective_unix_ns=(NOON_S + 60) * 10**9),
    )

    async def body(database):
        await promise(database, *changed)
        await post(database, booked(1, at_s=NOON_S + 59.9), booked(2, at_s=NOON_S + 60))
        return await counted_by_version(database)

    assert with_database(body) == {(NOON_S, "v1"): (1, 1), (NOON_S + 60, "v2"): (1, 0)}


def test_results_are_told_once_their_transaction_is_committed(with_database):
    told = []

    async def rolled_back(database, ledger):
        async with database.transaction() as session:
            await ledger.post(session, [booked(1)], {"rc_1": CARD})
            raise ZeroDivisionError

    async def body(database):
        await promise(database, objective("ttft", 50))
        fold = SloFold(lambda *result: told.append(result))
        with pytest.raises(ZeroDivisionError):
            await rolled_back(database, Ledger((fold,)))
        before = list(told)
        await post(database, booked(1), fold=fold)
        await post(database, booked(1), fold=fold)
        return before

    assert with_database(body) == []
    assert sorted(told) == [("smollm2", "standard", "availability", True), ("smollm2", "standard", "ttft", False)]


def test_an_upgrade_keeps_what_was_summed_by_minute(unmigrated_url, with_unmigrated):
    """The rows as they were kept before, made from what is kept now."""
    requests = list(traffic(9, 80))

    async def written(database):
        return [await sums_of(database, width_s) for width_s in WIDTHS_S], await counted_by_version(database)

    async def write(database):
        await promise(database, *PROMISED)
        await post_in_batches(database, requests, [30, 30])
        return await written(database)

    async def write_old_rows(database):
        async with database.transaction() as session:
            connection = await session.connection()
            for (minute_s, model, flow_class), sums in minutes.items():
                place = {"minute_s": minute_s, "model": model, "flow_class": flow_class}
                kept = msgspec.msgpack.encode([sums.histograms, sums.excluded])
                await connection.execute(text(_OLD_SAMPLES), place | {"sums": kept})
            for (minute_s, model, flow_class, sli, version_id), (valid, good) in recounted(requests).items():
                row = {"minute_s": minute_s, "model": model, "flow_class": flow_class, "sli": sli}
                await connection.execute(
                    text(_OLD_COUNTS), row | {"version_id": version_id, "valid": valid, "good": good}
                )

    migrations.upgrade(unmigrated_url)
    before = with_unmigrated(write)
    minutes = before[0][-1]
    migrations.downgrade(unmigrated_url, "replica_hours")
    with_unmigrated(write_old_rows)
    migrations.upgrade(unmigrated_url)

    assert with_unmigrated(written) == before


_OLD_SAMPLES = "INSERT INTO latency_minute VALUES ('ten_a', :minute_s, :model, :flow_class, :sums)"
_OLD_COUNTS = (
    "INSERT INTO slo_minute VALUES ('ten_a', :minute_s, :model, :flow_class, :sli, :version_id, :valid, :good)"
)
