"""The engine and sessions of SQLAlchemy, set so that SQLite serves several processes of one host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlencode

from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlmodel.ext.asyncio.session import AsyncSession

_WRITES = "tenora_writes"
_LIBPQ_ONLY = ("application_name", "passfile", "target_session_attrs")  # and all that begins with ssl
_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "foreign_keys=ON")


def async_url(url: str) -> str:
    """``sqlite:///x`` and ``postgresql://…`` with the drivers we use; an explicit driver stays."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    parsed = make_url(url)
    return parsed.set(drivername=drivers.get(parsed.drivername, parsed.drivername)).render_as_string(False)


def create_engine(url: str) -> AsyncEngine:
    """An async engine; for SQLite with WAL, a busy timeout, foreign keys, and transactions that we begin. Its errors,
    which logs show, have no values of its statements."""
    parsed = make_url(async_url(url))
    is_sqlite = parsed.get_backend_name() == "sqlite"
    libpq = {} if is_sqlite else {name: value for name, value in parsed.query.items() if _is_libpqs(name)}
    more = {"dsn": f"postgresql://?{urlencode(libpq, doseq=True)}"} if libpq else {}
    url_alone = parsed.difference_update_query(libpq)
    engine = create_async_engine(url_alone, connect_args=more, pool_pre_ping=not is_sqlite, hide_parameters=True)
    if is_sqlite:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    else:
        event.listen(engine.sync_engine, "do_connect", _connect_postgres)
    return engine


def _is_libpqs(name: str) -> bool:
    """What a PostgreSQL URL may ask for and the driver knows in a URL only; ``ssl`` alone is the driver's own word."""
    return name in _LIBPQ_ONLY or (name.startswith("ssl") and name != "ssl")


def _connect_postgres(dialect, _record, args, options):
    """A server that is away is an OperationalError, as SQLAlchemy has it of any other database: the errors of sockets
    come raw from this driver."""
    try:
        return dialect.connect(*args, **options)
    except OSError as error:
        raise dialect.loaded_dbapi.OperationalError(str(error) or type(error).__name__, error) from error


def _prepare_sqlite(connection, _record) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin_sqlite does
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer fails at once when another wrote in between, busy timeout or not:
    # whoever will write takes the write lock first.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class Database:
    """Sessions on one database. Repositories take a session and never commit; ``transaction`` does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Opens the pool and proves that the database answers. Raises SQLAlchemyError."""
        self._engine = create_engine(self.url)
        async with self._engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
        writing = self._engine.execution_options(**{_WRITES: True})
        self._reads = async_sessionmaker(self._engine, class_=AsyncSession, expire_on_commit=False)
        self._writes = async_sessionmaker(writing, class_=AsyncSession, expire_on_commit=False)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    def session(self) -> AsyncSession:
        """For reading: ``async with database.session() as session``. Nothing is committed."""
        return self._reads()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commits at the end of the block, rolls back when it raises. On SQLite writers come one after another."""
        async with self._writes() as session, session.begin():
            yield session
