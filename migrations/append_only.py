"""Tables that are only ever inserted into: their database refuses to change or delete a row, whoever asks.

A migration that copies such a table (SQLite's batch mode) loses its triggers and makes them again.
"""

from alembic import op

_FUNCTION = """
CREATE FUNCTION tenora_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$
"""


def make_append_only(*tables: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_FUNCTION.replace("CREATE", "CREATE OR REPLACE"))
    for table in tables:
        for statement in _triggers(table):
            op.execute(statement)


def make_changeable(*tables: str) -> None:
    """The way back; the last one takes the function with it when ``drop_function`` is called."""
    postgres = op.get_bind().dialect.name == "postgresql"
    for table in tables:
        if postgres:
            op.execute(f"DROP TRIGGER append_only_{table} ON {table}")
        else:
            op.execute(f"DROP TRIGGER append_only_{table}_update")
            op.execute(f"DROP TRIGGER append_only_{table}_delete")


def make_unemptiable(*tables: str) -> None:
    """PostgreSQL's row triggers don't see a TRUNCATE."""
    for table in tables:
        op.execute(
            f"CREATE TRIGGER append_only_{table}_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION tenora_append_only()"
        )


def make_emptiable(*tables: str) -> None:
    for table in tables:
        op.execute(f"DROP TRIGGER append_only_{table}_truncate ON {table}")


def drop_function() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION tenora_append_only()")


def _triggers(table: str) -> list[str]:
    if op.get_bind().dialect.name == "postgresql":
        return [
            f"CREATE TRIGGER append_only_{table} BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION tenora_append_only()"
        ]
    return [
        f"CREATE TRIGGER append_only_{table}_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ]
