"""What all commands share: one-line errors, options, tables, and the way to our two APIs."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from gateway.client import Answer, Api, ApiFailed
from gateway.settings import async_database_url


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
        except BrokenPipeError:  # `tenora … | head`: whoever reads has enough
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python still flushes it at its end)
            ctx.exit(1)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise Failed(f"{where}{error.strerror or type(error).__name__}: give another path") from error


def _complain(message: str, context: click.Context | None) -> None:
    hint = f" (see `{context.command_path} --help`)" if context else ""
    click.echo(f"tenora: {' '.join(message.split())}{hint}", err=True)


def apply_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print the server's JSON.")
home_option = click.option("--home", default="./.tenora", envvar="TENORA_HOME", show_default=True, type=Path)
ops_options = apply_options(
    home_option,
    click.option("--ops-url", default="http://127.0.0.1:8001", envvar="TENORA_OPS_URL", show_default=True),
    click.option("--operator-key", default="", envvar="TENORA_OPERATOR_KEY", help="[default: from credentials.json]"),
    as_json,
)
database_options = apply_options(
    home_option,
    click.option(
        "--database-url",
        default="",
        envvar="TENORA_DATABASE_URL",
        callback=lambda _context, _option, url: async_database_url(url),
        help="[default: SQLite in HOME]",
    ),
    as_json,
)
overlap_option = click.option(
    "--overlap-seconds",
    type=click.IntRange(0, 30 * 86_400),
    default=86_400,
    show_default=True,
    help="How long the old key lives on; 0 ends it at once.",
)
tenant_url = click.option("--url", default="http://127.0.0.1:8000/v1", envvar="TENORA_URL", show_default=True)


def tenants_key(*, required: bool) -> Callable[[Any], Any]:
    return click.option("--api-key", envvar="TENORA_API_KEY", required=required, help="The tenant's key.")


tenant_options = apply_options(tenant_url, tenants_key(required=True), as_json)


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
    cells = [list(columns.values()), *([cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None or value == "" else str(value)


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
