"""What the fields of tenants and keys may hold: every number has bounds, every name a form."""

from collections.abc import Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

from tenants.errors import InvalidValue
from tenants.periods import LAST_ANCHOR_DAY
from tenants.quota.budgets import ScopeKind
from tenants.quota.quota import Limits
from tenants.tables import MAX_NAME_LENGTH, ApiKey, Tenant

CLASSES = ("interactive", "standard", "batch")
CACHE_POLICIES = ("private", "shared", "off")
KEY_SCOPES = ("inference", "adapters:read", "adapters:write", "usage", "webhooks")
OPERATOR_SCOPES = ("read", "billing", "admin")
RATE_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
SPEND_LIMIT = "spend_limit_picousd_per_month"
_BOUNDS = {  # limits that are never null
    "default_output_tokens": (1, 10**9),
    "max_adapters": (0, 10**6),
    "max_adapter_rank": (0, 65_536),
    "max_adapter_bytes": (0, 1 << 40),
    "max_storage_bytes": (0, 1 << 50),
    "weight": (1, 1000),
}
_MAX_ALERTS = 10
_MAX_SPEND = (1 << 63) - 1
_CHOICES = {"max_class": CLASSES, "cache_policy": CACHE_POLICIES}
SPEND_ALERTS = "spend_alerts"
TENANT_LIMITS = (*RATE_LIMITS, SPEND_LIMIT, SPEND_ALERTS, *_BOUNDS, *_CHOICES)
KEY_LIMITS = (*RATE_LIMITS, SPEND_LIMIT)
SCOPED_LIMITS = KEY_LIMITS
MAX_SCOPED_LIMITS = 32  # of one key
_MAX_MODEL_LENGTH = 64

SCOPE_KINDS: tuple[ScopeKind, ...] = ("model", "adapter")


def set_limits(row: Tenant | ApiKey, changes: Mapping[str, Any]) -> None:
    """Changes only the limits named. Raises InvalidValue for an unknown one and for a bad value."""
    allowed = TENANT_LIMITS if isinstance(row, Tenant) else KEY_LIMITS
    for field, value in changes.items():
        if field not in allowed:
            raise InvalidValue(field, f"is no limit here; limits are {', '.join(allowed)}")
        if field in _CHOICES:
            check_choice(field, value, _CHOICES[field])
        elif field in _BOUNDS:
            _check_integer(field, value, *_BOUNDS[field])
        elif field == SPEND_ALERTS:
            _check_alerts(value)
        else:
            _check_nullable(field, value)
        setattr(row, field, value)


def set_scoped_limits(key: ApiKey, kind: ScopeKind, name: Any, changes: Mapping[str, Any]) -> None:
    """The same for what the key does with one base model or one adapter. Without any limit the scope is gone."""
    if not isinstance(name, str) or not 0 < len(name.encode()) <= _MAX_MODEL_LENGTH or not name.isprintable():
        raise InvalidValue(kind, f"is a name of at most {_MAX_MODEL_LENGTH} bytes")
    for field in changes:
        if field not in SCOPED_LIMITS:
            raise InvalidValue(field, f"is no limit of one {kind}; limits are {', '.join(SCOPED_LIMITS)}")
        _check_nullable(field, changes[field])
    old = next((scope for scope in key.scoped_limits if scope.get(kind) == name), {})
    values = {field: old.get(field) for field in SCOPED_LIMITS} | dict(changes)
    others = [scope for scope in key.scoped_limits if scope.get(kind) != name]
    if all(value is None for value in values.values()):
        key.scoped_limits = others
    elif len(others) == MAX_SCOPED_LIMITS:
        raise InvalidValue(kind, f"a key has limits for at most {MAX_SCOPED_LIMITS} models and adapters")
    else:
        key.scoped_limits = [*others, {kind: name, **values}]


def check_scopes(scopes: Sequence[str], choices: tuple[str, ...]) -> list[str]:
    """Each once, in a fixed order. Raises InvalidValue for none and for an unknown one."""
    if not scopes:
        raise InvalidValue("scopes", f"is one or more of {', '.join(choices)}")
    for scope in scopes:
        check_choice("scopes", scope, choices)
    return sorted(set(scopes))


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidValue(field, f"is one of {', '.join(choices)}")


def check_name(name: str) -> None:
    check_label("name", name)
    if not name.strip():
        raise InvalidValue("name", "may not be empty")


def check_label(field: str, text: str) -> None:
    """Of what an operator or a tenant calls something; '' is none. A line break would end its row of a table."""
    check_length(field, text)
    if text and not text.isprintable():
        raise InvalidValue(field, "is printable text, on one line")


def check_length(field: str, text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_NAME_LENGTH:
        raise InvalidValue(field, f"has at most {MAX_NAME_LENGTH} bytes")


def check_time_zone(name: str) -> ZoneInfo:
    """Raises InvalidValue."""
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:
        raise InvalidValue("time_zone", f"{name!r} is no IANA time zone") from error


def check_anchor_day(day: int) -> None:
    """Raises InvalidValue."""
    _check_integer("billing_anchor_day", day, 1, LAST_ANCHOR_DAY)


def check_expiry(expires_unix_ns: int | None, now_unix_ns: int) -> None:
    if expires_unix_ns is not None and expires_unix_ns <= now_unix_ns:
        raise InvalidValue("expires_at", "lies in the future")


def _check_nullable(field: str, value: Any) -> None:
    """A rate or a spend limit."""
    if field in RATE_LIMITS:
        Limits(**{field: value})
    elif value is not None:
        _check_integer(field, value, 0, _MAX_SPEND)


def _check_alerts(value: Any) -> None:
    is_list = isinstance(value, list) and len(value) <= _MAX_ALERTS and all(type(each) is int for each in value)
    if not is_list or any(not 1 <= each <= 100 for each in value) or sorted(set(value)) != value:
        raise InvalidValue(SPEND_ALERTS, f"is a rising list of at most {_MAX_ALERTS} percentages from 1 to 100")


def _check_integer(field: str, value: Any, smallest: int, largest: int) -> None:
    if type(value) is not int or not smallest <= value <= largest:
        raise InvalidValue(field, f"is a whole number from {smallest} to {largest}")
