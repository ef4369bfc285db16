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
from sqlalchemy.exc import SQLAlchemyError

import migrations
from gateway.client import Api, ApiFailed, push_adapter
from gateway.ops_app import OpsContext
from gateway.settings import DEFAULT_MODEL, MOE_MODEL, CannotStart, Settings, parse_model
from tenants import keys
from tenants.database import Database
from tenants.directory import Directory, bump_epoch
from tenants.errors import TenantsError
from tenants.keys import Minted
from tenants.pricing import default_prices
from tenants.repositories import OPERATOR_SCOPES, KeyRepository, RateCardRepository, TenantRepository
from tenants.secrets import Secrets

log = logging.getLogger(__name__)

DEMO_ADAPTERS = {"acme": "support", "blackbeard": "pirate"}  # tenant → its adapter, in gateway/demo
DEMO_KEY_DAYS = 7
_DAY_NS = 86_400 * 10**9
_DEMO = Path(__file__).parent / "demo"


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
    except (migrations.SchemaDrift, SQLAlchemyError, ImportError, OSError) as error:
        raise BootstrapError(f"the database can't be migrated: {error}") from error


async def prepare(settings: Settings) -> Start:
    """Opens the stores of a migrated home and makes what is absent. Raises BootstrapError."""
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


async def _ensure(settings: Settings, context: OpsContext, credentials: Credentials) -> None:
    await _ensure_rate_card(context.database)
    await _ensure_operator(context, credentials)
    if settings.wants_demo:
        await _ensure_demo_tenants(context, credentials)
    write_credentials(settings.credentials, credentials)
    await bump_epoch(context.redis)


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
    return OpsContext(database, redis, secrets, directory)


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
            await cards.publish(default_prices(), now, now)


async def _ensure_operator(context: OpsContext, credentials: Credentials) -> None:
    if context.directory.authenticate_operator(credentials.operator_key):
        return
    minted = keys.mint("ops")
    async with context.database.transaction() as session:
        digest = keys.digest(minted.text, context.secrets.key_pepper)
        await KeyRepository(session).create_operator(minted, digest, "first start", list(OPERATOR_SCOPES))
    credentials.operator_key = minted.text


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
            tenant = tenant or await TenantRepository(session).create(name)
            minted = await _mint_demo_key(KeyRepository(session), tenant.tenant_id, context.secrets)
        credentials.tenants[name] = TenantCredentials(tenant.tenant_id, minted.text)


async def _mint_demo_key(repository: KeyRepository, tenant_id: str, secrets: Secrets) -> Minted:
    minted = keys.mint("live")
    digest = keys.digest(minted.text, secrets.key_pepper)
    expires = time.time_ns() + DEMO_KEY_DAYS * _DAY_NS
    await repository.create(tenant_id, minted, digest, name="demo", expires_unix_ns=expires)
    return minted


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
