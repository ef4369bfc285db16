"""`tenora audit`: proves the books from the journals and the database, apart from the server that writes them."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.commands.common import Failed, database_options, show
from gateway.settings import default_database

if TYPE_CHECKING:
    from gateway.commands.journals import HomeJournal
    from tenants.audit import Finding

PRINTED = "audit.head"  # in HOME: the last heads that --head printed
AUDIT_LOG = ""
SAID = 5  # breaches in the one line of an error
_HEAD = re.compile(r"(?:([^=\s]+)=)?([0-9]{1,18}):([0-9a-f]{64})")
Heads = dict[str, dict[int, str]]  # journal ('' = the audit log) → number → hash


@dataclass(slots=True)
class Audited:
    """All that one run found."""

    findings: "list[Finding]"
    journals: "list[HomeJournal]"
    head: tuple[int, str]
    not_covered: list[str]

    @property
    def heads(self) -> list[str]:
        """As --head prints them and --expect takes them."""
        lines = [f"{journal.name}={_head(journal.head)}" for journal in self.journals if journal.head[0]]
        return [_head(self.head), *lines]

    @property
    def breaches(self) -> list[str]:
        return [f"{found.invariant}: {words}" for found in self.findings for words in found.examples]

    @property
    def num_breaches(self) -> int:
        return sum(found.breaches for found in self.findings)


@click.command("audit")
@click.option("--head", "print_head", is_flag=True, help="Print the chains' heads, and expect them from now on.")
@click.option("--expect", "expected", multiple=True, metavar="[JOURNAL=]NUMBER:HASH", help="A head printed before.")
@click.option("--secrets", type=Path, envvar="TENORA_SECRETS", help="[default: HOME/secrets.json]")
@click.option("--some-journals", is_flag=True, help="Other hosts have journals too.")
@database_options
def audit(
    print_head: bool,
    expected: tuple[str, ...],
    secrets: Path | None,
    some_journals: bool,
    home: Path,
    database_url: str,
    as_json: bool,
) -> None:
    """Recompute the ledger from the journals, check every invariant and hash chain; exit 1 on any breach.

    May run while the home is served. Heads that were printed before must lie on their chains: the last ones are kept
    in HOME/audit.head.
    """
    home = home.expanduser().resolve()
    if not database_url and not (home / "tenora.db").exists():
        raise Failed(f"no database in {home}: give --home of the server, or --database-url")
    kept = home / PRINTED
    known = _parse([*expected, *(kept.read_text().split() if kept.exists() else [])])
    url, secrets = database_url or default_database(home), secrets or home / "secrets.json"
    audited = asyncio.run(_audit(url, home, secrets, known, not some_journals))
    if print_head and not audited.num_breaches:
        kept.write_text("\n".join(audited.heads) + "\n")
    _print(audited, print_head, as_json)
    if audited.num_breaches:
        first = "; ".join(audited.breaches[:SAID])
        raise Failed(f"{audited.num_breaches} breaches (--json shows more): {first}")


def _parse(texts: Iterable[str]) -> Heads:
    """Raises click.UsageError."""
    heads: Heads = defaultdict(dict)
    for text in texts:
        found = _HEAD.fullmatch(text)
        if not found:
            raise click.UsageError(f"{text}: give NUMBER:HASH as --head prints it")
        if number := int(found[2]):
            heads[found[1] or AUDIT_LOG][number] = found[3]
    return heads


async def _audit(url: str, home: Path, secrets: Path, known: Heads, all_journals: bool) -> Audited:
    """Raises Failed for a database, a journal or secrets that can't be read."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.commands.journals import home_journals
    from tenants.audit import audit as audit_books
    from tenants.audit import begin_snapshot
    from tenants.audit_log import Head
    from tenants.database import Database
    from tenants.errors import UnsafeSecrets
    from tenants.secrets import Secrets

    database = Database(url)
    try:
        journals = home_journals(home, lambda: Secrets.load(secrets).every_context_key, known)
        await database.start()
        async with database.session() as session:
            await begin_snapshot(session)
            heads = [Head(*head) for head in known[AUDIT_LOG].items()]
            found = await audit_books(session, journals, heads, all_journals=all_journals)
        head = found.log_head.number, found.log_head.hash
        return Audited(found.findings, journals, head, found.not_covered)
    except UnsafeSecrets as error:
        raise Failed(str(error)) from error
    except (SQLAlchemyError, OSError) as error:
        raise Failed(f"the database can't be read ({type(error).__name__}): give --home or --database-url") from error
    finally:
        await database.close()


def _print(audited: Audited, print_head: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_shown(audited), indent=2))
    elif print_head:
        click.echo("\n".join(audited.heads))
    else:
        columns = {"id": "INVARIANT", "title": "SAYS", "checked": "CHECKED", "breaches": "BREACHES"}
        show({"data": [_shown_finding(found) for found in audited.findings]}, False, columns)
        for words in audited.not_covered:
            click.echo(f"not covered: {words}")


def _shown(audited: Audited) -> dict[str, Any]:
    (chain,) = (found for found in audited.findings if found.invariant == "I11")
    return {
        "object": "audit",
        "ok": not audited.num_breaches,
        "invariants": [_shown_finding(found) for found in audited.findings],
        "not_covered": audited.not_covered,
        "audit_log": {"events": audited.head[0], "head": _head(audited.head), "breaches": chain.examples},
        "journals": [
            {"journal": each.name, "records": each.num_entries, "acknowledged": each.acked, "head": _head(each.head)}
            for each in audited.journals
        ],
    }


def _shown_finding(found: "Finding") -> dict[str, Any]:
    return {
        "id": found.invariant,
        "title": found.title,
        "checked": found.checked,
        "breaches": found.breaches,
        "examples": found.examples,
    }


def _head(head: tuple[int, str]) -> str:
    return f"{head[0]}:{head[1]}"
