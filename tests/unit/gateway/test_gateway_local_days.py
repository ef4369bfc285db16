"""Case 25: usage and costs by the days of a time zone, over HTTP."""

import uuid
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from gateway_harness import House, rows

from tenants.ledger import Ledger
from tenants.meter import RequestContext
from tenants.pricing import RateCard, default_prices
from tenants.settled import SettledRequest
from tenants.tables import LedgerEntry

NS = 10**9
USAGE, COSTS = "/organization/usage/completions", "/organization/costs"
CARD = RateCard("rc_days", 1, 0, default_prices())
CLOCKS = ("23:30", "23:59:59.999999", "00:00", "00:30")  # on both sides of both midnights of a day


class Booked(NamedTuple):
    """``tokens`` are a power of two: a sum says which rows are in it."""

    tokens: int
    local_day: date
    unix_ns: int


def instants(zone: str, day: date) -> list[tuple[date, int]]:
    """On the day before, on the day and behind it; where the clocks go back, the hour that comes twice, both times."""
    found = []
    for offset in (-1, 0, 1):
        local_day = day + timedelta(days=offset)
        for clock in (*CLOCKS, "02:30"):
            once, again = [
                datetime.fromisoformat(f"{local_day}T{clock}").replace(tzinfo=ZoneInfo(zone), fold=fold)
                for fold in (0, 1)
            ]
            found.append((local_day, once))
            if once.utcoffset() != again.utcoffset() and again.timestamp() > once.timestamp():
                found.append((local_day, again))
    return [(local_day, round(when.timestamp() * 10**6) * 1000) for local_day, when in found]


def book(house: House, key: str, zone: str, day: date) -> list[Booked]:
    booked = [Booked(1 << n, local_day, ns) for n, (local_day, ns) in enumerate(instants(zone, day))]
    house.on_loop(_post(house, house.tenants[key], booked))
    return booked


async def _post(house: House, tenant_id: str, booked: list[Booked]) -> None:
    requests = []
    for row in booked:
        names = ("k", str(uuid.uuid4()), 1, "tiny", "tiny", "", "standard", CARD.rate_card_id)
        context = RequestContext(tenant_id, *names, admitted_unix_ns=row.unix_ns - NS)
        requests.append(SettledRequest(context, 200, 1, 0, row.tokens, 1, 1, 1, 1, 1, 1, 1, row.unix_ns))
    async with house.parts.database.transaction() as session:
        await Ledger().post(session, requests, {CARD.rate_card_id: CARD})


def midnight(zone: str, day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).timestamp())


def buckets(house: House, key: str, path: str, **query) -> list[dict]:
    with house.http(key) as http:
        answer = http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def tokens_of(bucket: dict) -> int:
    return sum(result["output_tokens"] for result in bucket["results"])


def picousd_of(found: list[dict]) -> int:
    return sum(result["amount"]["picousd"] for bucket in found for result in bucket["results"])


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Asia/Kolkata", date(2026, 7, 1), 24),
        ("America/Los_Angeles", date(2026, 7, 1), 24),
        ("UTC", date(2026, 7, 1), 24),
        ("Europe/Berlin", date(2026, 3, 29), 23),
        ("Europe/Berlin", date(2026, 10, 25), 25),
    ],
)
def test_each_row_is_in_one_local_day_and_days_sum_to_the_whole_and_to_the_ledger(
    house: House, zone: str, day: date, hours: int
):
    key = house.new_tenant(f"days of {zone} around {day}")
    booked = book(house, key, zone, day)
    days = [day + timedelta(days=offset) for offset in (-1, 0, 1)]
    edges = [midnight(zone, each) for each in (*days, day + timedelta(days=2))]
    whole = {"start_time": edges[0], "end_time": edges[-1], "time_zone": zone}

    together = buckets(house, key, USAGE, **whole)
    apart = [
        buckets(house, key, USAGE, start_time=start, end_time=end, time_zone=zone)[0] for start, end in pairwise(edges)
    ]
    costs = buckets(house, key, COSTS, **whole)

    assert [(each["start_time"], each["end_time"]) for each in together] == list(pairwise(edges))
    assert edges[2] - edges[1] == hours * 3600
    assert [tokens_of(each) for each in together] == [
        sum(row.tokens for row in booked if row.local_day == each) for each in days
    ]
    assert together == apart
    entries = rows(house, key, LedgerEntry)
    assert sum(map(tokens_of, together)) == sum(each.quantity for each in entries if each.meter == "output_tokens")
    assert picousd_of(costs) == sum(each.amount_picousd for each in entries)
    assert [each["start_time"] for each in costs] == edges[:-1]


def test_the_hour_that_comes_twice_is_two_buckets(house: House):
    zone, day = "Europe/Berlin", date(2026, 10, 25)
    key = house.new_tenant("an hour twice")
    booked = {row.unix_ns // NS // 3600 * 3600: row for row in book(house, key, zone, day) if row.local_day == day}
    span = {"start_time": midnight(zone, day), "end_time": midnight(zone, day + timedelta(days=1))}

    found = buckets(house, key, USAGE, **span, time_zone=zone, bucket_width="1h", limit=168)

    twice = [each for each in found if datetime.fromtimestamp(each["start_time"], ZoneInfo(zone)).hour == 2]
    assert len(found) == 25
    assert [tokens_of(each) for each in twice] == [booked[each["start_time"]].tokens for each in twice]
    assert len({tokens_of(each) for each in twice}) == 2


def test_hours_of_a_zone_begin_when_its_clocks_say_so_and_pages_follow_each_other(house: House):
    zone, day = "Asia/Kolkata", date(2026, 7, 1)
    key = house.new_tenant("half hours")
    book(house, key, zone, day)
    span = {"start_time": midnight(zone, day) - 600, "end_time": midnight(zone, day) + 7200, "time_zone": zone}
    with house.http(key) as http:
        pages = [http.get(USAGE, params=span | {"bucket_width": "1h", "limit": 2}).json()]
        while page := pages[-1]["next_page"]:
            pages.append(http.get(USAGE, params=span | {"bucket_width": "1h", "limit": 2, "page": page}).json())

    starts = [each["start_time"] - midnight(zone, day) for page in pages for each in page["data"]]
    assert starts == [-600, 0, 3600]
    assert all(datetime.fromtimestamp(each + midnight(zone, day), UTC).minute == 30 for each in starts[1:])


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "America", "../UTC", "Europe/Berlin\0"])
def test_an_unknown_zone_is_400_and_named(house: House, key: str, zone: str):
    with house.http(key) as http:
        answers = [http.get(path, params={"start_time": 0, "time_zone": zone}) for path in (USAGE, COSTS)]

    assert [(each.status_code, each.json()["error"]["param"]) for each in answers] == [(400, "time_zone")] * 2
