"""Idempotency keys: what a tenant sends twice under one key runs once and is answered twice.

Of a key's value only keyed hashes are stored. The value itself is what opens the stored answer: whoever asks for
it again brings that along. Database and secrets together don't give it, as long as the value can't be guessed.
"""

import hmac
import secrets as random
from dataclasses import dataclass

from sqlalchemy import delete, update
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new, remove
from tenants.secrets import Secret
from tenants.tables import IdempotentRequest

KEEP_NS = 24 * 3600 * 10**9
LEASE_NS = 30 * 10**9
_NONCE_BYTES = 12
_COLUMNS = ("tenant_id", "key_hash", "body_hash", "request_id", "lease_unix_ns", "keep_until_unix_ns")


@dataclass(frozen=True, slots=True, eq=False)
class IdempotencyKey:
    """A key as its tenant sent it: ``key_hash`` names it in the database, ``secret`` (32 bytes) is never stored."""

    tenant_id: str
    key_hash: str
    secret: Secret

    def body_hash(self, request: bytes) -> bytes:
        """What tells one request from another under this key, and nobody without it anything; 32 bytes."""
        return hmac.digest(self.secret.reveal(), request, "sha256")

    def seal(self, request_id: str, answer: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # megabytes that few processes need

        nonce = random.token_bytes(_NONCE_BYTES)
        return nonce + AESGCM(self.secret.reveal()).encrypt(nonce, answer, self._bound_to(request_id))

    def open(self, request_id: str, sealed: bytes) -> bytes:
        """Raises cryptography's InvalidTag for what was not sealed with this key for this request."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return AESGCM(self.secret.reveal()).decrypt(nonce, data, self._bound_to(request_id))

    def _bound_to(self, request_id: str) -> bytes:
        return f"{self.tenant_id}/{self.key_hash}/{request_id}".encode()


class IdempotencyRepository:
    """Which request a key stands for. Every write names the request that it believes to hold the key."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def claim(
        self, key: IdempotencyKey, body_hash: bytes, request_id: str, now_ns: int
    ) -> IdempotentRequest | None:
        """None: the key stands for ``request_id`` from now on. Else the request that it stands for already."""
        row = (key.tenant_id, key.key_hash, body_hash, request_id, now_ns + LEASE_NS, now_ns + KEEP_NS)
        while not await insert_new(self._session, IdempotentRequest, _COLUMNS, [row]):
            found = await self._find(key)  # None: released just now
            if found is not None and _is_live(found, now_ns):
                return found
            if found is not None and await self.take_over(key, found, body_hash, request_id, now_ns):
                break
        return None

    async def take_over(
        self, key: IdempotencyKey, found: IdempotentRequest, body_hash: bytes, request_id: str, now_ns: int
    ) -> bool:
        """From a request that is of no use to its caller; False when another was faster."""
        return await self._change(
            key,
            found.request_id,
            body_hash=body_hash,
            request_id=request_id,
            lease_unix_ns=now_ns + LEASE_NS,
            finished_unix_ns=None,
            answer=None,
            keep_until_unix_ns=now_ns + KEEP_NS,
        )

    async def renew(self, key: IdempotencyKey, request_id: str, now_ns: int) -> bool:
        """Another LEASE_NS for a request that still runs."""
        return await self._change(key, request_id, lease_unix_ns=now_ns + LEASE_NS)

    async def finish(self, key: IdempotencyKey, request_id: str, sealed: bytes | None, now_ns: int) -> bool:
        """``sealed``: its answer; None: its receipt stands for it. False when another request holds the key."""
        return await self._change(key, request_id, finished_unix_ns=now_ns, answer=sealed)

    async def release(self, key: IdempotencyKey, request_id: str) -> None:
        """The request came to nothing: the key is free."""
        await self._session.exec(delete(IdempotentRequest).where(*_is(key, request_id)))

    async def purge(self, now_ns: int) -> int:
        """Removes what has been kept long enough; how many that were."""
        return await remove(self._session, IdempotentRequest, col(IdempotentRequest.keep_until_unix_ns) <= now_ns)

    async def _find(self, key: IdempotencyKey) -> IdempotentRequest | None:
        query = select(IdempotentRequest).where(
            IdempotentRequest.tenant_id == key.tenant_id, IdempotentRequest.key_hash == key.key_hash
        )
        return (await self._session.exec(query.execution_options(populate_existing=True))).first()

    async def _change(self, key: IdempotencyKey, held_by: str, **values: object) -> bool:
        changed = await self._session.exec(update(IdempotentRequest).where(*_is(key, held_by)).values(values))
        return changed.rowcount == 1


def _is(key: IdempotencyKey, request_id: str) -> tuple:
    columns = IdempotentRequest
    return (
        col(columns.tenant_id) == key.tenant_id,
        col(columns.key_hash) == key.key_hash,
        col(columns.request_id) == request_id,
    )


def _is_live(row: IdempotentRequest, now_ns: int) -> bool:
    """A request that nobody renews any more has died with its gateway; unbilled, since no gateway closed it."""
    return now_ns < row.keep_until_unix_ns and (row.finished_unix_ns is not None or now_ns < row.lease_unix_ns)
