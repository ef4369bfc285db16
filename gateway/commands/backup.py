"""`tenora backup`: a copy of all that an installation keeps, while it is served.

The order makes the copy sound. First how far each journal was acknowledged, then the database, then the journals: so
every record that the copied cursor passes over is in the copied database, and whatever that lacks is delivered again
by the engine that opens the copy. Blobs come behind the rows that name them.
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import click

from gateway.commands.common import Failed, database_options, show
from gateway.settings import default_database

DUMP = "database.dump"
DATABASE = "tenora.db"
_RETRIES = 5


@click.command("backup")
@click.argument("to", type=Path)
@click.option("--blobs", type=Path, envvar="TENORA_BLOBS", help="[default: HOME/blobs]")
@click.option("--secrets", type=Path, envvar="TENORA_SECRETS", help="[default: HOME/secrets.json]")
@click.option("--pg-dump", default="pg_dump", show_default=True, help="As new as the PostgreSQL server, or newer.")
@database_options
def backup(
    to: Path, blobs: Path | None, secrets: Path | None, pg_dump: str, home: Path, database_url: str, as_json: bool
) -> None:
    """Copy everything that is kept into the new folder TO, whether HOME is being served or not.

    To restore: `tenora serve --home` a copy of TO (with PostgreSQL: `pg_restore` TO/database.dump into an empty
    database first, and give its --database-url). `tenora audit` proves the copy, before and after.
    """
    home, to = home.expanduser().resolve(), to.expanduser().resolve()
    if not database_url and not (home / DATABASE).exists():
        raise Failed(f"no database in {home}: give --home of the server, or --database-url")
    if to.exists() and any(to.iterdir()):
        raise Failed(f"{to} is not empty: give a new folder")
    with _for_us_only(), _nothing_left_of_failures(to):
        _copy_all(home, to, database_url, blobs or home / "blobs", secrets or home / "secrets.json", pg_dump)
    done = {"backup": str(to), "bytes": sum(path.stat().st_size for path in to.rglob("*") if path.is_file())}
    show(done, as_json, {"backup": "BACKUP", "bytes": "BYTES"})


@contextlib.contextmanager
def _for_us_only():
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _nothing_left_of_failures(to: Path):
    """A copy that broke off would be taken for a backup, and be in the next one's way."""
    try:
        yield
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        raise


def _copy_all(home: Path, to: Path, database_url: str, blobs: Path, secrets: Path, pg_dump: str) -> None:
    to.mkdir(parents=True, exist_ok=True)
    engines = sorted(path for path in (home / "engines").glob("*") if path.is_dir())
    for engine in engines:
        _copy_cursor(engine, to / "engines" / engine.name)
    _copy_database(home, database_url, to, pg_dump)
    for engine in engines:
        _copy_journal(engine, to / "engines" / engine.name)
    _copy_blobs(blobs, to / "blobs")
    _copy(secrets, to / "secrets.json")
    for name in ("credentials.json", "audit.head"):
        if (home / name).exists():
            _copy(home / name, to / name)


def _copy_database(home: Path, database_url: str, to: Path, pg_dump: str) -> None:
    url = database_url or default_database(home)
    if not url.startswith("sqlite"):
        _dump(url, to / DUMP, pg_dump)
        return
    from sqlalchemy.engine import make_url

    source = make_url(url).database
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
        contextlib.closing(sqlite3.connect(to / DATABASE)) as copy,
    ):
        live.backup(copy)


def _dump(url: str, to: Path, pg_dump: str) -> None:
    """Raises Failed. The password goes by the environment: arguments can be read by others."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url).set(drivername="postgresql")
    program = shutil.which(pg_dump)
    if program is None:
        raise Failed(f"no {pg_dump} on PATH: install PostgreSQL's client programs, or give --pg-dump")
    where = f"--dbname={parsed.set(password=None).render_as_string(hide_password=False)}"
    environment = {"PGPASSWORD": str(parsed.password)} if parsed.password is not None else {}
    arguments = [program, "--format=custom", f"--file={to}", "--no-owner", "--no-privileges", where]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise Failed(f"{pg_dump} failed: {' '.join(done.stderr.split())}")


def _copy_cursor(engine: Path, to: Path) -> None:
    from engine.wire.journal import ACK

    to.mkdir(parents=True)
    if (engine / ACK).exists():
        _copy(engine / ACK, to / ACK)


def _copy_journal(engine: Path, to: Path) -> None:
    """The growing file first: sealed meanwhile, it only is there twice. Raises Failed when it is pruned too often."""
    from engine.wire.journal import BASE, LOG, sealed_files

    if (engine / LOG).exists():
        _copy(engine / LOG, to / LOG)
    for _ in range(_RETRIES):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, being old: the rest is noted as complete
            for path in sealed_files(engine):
                _copy(path, to / path.name)
            if (engine / BASE).exists():
                _copy(engine / BASE, to / BASE)
            return
    raise Failed(f"the journal {engine.name} changes faster than it can be copied: try again")


def _copy_blobs(blobs: Path, to: Path) -> None:
    """What is deleted meanwhile is left out; files never change under their name. Staged uploads come again."""
    for path in sorted((blobs / "tenants").rglob("*")):
        if path.is_file() and not path.is_symlink():
            target = to / path.relative_to(blobs)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                _copy(path, target)


def _copy(path: Path, to: Path) -> None:
    shutil.copy2(path, to)
    to.chmod(0o600)
