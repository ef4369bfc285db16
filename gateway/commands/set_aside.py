"""`tenora set-aside`, with an operator's key."""

from typing import Any

import click

from gateway.commands.common import apply_options, ops_api, ops_options, show

_COLUMNS = {
    "request_id": "REQUEST",
    "attempt": "ATTEMPT",
    "tenant_id": "TENANT",
    "state": "STATE",
    "reason": "REASON",
    "rate_card_id": "RATE CARD",
    "input_tokens": "INPUT",
    "output_tokens": "OUTPUT",
}
_which = apply_options(
    click.argument("request_id"), click.option("--attempt", type=click.IntRange(0), default=0, show_default=True)
)


@click.group("set-aside")
def set_aside() -> None:
    """Usage records that could not be booked."""


@set_aside.command("list")
@ops_options
def set_aside_list(as_json: bool, **where: Any) -> None:
    """List them all, and what became of them."""
    show(ops_api(**where).call("GET", "/set-aside"), as_json, _COLUMNS)


@set_aside.command("settle")
@_which
@ops_options
def set_aside_settle(request_id: str, attempt: int, as_json: bool, **where: Any) -> None:
    """Charge for one, once its rate card is there again."""
    settled = ops_api(**where).call("POST", f"/set-aside/{request_id}/settle", json={"attempt": attempt})
    show(settled, as_json, _COLUMNS)


@set_aside.command("write-off")
@_which
@click.option("--reason", required=True, help="Kept in the audit log.")
@ops_options
def set_aside_write_off(request_id: str, attempt: int, reason: str, as_json: bool, **where: Any) -> None:
    """Charge nobody for one, ever."""
    body = {"reason": reason, "attempt": attempt}
    show(ops_api(**where).call("POST", f"/set-aside/{request_id}/write-off", json=body), as_json, _COLUMNS)
