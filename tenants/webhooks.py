"""Endpoints of webhooks: where a tenant wants to be told of its events, and the secrets that sign what is sent."""

import time
from collections.abc import Sequence

from sqlalchemy import delete, func, update
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.errors import LimitExceeded, NotFound
from tenants.events import KINDS
from tenants.limits import check_choice, check_label
from tenants.secrets import Secret, Secrets
from tenants.stamps import is_id, new_id
from tenants.tables import Event, Tenant, WebhookDelivery, WebhookEndpoint

MAX_ENDPOINTS = 10  # of a tenant
MAX_OVERLAP_S = 7 * 86_400
_NS = 10**9


class WebhookRepository:
    """Every method is about one tenant's endpoints; another's is absent. What a URL may be its caller has checked."""

    def __init__(self, session: AsyncSession, secrets: Secrets) -> None:
        self._session = session
        self._secrets = secrets

    async def create(
        self, tenant_id: str, url: str, kinds: Sequence[str] = (), description: str = ""
    ) -> WebhookEndpoint:
        """Raises NotFound (no such tenant), LimitExceeded, InvalidValue."""
        tenant = select(Tenant).where(Tenant.tenant_id == tenant_id, col(Tenant.deleted_unix_ns).is_(None))
        if (await self._session.exec(tenant.with_for_update())).first() is None:  # no two at once pass the limit
            raise NotFound(f"no tenant {tenant_id}")
        counted = select(func.count()).where(WebhookEndpoint.tenant_id == tenant_id)
        if (await self._session.exec(counted)).one() >= MAX_ENDPOINTS:
            raise LimitExceeded("webhook endpoints", MAX_ENDPOINTS)
        check_label("description", description)
        endpoint = WebhookEndpoint(
            endpoint_id=new_id("whe"),
            tenant_id=tenant_id,
            url=url,
            description=description,
            kinds=checked_kinds(kinds),
            secret_name=self._secrets.new_webhook_secret_name(),
            created_unix_ns=time.time_ns(),
        )
        self._session.add(endpoint)
        await self._session.flush()
        return endpoint

    async def get(self, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
        """Raises NotFound."""
        return await self._found(tenant_id, endpoint_id, locked=False)

    async def list_all(self, tenant_id: str) -> list[WebhookEndpoint]:
        query = select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)
        return list((await self._session.exec(query.order_by(col(WebhookEndpoint.created_unix_ns)))).all())

    async def change(
        self,
        tenant_id: str,
        endpoint_id: str,
        *,
        url: str | None = None,
        kinds: Sequence[str] | None = None,
        description: str | None = None,
        enabled: bool | None = None,
    ) -> WebhookEndpoint:
        """None leaves as it is. A disabled endpoint hears of nothing that happens meanwhile; what it has not taken
        yet ends as failed. Raises NotFound, InvalidValue."""
        endpoint = await self._found(tenant_id, endpoint_id, locked=True)
        endpoint.url = endpoint.url if url is None else url
        if kinds is not None:
            endpoint.kinds = checked_kinds(kinds)
        if description is not None:
            check_label("description", description)
            endpoint.description = description
        if enabled is not None and enabled != (endpoint.status == "enabled"):
            await set_status(self._session, endpoint, "enabled" if enabled else "disabled", time.time_ns())
        self._session.add(endpoint)
        await self._session.flush()
        return endpoint

    async def rotate_secret(self, tenant_id: str, endpoint_id: str, overlap_seconds: int) -> WebhookEndpoint:
        """A new secret; for so many seconds the one before it signs beside it. Raises NotFound."""
        endpoint = await self._found(tenant_id, endpoint_id, locked=True)
        endpoint.old_secret_name = endpoint.secret_name
        endpoint.old_secret_until_unix_ns = time.time_ns() + overlap_seconds * _NS
        endpoint.secret_name = self._secrets.new_webhook_secret_name()
        self._session.add(endpoint)
        await self._session.flush()
        return endpoint

    async def delete(self, tenant_id: str, endpoint_id: str) -> None:
        """With its deliveries. Raises NotFound."""
        endpoint = await self._found(tenant_id, endpoint_id, locked=True)
        await self._session.exec(delete(WebhookDelivery).where(col(WebhookDelivery.endpoint_id) == endpoint_id))
        await self._session.delete(endpoint)
        await self._session.flush()

    async def deliveries(self, tenant_id: str, endpoint_id: str, limit: int) -> list[tuple[WebhookDelivery, Event]]:
        """The newest first. Raises NotFound."""
        await self.get(tenant_id, endpoint_id)
        query = select(WebhookDelivery, Event).join(Event, col(Event.event_id) == col(WebhookDelivery.event_id))
        query = query.where(WebhookDelivery.endpoint_id == endpoint_id)
        query = query.order_by(col(WebhookDelivery.number).desc()).limit(limit)
        return list((await self._session.exec(query)).all())

    async def _found(self, tenant_id: str, endpoint_id: str, *, locked: bool) -> WebhookEndpoint:
        if not is_id("whe", endpoint_id):
            raise NotFound(f"no webhook endpoint {endpoint_id}")
        query = select(WebhookEndpoint).where(
            WebhookEndpoint.tenant_id == tenant_id, WebhookEndpoint.endpoint_id == endpoint_id
        )
        found = await self._session.exec(query.with_for_update() if locked else query)
        endpoint = found.first()
        if endpoint is None:
            raise NotFound(f"no webhook endpoint {endpoint_id}")
        return endpoint


async def set_status(session: AsyncSession, endpoint: WebhookEndpoint, status: str, now_ns: int) -> None:
    """Of an endpoint that this transaction has locked. What a disabled one has not taken yet has failed."""
    endpoint.status, endpoint.failing_since_unix_ns = status, None
    if status == "enabled":
        return
    pending = (col(WebhookDelivery.endpoint_id) == endpoint.endpoint_id) & (col(WebhookDelivery.state) == "pending")
    ended = {"state": "failed", "due_unix_ns": now_ns, "last_error": "endpoint_disabled"}
    await session.exec(update(WebhookDelivery).where(pending).values(**ended))


def checked_kinds(kinds: Sequence[str]) -> list[str]:
    """Each once, in a fixed order. Raises InvalidValue."""
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    return sorted(set(kinds))


def signing_secrets(secrets: Secrets, endpoint: WebhookEndpoint, now_ns: int) -> list[Secret]:
    """Those that sign for the endpoint now, the newest first."""
    names = [endpoint.secret_name]
    if now_ns < endpoint.old_secret_until_unix_ns:
        names.append(endpoint.old_secret_name)
    return [secrets.webhook_secret(endpoint.endpoint_id, name) for name in names]
