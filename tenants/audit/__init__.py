"""The audit: recomputes what the books must hold, apart from what wrote them.

Nothing here imports pricing, the ledger, invoices, rollups or reports: a fault of theirs must not hide itself. All of
it reads one snapshot of the database, so that it may run while serving: a record that was acknowledged before the
snapshot must be in it, and what is in it was in a journal before; what lies between the two is on its way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.audit.books import check_books
from tenants.audit.detached import read_detached
from tenants.audit.findings import Finding, Findings
from tenants.audit.invoices import check_invoices
from tenants.audit.journals import Journal, Journaled, check_journals
from tenants.audit.replicas import JournaledTime, check_replicas
from tenants.audit.wallets import check_wallets
from tenants.audit_log import AuditLog, Head

__all__ = ["Audit", "Finding", "Journal", "Journaled", "JournaledTime", "audit", "begin_snapshot"]


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found, the audit log's head, and what nothing of this is said of."""

    findings: list[Finding]
    log_head: Head
    not_covered: list[str]


async def begin_snapshot(session: AsyncSession) -> None:
    """Has all that the session reads from now on be of this moment."""
    connection = await session.connection()
    if connection.dialect.name == "postgresql":
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
    await connection.execute(text("SELECT count(*) FROM rate_card"))


async def audit(
    session: AsyncSession, journals: Sequence[Journal], known: Iterable[Head] = (), *, all_journals: bool = True
) -> Audit:
    """Every invariant with what breaks it. Make the ``journals`` before ``begin_snapshot``, and call this behind it.

    ``known`` are heads of the audit log that must lie on it. ``all_journals`` False: others exist, so that what these
    lack is no breach.
    """
    findings, connection = Findings(), await session.connection()
    detached = await read_detached(connection)
    await check_journals(connection, journals, findings, detached, all_journals=all_journals)
    await check_books(connection, findings)
    await check_invoices(connection, findings, detached)
    await check_replicas(connection, findings)
    await check_wallets(connection, findings)
    head = await _check_log(session, known, findings)
    return Audit(findings.all(), head, detached.words())


async def _check_log(session: AsyncSession, known: Iterable[Head], findings: Findings) -> Head:
    log = AuditLog(session)
    head = await log.head()
    findings["I11"].checked += head.number
    for words in await log.verify(known):
        findings["I11"].breach(f"audit log: {words}")
    return head
