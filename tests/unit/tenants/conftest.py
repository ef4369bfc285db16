"""Fixtures of the tenants tests: an empty database of each kind, a real Valkey, secrets."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis
from stores import PostgresServer, ValkeyServer, postgres_server, valkey_server

import migrations
from tenants import tables
from tenants.database import Database
from tenants.secrets import Secrets


@pytest.fixture(scope="session")
def empty_database_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A migrated SQLite file; tests start from copies of it."""
    path = tmp_path_factory.mktemp("template") / "tenora.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_database(postgres: PostgresServer) -> str:
    """The name of a migrated PostgreSQL database; tests empty it before they begin."""
    name = postgres.create_database()
    migrations.upgrade(postgres.url(name))
    return name


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a migrated, empty database: every test that asks for it runs on both kinds."""
    if request.param == "sqlite":
        path = tmp_path / "tenora.db"
        path.write_bytes(request.getfixturevalue("empty_database_file"))
        return f"sqlite:///{path}"
    name, postgres = request.getfixturevalue("migrated_database"), request.getfixturevalue("postgres")
    names = ", ".join(table.name for table in tables.metadata.sorted_tables)
    as_replica = "SET LOCAL session_replication_role = replica"  # without triggers: books refuse to be emptied
    postgres.execute(f"DO $$ BEGIN {as_replica}; TRUNCATE {names}; END $$", name)
    return postgres.url(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def unmigrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a database without any table, on both kinds."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'tenora.db'}"
        return
    postgres = request.getfixturevalue("postgres")
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


Body: TypeAlias = Callable[[Database], Coroutine[Any, Any, Any]]


def run_on(url: str, body: Body) -> Any:
    """``body(database)`` on a loop of its own."""

    async def main() -> Any:
        database = Database(url)
        await database.start()
        try:
            return await body(database)
        finally:
            await database.close()

    return asyncio.run(main())


@pytest.fixture
def with_database(database_url: str) -> Callable[[Body], Any]:
    return partial(run_on, database_url)


@pytest.fixture
def with_unmigrated(unmigrated_url: str) -> Callable[[Body], Any]:
    return partial(run_on, unmigrated_url)


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
def with_redis(valkey: ValkeyServer) -> Callable[[Callable[[Redis], Coroutine[Any, Any, Any]]], Any]:
    """Runs ``body(redis)`` on a loop of its own, with an empty store."""

    def run(body: Callable[[Redis], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with Redis.from_url(valkey.url) as redis:
                await redis.flushall()
                return await body(redis)

        return asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets.load_or_create(tmp_path_factory.mktemp("secrets") / "secrets.json")
