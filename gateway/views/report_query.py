"""What a usage or cost report is asked for: OpenAI's query parameters and a time zone, as one page's UsageQuery."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from litestar import Request

from gateway.errors import invalid
from gateway.resources import Bucket, ReportPage
from tenants.errors import InvalidValue
from tenants.limits import check_time_zone
from tenants.usage.query import WIDTH_S, BucketWidth, GroupBy, Row, TimeBucket, UsageQuery, page_end
from tenants.usage.repository import UsageRepository

Result = TypeVar("Result")
_MAX_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """One kind of report: its buckets as width → (how many by default, how many at most), and its groups: OpenAI's
    name → ours, None where everything is in one group. A tenant is its own only project."""

    limits: dict[str, tuple[int, int]]
    groups: dict[str, GroupBy | None]


USAGE = Report(
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
COSTS = Report(
    limits={"1d": (7, 180)},
    groups={
        "project_id": "project_id",
        "user_id": None,
        "line_item": "line_item",
        "api_key_id": "api_key_id",
        "api_source": None,
    },
)


@dataclass(frozen=True, slots=True)
class Page:
    """``query`` spans the page's buckets. ``matches`` False: its filters name what no tenant's usage has.
    ``grouped`` are the groups in OpenAI's names, ``end_s`` is the end of the whole interval."""

    query: UsageQuery
    matches: bool
    grouped: frozenset[str]
    end_s: int

    def answer(
        self, found: Iterable[TimeBucket[Row]], tell: Callable[[Row, frozenset[str]], Result]
    ) -> ReportPage[Result]:
        """What was found as a page, each row told with the groups' names, and the way to the next one."""
        buckets = [
            Bucket(
                start_time=each.start_s,
                end_time=each.end_s,
                results=[tell(row, self.grouped) for row in each.rows if self.matches],
            )
            for each in found
        ]
        more = self.query.end_s < self.end_s
        next_page = f"page_{self.query.end_s}" if more else None
        return ReportPage(data=buckets, has_more=more, next_page=next_page)


async def page_of(request: Request, report: Report, usage: UsageRepository, tenant_id: str | None) -> Page:
    """Hours and days are UTC's, or those of ``time_zone``. An interval with more buckets than a page can have begins
    with the first charge: the tenant's, or with None anybody's.

    Raises ApiError 400 that names the parameter.
    """
    width: BucketWidth = request.query_params.get("bucket_width", "1d")  # pyright: ignore[reportAssignmentType]
    if width not in report.limits:
        raise invalid(f"'bucket_width' is one of {', '.join(report.limits)}.", "bucket_width")
    grouped = _listed(request, "group_by")
    if not set(grouped) <= set(report.groups):
        raise invalid(f"'group_by' holds of {', '.join(report.groups)}.", "group_by")
    default, most = report.limits[width]
    limit = _number(request, "limit", default)
    if not 1 <= limit <= most:
        raise invalid(f"'limit' lies between 1 and {most}.", "limit")
    end_s = _number(request, "end_time", int(time.time()) + 1)
    start_s = await _start(request, end_s, most * WIDTH_S[width], usage, tenant_id)
    ours: list[GroupBy | None] = [report.groups[name] for name in dict.fromkeys(grouped)]
    groups: list[GroupBy] = [name for name in ours if name is not None]
    filters = _listed(request, "models"), _listed(request, "api_key_ids"), _listed(request, "project_ids")
    try:
        zone = check_time_zone(request.query_params.get("time_zone", "UTC"))
        page_end_s = page_end(start_s, end_s, width, zone, limit)
        query = UsageQuery(start_s, page_end_s, width, tuple(groups), *filters, zone)
    except InvalidValue as error:
        raise invalid(str(error), error.field) from None
    return Page(query, _matches(request), frozenset(grouped), end_s)


async def _start(request: Request, end_s: int, longest_s: int, usage: UsageRepository, tenant_id: str | None) -> int:
    page = request.query_params.get("page", "")
    if page:
        number = page.removeprefix("page_")
        if not _is_number(number):
            raise invalid("'page' is the 'next_page' of an earlier answer.", "page")
        return int(number)
    if "start_time" not in request.query_params:
        raise invalid("'start_time' is required (Unix seconds).", "start_time")
    start_s = _number(request, "start_time", 0)
    if end_s - start_s <= longest_s:
        return start_s
    return max(start_s, min(await usage.first_s(tenant_id) or end_s, end_s - 1))


def _matches(request: Request) -> bool:
    """Users are not told apart, and there are no batch jobs."""
    batch = request.query_params.get("batch", "false").lower()
    if batch not in ("true", "false"):
        raise invalid("'batch' is true or false.", "batch")
    return batch == "false" and not _listed(request, "user_ids")


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not _is_number(text):
        raise invalid(f"'{name}' is a whole number.", name)
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _listed(request: Request, name: str) -> tuple[str, ...]:
    """Repeated, or with [] behind the name, or parted by commas."""
    values = request.query_params.getall(name, []) + request.query_params.getall(f"{name}[]", [])
    items = tuple(item for value in values for item in value.split(",") if item)
    if len(items) > _MAX_LISTED:
        raise invalid(f"'{name}' may hold at most {_MAX_LISTED} items.", name)
    return items
