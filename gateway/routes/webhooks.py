"""/v1/webhooks and /v1/organization/events: where the caller is told of what happens, and what has happened."""

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath

from gateway.access import needs
from gateway.call import call_of
from gateway.errors import invalid
from gateway.parts import parts_of, principal_of
from gateway.resources import Listed
from gateway.schemas import MAX_BODY_BYTES, decode
from gateway.webhooks.endpoints import Webhooks
from gateway.webhooks.message import shown
from gateway.webhooks.operations import MAX_LISTED
from gateway.webhooks.resources import (
    DeliveryBody,
    EventPage,
    NewWebhook,
    SecretRotation,
    WebhookBody,
    WebhookChanges,
    WebhookDeleted,
    WebhookTest,
    WebhookWithSecret,
    delivery_body,
    event_body,
    webhook_facts,
)
from tenants.secrets import Secret
from tenants.tables import WebhookEndpoint


@post("/v1/webhooks", status_code=201, opt=needs("webhooks"))
async def create_webhook(request: Request) -> Response:
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), NewWebhook)
    made = await _webhooks(request).create(principal_of(request).tenant_id, body)
    return Response(_with_secret(*made), status_code=201)


@get("/v1/webhooks", opt=needs("webhooks"))
async def list_webhooks(request: Request) -> Listed[WebhookBody]:
    endpoints = await _webhooks(request).list_all(principal_of(request).tenant_id)
    return Listed(data=[WebhookBody(**webhook_facts(endpoint)) for endpoint in endpoints])


@get("/v1/webhooks/{endpoint_id:str}", opt=needs("webhooks"))
async def get_webhook(request: Request, endpoint_id: FromPath[str]) -> WebhookBody:
    return WebhookBody(**webhook_facts(await _webhooks(request).get(principal_of(request).tenant_id, endpoint_id)))


@post("/v1/webhooks/{endpoint_id:str}", status_code=200, opt=needs("webhooks"))
async def change_webhook(request: Request, endpoint_id: FromPath[str]) -> WebhookBody:
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), WebhookChanges)
    changed = await _webhooks(request).change(principal_of(request).tenant_id, endpoint_id, body)
    return WebhookBody(**webhook_facts(changed))


@delete("/v1/webhooks/{endpoint_id:str}", status_code=200, opt=needs("webhooks"))
async def delete_webhook(request: Request, endpoint_id: FromPath[str]) -> WebhookDeleted:
    await _webhooks(request).delete(principal_of(request).tenant_id, endpoint_id)
    return WebhookDeleted(id=endpoint_id)


@post("/v1/webhooks/{endpoint_id:str}/rotate", status_code=200, opt=needs("webhooks"))
async def rotate_webhook_secret(request: Request, endpoint_id: FromPath[str]) -> WebhookWithSecret:
    body = decode(await call_of(request.scope).body(MAX_BODY_BYTES), SecretRotation)
    tenant_id = principal_of(request).tenant_id
    return _with_secret(*await _webhooks(request).rotate_secret(tenant_id, endpoint_id, body.overlap_seconds))


@post("/v1/webhooks/{endpoint_id:str}/test", status_code=200, opt=needs("webhooks"))
async def test_webhook(request: Request, endpoint_id: FromPath[str]) -> WebhookTest:
    return WebhookTest(event_id=await _webhooks(request).test(principal_of(request).tenant_id, endpoint_id))


@get("/v1/webhooks/{endpoint_id:str}/deliveries", opt=needs("webhooks"))
async def list_deliveries(request: Request, endpoint_id: FromPath[str]) -> Listed[DeliveryBody]:
    found = await _webhooks(request).deliveries(principal_of(request).tenant_id, endpoint_id, _limit(request))
    return Listed(data=[delivery_body(delivery, event) for delivery, event in found])


@get("/v1/organization/events", opt=needs("webhooks"))
async def list_events(request: Request) -> EventPage:
    """In the order in which they were told: who goes on from ``last_id`` misses none."""
    limit, after = _limit(request), request.query_params.get("after")
    events = await _webhooks(request).events(principal_of(request).tenant_id, after, limit + 1)
    page = events[:limit]
    return EventPage(
        data=[event_body(event) for event in page],
        has_more=len(events) > limit,
        last_id=page[-1].event_id if page else after,
    )


def _with_secret(endpoint: WebhookEndpoint, secret: Secret) -> WebhookWithSecret:
    return WebhookWithSecret(**webhook_facts(endpoint), secret=shown(secret))


def _webhooks(request: Request) -> Webhooks:
    return parts_of(request).webhooks


def _limit(request: Request) -> int:
    """Raises ApiError 400."""
    text = request.query_params.get("limit", "20")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LISTED):
        raise invalid(f"'limit' is a whole number from 1 to {MAX_LISTED}.", "limit")
    return int(text)


handlers = [
    create_webhook,
    list_webhooks,
    get_webhook,
    change_webhook,
    delete_webhook,
    rotate_webhook_secret,
    test_webhook,
    list_deliveries,
    list_events,
]
