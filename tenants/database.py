"""The engine and sessions of SQLAlchemy, set so that SQLite serves several processes of one host."""

import copy
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar
from urllib.parse import urlencode

from sqlalchemy import ScalarResult, event
from sqlalchemy import exc as failures
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlmodel.ext.asyncio.session import AsyncSession
from sqlmodel.sql.expression import SelectOfScalar

from tenants.patience import patience

_Row = TypeVar("_Row")
CONNECT_S = 10.0
PROMPT_S = 5.0  # for what a request waits for; as long as SQLite waits for its lock
REPORT_S = 60.0  # for sums over much
BOOKS_S = 3600.0  # for sums over all there is
DEAD_PEER_S = 20
_WRITES = "tenora_writes"
_LIBPQ_ONLY = ("application_name", "passfile", "target_session_attrs")  # and all that begins with ssl
_PRAGMAS = (
    *("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "foreign_keys=ON"),
    "cache_size=-8192",  # KiB: a booking changes up to 2,000 pages, which must not go out and come back before its end
    "wal_autocheckpoint=4000",  # pages: two such bookings, and not half of one
)


def async_url(url: str) -> str:
    """``sqlite:///x`` and ``postgresql://…`` with the drivers we use; an explicit driver stays."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    parsed = make_url(url)
    return parsed.set(drivername=drivers.get(parsed.drivername, parsed.drivername)).render_as_string(False)


def create_engine(url: str) -> AsyncEngine:
    """An async engine; for SQLite with WAL, a busy timeout, foreign keys, and transactions that we begin. Its errors,
    which logs show, have no values of its statements."""
    parsed = make_url(async_url(url))
    return _sqlite_engine(parsed) if parsed.get_backend_name() == "sqlite" else _postgres_engine(parsed)


def _sqlite_engine(url: URL) -> AsyncEngine:
    # last in, first out: pages lie in the memory of a connection
    engine = create_async_engine(url, hide_parameters=True, pool_use_lifo=True)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _postgres_engine(url: URL) -> AsyncEngine:
    libpq = {name: value for name, value in url.query.items() if _is_libpqs(name)}
    dsn = {"dsn": f"postgresql://?{urlencode(libpq, doseq=True)}"} if libpq else {}
    engine = create_async_engine(
        url.difference_update_query(libpq),
        connect_args={"timeout": CONNECT_S, **dsn},
        pool_pre_ping=True,
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "do_connect", _connect_postgres)
    event.listen(engine.sync_engine, "connect", _watch_postgres)
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


def _watch_postgres(connection, _record) -> None:
    """A peer that is gone without a word, as after a failover, ends its connections within DEAD_PEER_S: whoever waits
    for its answer would wait for the system's quarter of an hour. A peer that only takes long is left its time."""
    peer = connection.driver_connection._transport.get_extra_info("socket")
    if peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_PEER_S // 2)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_PEER_S // 4)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)


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


class ReadingSession(AsyncSession):
    """Has no commit. One that read and then wrote would now and then fail, on SQLite, beside another writer."""

    async def commit(self) -> None:
        raise TypeError("a session for reading commits nothing: Database.transaction does")


class Database:
    """Sessions on one database. Repositories take a session and never commit; ``transaction`` does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: AsyncEngine | None = None
        self._deadline_s: float | None = None

    async def start(self) -> None:
        """Opens the pool and proves that the database answers. Raises SQLAlchemyError."""
        self._engine = create_engine(self.url)
        async with self._engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
        writing = self._engine.execution_options(**{_WRITES: True})
        self._reads = async_sessionmaker(self._engine, class_=ReadingSession, expire_on_commit=False)
        self._writes = async_sessionmaker(writing, class_=AsyncSession, expire_on_commit=False)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    def within(self, deadline_s: float = PROMPT_S) -> "Database":
        """The same one, which is started and is closed apart, for what somebody waits for: each session and transaction
        of it is ``in_time``."""
        prompt = copy.copy(self)
        prompt._deadline_s = deadline_s
        return prompt

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """For reading: ``async with database.session() as session``. Nothing is committed."""
        async with self._bound(), self._reads() as session:
            yield session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commits at the end of the block, rolls back when it raises. On SQLite writers come one after another."""
        async with self._bound(), self._writes() as session, session.begin():
            yield session

    def _bound(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._deadline_s is None else in_time(self._deadline_s)


@asynccontextmanager
async def in_time(deadline_s: float = PROMPT_S) -> AsyncIterator[None]:
    """Around what somebody waits for: a database that is connected and silent has failed, with SQLAlchemy's
    TimeoutError, after ``deadline_s`` and what its driver takes to give the connection up (2 s). Nobody else is waited
    for longer than that either: each connection that was asked is given up, and the next one asks on another."""
    try:
        async with patience(deadline_s):
            yield
    except TimeoutError:
        raise failures.TimeoutError("the database is silent") from None


async def one_snapshot(session: AsyncSession) -> None:
    """All that this session reads from now on, its first query, is of one moment. (On SQLite every transaction is.)"""
    if session.get_bind().dialect.name == "postgresql":
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


async def locked(session: AsyncSession, query: SelectOfScalar[_Row]) -> ScalarResult[_Row]:
    """The rows of ``query`` as they are now, nobody else's to change until this transaction ends: for what is read,
    reckoned with and written back. What the session had read of them before is read anew. (A writer on SQLite is alone
    anyway.)"""
    return await session.exec(query.with_for_update().execution_options(populate_existing=True))
