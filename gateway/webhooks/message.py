"""A webhook as Standard Webhooks has it (standardwebhooks.com): the body of an event, and the headers that sign it."""

import base64
import hashlib
import hmac
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from tenants.secrets import Secret
from tenants.tables import Event

_S = 10**9
SHOWN_PREFIX = "whsec_"


def body_of(event: Event) -> bytes:
    """The same bytes at every attempt."""
    at = datetime.fromtimestamp(event.occurred_unix_ns // _S, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": event.kind, "timestamp": at, "data": msgspec.Raw(event.data.encode())})


def signed_headers(event_id: str, body: bytes, secrets: Iterable[Secret], now_ns: int) -> dict[str, str]:
    """One signature a secret; the time is the attempt's, the id the event's at every attempt."""
    seconds = str(now_ns // _S)
    message = f"{event_id}.{seconds}.".encode() + body
    signatures = (hmac.digest(secret.reveal(), message, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": seconds,
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in signatures),
    }


def shown(secret: Secret) -> str:
    """As its owner gets it to see, once."""
    return SHOWN_PREFIX + base64.b64encode(secret.reveal()).decode()
