"""Usage and costs as OpenAI's own client reads them."""

import time

import openai
import pytest
from gateway_harness import House, eventually, rows

from gateway.client import Api
from tenants.tables import LedgerEntry

DAY_S = 86_400


@pytest.fixture(scope="module")
def user(house: House) -> str:
    """A tenant with three requests: one flex, one streamed, one with another tier."""
    key = house.new_tenant("usage-reader")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    with house.http(key) as http:
        for change in ({"service_tier": "flex"}, {"stream": True}, {"service_tier": "priority"}):
            house.receipt(key, http.post("/completions", json=body | change).headers["x-request-id"])
    return key


def usage_of(house: House, key: str):
    return openai.OpenAI(base_url=house.url + "/v1", api_key="none", admin_api_key=key, max_retries=0)


def results(page) -> list:
    return [result for bucket in page.data for result in bucket.results]


def test_openais_admin_client_reads_usage(house: House, user: str):
    with usage_of(house, user) as client:
        page = client.admin.organization.usage.completions(start_time=int(time.time()) - DAY_S)

    (result,) = results(page)
    assert (result.input_tokens, result.output_tokens, result.num_model_requests) == (9, 12, 3)
    assert result.input_cached_tokens + result.input_uncached_tokens == 9
    assert (result.model, result.project_id, result.api_key_id, result.service_tier) == (None, None, None, None)


def test_usage_is_grouped_by_every_name_that_openai_knows(house: House, user: str):
    names = ["project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"]
    with usage_of(house, user) as client:
        page = client.admin.organization.usage.completions(start_time=int(time.time()) - DAY_S, group_by=names)  # type: ignore[arg-type]

    found = results(page)
    assert sorted(result.service_tier for result in found) == ["default", "flex", "priority"]
    assert {(result.model, result.project_id) for result in found} == {("tiny", house.tenants[user])}
    assert {(result.batch, result.user_id, result.api_source) for result in found} == {(False, None, "unlabeled")}
    assert all(user.startswith(f"tn_live_{result.api_key_id}") for result in found)


@pytest.mark.parametrize(
    ("filters", "num"),
    [
        ({"models": "tiny"}, 3),
        ({"models": "nobody"}, 0),
        ({"models": ["nobody", "tiny"]}, 3),
        ({"api_key_ids": "KEY"}, 3),
        ({"api_key_ids": "other"}, 0),
        ({"project_ids": "TENANT"}, 3),
        ({"project_ids": "ten_of_others"}, 0),
        ({"user_ids": "anybody"}, 0),
        ({"batch": "true"}, 0),
        ({"batch": "false"}, 3),
    ],
)
def test_a_filter_leaves_what_it_names(house: House, user: str, filters: dict, num: int):
    own = {"KEY": user[8:18], "TENANT": house.tenants[user]}
    params = {name: own.get(value, value) if isinstance(value, str) else value for name, value in filters.items()}
    with house.http(user) as http:
        query = {"start_time": int(time.time()) - DAY_S} | params
        page = http.get("/organization/usage/completions", params=query).json()

    assert sum(result["num_model_requests"] for bucket in page["data"] for result in bucket["results"]) == num
    assert page["data"]


@pytest.mark.parametrize(("width", "width_s", "default"), [("1d", DAY_S, 7), ("1h", 3600, 24), ("1m", 60, 60)])
def test_pages_of_the_default_length_follow_each_other_without_gap(house: House, user: str, width, width_s, default):
    end = int(time.time()) // width_s * width_s
    start = end - (2 * default + 3) * width_s
    pages, page = [], {}
    with house.http(user) as http:
        while page.get("has_more", True):
            query = {"start_time": start, "end_time": end, "bucket_width": width} | _next(page)
            page = http.get("/organization/usage/completions", params=query).json()
            pages.append(page["data"])

    buckets = [bucket for data in pages for bucket in data]
    assert [len(data) for data in pages] == [default, default, 3]
    assert [bucket["start_time"] for bucket in buckets] == list(range(start, end, width_s))
    assert [bucket["end_time"] for bucket in buckets] == list(range(start + width_s, end + 1, width_s))
    assert page["next_page"] is None


def _next(page: dict) -> dict:
    return {"page": page["next_page"]} if page else {}


def test_an_endless_interval_begins_with_the_first_request_and_an_unused_one_is_a_single_bucket(
    house: House, user: str
):
    with house.http(user) as http, house.http(house.new_tenant("used-nothing")) as newcomer:
        page = http.get("/organization/usage/completions", params={"start_time": 0}).json()
        empty = newcomer.get("/organization/usage/completions", params={"start_time": 0}).json()

    assert sum(result["num_model_requests"] for bucket in page["data"] for result in bucket["results"]) == 3
    assert not page["has_more"]
    assert [bucket["results"] for bucket in empty["data"]] == [[]]


def test_costs_are_the_ledgers_amounts_by_line_item(house: House, user: str):
    entries = eventually(lambda: rows(house, user, LedgerEntry))
    with usage_of(house, user) as client:
        page = client.admin.organization.usage.costs(start_time=int(time.time()) - DAY_S, group_by=["line_item"])

    found = {result.line_item: result.amount for result in results(page)}
    assert set(found) == {entry.meter for entry in entries}
    assert sum(amount.picousd for amount in found.values()) == sum(entry.amount_picousd for entry in entries) > 0
    assert all(amount.currency == "usd" for amount in found.values())
    assert sum(amount.value for amount in found.values()) * 1e12 == pytest.approx(
        sum(entry.amount_picousd for entry in entries)
    )


@pytest.mark.parametrize("query", [{"bucket_width": "1h"}, {"limit": 181}, {"group_by": "model"}, {"page": "x"}])
def test_a_bad_cost_query_is_400_and_named(house: House, user: str, query: dict):
    with house.http(user) as http:
        answer = http.get("/organization/costs", params={"start_time": int(time.time()) - DAY_S} | query)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


def test_the_command_line_reads_every_page(house: House, user: str):
    end = int(time.time()) + 1
    start = end // 60 * 60 - 4 * 60
    query = {"start_time": start, "end_time": end, "bucket_width": "1m", "limit": 2}

    buckets = Api(house.url + "/v1", user).every("/organization/usage/completions", query)

    assert [bucket["start_time"] for bucket in buckets] == list(range(start, end, 60))
