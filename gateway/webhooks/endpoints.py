"""What a tenant does with its webhook endpoints. HTTP is routes/webhooks.py, delivery courier.py."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.errors import ApiError, invalid, invalid_key
from gateway.webhooks.addresses import BadDestination, destination_of
from gateway.webhooks.resources import NewWebhook, WebhookChanges
from tenants.database import Database
from tenants.errors import InvalidValue, LimitExceeded, NotFound
from tenants.events import EventRepository, emit_test
from tenants.secrets import Secret, Secrets
from tenants.tables import Event, WebhookDelivery, WebhookEndpoint
from tenants.webhooks import WebhookRepository


@dataclass(frozen=True, slots=True)
class Webhooks:
    """Every call is about one tenant's; what is not its own is absent: ApiError 404."""

    database: Database
    secrets: Secrets
    allow_loopback: bool = False

    async def create(self, tenant_id: str, new: NewWebhook) -> tuple[WebhookEndpoint, Secret]:
        """Raises ApiError 400, 409."""
        url = self._checked(new.url)
        async with self._changing() as webhooks:
            try:
                made = await webhooks.create(tenant_id, url, new.event_types, new.description)
            except NotFound:  # the account was deleted meanwhile
                raise invalid_key() from None
        return made, self._newest_secret(made)

    async def change(self, tenant_id: str, endpoint_id: str, changes: WebhookChanges) -> WebhookEndpoint:
        """Raises ApiError 400, 404."""
        url = None if changes.url is None else self._checked(changes.url)
        more = {"kinds": changes.event_types, "description": changes.description, "enabled": changes.enabled}
        async with self._changing() as webhooks:
            return await webhooks.change(tenant_id, endpoint_id, url=url, **more)

    async def rotate_secret(
        self, tenant_id: str, endpoint_id: str, overlap_seconds: int
    ) -> tuple[WebhookEndpoint, Secret]:
        async with self._changing() as webhooks:
            endpoint = await webhooks.rotate_secret(tenant_id, endpoint_id, overlap_seconds)
        return endpoint, self._newest_secret(endpoint)

    async def delete(self, tenant_id: str, endpoint_id: str) -> None:
        async with self._changing() as webhooks:
            await webhooks.delete(tenant_id, endpoint_id)

    async def list_all(self, tenant_id: str) -> list[WebhookEndpoint]:
        async with self._reading() as session:
            return await WebhookRepository(session, self.secrets).list_all(tenant_id)

    async def get(self, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
        async with self._reading() as session:
            return await WebhookRepository(session, self.secrets).get(tenant_id, endpoint_id)

    async def deliveries(self, tenant_id: str, endpoint_id: str, limit: int) -> list[tuple[WebhookDelivery, Event]]:
        async with self._reading() as session:
            return await WebhookRepository(session, self.secrets).deliveries(tenant_id, endpoint_id, limit)

    async def test(self, tenant_id: str, endpoint_id: str) -> str:
        """The id of the event that is on its way now. Raises ApiError 400 for an endpoint that is told nothing."""
        with _told():
            async with self.database.transaction() as session:
                endpoint = await WebhookRepository(session, self.secrets).get(tenant_id, endpoint_id)
                if endpoint.status != "enabled":
                    raise invalid("This endpoint is disabled: enable it first.", "endpoint_id")
                return await emit_test(session, tenant_id, endpoint_id)

    async def events(self, tenant_id: str, after: str | None, limit: int) -> list[Event]:
        """Raises ApiError 404 for an ``after`` that is no event of the tenant's."""
        async with self._reading() as session:
            events = EventRepository(session)
            number = 0 if after is None else await events.number_of(tenant_id, after)
            return await events.page(tenant_id, number, limit)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[WebhookRepository]:
        with _told():
            async with self.database.transaction() as session:
                yield WebhookRepository(session, self.secrets)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncSession]:
        with _told():
            async with self.database.session() as session:
                yield session

    def _checked(self, url: str) -> str:
        try:
            return str(destination_of(url, allow_loopback=self.allow_loopback).url)
        except BadDestination as error:
            raise invalid(f"'url' {error}.", "url") from None

    def _newest_secret(self, endpoint: WebhookEndpoint) -> Secret:
        return self.secrets.webhook_secret(endpoint.endpoint_id, endpoint.secret_name)


@contextlib.contextmanager
def _told():
    """What the tables refuse, as the caller is told."""
    try:
        yield
    except NotFound as error:
        raise ApiError(f"There is {error}.", code="not_found") from None
    except LimitExceeded as error:
        raise ApiError(f"This account's limit is reached: {error}.", code="limit_reached") from None
    except InvalidValue as error:
        raise invalid(str(error), error.field) from None
