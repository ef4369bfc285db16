"""`tenora rollup`: old seconds of replicas become sums of hours."""

import asyncio
import time
from pathlib import Path

import click

from gateway.commands.common import Failed, database_options, show
from gateway.settings import default_database

_DAY_NS = 86_400 * 10**9


@click.command("rollup")
@click.option(
    "--older-than-days",
    type=click.IntRange(2, 36_500),
    default=100,
    show_default=True,
    help="Leave younger ones; longer than --journal-keep-days, audits still compare every second with its journal.",
)
@database_options
def rollup(older_than_days: int, home: Path, database_url: str, as_json: bool) -> None:
    """Keep the time of replicas by the hour instead of by the second, but for the last days.

    31 million rows a replica and year become 8,766. May run while the home is served, and any number of times. Reports
    and audits go on with the sums; an hour that lacks a record stays as it is, for the audit to tell of.
    """
    home = home.expanduser().resolve()
    if not database_url and not (home / "tenora.db").exists():
        raise Failed(f"no database in {home}: give --home of the server, or --database-url")
    url = database_url or default_database(home)
    done = asyncio.run(_roll_up(url, time.time_ns() - older_than_days * _DAY_NS))
    show({"rolled_up": done}, as_json, {"rolled_up": "ROWS ROLLED UP"})


async def _roll_up(url: str, before_ns: int) -> int:
    """Raises Failed."""
    from sqlalchemy.exc import SQLAlchemyError

    from tenants.database import Database
    from tenants.replica_hours import roll_up

    database = Database(url)
    try:
        await database.start()
        return await roll_up(database, before_ns)
    except (SQLAlchemyError, OSError) as error:
        raise Failed(f"the database can't be changed ({type(error).__name__}): `tenora migrate check`") from error
    finally:
        await database.close()
