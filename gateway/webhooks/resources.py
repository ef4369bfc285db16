"""What is read and answered at /v1/webhooks and /v1/organization/events: msgspec structs."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from gateway.resources import Seconds
from tenants.events import TEST_KIND, Kind
from tenants.tables import Event, WebhookDelivery, WebhookEndpoint
from tenants.webhooks import MAX_OVERLAP_S

Url: TypeAlias = Annotated[str, Meta(min_length=1, max_length=2048)]
Description: TypeAlias = Annotated[str, Meta(max_length=64)]
Kinds: TypeAlias = Annotated[list[Kind], Meta(max_length=32)]
AnyKind: TypeAlias = Kind | Literal["webhook.test"]
assert TEST_KIND == "webhook.test"
_NS = 10**9


class NewWebhook(Struct, frozen=True):
    """``event_types`` empty: all of them."""

    url: Url
    event_types: Kinds = []
    description: Description = ""


class WebhookChanges(Struct, frozen=True):
    """null leaves a field as it is. ``enabled`` true also undoes what failures have disabled."""

    url: Url | None = None
    event_types: Kinds | None = None
    description: Description | None = None
    enabled: bool | None = None


class SecretRotation(Struct, frozen=True):
    """How long the old secret signs beside the new one."""

    overlap_seconds: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] = 86_400


class WebhookBody(Struct, frozen=True, kw_only=True):
    """``status``: `disabled` by you, `gone` by its own 410, `failing` for days; only `enabled` is told of events."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str
    event_types: list[str]
    description: str
    status: Literal["enabled", "disabled", "gone", "failing"]
    failing_since: Seconds | None
    old_secret_until: Seconds | None
    created_at: Seconds


class WebhookWithSecret(WebhookBody, frozen=True, kw_only=True):
    """The only answer with the secret in it."""

    secret: Annotated[str, Meta(pattern="^whsec_[A-Za-z0-9+/]{43}=$")]


class WebhookDeleted(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["webhook"] = "webhook"
    deleted: Literal[True] = True


class WebhookTest(Struct, frozen=True, kw_only=True):
    """The event that is on its way: its id is the `webhook-id` of what comes."""

    event_id: str
    object: Literal["webhook.test"] = "webhook.test"


class DeliveryBody(Struct, frozen=True, kw_only=True):
    """``last_status``: null where there was no answer; ``last_error`` says why."""

    object: Literal["webhook.delivery"] = "webhook.delivery"
    event_id: str
    event_type: str
    state: Literal["pending", "delivered", "failed"]
    attempts: Annotated[int, Meta(ge=0)]
    last_status: int | None
    last_error: str | None
    next_attempt_at: Seconds | None
    finished_at: Seconds | None


class WebhookSeen(WebhookBody, frozen=True, kw_only=True):
    """As an operator sees it; the latest deliveries first."""

    deliveries: list[DeliveryBody]


class EventBody(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["event"] = "event"
    type: AnyKind
    created_at: Seconds
    data: Annotated[Raw, Meta(description="An object.")]


class EventPage(Struct, frozen=True, kw_only=True):
    """``last_id`` as the next call's ``after`` gives what follows, also what has yet to happen."""

    object: Literal["list"] = "list"
    data: list[EventBody]
    has_more: bool
    last_id: str | None


def webhook_facts(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """The fields of a WebhookBody."""
    return {
        "id": endpoint.endpoint_id,
        "url": endpoint.url,
        "event_types": endpoint.kinds,
        "description": endpoint.description,
        "status": endpoint.status,
        "failing_since": _seconds(endpoint.failing_since_unix_ns),
        "old_secret_until": _seconds(endpoint.old_secret_until_unix_ns or None),
        "created_at": _seconds(endpoint.created_unix_ns),
    }


def delivery_body(delivery: WebhookDelivery, event: Event) -> DeliveryBody:
    at, pending = _seconds(delivery.due_unix_ns), delivery.state == "pending"
    return DeliveryBody(
        event_id=event.event_id,
        event_type=event.kind,
        state=delivery.state,  # pyright: ignore[reportArgumentType]
        attempts=delivery.attempts,
        last_status=delivery.last_status or None,
        last_error=delivery.last_error or None,
        next_attempt_at=at if pending else None,
        finished_at=None if pending else at,
    )


def event_body(event: Event) -> EventBody:
    return EventBody(
        id=event.event_id,
        type=event.kind,  # pyright: ignore[reportArgumentType]
        created_at=event.occurred_unix_ns // _NS,
        data=Raw(event.data.encode()),
    )


def _seconds(unix_ns: int | None) -> int | None:
    return None if unix_ns is None else unix_ns // _NS
