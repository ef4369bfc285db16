"""Idempotency-Key: a request sent twice runs once, is billed once, and is answered twice."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import anyio
import msgspec
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel.ext.asyncio.session import AsyncSession

from gateway.call import Call
from gateway.errors import ApiError, invalid
from gateway.views.receipts import receipt_of
from gateway.work import Work
from tenants.database import Database
from tenants.idempotency import LEASE_NS, IdempotencyKey, IdempotencyRepository
from tenants.secrets import Secrets
from tenants.stamps import clock_ns
from tenants.tables import IdempotentRequest

HEADER = "Idempotency-Key"
MAX_STORED_BYTES = 256 << 10
PURGE_EVERY_S = 300.0
_SETTLED_IN_NS = 600 * 10**9  # by then the ledger has a finished request, or never will
_VALUE = re.compile(r"[\x20-\x7e]{1,255}")
_log = logging.getLogger("gateway.idempotency")


class Replayed(Exception):
    """The call has been answered with what an earlier one under its key got: there is nothing left to do."""


@dataclass(slots=True)
class Idempotency:
    """The stage in front of admission. Only whole answers hold their key: what was refused, broken off or lost
    cost nothing and may be sent again. A gateway that dies lets go of its keys with their leases."""

    database: Database
    secrets: Secrets
    now_ns: Callable[[AsyncSession], Awaitable[int]] = clock_ns  # leases are compared by one clock
    _purging: asyncio.Task[None] | None = field(default=None)

    async def start(self) -> None:
        self._purging = asyncio.create_task(self._purge(), name="old idempotency keys")

    async def close(self) -> None:
        if self._purging is not None:
            self._purging.cancel()

    def once(self, call: Call, work: Work) -> AbstractAsyncContextManager[None]:
        """Holds the call's key while entered, and from its whole answer on; without the header it does nothing.

        Raises Replayed when an earlier request has answered, ApiError 400, 409 and 422.
        """
        value = call.idempotency_key
        return contextlib.nullcontext() if value is None else self._held(call, work, value)

    @contextlib.asynccontextmanager
    async def _held(self, call: Call, work: Work, value: str) -> AsyncIterator[None]:
        tenant_id = work.principal.tenant_id
        if not _VALUE.fullmatch(value):
            raise invalid(f"'{HEADER}' has 1 to 255 printable ASCII characters.", HEADER)
        key = IdempotencyKey(tenant_id, *self.secrets.idempotency_key(tenant_id, value))
        await self._claim(call, key, key.body_hash(work.operation.encode() + call.body_hash))
        holder = _Holder(self, call, key)
        call.on_whole = holder.finish
        renewing = asyncio.create_task(holder.renew(), name=f"idempotency key of {call.request_id}")
        try:
            yield
        finally:
            renewing.cancel()
            await holder.let_go()

    async def _claim(self, call: Call, key: IdempotencyKey, body_hash: bytes) -> None:
        async with self.database.transaction() as session:
            repository = IdempotencyRepository(session)
            found = await repository.claim(key, body_hash, call.request_id, await self.now_ns(session))
            if found is None:
                return
            if found.body_hash != body_hash:
                raise ApiError(f"This '{HEADER}' came with another request.", "idempotency_mismatch", HEADER)
            answer = await self._earlier_answer(session, key, found)
            if answer is None:
                now_ns = await self.now_ns(session)
                if await repository.take_over(key, found, body_hash, call.request_id, now_ns):
                    return
        if answer is None:
            raise _in_flight()
        call.request_id, call.is_replay = found.request_id, True
        call.headers["idempotency-replayed"] = "true"
        await call.answer(answer)
        raise Replayed

    async def _earlier_answer(self, session: AsyncSession, key: IdempotencyKey, row: IdempotentRequest) -> bytes | None:
        """The body, or the receipt; None: it came to nothing that its caller paid for. Raises ApiError 409."""
        if row.finished_unix_ns is None:
            raise _in_flight()
        if row.answer is not None:
            return key.open(row.request_id, row.answer)
        receipt = await receipt_of(session, row.tenant_id, row.request_id)
        if receipt is None and await self.now_ns(session) < row.finished_unix_ns + _SETTLED_IN_NS:
            raise _in_flight()
        return msgspec.json.encode(receipt) if receipt and receipt.price.billed else None

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(PURGE_EVERY_S)
            try:
                await self.purge()
            except SQLAlchemyError as error:
                _log.warning("old idempotency keys stay for now: %s", type(error).__name__)

    async def purge(self) -> int:
        """Removes the keys whose time is over; how many that were."""
        async with self.database.transaction() as session:
            return await IdempotencyRepository(session).purge(await self.now_ns(session))


@dataclass(slots=True)
class _Holder:
    """A running request's hold on its key."""

    stage: Idempotency
    call: Call
    key: IdempotencyKey
    is_whole: bool = False

    async def finish(self, body: bytes | None) -> None:
        """Keeps the answer; where it is too large, streamed or cut off by its caller, its receipt stands for it.

        Raises what the database raises: an answer that could not be given again is not given at all.
        """
        sealed = None
        if body is not None and len(body) <= MAX_STORED_BYTES and not self.call.gone.is_set():
            sealed = self.key.seal(self.call.request_id, body)
        async with self.stage.database.transaction() as session:
            now_ns = await self.stage.now_ns(session)
            await IdempotencyRepository(session).finish(self.key, self.call.request_id, sealed, now_ns)
        self.is_whole = True

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_NS / 3e9)
            try:
                async with self.stage.database.transaction() as session:
                    now_ns = await self.stage.now_ns(session)
                    await IdempotencyRepository(session).renew(self.key, self.call.request_id, now_ns)
            except SQLAlchemyError as error:
                _log.warning("the lease of an idempotency key was not renewed: %s", type(error).__name__)

    async def let_go(self) -> None:
        """Frees the key of a request without a whole answer; where the database fails the lease runs out."""
        if self.is_whole:
            return
        with anyio.CancelScope(shield=True):
            try:
                async with self.stage.database.transaction() as session:
                    await IdempotencyRepository(session).release(self.key, self.call.request_id)
            except SQLAlchemyError as error:
                _log.warning("an idempotency key is held until its lease runs out: %s", type(error).__name__)


def _in_flight() -> ApiError:
    return ApiError(f"A request with this '{HEADER}' is still being answered.", "idempotency_in_flight", HEADER)
