"""`tenora export`: the ledger for other systems, an event a line."""

import json
from typing import Any

import click

from gateway.commands.common import ops_api, ops_options

PAGE = 1000


@click.group("export")
def export() -> None:
    """Write what was charged for other systems, a JSON object a line, each entry once.

    The last line on stderr says where to go on next time: `--after PLACE`.
    """


@export.command("cloudevents")
@click.option("--after", default="1.0", show_default=True, metavar="PLACE", help="Where an earlier export ended.")
@ops_options
def export_cloudevents(after: str, as_json: bool, **where: Any) -> None:
    """As CloudEvents 1.0."""
    _write("cloudevents", after, as_json, **where)


@export.command("meter-events")
@click.option("--after", default="1.0", show_default=True, metavar="PLACE", help="Where an earlier export ended.")
@ops_options
def export_meter_events(after: str, as_json: bool, **where: Any) -> None:
    """As Stripe's meter events, of tenants with a billing_reference (`tenora tenant set`)."""
    _write("meter-events", after, as_json, **where)


def _write(kind: str, after: str, as_json: bool, **where: Any) -> None:
    api, has_more, num_passed_over = ops_api(**where), True, 0
    while has_more:
        page = api.call("GET", f"/exports/{kind}", params={"after": after, "limit": PAGE})
        after, has_more = page["next_after"], page["has_more"]
        num_passed_over += page.get("num_without_reference", 0)
        for event in page["data"]:
            click.echo(json.dumps(event, separators=(",", ":")))
        if as_json:
            click.echo(json.dumps({"next_after": after}))
    if num_passed_over:
        click.echo(f"passed over {num_passed_over} entries of tenants without billing_reference", err=True)
    click.echo(f"--after {after}", err=True)
