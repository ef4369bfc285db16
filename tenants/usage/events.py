"""Ledger entries in the words of others: CloudEvents 1.0, and meter events as Stripe takes them. Pure."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from tenants.tables import LedgerEntry

SOURCE = "/tenora/ledger"
_NS = 10**9
_DATA = (
    *("request_id", "key_id", "meter", "quantity", "unit_price_picousd", "amount_picousd"),
    *("model", "base_model", "flow_class", "rate_card_id"),
)


def cloud_event(entry: LedgerEntry) -> dict[str, Any]:
    """In structured mode: (``source``, ``id``) is the entry's permanent name, ``subject`` its tenant."""
    return {
        "specversion": "1.0",
        "id": entry.entry_id,
        "source": SOURCE,
        "type": f"tenora.usage.{entry.meter}",
        "subject": entry.tenant_id,
        "time": _rfc3339(entry.occurred_unix_ns),
        "datacontenttype": "application/json",
        "data": {name: getattr(entry, name) for name in _DATA},
    }


def meter_events(entries: Iterable[LedgerEntry], references: Mapping[str, str]) -> list[dict[str, Any]]:
    """Of the entries whose tenant has a billing reference. ``identifier`` is the entry's permanent name, so that what
    is sent twice counts once; ``value`` is decimal text."""
    return [
        {
            "event_name": entry.meter,
            "identifier": entry.entry_id,
            "timestamp": entry.occurred_unix_ns // _NS,
            "payload": {"stripe_customer_id": references[entry.tenant_id], "value": str(entry.quantity)},
        }
        for entry in entries
        if entry.tenant_id in references
    ]


def _rfc3339(unix_ns: int) -> str:
    """To the nanosecond."""
    seconds, rest = divmod(unix_ns, _NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
