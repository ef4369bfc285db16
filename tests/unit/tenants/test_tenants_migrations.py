"""The schema's history on both kinds of database."""

import asyncio

import pytest
from sqlalchemy import inspect, text

import migrations
from tenants.database import create_engine


def on_connection(url: str, action):
    async def run():
        engine = create_engine(url)
        async with engine.begin() as connection:
            result = await connection.run_sync(action)
        await engine.dispose()
        return result

    return asyncio.run(run())


def tables_of(url: str) -> set[str]:
    return on_connection(url, lambda connection: set(inspect(connection).get_table_names()))


def test_the_schema_goes_up_down_and_up_again_without_drift(unmigrated_url):
    migrations.upgrade(unmigrated_url)
    migrations.check(unmigrated_url)
    assert {"tenant", "api_key", "adapter_version", "request_record", "ledger_entry"} <= tables_of(unmigrated_url)
    migrations.downgrade(unmigrated_url)
    assert tables_of(unmigrated_url) == {"alembic_version"}
    migrations.upgrade(unmigrated_url)
    migrations.upgrade(unmigrated_url)  # a second time changes nothing
    migrations.check(unmigrated_url)


def test_a_database_that_was_never_migrated_is_drift(unmigrated_url):
    with pytest.raises(migrations.SchemaDrift):
        migrations.check(unmigrated_url)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("ALTER TABLE tenant ADD COLUMN surprise INTEGER", "surprise"),
        ("DROP INDEX ix_ledger_entry_request_id", "ix_ledger_entry_request_id"),
    ],
)
def test_a_schema_that_is_not_the_tables_is_drift(unmigrated_url, change, named):
    migrations.upgrade(unmigrated_url)
    on_connection(unmigrated_url, lambda connection: connection.execute(text(change)))
    with pytest.raises(migrations.SchemaDrift, match=named):
        migrations.check(unmigrated_url)


def test_a_downgrade_leaves_no_type_or_sequence_behind(postgres):
    name = postgres.create_database()
    before = postgres.execute("SELECT typname FROM pg_type ORDER BY 1", name)
    migrations.upgrade(postgres.url(name))
    migrations.downgrade(postgres.url(name))
    postgres.execute("DROP TABLE alembic_version", name)

    assert postgres.execute("SELECT typname FROM pg_type ORDER BY 1", name) == before
    postgres.drop_database(name)
