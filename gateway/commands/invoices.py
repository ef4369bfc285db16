"""`tenora invoice`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gateway.client import Api
from gateway.commands.common import Failed, find_tenant, ops_api, ops_options, show

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
    """Invoices and credit notes: issued once, never changed. TENANT is an id or a name, INVOICE an id or a number."""


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
    wanted = {"tenant_id": find_tenant(api, tenant)["id"]} if tenant else {}
    show({"object": "list", "data": list(_every(api, wanted))}, as_json, INVOICE)


@invoice.command("show")
@click.argument("invoice")
@click.option(
    "--format", "as_format", type=click.Choice(["table", "csv", "html", "focus"]), default="table", show_default=True
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def invoice_show(invoice: str, as_format: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Show an invoice with its lines; as html it prints to one page."""
    api = ops_api(**where)
    path = _path(api, invoice)
    if as_format == "table" or as_json:
        _show(api.call("GET", path), as_json)
        return
    document = "/focus" if as_format == "focus" else f"?format={as_format}"
    _write(api.text(path + document), output)


@invoice.command("credit")
@click.argument("invoice")
@click.option("--reason", required=True, help="What the credit note says.")
@click.option("--line", "lines", multiple=True, metavar="LINE=CENTS", help="Repeatable.  [default: all that is left]")
@ops_options
def invoice_credit(invoice: str, reason: str, lines: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Give back what an invoice charged, or a part of it: the tenant's next invoice takes it off."""
    body = {"reason": reason, "lines": [_credited(text) for text in lines] or None}
    api = ops_api(**where)
    show(api.call("POST", f"{_path(api, invoice)}/credit-notes", json=body), as_json, NOTE)


@invoice.command("note")
@click.argument("invoice")
@click.argument("credit_note_id")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
@ops_options
def invoice_note(invoice: str, credit_note_id: str, output: Path | None, as_json: bool, **where: Any) -> None:
    """Print a credit note of an invoice, as html to send."""
    api = ops_api(**where)
    path = f"{_path(api, invoice)}/credit-notes/{credit_note_id}"
    if as_json:
        show(api.call("GET", path), as_json, NOTE)
    else:
        _write(api.text(f"{path}?format=html"), output)


def _every(api: Api, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    page = api.call("GET", "/invoices", params=wanted | {"limit": 1000})
    yield from page["data"]
    while page["has_more"]:
        page = api.call("GET", "/invoices", params=wanted | {"limit": 1000, "after": page["next_after"]})
        yield from page["data"]


def _path(api: Api, invoice: str) -> str:
    """Where an invoice is, by its id or the number that stands on it. Raises Failed."""
    if invoice.startswith("inv_"):
        return f"/invoices/{invoice}"
    for each in _every(api, {}):
        if each["number"] == invoice:
            return f"/invoices/{each['id']}"
    raise Failed(f"no invoice {invoice}: `tenora invoice list` shows them")


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
