"""What a home needs before the first request: secrets, tables, an operator key, prices and, on a machine of
one's own, two demo tenants. Every step finds what an earlier start left and makes only what is absent."""

import asyncio
import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlmodel.ext.asyncio.session import AsyncSession

import migrations
from gateway.client import Api, ApiFailed, push_adapter
from gateway.serve.ops_app import OpsContext
from gateway.settings import DEFAULT_MODEL, MOE_MODEL, CannotStart, Settings, parse_model
from gateway.views.rows import key_body, operator_body, rate_card_body, tenant_body
from tenants import keys
from tenants.adapters.blobs import BlobStore
from tenants.audit_log import SERVER, AuditLog, Change
from tenants.database import Database
from tenants.directory import Directory, bump_epoch
from tenants.errors import TenantsError
from tenants.key_repository import KeyRepository, OperatorRepository
from tenants.limits import OPERATOR_SCOPES
from tenants.pricing import default_prices
from tenants.quota.quota import Quota
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.secrets import Secrets
from tenants.tables import Tenant

log = logging.getLogger(__name__)

DEMO_ADAPTERS = {"acme": "support", "blackbeard": "pirate"}  # tenant → its adapter, in gateway/demo
DEMO_KEY_DAYS = 7
STORE_TIMEOUT_S = 5.0
_DAY_NS = 86_400 * 10**9
_DEMO = Path(__file__).parents[1] / "demo"


class BootstrapError(CannotStart):
    """The home can't be made ready; the message says what to do."""


class TenantCredentials(msgspec.Struct):
    tenant_id: str
    api_key: str


class Credentials(msgspec.Struct):
    """HOME/credentials.json: the keys that this home made for its owner."""

    operator_key: str = ""
    tenants: dict[str, TenantCredentials] = {}


@dataclass(slots=True)
class Start:
    """What a start has made or found. ``demo_models``: demo tenant → the adapter it can name as a model."""

    context: OpsContext
    credentials: Credentials
    demo_models: dict[str, str] = field(default_factory=dict)


def migrate(database_url: str) -> None:
    """Brings the database to the newest revision. Raises BootstrapError."""
    try:
        migrations.upgrade(database_url)
    except OperationalError as error:
        raise BootstrapError(
            f"the database does not answer ({error.orig}): start it, or give another --database-url"
        ) from error
    except (migrations.SchemaDrift, SQLAlchemyError) as error:
        raise BootstrapError(f"the database can't be migrated: {error}") from error


async def prepare(settings: Settings) -> Start:
    """Opens the stores of a migrated home and makes what is absent. Raises BootstrapError."""
    await _find_store(settings.redis_url)
    try:
        credentials = read_credentials(settings.credentials)
        context = await open_stores(settings)
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(context.close)
            await _ensure(settings, context, credentials)
            on_failure.pop_all()
    except (TenantsError, SQLAlchemyError, OSError) as error:
        raise BootstrapError(f"{settings.home} can't be made ready: {error}") from error
    return Start(context, credentials)


async def _find_store(url: str) -> None:
    """Before anything is written that nobody could be told of. The URL is not repeated: it may hold a password."""
    redis = Redis.from_url(url, socket_connect_timeout=STORE_TIMEOUT_S, socket_timeout=STORE_TIMEOUT_S)
    try:
        await redis.ping()
    except (RedisError, OSError) as error:
        raise BootstrapError(f"no store answers at --redis-url ({error}): start it, or give another") from error
    finally:
        await redis.aclose()


async def _ensure(settings: Settings, context: OpsContext, credentials: Credentials) -> None:
    await _ensure_rate_card(context.database)
    await _ensure_operator(context, credentials)
    if settings.wants_demo:
        await _ensure_demo_tenants(context, credentials)
    else:
        await _revoke_demo_keys(context.database)
    await _finish_deletions(context)
    write_credentials(settings.credentials, credentials)
    await bump_epoch(context.redis)
    await context.directory.refresh()  # the first caller of the ops port may have the new key already


async def open_stores(settings: Settings) -> OpsContext:
    """The supervisor's own connections; its directory follows the epoch."""
    secrets = Secrets.load_or_create(settings.secrets)
    async with contextlib.AsyncExitStack() as on_failure:
        database = Database(settings.database_url)
        on_failure.push_async_callback(database.close)
        await database.start()
        redis = Redis.from_url(settings.redis_url)
        on_failure.push_async_callback(redis.aclose)
        directory = Directory(database, redis, secrets)
        await directory.start()
        on_failure.pop_all()
    blobs, serve = BlobStore(settings.blobs), settings.serve
    return OpsContext(database, redis, Quota(redis), secrets, directory, blobs, serve.issuer, serve.gpu_hour_picousd)


def read_credentials(path: Path) -> Credentials:
    """Empty when the file is absent. Raises BootstrapError for one that is not ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError:
        return Credentials()
    except msgspec.MsgspecError as error:
        raise BootstrapError(f"{path} is not a credentials file: move it away") from error


def write_credentials(path: Path, credentials: Credentials) -> None:
    """In one move, readable by its owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(msgspec.to_builtins(credentials), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


async def _ensure_rate_card(database: Database) -> None:
    async with database.transaction() as session:
        cards = RateCardRepository(session)
        if not await cards.list_all():
            now = time.time_ns()
            card = await cards.publish(default_prices(), now, now)
            created = Change("rate_card.create", card.rate_card_id, None, rate_card_body(card))
            await AuditLog(session).append(SERVER, created)


async def _ensure_operator(context: OpsContext, credentials: Credentials) -> None:
    if context.directory.authenticate_operator(credentials.operator_key):
        return
    new = keys.issue("ops", context.secrets)
    async with context.database.transaction() as session:
        key = await OperatorRepository(session).create(new, "first start", OPERATOR_SCOPES)
        await AuditLog(session).append(SERVER, Change("operator.create", key.key_id, None, operator_body(key)))
    credentials.operator_key = new.minted.text


async def _ensure_demo_tenants(context: OpsContext, credentials: Credentials) -> None:
    for name in DEMO_ADAPTERS:
        known = credentials.tenants.get(name)
        if known and context.directory.authenticate(known.api_key):
            continue
        async with context.database.transaction() as session:
            tenant = await TenantRepository(session).by_name(name)
            if tenant and (known is None or known.tenant_id != tenant.tenant_id):
                log.warning("a tenant %s is there already and not from this home: no demo for it", name)
                continue
            tenant = tenant or await _create_demo_tenant(session, name)
            text = await _create_demo_key(session, tenant.tenant_id, context.secrets)
        credentials.tenants[name] = TenantCredentials(tenant.tenant_id, text)


async def _create_demo_tenant(session: AsyncSession, name: str) -> Tenant:
    tenant = await TenantRepository(session).create(name)
    await AuditLog(session).append(SERVER, Change("tenant.create", tenant.tenant_id, None, tenant_body(tenant)))
    return tenant


async def _create_demo_key(session: AsyncSession, tenant_id: str, secrets: Secrets) -> str:
    """The new key's text."""
    new, expires = keys.issue("live", secrets), time.time_ns() + DEMO_KEY_DAYS * _DAY_NS
    key = await KeyRepository(session).create(tenant_id, new, name="demo", expires_unix_ns=expires, is_demo=True)
    await AuditLog(session).append(SERVER, Change("key.create", key.key_id, None, key_body(key)))
    return new.minted.text


async def _revoke_demo_keys(database: Database) -> None:
    """Keys that an earlier start made for a machine of one's own open nothing where others can reach it."""
    async with database.transaction() as session:
        repository = KeyRepository(session)
        for key in await repository.live_demo_keys():
            before = key_body(key)
            after = key_body(await repository.revoke(key.tenant_id, key.key_id))
            await AuditLog(session).append(SERVER, Change("key.revoke", key.key_id, before, after))
            log.warning("the demo key %s is revoked: this start has no demo", key.key_id)


async def _finish_deletions(context: OpsContext) -> None:
    """Bytes of deleted tenants that a crash has left."""
    async with context.database.session() as session:
        deleted = await TenantRepository(session).list_deleted()
    for tenant_id in deleted:
        await asyncio.to_thread(context.blobs.delete_tenant, tenant_id)


# ── the demo's adapters, through the public API like any tenant's ────────────────────────────────


async def upload_demo_adapters(settings: Settings, start: Start) -> None:
    """Gives each demo tenant its adapter when the default model is served, dense or upcycled. Raises BootstrapError."""
    models = map(parse_model, settings.serve.models)
    bases = [name for name, source in models if source.partition("?")[0] in (DEFAULT_MODEL, MOE_MODEL)]
    if not bases:
        return
    for tenant, adapter in DEMO_ADAPTERS.items():
        owner = start.credentials.tenants.get(tenant)
        if owner and settings.wants_demo:
            await asyncio.to_thread(_upload, Api(settings.url, owner.api_key), adapter, bases[0])
            start.demo_models[tenant] = adapter


def _upload(api: Api, adapter: str, base_model: str) -> None:
    try:
        _push(api, adapter, base_model)
    except ApiFailed as error:
        raise BootstrapError(f"the demo adapter {adapter} could not be uploaded: {error}") from error


def _push(api: Api, adapter: str, base_model: str) -> None:
    """Uploads the adapter unless an earlier start has. Raises ApiFailed."""
    try:
        api.call("GET", f"/adapters/{adapter}")
    except ApiFailed as error:
        if error.status != 404:
            raise
        push_adapter(api, _DEMO / adapter, adapter, base_model, expected_version=0)
