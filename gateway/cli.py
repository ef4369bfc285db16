"""The `tenora` command: a client of the ops API and, with a tenant's key, of the public API.

Only `serve`, `engine`, `migrate`, `secrets`, `audit`, `backup` and `rollup` open anything themselves. Every error is
one line that says what to do.
"""

import os
import sys
from pathlib import Path
from typing import Any

import click

from gateway.commands.adapters import adapter
from gateway.commands.audit import audit
from gateway.commands.backup import backup
from gateway.commands.common import Failed, OneLine, database_options, show
from gateway.commands.exports import export
from gateway.commands.invoices import invoice
from gateway.commands.keys import key
from gateway.commands.operators import operator
from gateway.commands.prices import price
from gateway.commands.reports import report
from gateway.commands.rollup import rollup
from gateway.commands.secrets import secrets
from gateway.commands.set_aside import set_aside
from gateway.commands.slo import slo
from gateway.commands.sums import sums
from gateway.commands.tenants import tenant
from gateway.logs import log_to_stderr
from gateway.settings import CannotStart, Settings, default_database, serve_options


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tenora", prog_name="tenora")
def main() -> None:
    """Tenora: serve fine-tuned models to many tenants."""


# ── what opens stores or devices itself ──────────────────────────────────────────────────────────


@main.command("serve", params=list(serve_options()))
def serve(**options: Any) -> None:
    """Start everything on this machine; SIGTERM or Ctrl-C drains it."""
    from gateway.serve.supervisor import serve as run

    settings = Settings.from_options(options)
    log_to_stderr(settings.log_level)
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
            raise Failed(f"migrate {verb} failed: {' '.join(str(getattr(error, 'orig', error)).split())}") from error
        show({"migrate": verb, "ok": True}, as_json, {"migrate": "MIGRATE", "ok": "OK"})


_migration("upgrade", "upgrade", "Bring the schema to the newest revision.")
_migration("downgrade", "downgrade", "Take every table away, with its data.")
_migration("check", "check", "Fail unless the schema is the newest.")


for command in (
    *(
        tenant,
        key,
        operator,
        secrets,
        audit,
        set_aside,
        backup,
        rollup,
        sums,
        adapter,
        price,
        invoice,
        report,
        slo,
        export,
    ),
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="tenora")
