"""GET /v1/organization/usage/completions: OpenAI's query and result shape, for the caller's tenant."""

import time
from typing import Any, get_args

from litestar import Request, get

from gateway.access import needs
from gateway.errors import invalid
from gateway.parts import parts_of, principal_of
from tenants.errors import InvalidValue
from tenants.record_repository import BucketWidth
from tenants.repositories import RecordRepository, UsageBucket, UsageQuery, UsageRow

_WIDTH_S = {"1m": 60, "1h": 3600, "1d": 86400}
_MOST = {"1m": 1440, "1h": 168, "1d": 366}  # buckets in one answer
_GROUPS = ("model", "api_key_id", "project_id")


@get("/v1/organization/usage/completions", opt=needs("usage"))
async def usage_completions(request: Request) -> dict[str, Any]:
    """Days are UTC's. An interval with more buckets than one answer holds is answered from its newest end."""
    principal, parts = principal_of(request), parts_of(request)
    query, limit = _query(request)
    async with parts.database.session() as session:
        buckets = await RecordRepository(session).usage_buckets(principal.tenant_id, query)
    page = buckets[:limit]
    rest = buckets[limit:]
    return {
        "object": "page",
        "data": [_bucket(bucket) for bucket in page],
        "has_more": bool(rest),
        "next_page": f"page_{rest[0].start_s}" if rest else None,
    }


def _query(request: Request) -> tuple[UsageQuery, int]:
    width: BucketWidth = request.query_params.get("bucket_width", "1d")  # pyright: ignore[reportAssignmentType]
    if width not in get_args(BucketWidth):
        raise invalid("'bucket_width' is one of 1m, 1h, 1d.", "bucket_width")
    groups = _listed(request, "group_by")
    if not set(groups) <= set(_GROUPS):
        raise invalid(f"'group_by' holds of {', '.join(_GROUPS)}.", "group_by")
    end_s = _number(request, "end_time", int(time.time()) + 1)
    start_s = max(_start(request), end_s - (_MOST[width] - 1) * _WIDTH_S[width])
    limit = _number(request, "limit", _MOST[width])
    if not 1 <= limit <= _MOST[width]:
        raise invalid(f"'limit' lies between 1 and {_MOST[width]}.", "limit")
    try:
        query = UsageQuery(start_s, end_s, width, groups, _listed(request, "models"), _listed(request, "api_key_ids"))  # pyright: ignore[reportArgumentType]
    except InvalidValue as error:
        raise invalid(str(error), error.field) from None
    return query, limit


def _start(request: Request) -> int:
    page = request.query_params.get("page", "")
    if page:
        number = page.removeprefix("page_")
        if not (number.isascii() and number.isdigit() and len(number) <= 10):
            raise invalid("'page' is the 'next_page' of an earlier answer.", "page")
        return int(number)
    if "start_time" not in request.query_params:
        raise invalid("'start_time' is required (Unix seconds).", "start_time")
    return _number(request, "start_time", 0)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise invalid(f"'{name}' is a whole number.", name)
    return int(text)


def _listed(request: Request, name: str) -> tuple[str, ...]:
    """Repeated, or with [] behind the name, or parted by commas."""
    values = request.query_params.getall(name, []) + request.query_params.getall(f"{name}[]", [])
    return tuple(item for value in values for item in value.split(",") if item)


def _bucket(bucket: UsageBucket) -> dict[str, Any]:
    results = [_result(row) for row in bucket.rows]
    return {"object": "bucket", "start_time": bucket.start_s, "end_time": bucket.end_s, "results": results}


def _result(row: UsageRow) -> dict[str, Any]:
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
        "batch": None,
        "service_tier": None,
    }


handlers = [usage_completions]
