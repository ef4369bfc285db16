import sqlite3

import pytest

import migrations


def tables_of(path) -> set[str]:
    with sqlite3.connect(path) as connection:
        found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    return found


def test_the_schema_goes_up_down_and_up_again_without_drift(tmp_path):
    path = tmp_path / "tenora.db"
    url = f"sqlite:///{path}"
    migrations.upgrade(url)
    migrations.check(url)
    assert {"tenant", "api_key", "adapter_version", "request_record", "ledger_entry"} <= tables_of(path)
    migrations.downgrade(url)
    assert tables_of(path) == {"alembic_version"}
    migrations.upgrade(url)
    migrations.upgrade(url)  # a second time changes nothing
    migrations.check(url)


def test_a_database_that_was_never_migrated_is_drift(tmp_path):
    with pytest.raises(migrations.SchemaDrift):
        migrations.check(f"sqlite:///{tmp_path / 'empty.db'}")


def test_a_column_that_the_tables_do_not_have_is_drift(tmp_path):
    url = f"sqlite:///{tmp_path / 'tenora.db'}"
    migrations.upgrade(url)
    with sqlite3.connect(tmp_path / "tenora.db") as connection:
        connection.execute("ALTER TABLE tenant ADD COLUMN surprise INTEGER")
    connection.close()
    with pytest.raises(migrations.SchemaDrift, match="surprise"):
        migrations.check(url)
