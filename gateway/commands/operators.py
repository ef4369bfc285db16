"""`tenora operator`."""

from typing import Any

import click

from gateway.commands.common import ops_api, ops_options, overlap_option, show

OPERATOR = {
    "id": "ID",
    "name": "NAME",
    "last4": "LAST 4",
    "scopes": "SCOPES",
    "expires_at": "EXPIRES",
    "revoked_at": "REVOKED",
}
MADE = {"id": "ID", "operator_key": "KEY (shown once)"}


@click.group("operator")
def operator() -> None:
    """Named operators' keys of the ops port."""


@operator.command("create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["read", "billing", "admin"]),
    multiple=True,
    default=("read",),
    show_default=True,
    help="Repeatable. admin may do all.",
)
@click.option("--expires-at", type=int, help="Unix seconds.")
@ops_options
def operator_create(name: str, scopes: tuple[str, ...], expires_at: int | None, as_json: bool, **where: Any) -> None:
    """Make an operator's key; it is shown this once."""
    body = {"name": name, "scopes": scopes, "expires_at": expires_at}
    show(ops_api(**where).call("POST", "/operators", json=body), as_json, MADE)


@operator.command("list")
@ops_options
def operator_list(as_json: bool, **where: Any) -> None:
    """List all operators' keys, the revoked ones too."""
    show(ops_api(**where).call("GET", "/operators"), as_json, OPERATOR)


@operator.command("rotate")
@click.argument("key_id")
@overlap_option
@ops_options
def operator_rotate(key_id: str, overlap_seconds: int, as_json: bool, **where: Any) -> None:
    """Make a new key with the old one's name and scopes; the old one lives on for a while."""
    made = ops_api(**where).call("POST", f"/operators/{key_id}/rotate", json={"overlap_seconds": overlap_seconds})
    show(made, as_json, MADE)


@operator.command("revoke")
@click.argument("key_id")
@ops_options
def operator_revoke(key_id: str, as_json: bool, **where: Any) -> None:
    """Refuse an operator's key for ever. The last one that may administer stays."""
    show(ops_api(**where).call("DELETE", f"/operators/{key_id}"), as_json, {"id": "ID", "deleted": "REVOKED"})
