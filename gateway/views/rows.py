"""How the admin API shows rows: never a key's text, nor its digest."""

import json
from typing import Any

from tenants.limits import KEY_LIMITS, SCOPE_KINDS, SCOPED_LIMITS, TENANT_LIMITS
from tenants.pricing import RateCard
from tenants.slo.objectives import PPM, Objective
from tenants.tables import ApiKey, AuditEvent, OperatorKey, Tenant

Body = dict[str, Any]
_NS = 10**9


def tenant_body(tenant: Tenant) -> Body:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "status": tenant.status,
        "time_zone": tenant.time_zone,
        "billing_anchor_day": tenant.billing_anchor_day,
        "billing_reference": tenant.billing_reference,
        "created_at": tenant.created_unix_ns // _NS,
        "limits": limits_of(tenant, TENANT_LIMITS),
    }


def key_body(key: ApiKey) -> Body:
    more = {"tenant_id": key.tenant_id, "class": key.flow_class, "limits": key_limits_body(key)}
    return _credential_body("api_key", key) | more


def key_limits_body(key: ApiKey) -> Body:
    """``scoped``: those for one base model or one adapter."""
    scoped = [{name: scope.get(name) for name in (*SCOPE_KINDS, *SCOPED_LIMITS)} for scope in key.scoped_limits]
    return {**limits_of(key, KEY_LIMITS), "scoped": scoped}


def operator_body(key: OperatorKey) -> Body:
    return _credential_body("operator", key)


def _credential_body(kind: str, key: ApiKey | OperatorKey) -> Body:
    """``pepper`` is the number of the secret that it was made with: an old one after `secrets rotate`."""
    return {
        "id": key.key_id,
        "object": kind,
        "name": key.name,
        "last4": key.last4,
        "scopes": key.scopes,
        "pepper": key.pepper,
        "created_at": key.created_unix_ns // _NS,
        "expires_at": seconds(key.expires_unix_ns),
        "revoked_at": seconds(key.revoked_unix_ns),
    }


def rate_card_body(card: RateCard) -> Body:
    items = [
        {"meter": meter, "model": model, "class": flow_class, "price_picousd": price}
        for (meter, model, flow_class), price in sorted(card.prices.items())
    ]
    return {
        "id": card.rate_card_id,
        "object": "rate_card",
        "version": card.version,
        "effective_at": seconds(card.effective_unix_ns),
        "currency": card.currency,
        "items": items,
    }


def event_body(event: AuditEvent) -> Body:
    """``occurred_unix_ns`` whole: the hash covers it."""
    return {
        "number": event.number,
        "object": "audit_event",
        "occurred_unix_ns": event.occurred_unix_ns,
        "actor": {"key_id": event.actor_key_id or None, "name": event.actor},
        "action": event.action,
        "target": event.target,
        "before": json.loads(event.before),
        "after": json.loads(event.after),
        "prev_hash": event.prev_hash,
        "hash": event.hash,
    }


def objective_body(objective: Objective) -> Body:
    """``effective_at`` is when this version comes into force; ``threshold_ms`` is for reading, the ns are exact."""
    return {
        "id": objective.version_id,
        "object": "slo_objective",
        "tenant_id": objective.tenant_id,
        "name": objective.name,
        "description": objective.description,
        "model": objective.model,
        "class": objective.flow_class,
        "sli": objective.sli,
        "threshold_ns": objective.threshold_ns or None,
        "threshold_ms": objective.threshold_ns / 10**6 if objective.threshold_ns else None,
        "target": objective.target_ppm / PPM,
        "window_days": objective.window_days,
        "version": objective.version,
        "effective_at": seconds(objective.effective_unix_ns),
        "retired": objective.retired,
    }


def listed(data: list[Body], **more: Any) -> Body:
    return {"object": "list", "data": data, **more}


def limits_of(row: Tenant | ApiKey, names: tuple[str, ...]) -> Body:
    return {name: getattr(row, name) for name in names}


def seconds(unix_ns: int | None) -> int | None:
    return None if unix_ns is None else unix_ns // _NS
