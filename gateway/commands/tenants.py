"""`tenora tenant`."""

import re
from pathlib import Path
from typing import Any

import click

from gateway.commands.common import Failed, cell, find_tenant, ops_api, ops_options, parse_change, show

_USD = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
CREDIT = {
    "granted_picousd": "GRANTED (PICOUSD)",
    "spent_picousd": "SPENT",
    "reserved_picousd": "RESERVED",
    "free_picousd": "FREE",
}
TENANT = {"id": "ID", "name": "NAME", "status": "STATUS", "time_zone": "TIME ZONE"}
_OWN = ("name", "time_zone", "billing_anchor_day", "status", "billing_reference")


@click.group("tenant")
def tenant() -> None:
    """Tenants and their limits. TENANT is an id or a name."""


@tenant.command("create")
@click.argument("name")
@click.option("--time-zone", default="UTC", show_default=True)
@click.option(
    "--billing-anchor-day", type=click.IntRange(1, 31), default=1, show_default=True, help="Months begin on it."
)
@ops_options
def tenant_create(name: str, time_zone: str, billing_anchor_day: int, as_json: bool, **where: Any) -> None:
    """Make a tenant."""
    body = {"name": name, "time_zone": time_zone, "billing_anchor_day": billing_anchor_day}
    show(ops_api(**where).call("POST", "/tenants", json=body), as_json, TENANT)


@tenant.command("list")
@ops_options
def tenant_list(as_json: bool, **where: Any) -> None:
    """List all tenants."""
    show(ops_api(**where).call("GET", "/tenants"), as_json, TENANT)


@tenant.command("show")
@click.argument("name", metavar="TENANT")
@ops_options
def tenant_show(name: str, as_json: bool, **where: Any) -> None:
    """Show a tenant and its limits."""
    found = find_tenant(ops_api(**where), name)
    if as_json:
        show(found, as_json, {})
        return
    own = {field: found[field] for field in (*TENANT, "billing_anchor_day", "billing_reference")}
    for field, value in (own | found["limits"]).items():
        click.echo(f"{field:32}{cell(value)}")


@tenant.command("set")
@click.argument("name", metavar="TENANT")
@click.argument("changes", nargs=-1, required=True, metavar="FIELD=VALUE...")
@ops_options
def tenant_set(name: str, changes: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Change limits (requests_per_minute=60, concurrent_requests=none, …), name, time_zone, status,
    billing_anchor_day (1-31: its months begin on it) or billing_reference (Stripe's name, for `tenora export`)."""
    fields = dict(map(parse_change, changes))
    if (alerts := fields.get("spend_alerts")) is not None:
        fields["spend_alerts"] = _percentages(alerts)
    api = ops_api(**where)
    path = f"/tenants/{find_tenant(api, name)['id']}"
    own = {field: fields.pop(field) for field in _OWN if field in fields}
    if fields:
        api.call("PATCH", f"{path}/limits", json=fields)
    answer = api.call("PATCH", path, json=own) if own else api.call("GET", path)
    changed = {field: field.upper() for field in (*own, *fields) if field not in TENANT}
    show(answer if as_json else {"data": [answer | answer["limits"]]}, as_json, TENANT | changed)


@tenant.command("rename")
@click.argument("name", metavar="TENANT")
@click.argument("new_name")
@ops_options
def tenant_rename(name: str, new_name: str, as_json: bool, **where: Any) -> None:
    """Call a tenant otherwise; its id, keys and bills stay."""
    _change(name, {"name": new_name}, as_json, **where)


@tenant.command("suspend")
@click.argument("name", metavar="TENANT")
@ops_options
def tenant_suspend(name: str, as_json: bool, **where: Any) -> None:
    """Refuse all its keys from now on; what it runs ends at its next step."""
    _change(name, {"status": "suspended"}, as_json, **where)


@tenant.command("unsuspend")
@click.argument("name", metavar="TENANT")
@ops_options
def tenant_unsuspend(name: str, as_json: bool, **where: Any) -> None:
    """Take its keys again."""
    _change(name, {"status": "active"}, as_json, **where)


@tenant.command("export")
@click.argument("name", metavar="TENANT")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def tenant_export(name: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Write all that is kept of a tenant, a JSON object a line: limits, keys (not their text), adapters, records,
    ledger. It is JSON with --json or without."""
    api = ops_api(**where)
    lines = api.lines(f"/tenants/{find_tenant(api, name)['id']}/export")
    with click.open_file(str(output or "-"), "wb") as file:
        last = b""
        for last in lines:
            file.write(last + b"\n")
    if b'"object":"end"' not in last:
        raise Failed("the export was cut off: try again")


@tenant.command("credit")
@click.argument("name", metavar="TENANT")
@click.argument("amount", required=False, metavar="[USD]")
@click.option("--reference", default="", help="The payment's: granted once, however often it is given.")
@ops_options
def tenant_credit(name: str, amount: str | None, reference: str, as_json: bool, **where: Any) -> None:
    """Show a tenant's prepaid credit, or grant it USD more (a decimal number, up to 12 places)."""
    api = ops_api(**where)
    path = f"/tenants/{find_tenant(api, name)['id']}/credit"
    if amount is None:
        show(api.call("GET", path), as_json, CREDIT)
        return
    if not reference:
        raise click.UsageError("give --reference, so that one payment is never granted twice")
    body = {"amount_picousd": _picousd(amount), "reference": reference}
    show(api.call("POST", path, json=body), as_json, CREDIT)


@tenant.command("delete")
@click.argument("name", metavar="TENANT")
@click.option("--yes", is_flag=True, help="Don't ask.")
@ops_options
def tenant_delete(name: str, yes: bool, as_json: bool, **where: Any) -> None:
    """Delete a tenant's keys and adapters for ever. Its records and ledger entries stay for the books."""
    api = ops_api(**where)
    found = find_tenant(api, name)
    if not yes:
        click.confirm(f"Delete {found['name']} ({found['id']}), its keys and its adapters?", abort=True, err=True)
    show(api.call("DELETE", f"/tenants/{found['id']}"), as_json, {"id": "ID", "deleted": "DELETED"})


def _percentages(value: int | str) -> list[int]:
    """`50,80,100`. Raises click.UsageError."""
    parts = [part for part in str(value).split(",") if part]
    if not all(part.isdecimal() for part in parts):
        raise click.UsageError("spend_alerts: give percentages, as in spend_alerts=50,80,100")
    return list(map(int, parts))


def _picousd(usd: str) -> int:
    """Exactly. Raises click.UsageError."""
    if not _USD.fullmatch(usd):
        raise click.UsageError(f"{usd}: an amount is a decimal number of at most 12 places")
    whole, _, places = usd.partition(".")
    return int(whole) * 10**12 + int(places.ljust(12, "0"))


def _change(name: str, changes: dict[str, str], as_json: bool, **where: Any) -> None:
    api = ops_api(**where)
    show(api.call("PATCH", f"/tenants/{find_tenant(api, name)['id']}", json=changes), as_json, TENANT)
