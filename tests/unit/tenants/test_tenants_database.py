"""What a database's URL may say beside where it is."""

import asyncio
import socket

import pytest
from sqlalchemy import exc as failures
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlmodel import select

from tenants.database import DEAD_PEER_S, Database, in_time
from tenants.tables import Tenant
from tests.stores import PostgresServer, postgres_server


def asked(url: str, question: str) -> str:
    async def main() -> str:
        database = Database(url)
        try:
            await database.start()
            async with database.session() as session:
                return str((await (await session.connection()).exec_driver_sql(question)).scalar())
        finally:
            await database.close()

    return asyncio.run(main())


def test_a_url_as_managed_databases_hand_it_out_is_understood(postgres: PostgresServer):
    url = f"{postgres.url('postgres')}?sslmode=disable&application_name=tenora"

    assert asked(url.replace("+asyncpg", ""), "SHOW application_name") == "tenora"


def test_a_url_that_asks_for_tls_is_not_served_without(postgres: PostgresServer):
    with pytest.raises(OperationalError, match="SSL"):
        asked(f"{postgres.url('postgres')}?sslmode=require", "SELECT 1")


def test_a_server_that_is_away_or_lets_nobody_in_is_an_error_of_databases(postgres: PostgresServer):
    with pytest.raises(OperationalError, match="Connect call failed"):
        asked("postgresql://127.0.0.1:1/tenora", "SELECT 1")
    with pytest.raises(DBAPIError, match="nobody"):
        asked(postgres.url("postgres").replace("postgres:", "nobody:"), "SELECT 1")


def test_an_error_that_a_log_may_show_has_no_values_of_its_statement(with_database):
    async def body(database: Database):
        async with database.session() as session:
            with pytest.raises(DBAPIError) as caught:
                await (await session.connection()).execute(text("SELECT x FROM nowhere WHERE x = :x"), {"x": "secret"})
        assert "nowhere" in str(caught.value)
        assert "secret" not in str(caught.value)

    with_database(body)


def test_a_session_for_reading_commits_nothing(with_database):
    async def body(database: Database):
        async with database.session() as session:
            await session.exec(select(Tenant))
            with pytest.raises(TypeError, match="transaction"):
                await session.commit()

    with_database(body)


def test_who_asks_sqlite_gets_the_connection_that_was_used_last(tmp_path):
    async def main() -> set[int]:
        database = Database(f"sqlite:///{tmp_path / 'a.db'}")
        await database.start()

        async def connection_of(session) -> int:
            raw = await (await session.connection()).get_raw_connection()
            return id(raw.driver_connection)

        try:
            async with database.session() as one, database.session() as two, database.session() as three:
                assert len({await connection_of(each) for each in (one, two, three)}) == 3
            used = set()
            for _ in range(6):
                async with database.session() as session:
                    used.add(await connection_of(session))
            return used
        finally:
            await database.close()

    assert len(asyncio.run(main())) == 1


def test_a_peer_that_is_gone_without_a_word_is_found_out_in_seconds(postgres: PostgresServer):
    async def main() -> tuple[int, int, int]:
        database = Database(postgres.url("postgres"))
        await database.start()
        try:
            async with database.session() as session:
                raw = await (await session.connection()).get_raw_connection()
                peer = raw.driver_connection._transport.get_extra_info("socket")
                return (
                    peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                    peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                )
        finally:
            await database.close()

    assert asyncio.run(main()) == (1, DEAD_PEER_S // 2, DEAD_PEER_S * 1000)


def test_a_private_socket_is_left_as_it_is(postgres: PostgresServer):
    url = f"postgresql://postgres@/postgres?host={postgres.folder}&port={postgres.port}"

    assert asked(url, "SELECT 1") == "1"


def test_a_database_that_is_connected_and_silent_fails_in_time_for_all_who_ask_and_serves_them_again_afterwards():
    async def ask(database: Database) -> int:
        async with in_time(0.2), database.session() as session:
            return len((await session.exec(select(1))).all())

    async def main(server: PostgresServer) -> None:
        database = Database(server.url("postgres"))
        await database.start()
        try:
            with server.frozen():
                async with asyncio.timeout(30):
                    answers = await asyncio.gather(*(ask(database) for _ in range(40)), return_exceptions=True)
            assert {type(answer) for answer in answers} == {failures.TimeoutError}
            async with database.session() as session:
                assert (await session.exec(select(1))).one() == 1
        finally:
            await database.close()

    with postgres_server() as server:
        asyncio.run(main(server))
