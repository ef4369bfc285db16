"""Prepaid credit: what wallets hold against the grants and the holds they come from: the wallets' part of I5."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants.audit.detached import HOLDS
from tenants.audit.findings import Finding, Findings

_SPLIT = 10**9  # SQLite's sums overflow: quotients and remainders are added apart
_NAMES = "h.request_id, h.attempt, h.spent_picousd, r.price_picousd"
_HOLDS = (
    (
        f"SELECT {_NAMES} FROM wallet_hold h JOIN request_record r ON r.request_id = h.request_id"
        " AND r.attempt = h.attempt WHERE h.resolved_unix_ns IS NULL",
        "hold of request {request_id}, attempt {attempt}: its record is booked and it is still open",
    ),
    (
        f"SELECT {_NAMES} FROM wallet_hold h LEFT JOIN request_record r ON r.request_id = h.request_id"
        " AND r.attempt = h.attempt WHERE h.resolved_unix_ns IS NOT NULL"
        f" AND coalesce(h.spent_picousd, -1) <> coalesce(r.price_picousd, 0) AND NOT {HOLDS.format(id='h.request_id')}",
        "hold of request {request_id}, attempt {attempt}: {spent_picousd} picousd were spent, charged: {price_picousd}",
    ),
    (
        "SELECT request_id, attempt, spent_picousd FROM wallet_hold"
        " WHERE (resolved_unix_ns IS NULL AND spent_picousd IS NOT NULL) OR amount_picousd < 0",
        "hold of request {request_id}, attempt {attempt} was spent and is open",
    ),
)
_WALLETS = "SELECT tenant_id, granted_picousd, reserved_picousd, spent_picousd FROM wallet"


def _sums(amount: str, table: str, condition: str) -> str:
    return (
        f"SELECT tenant_id, sum({amount} / {_SPLIT}) AS high, sum({amount} % {_SPLIT}) AS low FROM {table}"
        f" WHERE {condition} GROUP BY tenant_id"
    )


_GRANTED = _sums("amount_picousd", "wallet_grant", "1 = 1")
_RESERVED = _sums("amount_picousd", "wallet_hold", "resolved_unix_ns IS NULL")
_SPENT = _sums("spent_picousd", "wallet_hold", "resolved_unix_ns IS NOT NULL")


async def check_wallets(connection: AsyncConnection, findings: Findings) -> None:
    finding = findings["I5"]
    finding.checked += (await connection.execute(text("SELECT count(*) FROM wallet_hold"))).scalar_one()
    for query, says in _HOLDS:
        for row in await connection.execute(text(query)):
            finding.breach(says.format(**row._mapping))
    await _check_balances(connection, finding)


async def _check_balances(connection: AsyncConnection, finding: Finding) -> None:
    """A wallet's row is what its grants and holds sum to. Old spending may be left out of it, on both sides."""
    granted, reserved, spent = [await _by_tenant(connection, query) for query in (_GRANTED, _RESERVED, _SPENT)]
    for row in await connection.execute(text(_WALLETS)):
        tenant = row.tenant_id
        if row.reserved_picousd != reserved.get(tenant, 0):
            held = reserved.get(tenant, 0)
            finding.breach(f"wallet of {tenant}: {row.reserved_picousd} picousd reserved, its open holds have {held}")
        left, due = row.granted_picousd - row.spent_picousd, granted.get(tenant, 0) - spent.get(tenant, 0)
        if left != due:
            finding.breach(f"wallet of {tenant}: {left} picousd are left, its grants and holds say {due}")


async def _by_tenant(connection: AsyncConnection, query: str) -> dict[str, int]:
    found = await connection.execute(text(query))
    return {row.tenant_id: int(row.high) * _SPLIT + int(row.low) for row in found}
