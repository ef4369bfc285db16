"""GET /v1/organization/usage/completions and /costs: OpenAI's query and result shapes, for the caller's tenant."""

from typing import Any

from litestar import Request, get

from gateway.access import needs
from gateway.parts import parts_of, principal_of
from gateway.report_query import Report, page_of
from gateway.work import TIER_OF
from tenants.record_repository import CostRow
from tenants.repositories import RecordRepository, UsageRow

_USAGE = Report(
    limits={"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)},
    groups={
        "project_id": "project_id",
        "user_id": None,
        "api_key_id": "api_key_id",
        "model": "model",
        "batch": None,
        "service_tier": "flow_class",
        "api_source": None,
    },
)
_COSTS = Report(
    limits={"1d": (7, 180)},
    groups={
        "project_id": "project_id",
        "user_id": None,
        "line_item": "line_item",
        "api_key_id": "api_key_id",
        "api_source": None,
    },
)
_PICO = 10**12


@get("/v1/organization/usage/completions", opt=needs("usage"))
async def usage_completions(request: Request) -> dict[str, Any]:
    principal, page = principal_of(request), await page_of(request, _USAGE)
    async with parts_of(request).database.session() as session:
        buckets = await RecordRepository(session).usage_buckets(principal.tenant_id, page.query)
    return page.answer(
        [
            _bucket(each.start_s, each.end_s, [_used(row, page.grouped) for row in each.rows if page.matches])
            for each in buckets
        ]
    )


@get("/v1/organization/costs", opt=needs("usage"))
async def costs(request: Request) -> dict[str, Any]:
    principal, page = principal_of(request), await page_of(request, _COSTS)
    async with parts_of(request).database.session() as session:
        buckets = await RecordRepository(session).cost_buckets(principal.tenant_id, page.query)
    return page.answer(
        [
            _bucket(each.start_s, each.end_s, [_cost(row, page.grouped) for row in each.rows if page.matches])
            for each in buckets
        ]
    )


def _bucket(start_s: int, end_s: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "bucket", "start_time": start_s, "end_time": end_s, "results": results}


def _used(row: UsageRow, grouped: frozenset[str]) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": row.input_tokens,
        "input_cached_tokens": row.input_cached_tokens,
        "input_uncached_tokens": row.input_tokens - row.input_cached_tokens,
        "output_tokens": row.output_tokens,
        "num_model_requests": row.num_model_requests,
        "project_id": row.project_id,
        "user_id": None,
        "api_key_id": row.api_key_id,
        "model": row.model,
        "batch": False if "batch" in grouped else None,
        "service_tier": row.flow_class and TIER_OF[row.flow_class],
        "api_source": _source(grouped),
    }


def _cost(row: CostRow, grouped: frozenset[str]) -> dict[str, Any]:
    """``value`` is a float as OpenAI's is; ``picousd`` is exact."""
    return {
        "object": "organization.costs.result",
        "amount": {"value": row.amount_picousd / _PICO, "currency": "usd", "picousd": row.amount_picousd},
        "line_item": row.line_item,
        "project_id": row.project_id,
        "user_id": None,
        "api_key_id": row.api_key_id,
        "api_source": _source(grouped),
    }


def _source(grouped: frozenset[str]) -> str | None:
    return "unlabeled" if "api_source" in grouped else None


handlers = [usage_completions, costs]
