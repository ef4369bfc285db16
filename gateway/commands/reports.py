"""`tenora report`: with a tenant's own key what it used; with an operator's what it was promised and got."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from gateway.client import Api
from gateway.commands.common import find_tenant, ops_api, ops_options, show, tenant_options
from gateway.commands.cost import report_cost


@click.group("report")
def report() -> None:
    """What a tenant used (with the tenant's own key), what it cost and how it was served (with an operator's)."""


report.add_command(report_cost)


@report.command("usage")
@click.option("--start-time", type=int, required=True, help="Unix seconds, inclusive.")
@click.option("--end-time", type=int, help="Unix seconds, exclusive.  [default: now]")
@click.option("--bucket-width", type=click.Choice(["1m", "1h", "1d"]), default="1d", show_default=True)
@click.option("--group-by", multiple=True, help="model, api_key_id, service_tier, …  Repeatable.")
@tenant_options
def report_usage(url: str, api_key: str, as_json: bool, **query: Any) -> None:
    """Tokens and requests by time."""
    wanted = {name: value for name, value in query.items() if value not in (None, ())}
    buckets = Api(url, api_key).every("/organization/usage/completions", wanted)
    rows = [row | {"start_time": bucket["start_time"]} for bucket in buckets for row in bucket["results"]]
    columns = ("start_time", "model", "input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
    show(
        {"object": "page", "data": buckets} if as_json else {"data": rows},
        as_json,
        {name: name.upper() for name in columns},
    )


@report.command("slo")
@click.argument("name", metavar="TENANT")
@click.option("--start", help="Unix seconds, or a date of the tenant's zone.  [default: 30 days before the end]")
@click.option("--end", help="Not included.  [default: now]")
@click.option("--group", default="model,class", show_default=True, help="model, class, both or none.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "html"]), default="table", show_default=True)
@click.option("--table", "which", default="rows", help="Of a CSV: rows, objectives, incidents, days or hours.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def report_slo(name: str, form: str, which: str, output: Path | None, as_json: bool, **more: Any) -> None:
    """How a tenant was served: objectives, attainment, latencies. TENANT is an id or a name; --json prints all."""
    asked = {field: more.pop(field) for field in ("start", "end", "group")}
    api = ops_api(**more)
    params = {"tenant": find_tenant(api, name)["id"]} | {field: value for field, value in asked.items() if value}
    if form != "table" and not as_json:
        text = api.text(f"/reports/slo?{urlencode(params | {'format': form, 'table': which})}")
        with click.open_file(str(output or "-"), "w", encoding="utf-8") as file:
            file.write(text)
        return
    answer = api.call("GET", "/reports/slo", params=params)
    rows = [row | {"attained": row["attainment"]["ratio"]} for row in answer["objectives"]]
    columns = ("name", "sli", "model", "class", "version", "target", "attained", "is_met")
    show(answer if as_json else {"data": rows}, as_json, {column: column.upper() for column in columns})
