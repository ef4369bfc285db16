"""What a database's URL may say beside where it is."""

import asyncio

import pytest

from tenants.database import Database
from tests.stores import PostgresServer


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
    with pytest.raises(ConnectionError, match="SSL"):
        asked(f"{postgres.url('postgres')}?sslmode=require", "SELECT 1")
