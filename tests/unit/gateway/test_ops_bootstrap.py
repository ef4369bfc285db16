"""First and later starts of a home: what is made once, kept for ever, and never shown to others."""

import asyncio
import contextlib
import sqlite3
import stat
from pathlib import Path

import pytest

from gateway.serve import bootstrap
from gateway.serve.supervisor import banner
from gateway.settings import Settings
from tenants import keys
from tenants.key_repository import KeyRepository
from tenants.repositories import TenantRepository
from tenants.secrets import rotate
from tests.ops_server import settings_of
from tests.stores import valkey_server


def start(settings: Settings) -> bootstrap.Credentials:
    """What a start does before the first child serves."""

    async def main() -> bootstrap.Credentials:
        started = await bootstrap.prepare(settings)
        await started.context.close()
        return started.credentials

    settings.home.mkdir(parents=True, exist_ok=True)
    bootstrap.migrate(settings.database_url)
    return asyncio.run(main())


def in_context(settings: Settings, work):
    async def main():
        context = await bootstrap.open_stores(settings)
        try:
            return await work(context)
        finally:
            await context.close()

    return asyncio.run(main())


@pytest.fixture
def settings(tmp_path: Path):
    with valkey_server() as store:
        yield settings_of(tmp_path / "home", store.url, "--demo")


def test_a_database_that_cannot_be_ours_stops_the_start(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "newer.db")) as newer:
        newer.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        newer.execute("INSERT INTO alembic_version VALUES ('of the future')")
        newer.commit()

    with pytest.raises(bootstrap.BootstrapError, match="migrated"):
        bootstrap.migrate(f"sqlite:///{tmp_path}/newer.db")


def test_a_database_that_is_away_stops_the_start_by_its_option() -> None:
    with pytest.raises(bootstrap.BootstrapError, match=r"does not answer .*another --database-url"):
        bootstrap.migrate("postgresql+asyncpg://127.0.0.1:1/tenora")


def test_a_store_that_is_away_stops_the_start_by_its_option_before_anything_is_written(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "home", f"unix://{tmp_path}/nobody.sock", "--demo")

    with pytest.raises(bootstrap.BootstrapError, match="no store answers at --redis-url"):
        start(settings)

    assert not settings.credentials.exists()
    assert not settings.secrets.exists()


def test_a_second_start_keeps_every_key(settings: Settings) -> None:
    first = start(settings)
    second = start(settings)
    assert second == first
    assert set(first.tenants) == {"acme", "blackbeard"}
    assert first.operator_key.startswith("tn_ops_")


def test_credentials_and_secrets_are_for_their_owner_only(settings: Settings) -> None:
    start(settings)
    for path in (settings.credentials, settings.secrets):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert bootstrap.read_credentials(settings.credentials).operator_key


def test_demo_keys_end_after_a_week_and_a_later_start_makes_new_ones(settings: Settings) -> None:
    first = start(settings)
    acme = first.tenants["acme"]

    async def expiry(context) -> int | None:
        async with context.database.transaction() as session:
            key = await KeyRepository(session).get(acme.tenant_id, keys.parse(acme.api_key) or "")
            assert key
            lifetime_ns = (key.expires_unix_ns or 0) - key.created_unix_ns
            key.expires_unix_ns = 1  # long ago
            session.add(key)
            return lifetime_ns

    assert round((in_context(settings, expiry) or 0) / 86_400e9, 3) == 7

    second = start(settings)

    assert second.tenants["acme"].tenant_id == acme.tenant_id
    assert second.tenants["acme"].api_key != acme.api_key
    assert second.tenants["blackbeard"] == first.tenants["blackbeard"]


def test_another_tenant_of_that_name_is_left_alone(settings: Settings) -> None:
    settings.home.mkdir(parents=True)
    bootstrap.migrate(settings.database_url)

    async def make(context) -> str:
        async with context.database.transaction() as session:
            return (await TenantRepository(session).create("acme")).tenant_id

    tenant_id = in_context(settings, make)

    credentials = start(settings)

    async def its_keys(context) -> list:
        async with context.database.session() as session:
            return await KeyRepository(session).list_all(tenant_id)

    assert set(credentials.tenants) == {"blackbeard"}
    assert in_context(settings, its_keys) == []


def test_where_others_can_reach_it_there_is_no_demo(tmp_path: Path) -> None:
    with valkey_server() as store:
        credentials = start(settings_of(tmp_path, store.url, "--host", "0.0.0.0"))
    assert credentials.tenants == {}
    assert credentials.operator_key


def test_a_lost_database_gets_keys_of_its_own(settings: Settings) -> None:
    first = start(settings)
    for path in settings.home.glob("tenora.db*"):
        path.unlink()

    second = start(settings)

    assert second.operator_key != first.operator_key
    assert second.tenants["acme"].tenant_id != first.tenants["acme"].tenant_id


def test_a_broken_credentials_file_is_not_overwritten(settings: Settings) -> None:
    start(settings)
    settings.credentials.write_text("not JSON")
    with pytest.raises(bootstrap.BootstrapError, match="move it away"):
        start(settings)
    assert settings.credentials.read_text() == "not JSON"


def test_secrets_that_others_can_read_stop_the_start(settings: Settings) -> None:
    start(settings)
    settings.secrets.chmod(0o644)
    with pytest.raises(bootstrap.BootstrapError, match="chmod 600"):
        start(settings)


# ── the demo, where others can reach it ──────────────────────────────────────────────────────────


def demo_keys(settings: Settings, credentials: bootstrap.Credentials) -> list[bool]:
    """Whether each demo tenant's key is taken."""

    async def ask(context) -> list[bool]:
        return [context.directory.authenticate(t.api_key) is not None for t in credentials.tenants.values()]

    return in_context(settings, ask)


@pytest.mark.parametrize("without", [("--host", "0.0.0.0"), ("--no-demo",)])
def test_demo_keys_of_an_earlier_start_are_revoked_by_one_without_a_demo(tmp_path: Path, without: tuple[str, ...]):
    with valkey_server() as store:
        at_home, public = settings_of(tmp_path, store.url), settings_of(tmp_path, store.url, *without)
        first = start(at_home)
        assert demo_keys(at_home, first) == [True, True]

        second = start(public)

        assert demo_keys(public, first) == demo_keys(public, second) == [False, False]
        lines = "\n".join(banner(public, bootstrap.Start(None, second), []))  # type: ignore[arg-type]
        assert "tn_live_" not in lines
        third = start(at_home)
        assert demo_keys(at_home, third) == [True, True]
        assert third.tenants["acme"].tenant_id == first.tenants["acme"].tenant_id


def test_with_demo_asked_for_by_name_the_keys_stay(tmp_path: Path):
    with valkey_server() as store:
        first = start(settings_of(tmp_path, store.url))
        public = settings_of(tmp_path, store.url, "--host", "0.0.0.0", "--demo")
        start(public)
        assert demo_keys(public, first) == [True, True]


def test_other_keys_of_that_name_are_not_taken_for_demo_keys(settings: Settings):
    first = start(settings)

    async def make(context) -> str:
        new = keys.issue("live", context.secrets)
        async with context.database.transaction() as session:
            await KeyRepository(session).create(first.tenants["acme"].tenant_id, new, name="demo")
        return new.minted.text

    text = in_context(settings, make)
    public = settings_of(settings.home, settings.redis_url, "--no-demo")
    start(public)

    async def ask(context) -> bool:
        return context.directory.authenticate(text) is not None

    assert in_context(public, ask)


def test_bytes_of_a_deleted_tenant_that_a_crash_left_go_at_the_next_start(settings: Settings):
    first = start(settings)
    tenant_id = first.tenants["acme"].tenant_id

    async def delete_but_for_the_bytes(context):
        staged = context.blobs.stage()
        blob = context.blobs.publish(tenant_id, "ab" * 32, staged)
        async with context.database.transaction() as session:
            await TenantRepository(session).delete(tenant_id)
        return blob

    blob = in_context(settings, delete_but_for_the_bytes)
    assert blob.exists()
    start(settings)
    assert not blob.parent.exists()


def test_keys_from_before_secrets_were_rotated_stay_valid_and_new_ones_have_the_new_pepper(settings: Settings):
    first = start(settings)
    rotate(settings.secrets)
    second = start(settings)
    assert second == first

    async def ask(context):
        assert context.directory.authenticate_operator(first.operator_key)
        new = keys.issue("live", context.secrets)
        async with context.database.transaction() as session:
            key = await KeyRepository(session).create(first.tenants["acme"].tenant_id, new)
        await context.directory.refresh()
        assert context.directory.authenticate(new.minted.text)
        return key.pepper

    assert demo_keys(settings, first) == [True, True]
    assert in_context(settings, ask) == 2
