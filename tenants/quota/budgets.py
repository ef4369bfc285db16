"""What a request may cost at most, and which spend windows it counts in. Pure: dates and integers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo

from tenants.periods import Period, month_of
from tenants.pricing import METERS, RateCard

ScopeKind: TypeAlias = Literal["model", "adapter"]
_latest: dict[tuple[str, int], Period] = {}  # by time zone and anchor day
KEPT_MS = 86_400_000  # a window's sum outlives its period by a day, for what began in it


@dataclass(frozen=True, slots=True)
class Window:
    """One scope's spend in one period. ``limit_picousd`` None: nothing limits that scope now, but what is counted
    anywhere is counted here too. ``stamp`` is that of the row which holds the limit: a sum older than its limit may
    miss what nobody counted then."""

    name: str
    limit_picousd: int | None
    stamp: int
    period: Period

    @property
    def end_unix_ms(self) -> int:
        return self.period.end_unix_ns // 1_000_000


@dataclass(frozen=True, slots=True)
class Spend:
    """What one request takes of its windows: ``picousd``, an upper bound as long as it runs."""

    picousd: int
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a key and its tenant may spend: of prepaid credit or not, and in a month; None = no limit. ``scoped`` are
    (kind, name, limit) of what the key does with one base model or adapter. Stamps are those of the two rows' last
    change."""

    tenant_limit: int | None = None
    key_limit: int | None = None
    scoped: tuple[tuple[ScopeKind, str, int], ...] = ()
    tenant_stamp: int = 0
    key_stamp: int = 0
    time_zone: str = "UTC"
    anchor_day: int = 1
    is_prepaid: bool = False

    @property
    def is_limited(self) -> bool:
        return self.tenant_limit is not None or self.key_limit is not None or bool(self.scoped)

    def windows(self, key_id: str, base_model: str, adapter: str, unix_ns: int) -> tuple[Window, ...]:
        """Every window that a request begun at that time counts in; () when none of them has a limit."""
        if not self.is_limited:
            return ()
        return _windows(self, key_id, base_model, adapter, period_of(unix_ns, self.time_zone, self.anchor_day))


def scopes_of(key_id: str, base_model: str, adapter: str) -> tuple[str, ...]:
    """The names of all scopes that a request is in; ``adapter`` '' is none."""
    key = f"key:{key_id}"
    scopes = ("tenant", key, f"{key}:model:{base_model}")
    return (*scopes, f"{key}:adapter:{adapter}") if adapter else scopes


@lru_cache(1024)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def period_of(unix_ns: int, time_zone: str, anchor_day: int) -> Period:
    """The month of a tenant's calendar that holds that instant: nearly always the one that was asked for before."""
    period = _latest.get((time_zone, anchor_day))
    if period is None or not period.start_unix_ns <= unix_ns < period.end_unix_ns:
        period = _latest[time_zone, anchor_day] = month_of(unix_ns, _zone(time_zone), anchor_day)
    return period


@lru_cache(1024)
def _windows(budget: Budget, key_id: str, base_model: str, adapter: str, period: Period) -> tuple[Window, ...]:
    limits = {(kind, name): limit for kind, name, limit in budget.scoped}
    stamped = [
        (budget.tenant_limit, budget.tenant_stamp),
        (budget.key_limit, budget.key_stamp),
        (limits.get(("model", base_model)), budget.key_stamp),
        (limits.get(("adapter", adapter)), budget.key_stamp),
    ]
    scopes = scopes_of(key_id, base_model, adapter)
    found = tuple(_window(scope, period, *one) for scope, one in zip(scopes, stamped, strict=False))
    return found if any(window.limit_picousd is not None for window in found) else ()


def bound_picousd(card: RateCard, model: str, flow_class: str, prompt_tokens: int, output_tokens: int) -> int:
    """The most that such a request can cost, whatever of its prompt is found in a cache."""
    cold, warm, output, request = (card.price(meter, model, flow_class) for meter in METERS)
    return prompt_tokens * max(cold, warm) + output_tokens * output + request


def limited(windows: Sequence[Window]) -> list[Window]:
    return [window for window in windows if window.limit_picousd is not None]


def _window(scope: str, period: Period, limit: int | None, stamp: int) -> Window:
    return Window(f"{scope}@{period.label}", limit, stamp, period)
