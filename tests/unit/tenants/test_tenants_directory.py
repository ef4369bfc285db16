"""Authentication from memory, and how it follows the database through a real Valkey."""

import asyncio
import signal
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from redis.asyncio import Redis
from sqlalchemy import event
from stores import valkey_server

import migrations
from tenants import keys
from tenants.database import Database
from tenants.directory import EPOCH_KEY, Directory, bump_epoch
from tenants.errors import StoreUnavailable
from tenants.key_repository import KeyRepository, OperatorRepository
from tenants.pricing import default_prices
from tenants.quota.quota import Limits
from tenants.repositories import RateCardRepository, TenantRepository
from tenants.secrets import Secrets, rotate

TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"


class World:
    """One database, one store, a tenant with a key, and a directory that has started."""

    def __init__(self, database, redis, secrets) -> None:
        self.database, self.redis, self.secrets = database, redis, secrets
        self.directory = Directory(database, redis, secrets)

    async def make_key(self, tenant_id: str, **fields) -> keys.Minted:
        new = keys.issue("live", self.secrets)
        async with self.database.transaction() as session:
            await KeyRepository(session).create(tenant_id, new, **fields)
        return new.minted

    async def start(self) -> None:
        async with self.database.transaction() as session:
            self.tenant = await TenantRepository(session).create("acme", limits={"tokens_per_minute": 100})
        self.key = await self.make_key(self.tenant.tenant_id, flow_class="batch")
        await self.directory.start()

    async def becomes(self, condition) -> None:
        """Waits for the directory's own polling; the bound is only for a failing test."""
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


def run_world(database_url, valkey, secrets, scenario) -> None:
    async def main():
        database = Database(database_url)
        await database.start()
        async with Redis.from_url(valkey.url) as redis:
            await redis.flushall()
            world = World(database, redis, secrets)
            await world.start()
            try:
                await scenario(world)
            finally:
                await world.directory.close()
                await database.close()

    asyncio.run(main())


@pytest.fixture
def in_world(database_url, valkey, secrets):
    return lambda scenario: run_world(database_url, valkey, secrets, scenario)


def test_a_good_key_gives_its_tenant_and_both_sets_of_limits(in_world):
    async def scenario(world):
        principal = world.directory.authenticate(world.key.text)
        assert (principal.tenant_id, principal.tenant_name) == (world.tenant.tenant_id, "acme")
        assert (principal.key_id, principal.flow_class, principal.max_class) == (
            world.key.key_id,
            "batch",
            "interactive",
        )
        assert (principal.limits, principal.key_limits) == (Limits(tokens_per_minute=100), Limits())
        assert principal.adapter_limits.max_adapter_rank == 64

    in_world(scenario)


def test_what_a_key_may_spend_counts_in_months_of_its_tenants_own_calendar(in_world):
    async def scenario(world):
        async with world.database.transaction() as session:
            tenants = TenantRepository(session)
            await tenants.set_limits(world.tenant.tenant_id, {"spend_limit_picousd_per_month": 1})
            await tenants.set_time_zone(world.tenant.tenant_id, "Asia/Tokyo")
            await tenants.set_billing_anchor_day(world.tenant.tenant_id, 31)
        await bump_epoch(world.redis)
        await world.becomes(lambda: world.directory.authenticate(world.key.text).budget.anchor_day == 31)
        budget = world.directory.authenticate(world.key.text).budget
        first_minute = int(datetime(2028, 2, 28, 15, 0, tzinfo=UTC).timestamp()) * 10**9  # 2028-02-29 in Tokyo
        names = [budget.windows("k", "m", "", at)[0].name for at in (first_minute - 1, first_minute)]
        assert names == ["tenant@2028-01-31", "tenant@2028-02-29"]

    in_world(scenario)


def test_malformed_unknown_and_almost_right_keys_are_nobody(in_world):
    async def scenario(world):
        stolen_id = keys.mint("live").text
        forged = stolen_id[:8] + world.key.key_id + stolen_id[18:38]
        forged += keys._checksum(forged)
        assert keys.parse(forged) == world.key.key_id
        for text in ("", "tn_live_x", keys.mint("live").text, forged, world.key.text + "0", world.key.text[:-1]):
            assert world.directory.authenticate(text) is None
        assert world.directory.authenticate_operator(world.key.text) is None

    in_world(scenario)


def test_authentication_asks_no_database_and_costs_one_digest_whoever_calls(in_world, monkeypatch):
    async def scenario(world):
        statements, digests = [], []
        engine = world.database._engine.sync_engine
        event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments))
        real = keys.digest
        monkeypatch.setattr(keys, "digest", lambda *arguments: digests.append(1) or real(*arguments))
        for text in (world.key.text, keys.mint("live").text, "garbage"):
            digests.clear()
            world.directory.authenticate(text)
            assert len(digests) == 1
        assert statements == []

    in_world(scenario)


def test_a_new_key_and_changed_limits_are_seen_after_the_epoch_moved(in_world):
    async def scenario(world):
        fresh = await world.make_key(world.tenant.tenant_id)
        async with world.database.transaction() as session:
            await TenantRepository(session).set_limits(world.tenant.tenant_id, {"tokens_per_minute": 7})
        assert world.directory.authenticate(fresh.text) is None
        await bump_epoch(world.redis)
        await world.becomes(lambda: world.directory.authenticate(fresh.text) is not None)
        for key in (fresh, world.key):
            assert world.directory.authenticate(key.text).limits == Limits(tokens_per_minute=7)

    in_world(scenario)


@pytest.fixture
def patient(monkeypatch) -> None:
    """Whoever waits for a look gets one, however slow this machine is."""
    monkeypatch.setattr("tenants.directory._LOOK_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_key_made_a_moment_ago_is_known_after_the_next_look(in_world):
    async def scenario(world):
        fresh = await world.make_key(world.tenant.tenant_id)
        await bump_epoch(world.redis)
        assert world.directory.may_be_new(fresh.text)
        assert await world.directory.next_look()
        assert world.directory.authenticate(fresh.text) is not None
        assert not any(map(world.directory.may_be_new, ("", "tn_live_x", fresh.text, world.key.text)))

    in_world(scenario)


@pytest.mark.usefixtures("patient")
def test_a_key_that_was_never_announced_is_known_after_the_next_look(in_world):
    async def scenario(world):
        fresh = await world.make_key(world.tenant.tenant_id)
        assert await world.directory.next_look()
        assert world.directory.authenticate(fresh.text) is not None

    in_world(scenario)


@pytest.mark.usefixtures("patient")
def test_one_look_serves_however_many_wait_for_it(in_world, monkeypatch):
    async def scenario(world):
        looks, real = [], world.directory.refresh
        monkeypatch.setattr(world.directory, "refresh", lambda: looks.append(1) or real())
        assert all(await asyncio.gather(*(world.directory.next_look() for _ in range(500))))
        assert len(looks) == 1

    in_world(scenario)


def test_a_revoked_key_and_a_suspended_tenant_are_nobody_and_resuming_undoes_only_the_latter(in_world):
    async def scenario(world):
        other = await world.make_key(world.tenant.tenant_id)
        await world.directory.refresh()

        async def change(action):
            async with world.database.transaction() as session:
                await action(session)
            await bump_epoch(world.redis)

        directory = world.directory
        await change(lambda s: KeyRepository(s).revoke(world.tenant.tenant_id, world.key.key_id))
        await world.becomes(lambda: directory.authenticate(world.key.text) is None)
        assert directory.authenticate(other.text) is not None
        await change(lambda s: TenantRepository(s).set_status(world.tenant.tenant_id, "suspended"))
        await world.becomes(lambda: directory.authenticate(other.text) is None)
        await change(lambda s: TenantRepository(s).set_status(world.tenant.tenant_id, "active"))
        await world.becomes(lambda: directory.authenticate(other.text) is not None)
        assert directory.authenticate(world.key.text) is None

    in_world(scenario)


def test_an_expired_key_is_nobody_from_that_nanosecond_on(in_world, monkeypatch):
    async def scenario(world):
        expiry = time.time_ns() + 10**12
        mortal = await world.make_key(world.tenant.tenant_id, expires_unix_ns=expiry)
        await world.directory.refresh()
        monkeypatch.setattr("tenants.directory.time.time_ns", lambda: expiry - 1)
        assert world.directory.authenticate(mortal.text) is not None
        monkeypatch.setattr("tenants.directory.time.time_ns", lambda: expiry)
        assert world.directory.authenticate(mortal.text) is None

    in_world(scenario)


def test_an_operators_key_is_known_by_its_scopes_and_can_be_revoked(in_world):
    async def scenario(world):
        new, other = keys.issue("ops", world.secrets), keys.issue("ops", world.secrets)
        minted = new.minted
        async with world.database.transaction() as session:
            await OperatorRepository(session).create(new, "root", ["admin", "read"])
            await OperatorRepository(session).create(other, "who stays", ["admin"])
        await world.directory.refresh()
        operator = world.directory.authenticate_operator(minted.text)
        assert (operator.name, operator.scopes) == ("root", {"admin", "read"})
        assert world.directory.authenticate(minted.text) is None
        async with world.database.transaction() as session:
            await OperatorRepository(session).revoke(minted.key_id)
        await world.directory.refresh()
        assert world.directory.authenticate_operator(minted.text) is None

    in_world(scenario)


def test_a_store_that_lost_its_data_makes_the_directory_read_again(in_world):
    async def scenario(world):
        await bump_epoch(world.redis)
        fresh = await world.make_key(world.tenant.tenant_id)
        await world.redis.delete(EPOCH_KEY)
        await world.becomes(lambda: world.directory.authenticate(fresh.text) is not None)

    in_world(scenario)


def test_a_change_made_while_the_clock_was_behind_is_not_missed(in_world, monkeypatch):
    async def scenario(world):
        with monkeypatch.context() as patch:
            patch.setattr("tenants.stamps.time.time_ns", lambda: 1_000)
            async with world.database.transaction() as session:
                await KeyRepository(session).revoke(world.tenant.tenant_id, world.key.key_id)
        await world.directory.refresh()
        assert world.directory.authenticate(world.key.text) is None

    in_world(scenario)


def test_what_is_committed_between_two_of_its_reads_is_there_at_the_next_refresh_at_the_latest(in_world, monkeypatch):
    async def scenario(world):
        await world.directory.close()
        newcomers, made = [], []

        async def newcomer():
            async with world.database.transaction() as session:
                tenant = await TenantRepository(session).create(f"newcomer-{len(made)}")
                made.append(tenant)
                new = keys.issue("live", world.secrets)
                await KeyRepository(session).create(tenant.tenant_id, new)
                await RateCardRepository(session).publish(default_prices(), 1000 + len(made), len(made))
            newcomers.append(new.minted.text)

        real = world.database.session

        @asynccontextmanager
        async def session():  # of this database alone: others are read by other threads meanwhile
            async with real() as found:
                execute = found.exec

                async def exec_after_a_newcomer(*arguments, **options):
                    await newcomer()
                    return await execute(*arguments, **options)

                found.exec = exec_after_a_newcomer
                yield found

        with monkeypatch.context() as patch:
            patch.setattr(world.database, "session", session)
            await world.directory.refresh()
        assert len(newcomers) >= 5
        await world.directory.refresh()
        assert all(world.directory.authenticate(text) for text in newcomers)
        assert len(world.directory.rate_cards) == len(newcomers)

    in_world(scenario)


def test_the_rate_card_in_force_is_known_by_time(in_world):
    async def scenario(world):
        with pytest.raises(LookupError):
            world.directory.rate_card(10**18)
        async with world.database.transaction() as session:
            first = await RateCardRepository(session).publish(default_prices(), 100, 100)
            second = await RateCardRepository(session).publish(default_prices(), 200, 150)
        await world.directory.refresh()
        assert world.directory.rate_card(199) == first
        assert world.directory.rate_card(200) == second
        assert set(world.directory.rate_cards) == {first.rate_card_id, second.rate_card_id}

    in_world(scenario)


def test_a_store_that_is_down_keeps_the_snapshot_marks_it_stale_and_is_caught_up_with(database_url, secrets, caplog):
    with valkey_server() as server:

        async def scenario(world):
            server.process.send_signal(signal.SIGSTOP)
            await world.becomes(lambda: world.directory.stale)
            assert world.directory.authenticate(world.key.text) is not None
            with pytest.raises(StoreUnavailable):
                await bump_epoch(world.redis)
            fresh = await world.make_key(world.tenant.tenant_id)
            server.process.send_signal(signal.SIGCONT)
            await world.becomes(lambda: not world.directory.stale)
            assert world.directory.authenticate(fresh.text) is not None
            about_it = [record for record in caplog.records if record.name == "tenants.directory"]
            assert len(about_it) == 2  # one line a change

        run_world(database_url, server, secrets, scenario)


def test_it_starts_without_a_store_and_is_stale(database_url, secrets, tmp_path):
    class NoServer:
        url = f"unix://{tmp_path / 'nobody'}"

    async def main():
        database = Database(database_url)
        await database.start()
        async with Redis.from_url(NoServer.url) as redis:
            directory = Directory(database, redis, secrets)
            await directory.start()
            assert directory.stale
            assert directory.authenticate(keys.mint("live").text) is None
            await directory.close()
        await database.close()

    asyncio.run(main())


def test_a_database_that_refuses_connections_makes_it_stale_and_is_caught_up_with(postgres, valkey, secrets):
    name = postgres.create_database()
    migrations.upgrade(postgres.url(name))

    async def scenario(world):
        await asyncio.to_thread(postgres.execute, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await asyncio.to_thread(postgres.execute, TERMINATE.format(name))
        await bump_epoch(world.redis)
        await world.becomes(lambda: world.directory.stale)
        assert world.directory.authenticate(world.key.text) is not None
        assert not await world.directory.next_look()  # nobody can say which keys there are

        await asyncio.to_thread(postgres.execute, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        fresh = await world.make_key(world.tenant.tenant_id)
        await world.becomes(lambda: world.directory.authenticate(fresh.text) is not None)

    run_world(postgres.url(name), valkey, secrets, scenario)
    postgres.drop_database(name)


# ── who must end ─────────────────────────────────────────────────────────────────────────────────


def test_revocation_suspension_and_deletion_are_told_once_and_expiry_is_not(in_world, monkeypatch):
    async def scenario(world):
        directory, told = world.directory, []
        await directory.close()
        directory.on_revoked = told.append
        other = await world.make_key(world.tenant.tenant_id)
        expiry = time.time_ns() + 10**12
        mortal = await world.make_key(world.tenant.tenant_id, expires_unix_ns=expiry)
        await directory.refresh()
        with monkeypatch.context() as patch:
            patch.setattr("tenants.directory.time.time_ns", lambda: expiry)
            await directory.refresh()
            assert directory.authenticate(mortal.text) is None
        assert told == []

        async def change(action):
            async with world.database.transaction() as session:
                await action(session)
            await directory.refresh()
            await directory.refresh()

        await change(lambda s: KeyRepository(s).revoke(world.tenant.tenant_id, world.key.key_id))
        assert told == [{world.key.key_id}]
        assert (directory.holds(world.key.key_id), directory.holds(other.key_id)) == (False, True)
        await change(lambda s: TenantRepository(s).set_status(world.tenant.tenant_id, "suspended"))
        assert told[1:] == [{other.key_id, mortal.key_id}]
        await change(lambda s: TenantRepository(s).set_status(world.tenant.tenant_id, "active"))
        assert directory.holds(other.key_id)
        await change(lambda s: TenantRepository(s).delete(world.tenant.tenant_id))
        assert told[2:] == [{other.key_id, mortal.key_id}]
        assert directory.authenticate(other.text) is None
        assert directory._live == directory._live_rows == {}

    in_world(scenario)


def test_a_key_is_checked_with_the_pepper_that_made_it(in_world, tmp_path):
    async def scenario(world):
        await world.directory.close()
        path = tmp_path / "secrets.json"
        world.secrets = Secrets.load_or_create(path)
        old = await world.make_key(world.tenant.tenant_id)
        world.secrets = rotate(path)
        new = await world.make_key(world.tenant.tenant_id)

        both = Directory(world.database, world.redis, world.secrets)
        await both.refresh()
        assert both.authenticate(old.text)
        assert both.authenticate(new.text)
        before = Directory(world.database, world.redis, Secrets.load_or_create(tmp_path / "others.json"))
        await before.refresh()
        assert before.authenticate(new.text) is None

    in_world(scenario)


def test_a_change_is_seen_while_the_store_is_away(database_url, secrets):
    with valkey_server() as server:

        async def scenario(world):
            server.process.send_signal(signal.SIGSTOP)
            await world.becomes(lambda: world.directory.stale)
            fresh = await world.make_key(world.tenant.tenant_id)
            await world.becomes(lambda: world.directory.authenticate(fresh.text))
            assert world.directory.stale
            server.process.send_signal(signal.SIGCONT)

        run_world(database_url, server, secrets, scenario)
