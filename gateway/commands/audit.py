"""`tenora audit`: proves that the audit log is whole, apart from the server that writes it."""

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path

import click

from gateway.commands.common import Failed, database_options, show
from gateway.settings import default_database

PRINTED = "audit.head"  # in HOME: the last head that --head printed
_HEAD = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")


@click.command("audit")
@click.option("--head", "print_head", is_flag=True, help="Print the chain's head, and expect it from now on.")
@click.option("--expect", "expected", multiple=True, metavar="NUMBER:HASH", help="A head printed before. Repeatable.")
@database_options
def audit(print_head: bool, expected: tuple[str, ...], home: Path, database_url: str, as_json: bool) -> None:
    """Check the audit log's hash chain; exit 1 if anything in it was changed, removed or reordered.

    Heads that were printed before must lie on the chain: the last one is kept in HOME/audit.head.
    """
    home = home.expanduser().resolve()
    if not database_url and not (home / "tenora.db").exists():
        raise Failed(f"no database in {home}: give --home of the server, or --database-url")
    kept = home / PRINTED
    known = [*expected, *(kept.read_text().split() if kept.exists() else [])]
    number, digest, breaches = asyncio.run(_verify(database_url or default_database(home), list(map(_parse, known))))
    if print_head and not breaches and number:
        kept.write_text(f"{number}:{digest}\n")
    answer = {"audit_log": {"events": number, "head": f"{number}:{digest}", "breaches": breaches}}
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    elif print_head:
        click.echo(f"{number}:{digest}")
    else:
        row = {"chain": "audit log", "events": number, "breaches": len(breaches)}
        show(row, False, {"chain": "CHAIN", "events": "EVENTS", "breaches": "BREACHES"})
    if breaches:
        raise Failed("the audit log was tampered with: " + "; ".join(breaches))


def _parse(text: str) -> tuple[int, str]:
    """Raises click.UsageError."""
    found = _HEAD.fullmatch(text)
    if not found:
        raise click.UsageError(f"{text}: give NUMBER:HASH as --head prints it")
    return int(found[1]), found[2]


async def _verify(url: str, known: Iterable[tuple[int, str]]) -> tuple[int, str, list[str]]:
    """The head's number and hash, and what is wrong. Raises Failed for a database that can't be read."""
    from sqlalchemy.exc import SQLAlchemyError

    from tenants.audit_log import AuditLog, Head
    from tenants.database import Database

    database = Database(url)
    try:
        await database.start()
        async with database.session() as session:
            log = AuditLog(session)
            breaches = await log.verify(Head(*head) for head in known)
            head = await log.head()
        return head.number, head.hash, breaches
    except (SQLAlchemyError, OSError) as error:
        raise Failed(f"the database can't be read ({type(error).__name__}): give --home or --database-url") from error
    finally:
        await database.close()
