"""`tenora report`, with a tenant's own key."""

from typing import Any

import click

from gateway.client import Api
from gateway.commands.common import show, tenant_options
from gateway.commands.cost import report_cost


@click.group("report")
def report() -> None:
    """What a tenant used, with the tenant's own key; what it cost, with an operator's."""


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
