"""A tenant's end, in one transaction and in the one order of locks (README): so that nobody who books, delivers or
changes something waits for it in a circle."""

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.adapters.hours import AdapterHours
from tenants.postings import number_postings
from tenants.repositories import TenantRepository


async def delete_tenant(session: AsyncSession, tenant_id: str, now_unix_ns: int) -> list[str]:
    """Charges what it owes for its adapters up to now and takes all that is its own away for ever; the hashes of the
    files that are nobody's then. Only the audit log is written behind it. Raises NotFound."""
    tenants = TenantRepository(session)
    await tenants.lock(tenant_id)
    charged = await AdapterHours(session).close_tenant(tenant_id, now_unix_ns)
    orphans = await tenants.delete(tenant_id)
    await number_postings(session, charged)
    return orphans
