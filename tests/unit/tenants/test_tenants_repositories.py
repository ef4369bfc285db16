"""Tenants, keys, prices and adapters on real databases, migrated by Alembic."""

import asyncio
import time

import pytest
from sqlalchemy.exc import IntegrityError
from sqlmodel import select

from tenants import keys
from tenants.adapters.repository import AdapterRepository, NewVersion
from tenants.database import Database
from tenants.errors import InvalidValue, LimitExceeded, NameTaken, NotFound, VersionConflict
from tenants.key_repository import KeyRepository
from tenants.pricing import default_prices
from tenants.repositories import NOTICE_NS, RateCardRepository, TenantRepository
from tenants.tables import ApiKey


def new_version(sha256: str = "a" * 64, size_bytes: int = 100) -> NewVersion:
    return NewVersion(sha256, "smollm2-135m", 4, ["q_proj", "v_proj"], 60, size_bytes, [])


async def two_tenants(database) -> tuple[str, str]:
    async with database.transaction() as session:
        tenants = TenantRepository(session)
        return (await tenants.create("acme")).tenant_id, (await tenants.create("blackbeard")).tenant_id


async def publish(database, tenant_id, name="support", fields=None, expected_version=None) -> int:
    async with database.transaction() as session:
        repository = AdapterRepository(session)
        return (await repository.publish(tenant_id, name, fields or new_version(), expected_version)).version


async def resolve(database, tenant_id, name, version=None):
    async with database.session() as session:
        return await AdapterRepository(session).resolve(tenant_id, name, version)


# ── tenants and keys ─────────────────────────────────────────────────────────────────────────────


def test_a_new_tenant_has_the_documented_limits(with_database):
    async def body(database):
        async with database.transaction() as session:
            tenant = await TenantRepository(session).create("acme")
        assert tenant.tenant_id.startswith("ten_")
        assert len(tenant.tenant_id) == 28
        assert tenant.requests_per_minute is tenant.tokens_per_minute is tenant.concurrent_requests is None
        assert (tenant.default_output_tokens, tenant.max_adapters, tenant.max_adapter_rank) == (1024, 100, 64)
        assert (tenant.max_adapter_bytes, tenant.max_storage_bytes) == (512 << 20, 10 << 30)
        assert (tenant.max_class, tenant.weight, tenant.cache_policy) == ("interactive", 1, "private")

    with_database(body)


def test_a_tenants_name_is_taken_once(with_database):
    async def body(database):
        await two_tenants(database)
        async with database.transaction() as session:
            with pytest.raises(NameTaken):
                await TenantRepository(session).create("acme")

    with_database(body)


def test_of_many_that_take_a_name_at_once_one_gets_it_and_the_others_hear_that_it_is_taken(with_database):
    async def body(database):
        async def create():
            async with database.transaction() as session:
                return (await TenantRepository(session).create("acme")).name

        answers = await asyncio.gather(*(create() for _ in range(6)), return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["NameTaken"] * 5 + ["str"]

    with_database(body)


def test_limits_are_changed_one_by_one_and_null_is_no_limit(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        async with database.transaction() as session:
            await TenantRepository(session).set_limits(acme, {"tokens_per_minute": 100, "weight": 3})
        async with database.transaction() as session:
            tenant = await TenantRepository(session).set_limits(acme, {"tokens_per_minute": None})
        assert (tenant.tokens_per_minute, tenant.weight) == (None, 3)

    with_database(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_minute", -1),
        ("tokens_per_minute", "5"),
        ("weight", 0),
        ("weight", None),
        ("max_adapters", True),
        ("max_class", "vip"),
        ("max_class", None),
        ("cache_policy", ["private"]),
        ("spend_limit_picousd_per_month", 1 << 63),
        ("tenant_id", "ten_other"),
        ("status", "active"),
    ],
)
def test_a_limit_with_a_wrong_name_or_value_is_refused_by_name(with_database, field, value):
    async def body(database):
        acme, _ = await two_tenants(database)
        async with database.transaction() as session:
            with pytest.raises(InvalidValue) as caught:
                await TenantRepository(session).set_limits(acme, {field: value})
        assert caught.value.field == field

    with_database(body)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime"])
def test_an_unknown_time_zone_is_refused(with_database, zone):
    async def body(database):
        async with database.transaction() as session:
            with pytest.raises(InvalidValue):
                await TenantRepository(session).create("acme", time_zone=zone)

    with_database(body)


def test_a_deleted_tenant_leaves_its_neighbours_and_a_bare_row(with_database, secrets):
    async def body(database):
        acme, blackbeard = await two_tenants(database)
        for tenant_id in (acme, blackbeard):
            await publish(database, tenant_id)
            async with database.transaction() as session:
                await KeyRepository(session).create(tenant_id, keys.issue("live", secrets))
        async with database.transaction() as session:
            assert await TenantRepository(session).delete(acme) == [new_version().sha256]
        async with database.session() as session:
            tenants, adapters = TenantRepository(session), AdapterRepository(session)
            assert await tenants.get(acme) is None
            assert (await tenants.ever_was(acme), await tenants.ever_was("ten_0")) == (True, False)
            assert [tenant.name for tenant in await tenants.list_all()] == ["blackbeard"]
            assert await tenants.list_deleted() == [acme]
            assert (await adapters.list_current(acme), await KeyRepository(session).list_all(acme)) == ([], [])
            assert (
                len(await adapters.list_current(blackbeard))
                == len(await KeyRepository(session).list_all(blackbeard))
                == 1
            )
        for attempt in (publish(database, acme), rename(database, acme)):
            with pytest.raises(NotFound):
                await attempt
        async with database.transaction() as session:
            await TenantRepository(session).create("acme")

    with_database(body)


async def rename(database, tenant_id) -> None:
    async with database.transaction() as session:
        await TenantRepository(session).rename(tenant_id, "x")


def test_a_key_is_found_by_its_own_tenant_only(with_database, secrets):
    async def body(database):
        acme, blackbeard = await two_tenants(database)
        new = keys.issue("live", secrets)
        minted = new.minted
        async with database.transaction() as session:
            await KeyRepository(session).create(acme, new, name="ci")
        async with database.transaction() as session:
            repository = KeyRepository(session)
            assert (await repository.get(acme, minted.key_id)).name == "ci"
            assert await repository.get(blackbeard, minted.key_id) is None
            assert [key.key_id for key in await repository.list_all(acme)] == [minted.key_id]
            assert await repository.list_all(blackbeard) == []
            assert await repository.owner(minted.key_id) == acme
            for attempt in (
                repository.revoke(blackbeard, minted.key_id),
                repository.set_limits(blackbeard, minted.key_id, {"tokens_per_minute": 1}),
                repository.create("ten_nobody", keys.issue("live", secrets)),
            ):
                with pytest.raises(NotFound):
                    await attempt
            assert (await repository.get(acme, minted.key_id)).revoked_unix_ns is None

    with_database(body)


def test_only_the_digest_of_a_key_is_stored(with_database, secrets):
    async def body(database):
        acme, _ = await two_tenants(database)
        new = keys.issue("live", secrets)
        async with database.transaction() as session:
            await KeyRepository(session).create(acme, new)
        async with database.session() as session:
            (row,) = (await session.exec(select(*ApiKey.__table__.c))).all()
        assert new.digest in row
        secret_part = new.minted.text[18:38]
        assert not any(secret_part in str(value) or value == secret_part.encode() for value in row)

    with_database(body)


def test_changes_are_stamped_in_order_even_when_the_clock_goes_back(with_database, monkeypatch):
    async def body(database):
        acme, blackbeard = await two_tenants(database)
        stamps = []
        for hour in (0, 1, -1, -2):
            monkeypatch.setattr(time, "time_ns", lambda hour=hour: (1_900_000_000 + hour * 3600) * 10**9)
            async with database.transaction() as session:
                tenant = await TenantRepository(session).set_limits(acme if hour else blackbeard, {"weight": 2})
                stamps.append(tenant.changed_unix_ns)
        assert stamps == sorted(set(stamps))

    with_database(body)


def test_a_transaction_that_raises_leaves_nothing(with_database):
    async def body(database):
        async def make_a_ghost():
            async with database.transaction() as session:
                await TenantRepository(session).create("ghost")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            await make_a_ghost()
        async with database.session() as session:
            assert await TenantRepository(session).list_all() == []

    with_database(body)


def test_foreign_keys_are_enforced(with_database):
    async def body(database):
        names = {"key_id": "k", "tenant_id": "ten_none", "last4": "", "scopes": ["usage"]}
        orphan = ApiKey(digest=b"", created_unix_ns=1, changed_unix_ns=1, **names)

        async def add_an_orphan():
            async with database.transaction() as session:
                session.add(orphan)

        with pytest.raises(IntegrityError):
            await add_an_orphan()

    with_database(body)


def test_several_processes_that_read_and_then_write_wait_for_each_other(database_url):
    """Creating reads before it writes: with SQLite's deferred transactions some would fail at once."""

    async def create(database, name):
        async with database.transaction() as session:
            await TenantRepository(session).create(name)

    async def main():
        databases = [Database(database_url) for _ in range(3)]
        for database in databases:
            await database.start()
        creations = (
            create(database, f"{turn}-{number}") for turn in range(5) for number, database in enumerate(databases)
        )
        await asyncio.gather(*creations)
        async with databases[0].session() as session:
            assert len(await TenantRepository(session).list_all()) == 15
        for database in databases:
            await database.close()

    asyncio.run(main())


# ── rate cards ───────────────────────────────────────────────────────────────────────────────────


def test_new_prices_take_effect_when_every_gateway_has_heard_of_them(with_database):
    now = 10**18

    async def body(database):
        async with database.transaction() as session:
            cards = RateCardRepository(session)
            await cards.publish(default_prices(), 1, 1)
            with pytest.raises(InvalidValue):
                await cards.revise({}, now + NOTICE_NS - 1, now)
            assert (await cards.revise({}, now + NOTICE_NS, now)).effective_unix_ns == now + NOTICE_NS

    with_database(body)


def test_a_rate_card_is_a_new_version_in_the_future(with_database):
    async def body(database):
        async with database.transaction() as session:
            cards = RateCardRepository(session)
            first = await cards.publish(default_prices(), effective_unix_ns=100, now_unix_ns=100)
            second = await cards.publish(default_prices(), effective_unix_ns=500, now_unix_ns=200)
            for effective, now in ((200, 200), (100, 600), (500, 300)):
                with pytest.raises(InvalidValue):
                    await cards.publish(default_prices(), effective, now)
        async with database.session() as session:
            cards = RateCardRepository(session)
            assert await cards.list_all() == [first, second]
            assert await cards.get(second.rate_card_id) == second
            assert await cards.get("rc_none") is None
        assert (first.version, second.version) == (1, 2)

    with_database(body)


def test_of_many_cards_published_at_once_one_is_the_next_version(with_database):
    async def body(database):
        async def publish_card():
            async with database.transaction() as session:
                return (await RateCardRepository(session).publish(default_prices(), 500, 100)).version

        answers = await asyncio.gather(*(publish_card() for _ in range(4)), return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["InvalidValue"] * 3 + ["int"]

    with_database(body)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────


def test_publishing_a_known_name_makes_the_next_version_and_moves_the_name(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        assert await publish(database, acme) == 1
        first = await resolve(database, acme, "support")
        assert await publish(database, acme, fields=new_version("b" * 64)) == 2
        second = await resolve(database, acme, "support")
        assert (second.version, second.sha256) == (2, "b" * 64)
        assert await resolve(database, acme, "support", 1) == first
        assert first.target_modules == ["q_proj", "v_proj"]
        assert await resolve(database, acme, "support", 3) is None

    with_database(body)


def test_an_adapter_is_invisible_to_another_tenant_in_every_read(with_database):
    async def body(database):
        acme, blackbeard = await two_tenants(database)
        await publish(database, acme)
        mine = await resolve(database, acme, "support")
        async with database.transaction() as session:
            adapters = AdapterRepository(session)
            assert await adapters.resolve(blackbeard, "support") is None
            assert await adapters.resolve(blackbeard, "support", 1) is None
            assert await adapters.list_current(blackbeard) == []
            assert await adapters.versions(blackbeard, "support") == []
            assert await adapters.get_by_id(blackbeard, mine.adapter_version_id) is None
            assert await adapters.is_used(blackbeard, mine.sha256) is False
            assert await adapters.stored_bytes(blackbeard) == 0
            for attempt in (adapters.delete(blackbeard, "support"), adapters.rollback(blackbeard, "support", 1)):
                with pytest.raises(NotFound):
                    await attempt
            assert await adapters.get_by_id(acme, mine.adapter_version_id) == mine
        await publish(database, blackbeard, fields=new_version("c" * 64))
        assert (await resolve(database, acme, "support")).sha256 == "a" * 64

    with_database(body)


def test_an_expected_version_makes_publishing_a_compare_and_swap(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        with pytest.raises(VersionConflict):
            await publish(database, acme, expected_version=1)
        assert await publish(database, acme, expected_version=0) == 1
        with pytest.raises(VersionConflict) as caught:
            await publish(database, acme, expected_version=0)
        assert (caught.value.expected, caught.value.found) == (0, 1)
        assert await publish(database, acme, expected_version=1) == 2
        async with database.session() as session:
            assert len(await AdapterRepository(session).versions(acme, "support")) == 2

    with_database(body)


def test_of_many_swaps_at_once_exactly_one_wins(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        await publish(database, acme)
        uploads = (
            publish(database, acme, fields=new_version(f"{number:064}"), expected_version=1) for number in range(8)
        )
        answers = await asyncio.gather(*uploads, return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["VersionConflict"] * 7 + ["int"]

    with_database(body)


def test_many_uploads_at_once_without_a_swap_all_get_their_own_number(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        numbers = await asyncio.gather(*(publish(database, acme) for _ in range(8)))
        assert sorted(numbers) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert (await resolve(database, acme, "support")).version == 8

    with_database(body)


def test_a_rollback_moves_the_name_and_the_next_upload_does_not_reuse_a_number(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        await publish(database, acme)
        await publish(database, acme, fields=new_version("b" * 64))
        async with database.transaction() as session:
            adapters = AdapterRepository(session)
            with pytest.raises(VersionConflict):
                await adapters.rollback(acme, "support", 1, expected_version=1)
            with pytest.raises(NotFound):
                await adapters.rollback(acme, "support", 9)
            await adapters.rollback(acme, "support", 1, expected_version=2)
        assert (await resolve(database, acme, "support")).sha256 == "a" * 64
        assert await publish(database, acme, fields=new_version("c" * 64)) == 3

    with_database(body)


def test_a_deleted_name_is_gone_with_its_versions_and_its_numbers_are_never_used_again(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        await publish(database, acme)
        await publish(database, acme, name="other")
        gone = await resolve(database, acme, "support")
        async with database.transaction() as session:
            adapters = AdapterRepository(session)
            assert [version.version for version in await adapters.delete(acme, "support")] == [1]
            assert await adapters.resolve(acme, "support") is None
            assert await adapters.resolve(acme, "support", 1) is None
            assert await adapters.is_used(acme, gone.sha256)  # `other` has the same bytes
            assert [version.name for version in await adapters.list_current(acme)] == ["other"]
            assert (await adapters.get_by_id(acme, gone.adapter_version_id)).deleted_unix_ns is not None
            with pytest.raises(NotFound):
                await adapters.delete(acme, "support")
            await adapters.delete(acme, "other")
            assert not await adapters.is_used(acme, gone.sha256)
        assert await publish(database, acme, expected_version=0) == 2

    with_database(body)


def test_a_tenants_room_for_adapters_is_bounded_and_equal_bytes_count_once(with_database):
    async def body(database):
        acme, _ = await two_tenants(database)
        async with database.transaction() as session:
            await TenantRepository(session).set_limits(acme, {"max_adapters": 2, "max_storage_bytes": 250})
        await publish(database, acme, "one")
        await publish(database, acme, "two")
        with pytest.raises(LimitExceeded) as caught:
            await publish(database, acme, "three")
        assert (caught.value.limit, caught.value.allowed) == ("max_adapters", 2)
        await publish(database, acme, "two", new_version("b" * 64, size_bytes=150))
        with pytest.raises(LimitExceeded) as caught:
            await publish(database, acme, "two", new_version("c" * 64, size_bytes=1))
        assert caught.value.limit == "max_storage_bytes"
        assert (await resolve(database, acme, "two")).version == 2

    with_database(body)
