"""`tenora report usage` and `charges`: a tenant's own with its key, everybody's with an operator's."""

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import click

from gateway.client import Answer, Api
from gateway.commands.common import apply_options, find_tenant, ops_api, ops_options, show, tenant_url, tenants_key

_USED = ("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
_COLUMNS = {
    **{"from": "FROM", "project_id": "TENANT", "api_key_id": "KEY", "model": "MODEL", "service_tier": "TIER"},
    **{"line_item": "LINE ITEM", "usd": "USD"},
    **{name: name.upper().replace("_", " ") for name in _USED},
}
_GROUPS = {"tenant": "project_id", "key": "api_key_id"}  # our words for OpenAI's


def _group_by(*names: str) -> Callable[[Any], Any]:
    def read(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> list[str]:
        groups = [group for value in values for group in value.split(",")]
        for group in groups:
            if group not in names:
                raise click.BadParameter(f"{group!r} is not one of {', '.join(names)}")
        return [_GROUPS.get(group, group) for group in groups]

    return click.option("--group-by", multiple=True, callback=read, help=f"Of {', '.join(names)}: a,b.")


query_options = apply_options(
    click.option("--start-time", type=int, required=True, help="Unix seconds, inclusive."),
    click.option("--end-time", type=int, help="Unix seconds, exclusive.  [default: now]"),
    click.option("--time-zone", default="UTC", show_default=True, help="Whose days (and hours): an IANA name."),
    click.option("--tenant", help="One tenant's, by id or name, with an operator's key."),
    tenant_url,
    tenants_key(required=False),
    ops_options,
)


@click.command("usage")
@click.option("--bucket-width", type=click.Choice(["1m", "1h", "1d"]), default="1d", show_default=True)
@_group_by("tenant", "model", "key", "service_tier")
@query_options
def report_usage(**options: Any) -> None:
    """Tokens and requests by time: the tenant's whose --api-key is given, or everybody's."""
    _report("/organization/usage/completions", "/reports/usage", lambda row: row, **options)


@click.command("charges")
@_group_by("tenant", "line_item", "key")
@query_options
def report_charges(**options: Any) -> None:
    """What was charged by day: to the tenant whose --api-key is given, or to everybody."""

    def priced(row: Answer) -> Answer:
        return row | {"usd": f"{Decimal(row['amount']['picousd']).scaleb(-12):f}"}

    _report("/organization/costs", "/reports/charges", priced, **options)


def _report(
    own: str, everybodys: str, told: Callable[[Answer], Answer], *, as_json: bool, time_zone: str, **options: Any
) -> None:
    where = {name: options.pop(name) for name in ("home", "ops_url", "operator_key")}
    url, api_key, tenant = (options.pop(name) for name in ("url", "api_key", "tenant"))
    query = {name: value for name, value in options.items() if value is not None} | {"time_zone": time_zone}
    if api_key and not tenant:
        buckets = Api(url, api_key).every(own, query)
    else:
        api = ops_api(**where)
        one = {"project_ids": find_tenant(api, tenant)["id"]} if tenant else {}
        buckets = api.every(everybodys, query | one)
    if as_json:
        show({"object": "page", "data": buckets}, True, {})
        return
    zone = ZoneInfo(time_zone)  # the server knew it
    rows = [told(row) | {"from": _when(bucket, zone)} for bucket in buckets for row in bucket["results"]]
    if not rows:
        click.echo("nothing in this time")
        return
    known = {name for row in rows for name, value in row.items() if value is not None} | {"from"}
    show({"data": rows}, False, {name: title for name, title in _COLUMNS.items() if name in known})


def _when(bucket: Answer, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(bucket["start_time"], zone).isoformat()
