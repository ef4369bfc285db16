"""`tenora key`."""

from typing import Any

import click

from gateway.commands.common import find_tenant, ops_api, ops_options, overlap_option, parse_change, show

SCOPES = ("inference", "adapters:read", "adapters:write", "usage", "webhooks")
KEY = {
    "id": "ID",
    "name": "NAME",
    "last4": "LAST 4",
    "class": "CLASS",
    "scopes": "SCOPES",
    "expires_at": "EXPIRES",
    "revoked_at": "REVOKED",
}


@click.group("key")
def key() -> None:
    """Tenants' keys."""


@key.command("create")
@click.argument("name", metavar="TENANT")
@click.option("--name", "key_name", default="", help="What the key is for.")
@click.option("--class", "flow_class", type=click.Choice(["interactive", "standard", "batch"]), default="standard")
@click.option("--scope", "scopes", type=click.Choice(SCOPES), multiple=True, help="Repeatable.  [default: all]")
@click.option("--expires-at", type=int, help="Unix seconds.")
@ops_options
def key_create(name: str, key_name: str, flow_class: str, as_json: bool, **more: Any) -> None:
    """Make a key; it is shown this once."""
    scopes, expires_at = more.pop("scopes"), more.pop("expires_at")
    api = ops_api(**more)
    body = {"name": key_name, "class": flow_class, "scopes": scopes or SCOPES, "expires_at": expires_at}
    made = api.call("POST", f"/tenants/{find_tenant(api, name)['id']}/keys", json=body)
    show(made, as_json, {"id": "ID", "api_key": "KEY (shown once)"})


@key.command("list")
@click.argument("name", metavar="TENANT")
@ops_options
def key_list(name: str, as_json: bool, **where: Any) -> None:
    """List a tenant's keys, the revoked ones too."""
    api = ops_api(**where)
    show(api.call("GET", f"/tenants/{find_tenant(api, name)['id']}/keys"), as_json, KEY)


@key.command("rotate")
@click.argument("key_id")
@overlap_option
@ops_options
def key_rotate(key_id: str, overlap_seconds: int, as_json: bool, **where: Any) -> None:
    """Make a new key with all that the old one has; the old one lives on for a while."""
    made = ops_api(**where).call("POST", f"/keys/{key_id}/rotate", json={"overlap_seconds": overlap_seconds})
    show(made, as_json, {"id": "ID", "api_key": "KEY (shown once)"})


@key.command("revoke")
@click.argument("key_id")
@ops_options
def key_revoke(key_id: str, as_json: bool, **where: Any) -> None:
    """Refuse a key for ever, within a second everywhere; what it runs ends at its next step."""
    show(ops_api(**where).call("DELETE", f"/keys/{key_id}"), as_json, {"id": "ID", "deleted": "REVOKED"})


@key.command("limit")
@click.argument("key_id")
@click.argument("changes", nargs=-1, required=True, metavar="FIELD=VALUE...")
@ops_options
def key_limit(key_id: str, changes: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Change a key's limits (requests_per_minute=60, tokens_per_minute=none, …); with model=NAME or adapter=NAME
    among them, those for it alone."""
    answer = ops_api(**where).call("PATCH", f"/keys/{key_id}/limits", json=dict(map(parse_change, changes)))
    rows = [{"scope": "all", **answer}]
    for scope in answer["scoped"]:
        name = f"model {scope['model']}" if scope["model"] else f"adapter {scope['adapter']}"
        rows.append({**scope, "scope": name})
    columns = ("scope", "requests_per_minute", "tokens_per_minute", "concurrent_requests")
    show(answer if as_json else {"data": rows}, as_json, {column: column.upper() for column in columns})
