"""The `tenora` command: a client of the ops API and, with a tenant's key, of the public API.

Only `serve`, `engine` and `migrate` open anything themselves. Every error is one line that says what to do.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from gateway.client import Answer, Api, ApiFailed, adapter_bytes, progress, push_adapter
from gateway.settings import CannotStart, Settings, default_database, serve_options


class Failed(click.ClickException):
    """Exit code 1, and one line on stderr."""


class OneLine(click.Group):
    """A command whose every error is one line on stderr; exit 0 only on success."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _complain(error.format_message(), error.ctx if isinstance(error, click.UsageError) else None)
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ApiFailed as error:
            raise Failed(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise Failed(f"{where}{error.strerror or type(error).__name__}: give another path") from error


def _complain(message: str, context: click.Context | None) -> None:
    hint = f" (see `{context.command_path} --help`)" if context else ""
    click.echo(f"tenora: {' '.join(message.split())}{hint}", err=True)


def _with(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print the server's JSON.")
home_option = click.option("--home", default="./.tenora", envvar="TENORA_HOME", show_default=True, type=Path)
ops_options = _with(
    home_option,
    click.option("--ops-url", default="http://127.0.0.1:8001", envvar="TENORA_OPS_URL", show_default=True),
    click.option("--operator-key", default="", envvar="TENORA_OPERATOR_KEY", help="[default: from credentials.json]"),
    as_json,
)
tenant_options = _with(
    click.option("--url", default="http://127.0.0.1:8000/v1", envvar="TENORA_URL", show_default=True),
    click.option("--api-key", envvar="TENORA_API_KEY", required=True, help="The tenant's key."),
    as_json,
)


def ops_api(home: Path, ops_url: str, operator_key: str) -> Api:
    """The admin API with the key given, or with the home's own."""
    if not operator_key:
        path = home / "credentials.json"
        try:
            operator_key = json.loads(path.read_bytes())["operator_key"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Failed(f"no operator key in {path}: give --home of the server, or --operator-key") from error
    return Api(ops_url.rstrip("/") + "/admin/v1", operator_key)


def show(answer: Answer, as_json: bool, columns: Mapping[str, str]) -> None:
    """The answer as JSON, or as a table of some of its fields (field → heading)."""
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    rows = answer["data"] if isinstance(answer.get("data"), list) else [answer]
    cells = [list(columns.values()), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None or value == "" else str(value)


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tenora", prog_name="tenora")
def main() -> None:
    """Tenora: serve fine-tuned models to many tenants."""


# ── what opens stores or devices itself ──────────────────────────────────────────────────────────


@main.command("serve", params=list(serve_options()))
def serve(**options: Any) -> None:
    """Start everything on this machine; SIGTERM or Ctrl-C drains it."""
    from gateway.supervisor import serve as run

    settings = Settings.from_options(options)
    start_logging(settings.log_level)
    try:
        run(settings)
    except CannotStart as error:
        raise Failed(str(error)) from error


@main.command("engine", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """Start one engine (`tenora engine --help` shows its own options)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "engine", *arguments])  # noqa: S606


@main.group("migrate")
def migrate() -> None:
    """Change the database's schema."""


database_options = _with(
    home_option,
    click.option("--database-url", default="", envvar="TENORA_DATABASE_URL", help="[default: SQLite in HOME]"),
    as_json,
)


def _migration(verb: str, function: str, description: str) -> None:
    @migrate.command(verb, help=description)
    @database_options
    def command(home: Path, database_url: str, as_json: bool) -> None:
        import migrations

        url = database_url or default_database(home.expanduser().resolve())
        if not database_url:
            home.expanduser().mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            getattr(migrations, function)(url)
        except Exception as error:
            raise Failed(f"migrate {verb} failed: {' '.join(str(error).split())}") from error
        show({"migrate": verb, "ok": True}, as_json, {"migrate": "MIGRATE", "ok": "OK"})


_migration("upgrade", "upgrade", "Bring the schema to the newest revision.")
_migration("downgrade", "downgrade", "Take every table away, with its data.")
_migration("check", "check", "Fail unless the schema is the newest.")


# ── operators ────────────────────────────────────────────────────────────────────────────────────

TENANT = {"id": "ID", "name": "NAME", "status": "STATUS", "time_zone": "TIME ZONE"}
KEY = {
    "id": "ID",
    "name": "NAME",
    "last4": "LAST 4",
    "class": "CLASS",
    "expires_at": "EXPIRES",
    "revoked_at": "REVOKED",
}


@main.group("tenant")
def tenant() -> None:
    """Tenants and their limits. TENANT is an id or a name."""


@tenant.command("create")
@click.argument("name")
@click.option("--time-zone", default="UTC", show_default=True)
@ops_options
def tenant_create(name: str, time_zone: str, as_json: bool, **where: Any) -> None:
    """Make a tenant."""
    body = {"name": name, "time_zone": time_zone}
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
    for field, value in [*((field, found[field]) for field in TENANT), *found["limits"].items()]:
        click.echo(f"{field:32}{_cell(value)}")


@tenant.command("set")
@click.argument("name", metavar="TENANT")
@click.argument("changes", nargs=-1, required=True, metavar="FIELD=VALUE...")
@ops_options
def tenant_set(name: str, changes: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Change limits (requests_per_minute=60, concurrent_requests=none, …), time_zone or status."""
    fields = dict(map(parse_change, changes))
    api = ops_api(**where)
    path = f"/tenants/{find_tenant(api, name)['id']}"
    own = {field: fields.pop(field) for field in ("time_zone", "status") if field in fields}
    if fields:
        api.call("PATCH", f"{path}/limits", json=fields)
    answer = api.call("PATCH", path, json=own) if own else api.call("GET", path)
    show(answer if as_json else {"data": [answer | answer["limits"]]}, as_json, TENANT | {f: f.upper() for f in fields})


@tenant.command("suspend")
@click.argument("name", metavar="TENANT")
@ops_options
def tenant_suspend(name: str, as_json: bool, **where: Any) -> None:
    """Refuse all its keys from now on (`tenant set TENANT status=active` undoes it)."""
    api = ops_api(**where)
    found = find_tenant(api, name)
    show(api.call("PATCH", f"/tenants/{found['id']}", json={"status": "suspended"}), as_json, TENANT)


@main.group("key")
def key() -> None:
    """Tenants' keys."""


@key.command("create")
@click.argument("name", metavar="TENANT")
@click.option("--name", "key_name", default="", help="What the key is for.")
@click.option("--class", "flow_class", type=click.Choice(["interactive", "standard", "batch"]), default="standard")
@click.option("--expires-at", type=int, help="Unix seconds.")
@ops_options
def key_create(name: str, key_name: str, flow_class: str, expires_at: int | None, as_json: bool, **where: Any) -> None:
    """Make a key; it is shown this once."""
    api = ops_api(**where)
    body = {"name": key_name, "class": flow_class, "expires_at": expires_at}
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
@ops_options
def key_rotate(key_id: str, as_json: bool, **where: Any) -> None:
    """Replace a key by a new one with its limits; the old one is revoked at once."""
    made = ops_api(**where).call("POST", f"/keys/{key_id}/rotate")
    show(made, as_json, {"id": "ID", "api_key": "KEY (shown once)"})


@key.command("revoke")
@click.argument("key_id")
@ops_options
def key_revoke(key_id: str, as_json: bool, **where: Any) -> None:
    """Refuse a key for ever, within a second everywhere."""
    show(ops_api(**where).call("DELETE", f"/keys/{key_id}"), as_json, {"id": "ID", "deleted": "REVOKED"})


def find_tenant(api: Api, name: str) -> Answer:
    """A tenant by id or name. Raises Failed."""
    if name.startswith("ten_"):
        return api.call("GET", f"/tenants/{name}")
    for found in api.call("GET", "/tenants")["data"]:
        if found["name"] == name:
            return found
    raise Failed(f"no tenant {name}: `tenora tenant list` shows them")


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,40}")


def parse_change(text: str) -> tuple[str, Any]:
    """FIELD=VALUE; whole numbers are numbers, `none` is no limit. Raises click.UsageError."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise click.UsageError(f"{text}: give FIELD=VALUE")
    if value.lower() in ("none", "null"):
        return field, None
    return field, int(value) if _WHOLE_NUMBER.fullmatch(value) else value


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────

ADAPTER = {"name": "NAME", "version": "VERSION", "base_model": "BASE MODEL", "lora_rank": "RANK", "sha256": "SHA-256"}


@main.group("adapter")
def adapter() -> None:
    """A tenant's adapters, with the tenant's own key."""


@adapter.command("push")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", help="[default: the folder's name]")
@click.option("--base-model", required=True, help="A served base model.")
@click.option("--expected-version", type=click.IntRange(min=0), help="Fail unless this is the current version; 0: new.")
@tenant_options
def adapter_push(folder: Path, name: str | None, base_model: str, expected_version: int | None, **common: Any) -> None:
    """Upload FOLDER (adapter_config.json, adapter_model.safetensors) as the next version."""
    api, name = Api(common["url"], common["api_key"]), name or folder.resolve().name
    try:
        with progress(f"sending {name}", adapter_bytes(folder)) as sent:
            answer = push_adapter(api, folder, name, base_model, expected_version, sent)
    except OSError as error:
        raise Failed(f"{error.filename} can't be read: FOLDER is what PEFT's save_pretrained writes") from error
    show(answer, common["as_json"], ADAPTER)


@adapter.command("list")
@tenant_options
def adapter_list(url: str, api_key: str, as_json: bool) -> None:
    """List the tenant's adapters."""
    show(Api(url, api_key).call("GET", "/adapters"), as_json, ADAPTER)


@adapter.command("delete")
@click.argument("name")
@tenant_options
def adapter_delete(name: str, url: str, api_key: str, as_json: bool) -> None:
    """Delete an adapter with all its versions; running requests finish."""
    gone = Api(url, api_key).call("DELETE", f"/adapters/{name}")
    show(gone, as_json, {"id": "ID", "deleted": "DELETED"})


@main.group("report")
def report() -> None:
    """What a tenant used, with the tenant's own key."""


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


def start_logging(level: str) -> None:
    """One line an event on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for chatty in ("uvicorn", "httpx", "httpcore", "alembic", "asyncio", "aiosqlite"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
