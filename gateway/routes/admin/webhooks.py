"""/admin/v1/tenants/{id}/webhooks: where a tenant is told of events, and what came of it. Its own to change."""

from litestar import Controller, get
from litestar.datastructures import State
from litestar.params import FromPath

from gateway.administration import needs, session_of
from gateway.resources import Listed
from gateway.routes.admin.tenants import tenant_of
from gateway.webhooks.resources import WebhookSeen, delivery_body, webhook_facts
from tenants.webhooks import WebhookRepository

MAX_DELIVERIES = 20  # of each endpoint


class Webhooks(Controller):
    path = "/tenants/{tenant_id:str}/webhooks"

    @get(guards=[needs("read")])
    async def list_all(self, state: State, tenant_id: FromPath[str]) -> Listed[WebhookSeen]:
        """Each endpoint with its latest deliveries. No secret, and no event's data."""
        await tenant_of(state, tenant_id)
        async with session_of(state) as session:
            webhooks = WebhookRepository(session, state.ops.secrets)
            seen = []
            for endpoint in await webhooks.list_all(tenant_id):
                found = await webhooks.deliveries(tenant_id, endpoint.endpoint_id, MAX_DELIVERIES)
                latest = [delivery_body(delivery, event) for delivery, event in found]
                seen.append(WebhookSeen(**webhook_facts(endpoint), deliveries=latest))
        return Listed(data=seen)
