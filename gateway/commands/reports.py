"""`tenora report`: what was used and charged, what it cost, and what was promised and got."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from gateway.commands.common import find_tenant, ops_api, ops_options, show
from gateway.commands.cost import report_cost
from gateway.commands.usage import report_charges, report_usage


@click.group("report")
def report() -> None:
    """What tenants used and were charged (a tenant's own with its key, everybody's with an operator's), what that
    cost, and how tenants were served."""


for command in (report_usage, report_charges, report_cost):
    report.add_command(command)


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
