"""The operations of webhooks and events, for the OpenAPI document."""

from gateway.openapi.operation import BODY, KEYED, LABELS, STRING, Operation, Parameter
from gateway.resources import Listed
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
)

MAX_LISTED = 100
_ID = Parameter("endpoint_id", "path", STRING, "The endpoint's id.", True)
_LIMIT = Parameter(
    "limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20}, "How many at most."
)

WEBHOOKS = (
    Operation(
        method="POST",
        path="/v1/webhooks",
        name="createWebhook",
        summary="Has events sent to a URL, signed as Standard Webhooks are; the secret is shown this once",
        status=201,
        body=NewWebhook,
        answers=(WebhookWithSecret,),
        parameters=LABELS,
        refusals=(*BODY, "limit_reached"),
    ),
    Operation(
        method="GET",
        path="/v1/webhooks",
        name="listWebhooks",
        summary="Your endpoints",
        answers=(Listed[WebhookBody],),
        parameters=LABELS,
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/webhooks/{endpoint_id}",
        name="getWebhook",
        summary="An endpoint, and whether it takes what it is sent",
        answers=(WebhookBody,),
        parameters=(_ID, *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="POST",
        path="/v1/webhooks/{endpoint_id}",
        name="changeWebhook",
        summary="Changes an endpoint, or enables it again",
        body=WebhookChanges,
        answers=(WebhookBody,),
        parameters=(_ID, *LABELS),
        refusals=BODY,
    ),
    Operation(
        method="DELETE",
        path="/v1/webhooks/{endpoint_id}",
        name="deleteWebhook",
        summary="Deletes an endpoint with what was on its way to it",
        answers=(WebhookDeleted,),
        parameters=(_ID, *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="POST",
        path="/v1/webhooks/{endpoint_id}/rotate",
        name="rotateWebhookSecret",
        summary="Makes a new secret, shown this once; the old one signs beside it for a while",
        body=SecretRotation,
        answers=(WebhookWithSecret,),
        parameters=(_ID, *LABELS),
        refusals=BODY,
    ),
    Operation(
        method="POST",
        path="/v1/webhooks/{endpoint_id}/test",
        name="testWebhook",
        summary="Sends an event of type `webhook.test` there",
        answers=(WebhookTest,),
        parameters=(_ID, *LABELS),
        refusals=(*KEYED, "limit_reached"),
    ),
    Operation(
        method="GET",
        path="/v1/webhooks/{endpoint_id}/deliveries",
        name="listDeliveries",
        summary="The latest deliveries of an endpoint, the newest first",
        answers=(Listed[DeliveryBody],),
        parameters=(_ID, _LIMIT, *LABELS),
        refusals=KEYED,
    ),
    Operation(
        method="GET",
        path="/v1/organization/events",
        name="listEvents",
        summary="Your events in their order, for who has missed some",
        answers=(EventPage,),
        parameters=(
            Parameter("after", "query", {"type": "string", "minLength": 1}, "The id of an event; only later ones."),
            _LIMIT,
            *LABELS,
        ),
        refusals=KEYED,
    ),
)
