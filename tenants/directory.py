"""Who is calling: keys, tenants and prices in memory, so that authentication asks no database."""

import asyncio
import contextlib
import hmac
import logging
import secrets as random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tenants import keys
from tenants.database import Database
from tenants.errors import StoreUnavailable
from tenants.key_repository import KeyRepository, OperatorRepository
from tenants.limits import RATE_LIMITS, SCOPE_KINDS, SPEND_LIMIT, ScopeKind
from tenants.meter import FlowClass
from tenants.patience import patience
from tenants.pricing import RateCard
from tenants.quota.budgets import Budget
from tenants.quota.quota import Limits
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.secrets import Secrets
from tenants.tables import ApiKey, OperatorKey, Tenant

EPOCH_KEY = "tn:epoch"
_POLL_S = 0.25
_LOOK_S = 2.0  # longer than two polls and a read of what changed
_STORE_DEADLINE_S = 0.25
_REFRESH_ANYWAY_S = 30.0  # bounds what a lost epoch could hide
_REFRESH_BLIND_S = 0.5  # while the store can't tell of changes: a revocation takes a second then, too
_OVERLAP_NS = 60 * 10**9  # longer than any of our transactions: what committed late is read again
_NO_DIGEST = bytes(32)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What a tenant may keep."""

    max_adapters: int
    max_adapter_rank: int
    max_adapter_bytes: int
    max_storage_bytes: int


@dataclass(frozen=True, slots=True)
class ScopedLimits:
    """A key's limits for one base model (whichever adapter it runs with) or for one adapter (all its versions)."""

    kind: ScopeKind
    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated key and its tenant. ``scopes`` ⊆ limits.KEY_SCOPES; ``budget`` is what the two may spend."""

    tenant_id: str
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    flow_class: FlowClass
    max_class: FlowClass
    weight: int
    limits: Limits
    key_limits: Limits
    scoped_limits: tuple[ScopedLimits, ...]
    budget: Budget
    default_output_tokens: int
    adapter_limits: AdapterLimits
    cache_policy: str
    time_zone: str


@dataclass(frozen=True, slots=True)
class Operator:
    """An authenticated operator key. ``scopes`` ⊆ {"read", "billing", "admin"}."""

    key_id: str
    name: str
    scopes: frozenset[str]


async def bump_epoch(redis: Redis) -> None:
    """Tells every gateway that keys, tenants or prices changed. Call it after the commit.

    The value is random, so that a store which lost its data can't repeat an old one. Raises StoreUnavailable: the
    change is written, and whoever can't reach the store either reads it from the database within a second. (A store
    that fails for us alone hides it for at most 30 s.)
    """
    try:
        async with patience(_STORE_DEADLINE_S):
            await redis.set(EPOCH_KEY, random.token_hex(16))
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable("the change is written but could not be announced") from error


@dataclass(frozen=True, slots=True)
class _Known:
    """What the snapshot holds of one key."""

    digest: bytes
    pepper: int
    expires_unix_ns: int | None
    holder: Principal | Operator | None  # None = revoked, suspended or deleted
    budget: Budget | None = None  # of a tenant's key, whether or not it may be used


_UNKNOWN = _Known(_NO_DIGEST, 0, None, None)


class Directory:
    """A snapshot of keys, tenants and rate cards that follows the database through the store's epoch.

    ``authenticate`` never waits. The epoch is polled every 250 ms; while the store is down ``stale`` is set and the
    database is asked instead. Who has a key that ``may_be_new`` waits for the ``next_look`` before refusing it: that
    one reads the database for all who wait.
    ``on_revoked`` is called with the ids of keys that have just ceased to be valid by revocation, suspension or
    deletion (not by expiry: what an expiring key began may end).
    """

    def __init__(self, database: Database, redis: Redis, secrets: Secrets) -> None:
        self._database = database
        self._redis = redis
        self._secrets = secrets
        self._tenants: dict[str, Tenant] = {}
        self._live: dict[str, _Known] = {}
        self._live_rows: dict[str, ApiKey] = {}
        self._ops: dict[str, _Known] = {}
        self._rate_cards: list[RateCard] = []  # by effective time
        self._seen_unix_ns = 0  # the latest change that we have read
        self._epoch: bytes | str | None = None
        self._refreshed_s = 0.0
        self._follower: asyncio.Task[None] | None = None
        self._next_look: asyncio.Future[bool] | None = None  # somebody waits for the look that begins next
        self.stale = False
        self.on_revoked: Callable[[frozenset[str]], None] = lambda _: None

    async def start(self) -> None:
        """Reads everything, then follows. Raises what the database raises; a store that is down only makes it stale."""
        await self._follow_once(force=True)
        self._follower = asyncio.create_task(self._follow(), name="tenants-directory")

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None

    def authenticate(self, text: str) -> Principal | None:
        """The tenant key's principal; None when malformed, unknown, revoked, expired or suspended.

        All cost the same: one HMAC, one look-up, one comparison in constant time.
        """
        holder = self._check(text, self._live)
        return holder if isinstance(holder, Principal) else None

    def budget_of(self, key_id: str) -> Budget | None:
        """What that key may spend, also one that is not valid any more; None for one that we never heard of, or have
        forgotten with its deleted tenant."""
        return self._live.get(key_id, _UNKNOWN).budget

    def holds(self, key_id: str) -> bool:
        """Whether that key is neither revoked nor its tenant suspended, as far as we have heard."""
        return self._live.get(key_id, _UNKNOWN).holder is not None

    def authenticate_operator(self, text: str) -> Operator | None:
        """As ``authenticate``, for the ops port's keys."""
        holder = self._check(text, self._ops)
        return holder if isinstance(holder, Operator) else None

    def may_be_new(self, text: str) -> bool:
        """Well-formed, with a key id that we never heard of: perhaps made since we last looked."""
        key_id = keys.parse(text)
        return key_id is not None and key_id not in self._live and key_id not in self._ops

    async def next_look(self) -> bool:
        """Until the database was read once more from now on: all that was written before is known then. False: it could
        not be read, not within _LOOK_S."""
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with patience(_LOOK_S):
                return await asyncio.shield(self._next_look)
        return False

    @property
    def rate_cards(self) -> Mapping[str, RateCard]:
        """Every rate card by id."""
        return MappingProxyType({card.rate_card_id: card for card in self._rate_cards})

    def rate_card(self, unix_ns: int) -> RateCard:
        """The card in force at that time. Raises LookupError when none is yet."""
        for card in reversed(self._rate_cards):
            if card.effective_unix_ns <= unix_ns:
                return card
        raise LookupError("no rate card is in force")

    async def refresh(self) -> None:
        """Reads what changed since the last refresh. Raises what the database raises."""
        since = max(0, self._seen_unix_ns - _OVERLAP_NS)
        async with self._database.session() as session:
            live = await KeyRepository(session).changed_since(since)
            tenants = await TenantRepository(session).changed_since(since)  # second: no key without its tenant
            operators = await OperatorRepository(session).changed_since(since)
            rate_cards = await RateCardRepository(session).list_all()
        self._merge(tenants, live, operators)
        self._rate_cards = rate_cards
        self._refreshed_s = time.monotonic()

    def _merge(self, tenants: list[Tenant], live: list[ApiKey], operators: list[OperatorKey]) -> None:
        self._tenants |= {tenant.tenant_id: tenant for tenant in tenants}
        self._live_rows |= {key.key_id: key for key in live}
        changed = {tenant.tenant_id for tenant in tenants}
        touched = live + [key for key in self._live_rows.values() if key.tenant_id in changed]
        before = {key.key_id for key in touched if self.holds(key.key_id)}
        self._live |= {key.key_id: _known_key(key, self._tenants[key.tenant_id]) for key in touched}
        self._ops |= {key.key_id: _known_operator(key) for key in operators}
        rows = (*tenants, *live, *operators)
        self._seen_unix_ns = max((row.changed_unix_ns for row in rows), default=self._seen_unix_ns)
        self._forget_deleted({key.key_id for key in touched})
        revoked = frozenset(key_id for key_id in before if not self.holds(key_id))
        if revoked:
            self.on_revoked(revoked)

    def _forget_deleted(self, key_ids: set[str]) -> None:
        for key_id in key_ids:
            if self._tenants[self._live_rows[key_id].tenant_id].deleted_unix_ns is not None:
                del self._live[key_id], self._live_rows[key_id]

    def _check(self, text: str, known: Mapping[str, _Known]) -> Principal | Operator | None:
        found = known.get(keys.parse(text) or "", _UNKNOWN)
        digest = keys.digest(text, self._secrets.pepper(found.pepper))
        matches = hmac.compare_digest(digest, found.digest)
        expired = found.expires_unix_ns is not None and found.expires_unix_ns <= time.time_ns()
        return found.holder if matches and not expired else None

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            waiting, self._next_look = self._next_look, None
            looked = False
            try:
                await self._follow_once(force=waiting is not None)
                looked = True
            except Exception as error:  # whatever it is: a follower that ends would leave revoked keys valid
                if not self.stale:
                    _log.warning("directory is stale: it can't be read (%s)", type(error).__name__)
                self.stale = True
            finally:
                if waiting is not None:
                    waiting.set_result(looked)

    async def _follow_once(self, force: bool = False) -> None:
        """Epoch first, database second: a change in between is seen at the next poll."""
        try:
            async with patience(_STORE_DEADLINE_S):
                epoch = await self._read_epoch()
            reachable = True
        except (RedisError, OSError, TimeoutError):
            epoch, reachable = None, False
        overdue = time.monotonic() - self._refreshed_s > (_REFRESH_ANYWAY_S if reachable else _REFRESH_BLIND_S)
        moved = reachable and (epoch is None or epoch != self._epoch)
        if force or overdue or moved or (reachable and self.stale):
            await self.refresh()
            self._epoch = epoch
        if self.stale == reachable:
            _log.warning("directory is %s", "fresh again" if reachable else "stale: the store does not answer")
        self.stale = not reachable

    async def _read_epoch(self) -> bytes | str | None:
        """None when the store has lost it, or never had one: then it gets one, so that a later loss is seen too."""
        epoch = await self._redis.get(EPOCH_KEY)
        if epoch is None:
            await self._redis.set(EPOCH_KEY, random.token_hex(16), nx=True)
        return epoch


def _known_key(key: ApiKey, tenant: Tenant) -> _Known:
    usable = key.revoked_unix_ns is None and tenant.status == "active" and tenant.deleted_unix_ns is None
    budget = _budget(key, tenant)
    holder = _principal(key, tenant, budget) if usable else None
    return _Known(key.digest, key.pepper, key.expires_unix_ns, holder, budget)


def _known_operator(key: OperatorKey) -> _Known:
    holder = Operator(key.key_id, key.name, frozenset(key.scopes)) if key.revoked_unix_ns is None else None
    return _Known(key.digest, key.pepper, key.expires_unix_ns, holder)


def _principal(key: ApiKey, tenant: Tenant, budget: Budget) -> Principal:
    return Principal(
        tenant_id=tenant.tenant_id,
        tenant_name=tenant.name,
        key_id=key.key_id,
        scopes=frozenset(key.scopes),
        flow_class=cast(FlowClass, key.flow_class),
        max_class=cast(FlowClass, tenant.max_class),
        weight=tenant.weight,
        limits=_limits(tenant),
        key_limits=_limits(key),
        scoped_limits=tuple(map(_scoped, key.scoped_limits)),
        budget=budget,
        default_output_tokens=tenant.default_output_tokens,
        adapter_limits=AdapterLimits(
            max_adapters=tenant.max_adapters,
            max_adapter_rank=tenant.max_adapter_rank,
            max_adapter_bytes=tenant.max_adapter_bytes,
            max_storage_bytes=tenant.max_storage_bytes,
        ),
        cache_policy=tenant.cache_policy,
        time_zone=tenant.time_zone,
    )


def _budget(key: ApiKey, tenant: Tenant) -> Budget:
    scoped: list[tuple[ScopeKind, str, int]] = [
        (kind, row[kind], row[SPEND_LIMIT])
        for row in key.scoped_limits
        for kind in SCOPE_KINDS
        if kind in row and row.get(SPEND_LIMIT) is not None
    ]
    return Budget(
        tenant_limit=tenant.spend_limit_picousd_per_month,
        key_limit=key.spend_limit_picousd_per_month,
        scoped=tuple(scoped),
        tenant_stamp=tenant.changed_unix_ns,
        key_stamp=key.changed_unix_ns,
        time_zone=tenant.time_zone,
        anchor_day=tenant.billing_anchor_day,
        is_prepaid=tenant.is_prepaid,
    )


def _scoped(row: Mapping[str, Any]) -> ScopedLimits:
    kind: ScopeKind = next(kind for kind in SCOPE_KINDS if kind in row)
    return ScopedLimits(kind, row[kind], Limits(**{name: row[name] for name in RATE_LIMITS}))


def _limits(row: Tenant | ApiKey) -> Limits:
    return Limits(row.requests_per_minute, row.tokens_per_minute, row.concurrent_requests)
