"""What the request path tells the SLO reports."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_harness import House, eventually, rows, stopped

from tenants.slo.service import WIDTHS_S, decode_sums
from tenants.tables import RefusalMinute, RequestRecord, ServiceSum

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def limited(house: House) -> str:
    """A tenant with one request a minute, which it has used up."""
    key = house.new_tenant("slo-limited", requests_per_minute=1)
    with house.http(key) as http:
        house.receipt(key, http.post("/completions", json=BODY).headers["x-request-id"])
    return key


def counted(house: House, key: str) -> Counter:
    counts: Counter = Counter()
    for row in rows(house, key, RefusalMinute):
        counts[row.model, row.flow_class, row.status, row.reason] += row.num_requests
    return counts


def test_a_record_says_whether_it_was_streamed_and_how_many_choices_it_had(house: House):
    key = house.new_tenant("slo-facts")
    with house.http(key) as http:
        for change in ({"stream": True}, {"n": 2, "prompt": [[5, 6], [7, 8]]}):
            house.receipt(key, http.post("/completions", json=BODY | change).headers["x-request-id"])

    found = [(row.streamed, row.num_choices) for row in rows(house, key, RequestRecord)]
    assert sorted(found) == [(False, 4), (True, 1)]


def test_the_ledger_counts_a_request_against_slos_as_it_books_it(house: House):
    key = house.new_tenant("slo-counted")
    labels = {"model": "tiny", "class": "standard", "objective": "availability", "result": "good"}
    before = house.metric("tenora_slo_requests_total", **labels)
    with house.http(key) as http:
        house.receipt(key, http.post("/completions", json=BODY | {"stream": True}).headers["x-request-id"])

    found = [(row.width_s, row.model, decode_sums(row.sums)) for row in rows(house, key, ServiceSum)]
    assert sorted((width_s, model, sums.good) for width_s, model, sums in found) == [
        (width_s, "tiny", {"availability": 1, "all": 1}) for width_s in sorted(WIDTHS_S)
    ]
    eventually(lambda: house.metric("tenora_slo_requests_total", **labels) == before + 1)


def test_refusals_are_counted_by_their_reason(house: House, limited: str):
    with house.http(limited) as http:
        assert http.post("/completions", json=BODY).status_code == 429
        assert http.post("/completions", json=BODY).status_code == 429
        assert http.post("/completions", json=BODY | {"max_tokens": -1}).status_code == 400
        assert http.post("/completions", json=BODY | {"model": "nobody's"}).status_code == 404

    expected = {
        ("tiny", "standard", 429, "rate_limit_exceeded"): 2,
        ("", "standard", 400, "invalid_request"): 1,
        ("", "standard", 404, "model_not_found"): 1,
    }
    assert eventually(lambda: counted(house, limited) == expected)


def test_a_request_that_is_shed_is_bad(house: House):
    key = house.new_tenant("slo-shed")
    labels = {"model": "tiny", "class": "standard", "objective": "availability", "result": "bad"}
    before = house.metric("tenora_slo_requests_total", **labels)
    house.parts.pipeline.admission.closed = True
    try:
        with house.http(key) as http:
            assert http.post("/completions", json=BODY).status_code == 503
    finally:
        house.parts.pipeline.admission.closed = False

    assert eventually(lambda: counted(house, key) == {("tiny", "standard", 503, "draining"): 1})
    eventually(lambda: house.metric("tenora_slo_requests_total", **labels) == before + 1)


def test_nobodys_requests_are_nobodys(house: House):
    async def all_rows() -> list:
        from sqlmodel import select

        async with house.parts.database.session() as session:
            return list((await session.exec(select(RefusalMinute))).all())

    with house.http("tn_live_unknown") as http:
        assert http.post("/completions", json=BODY).status_code == 401

    assert all(row.tenant_id in house.tenants.values() for row in house.on_loop(all_rows()))


def report(house: House, key: str, **params):
    with house.http(key) as http:
        return http.get("/organization/slo", params=params)


def test_a_caller_reads_its_own_report(house: House, limited: str):
    now_s = int(time.time()) // 60 * 60
    eventually(lambda: counted(house, limited))
    told = report(house, limited, start=now_s - 3600, end=now_s + 120).json()

    assert (told["object"], told["tenant_id"], told["tenant_name"]) == (
        "slo_report",
        house.tenants[limited],
        "slo-limited",
    )
    assert (told["total"]["valid"], told["total"]["latency"]["e2e"]["count"]) == (1, 1)
    assert told["total"]["excluded"] == {"caller_error": 2, "own_limit": 2}
    assert told["total"]["price_picousd"] > 0
    assert "text/html" in report(house, limited, format="html").headers["content-type"]
    assert "text/csv" in report(house, limited, format="csv").headers["content-type"]


def test_another_tenants_report_cannot_be_asked_for(house: House, limited: str):
    other = house.new_tenant("slo-other")

    told = report(house, other, tenant=house.tenants[limited]).json()

    assert (told["tenant_id"], told["total"]["valid"]) == (house.tenants[other], 0)


@pytest.mark.parametrize(("params", "named"), [({"start": "x"}, "start"), ({"format": "pdf"}, "format")])
def test_a_report_that_makes_no_sense_is_refused_by_its_name(house: House, key: str, params, named):
    answer = report(house, key, **params)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


def preemptions(house: House) -> float:
    engines: list = []
    house.parts.catalog.each_engine(engines.append)
    families = house.on_loop(engines[0].stats())
    return sum(value for each in families if each.name == "tenora_preemptions" for _, _, value in each.samples)


def test_a_request_that_is_preempted_and_resumed_counts_once(house: House):
    """The house's pool has 2,048 tokens; these need 2,952."""
    key, before = house.new_tenant("slo-preempted"), preemptions(house)

    def stream(number: int) -> str:
        with house.http(key) as http:
            body = BODY | {"prompt": [5, 6, number], "max_tokens": 120, "stream": True}
            return http.post("/completions", json=body).headers["x-request-id"]

    with ThreadPoolExecutor(24) as pool:
        with stopped(house.engine_pid):  # until all are there
            asked = [pool.submit(stream, number) for number in range(3, 27)]
            eventually(lambda: house.parts.catalog.models["tiny"].engines[0].load == 24)
        for one in asked:
            house.receipt(key, one.result())

    assert preemptions(house) > before
    now_s = int(time.time()) // 60 * 60
    total = report(house, key, start=now_s - 3600, end=now_s + 120).json()["total"]
    assert (total["valid"], total["attainment"]["availability"]["good"]) == (24, 24)
    assert {name: each["count"] for name, each in total["latency"].items()} == {"ttft": 24, "tpot": 24, "e2e": 24}
