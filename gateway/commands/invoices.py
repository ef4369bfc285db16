"""`tenora invoice`."""

from pathlib import Path
from typing import Any

import click

from gateway.commands.common import find_tenant, ops_api, ops_options, show

INVOICE = {
    **{"number": "NUMBER", "id": "ID", "tenant_name": "TENANT", "period": "PERIOD", "total": "TOTAL"},
    **{"paid_from_credit": "PAID FROM CREDIT", "amount_due": "DUE"},
}
LINE = {
    **{"number": "LINE", "kind": "KIND", "model": "MODEL", "class": "CLASS", "meter": "METER"},
    **{"quantity": "QUANTITY", "unit_price_picousd": "PICOUSD EACH", "amount": "AMOUNT"},
}
NOTE = {"number": "NUMBER", "id": "ID", "invoice_id": "INVOICE", "total": "TOTAL", "reason": "REASON"}
ISSUE_TIMEOUT_S = 600.0  # the sums of months with millions of requests


@click.group("invoice")
def invoice() -> None:
    """Invoices and credit notes: issued once, never changed. TENANT is an id or a name."""


@invoice.command("issue")
@click.argument("tenant")
@click.argument("period", metavar="YYYY-MM")
@click.option("--force", is_flag=True, help="Also before the month is over; the rest goes to the next invoice.")
@ops_options
def invoice_issue(tenant: str, period: str, force: bool, as_json: bool, **where: Any) -> None:
    """Issue the invoice of a month; shows it when it is issued already."""
    api = ops_api(**where)
    body = {"tenant": find_tenant(api, tenant)["id"], "period": period, "force": force}
    _show(api.call("POST", "/invoices", json=body, timeout=ISSUE_TIMEOUT_S), as_json)


@invoice.command("list")
@click.option("--tenant", help="One tenant's.  [default: everybody's]")
@ops_options
def invoice_list(tenant: str | None, as_json: bool, **where: Any) -> None:
    """List invoices by number."""
    api = ops_api(**where)
    wanted: dict[str, Any] = {"limit": 1000} | ({"tenant_id": find_tenant(api, tenant)["id"]} if tenant else {})
    page = api.call("GET", "/invoices", params=wanted)
    every = page["data"]
    while page["has_more"]:
        page = api.call("GET", "/invoices", params=wanted | {"after": page["next_after"]})
        every += page["data"]
    show({"object": "list", "data": every}, as_json, INVOICE)


@invoice.command("show")
@click.argument("invoice_id")
@click.option(
    "--format", "as_format", type=click.Choice(["table", "csv", "html", "focus"]), default="table", show_default=True
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def invoice_show(invoice_id: str, as_format: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Show an invoice with its lines; as html it prints to one page."""
    api = ops_api(**where)
    if as_format == "table" or as_json:
        _show(api.call("GET", f"/invoices/{invoice_id}"), as_json)
        return
    document = "/focus" if as_format == "focus" else f"?format={as_format}"
    _write(api.text(f"/invoices/{invoice_id}{document}"), output)


@invoice.command("credit")
@click.argument("invoice_id")
@click.option("--reason", required=True, help="What the credit note says.")
@click.option("--line", "lines", multiple=True, metavar="LINE=CENTS", help="Repeatable.  [default: all that is left]")
@ops_options
def invoice_credit(invoice_id: str, reason: str, lines: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Give back what an invoice charged, or a part of it: the tenant's next invoice takes it off."""
    body = {"reason": reason, "lines": [_credited(text) for text in lines] or None}
    show(ops_api(**where).call("POST", f"/invoices/{invoice_id}/credit-notes", json=body), as_json, NOTE)


@invoice.command("note")
@click.argument("invoice_id")
@click.argument("credit_note_id")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def invoice_note(invoice_id: str, credit_note_id: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Print a credit note of an invoice, as html to send."""
    path = f"/invoices/{invoice_id}/credit-notes/{credit_note_id}"
    if as_json:
        show(ops_api(**where).call("GET", path), as_json, NOTE)
    else:
        _write(ops_api(**where).text(f"{path}?format=html"), output)


def _write(text: str, output: Path | None) -> None:
    with click.open_file(str(output or "-"), "wb") as file:
        file.write(text.encode())


def _credited(text: str) -> dict[str, int]:
    """Raises click.UsageError."""
    line, _, cents = text.partition("=")
    if not line.isdecimal() or not cents.isdecimal():
        raise click.UsageError(f"{text}: give LINE=CENTS")
    return {"line": int(line), "amount_cents": int(cents)}


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show(answer, as_json, {})
        return
    show({"data": [answer]}, as_json, INVOICE)
    click.echo()
    show({"data": answer["lines"]}, as_json, LINE)
