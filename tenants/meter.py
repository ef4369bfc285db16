"""The request context: what the gateway knows of a request, sealed, carried by the engine, and read again
when its usage record comes back, perhaps in another process after a crash."""

import hmac
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from tenants.errors import ForgedContext
from tenants.secrets import Secret

FlowClass: TypeAlias = Literal["interactive", "standard", "batch"]

MAX_CONTEXT_BYTES = 512
MAX_MODEL_BYTES = 64  # a served base model's name
MAX_REQUESTED_MODEL_BYTES = 80  # an adapter's name of 64 bytes, "@" and its version
MAX_LABEL_BYTES = 128
_MAC_BYTES = 16
_TAG = b"tenora-context\x01"


class RequestContext(Struct, frozen=True, array_like=True):
    """Who, what, at which price: pinned at admission.

    ``request_id`` is the bare UUIDv7 text; (request_id, attempt) names one dispatch, since a request that lost
    its engine before its first token is sent once more. ``model`` is what the caller asked for; prices go by
    ``base_model``. ``label`` is the caller's own X-Request-ID: recorded, never a key.
    """

    tenant_id: str
    key_id: str
    request_id: str
    attempt: int
    base_model: str
    model: str
    adapter_version_id: str
    flow_class: FlowClass
    rate_card_id: str
    admitted_unix_ns: int
    trace_id: str = ""
    operation: str = ""  # "chat" | "completions"
    label: str = ""
    streamed: bool = False
    num_choices: int = 1  # prompts × choices of each


_decoder = msgspec.msgpack.Decoder(RequestContext)


def seal(context: RequestContext, key: Secret) -> bytes:
    """MAC ‖ msgpack, ≤ 512 bytes.

    The label is cut to its bound. Raises ValueError when another field is longer than its own: such a name
    should not have been accepted anywhere.
    """
    if len(context.label.encode()) > MAX_LABEL_BYTES:
        label = context.label.encode()[:MAX_LABEL_BYTES].decode("utf-8", "ignore")
        context = msgspec.structs.replace(context, label=label)
    _check(len(context.base_model.encode()) <= MAX_MODEL_BYTES, "base_model")
    _check(len(context.model.encode()) <= MAX_REQUESTED_MODEL_BYTES, "model")
    body = msgspec.msgpack.encode(context)
    _check(_MAC_BYTES + len(body) <= MAX_CONTEXT_BYTES, "context")
    return _mac(body, key) + body


def unseal(data: bytes, *keys: Secret) -> RequestContext:
    """The context in ``data``. Raises ForgedContext unless we sealed it, with one of these keys."""
    mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if len(data) > MAX_CONTEXT_BYTES or not any(hmac.compare_digest(mac, _mac(body, key)) for key in keys):
        raise ForgedContext("the context's MAC is not ours")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ForgedContext(f"the context's shape is not ours: {error}") from error


def _mac(body: bytes, key: Secret) -> bytes:
    return hmac.digest(key.reveal(), _TAG + body, "sha256")[:_MAC_BYTES]


def _check(fits: bool, field: str) -> None:
    if not fits:
        raise ValueError(f"{field} is too long for a request context")
