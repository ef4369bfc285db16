"""Prepaid credit in SQL: granted, reserved by a conditional UPDATE, settled where the record is booked.

A hold is resolved exactly once: by the record of its attempt, or given back when none seems to come; a record that
comes after that is debited all the same. Credit in use at a time fits BIGINT ($9.2 M); what was granted and spent over
the years may be more, the grants keep it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import CursorResult, bindparam, update
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.database import locked
from tenants.errors import GrantDiffers, InvalidValue
from tenants.settled import Booked
from tenants.stamps import change_stamp
from tenants.tables import RequestRecord, Tenant, Wallet, WalletGrant, WalletHold

MAX_PICOUSD = (1 << 63) - 1
MAX_REFERENCE_LENGTH = 128
_EMPTY = ("tenant_id", "granted_picousd", "reserved_picousd", "spent_picousd", "num_grants")
_OPEN = col(WalletHold.resolved_unix_ns).is_(None)
_WALLETS = select(Wallet.tenant_id).where(col(Wallet.tenant_id).in_(bindparam("tenant_ids", expanding=True))).limit(1)
_FREE = col(Wallet.granted_picousd) - col(Wallet.spent_picousd) - col(Wallet.reserved_picousd)


@dataclass(frozen=True, slots=True)
class Hold:
    """One dispatch's claim on its tenant's credit."""

    tenant_id: str
    request_id: str
    attempt: int
    gateway: str
    picousd: int


class WalletRepository:
    """Never commits. Every write takes the wallet's row first: writers of one tenant come one after another."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, tenant_id: str) -> Wallet | None:
        return await self._session.get(Wallet, tenant_id, populate_existing=True)

    async def grant(self, tenant: Tenant, amount_picousd: int, reference: str) -> Wallet:
        """Adds credit, and makes the tenant a prepaid one. Once a reference: again it changes nothing.

        Raises GrantDiffers when that reference granted another amount, InvalidValue.
        """
        _check_grant(amount_picousd, reference)
        wallet = await self._locked(tenant)
        known = await self._session.get(WalletGrant, (tenant.tenant_id, reference))
        if known is not None:
            if known.amount_picousd != amount_picousd:
                raise GrantDiffers(f"reference {reference!r} has granted {known.amount_picousd} picousd")
            return wallet
        _add(wallet, amount_picousd)
        self._session.add(wallet)
        self._session.add(
            WalletGrant(
                tenant_id=tenant.tenant_id,
                reference=reference,
                amount_picousd=amount_picousd,
                created_unix_ns=time.time_ns(),
            )
        )
        await self._session.flush()
        return wallet

    async def _locked(self, tenant: Tenant) -> Wallet:
        wallet = await self._wallet(tenant.tenant_id)
        if wallet is not None:
            return wallet
        tenant.is_prepaid, tenant.changed_unix_ns = True, await change_stamp(self._session)
        self._session.add(tenant)
        await self._session.flush()
        await insert_new(self._session, Wallet, _EMPTY, [(tenant.tenant_id, 0, 0, 0, 0)])  # of two first grants one
        wallet = await self._wallet(tenant.tenant_id)
        assert wallet is not None
        return wallet

    async def reserve(self, hold: Hold) -> bool:
        """False: the free credit is less, and nothing was taken."""
        if not await self._take(hold):
            return False
        self._session.add(
            WalletHold(
                request_id=hold.request_id,
                attempt=hold.attempt,
                tenant_id=hold.tenant_id,
                gateway=hold.gateway,
                amount_picousd=hold.picousd,
                created_unix_ns=time.time_ns(),
            )
        )
        await self._session.flush()
        return True

    async def extend(self, hold: Hold) -> bool:
        """Reserves ``hold.picousd`` more. False: nothing was taken, the credit or the hold is gone."""
        if not await self._take(hold):
            return False
        amount = col(WalletHold.amount_picousd) + hold.picousd
        if await self._changed(update(WalletHold).where(*_this(hold), _OPEN).values(amount_picousd=amount)):
            return True
        await self._move(hold.tenant_id, reserved=-hold.picousd)
        return False

    async def begin_attempt(self, hold: Hold) -> bool:
        """The open hold of the attempt before stands for ``hold.attempt`` from now on; where it was resolved, another
        is reserved. False: the credit is gone."""
        await self._wallet(hold.tenant_id)
        before = Hold(hold.tenant_id, hold.request_id, hold.attempt - 1, hold.gateway, hold.picousd)
        if await self._changed(update(WalletHold).where(*_this(before), _OPEN).values(attempt=hold.attempt)):
            return True
        return await self.reserve(hold)

    async def debit(self, tenant_id: str, request_id: str, attempt: int, spent_picousd: int) -> None:
        """What the record of a hold says was spent, also more than it held; once a record. A hold that was given back
        before, since nobody knew of one, is debited all the same: the record has the last word."""
        wallet, hold = await self._both(tenant_id, request_id, attempt)
        if wallet is None or hold is None:
            return
        if hold.resolved_unix_ns is None:
            _free(wallet, hold)
        hold.spent_picousd = (hold.spent_picousd or 0) + spent_picousd
        wallet.spent_picousd += spent_picousd
        self._session.add_all([hold, wallet])
        await self._session.flush()

    async def give_back(self, tenant_id: str, request_id: str, attempt: int) -> bool:
        """Ends an open hold of a request that no record is known of; False: there is no such hold, or there is one."""
        wallet, hold = await self._both(tenant_id, request_id, attempt)
        if wallet is None or hold is None or hold.resolved_unix_ns is not None:
            return False
        if await self._session.get(RequestRecord, (request_id, attempt)) is not None:
            return False
        _free(wallet, hold)
        hold.spent_picousd = 0
        self._session.add_all([hold, wallet])
        await self._session.flush()
        return True

    async def unresolved(self, gateways: Sequence[str], before_unix_ns: int) -> list[WalletHold]:
        """Open holds of these gateways that are older than that."""
        query = select(WalletHold).where(
            col(WalletHold.gateway).in_(gateways), WalletHold.created_unix_ns < before_unix_ns, _OPEN
        )
        return list((await self._session.exec(query)).all())

    async def holders(self) -> set[str]:
        """The gateways that have open holds."""
        query = select(WalletHold.gateway).where(WalletHold.gateway != "").distinct()
        return set((await self._session.exec(query)).all())

    async def _take(self, hold: Hold) -> bool:
        reserved = col(Wallet.reserved_picousd) + hold.picousd
        fits = update(Wallet).where(col(Wallet.tenant_id) == hold.tenant_id, hold.picousd <= _FREE)
        return await self._changed(fits.values(reserved_picousd=reserved))

    async def _move(self, tenant_id: str, *, reserved: int) -> None:
        moved = col(Wallet.reserved_picousd) + reserved
        await self._changed(update(Wallet).where(col(Wallet.tenant_id) == tenant_id).values(reserved_picousd=moved))

    async def _both(self, tenant_id: str, request_id: str, attempt: int) -> tuple[Wallet | None, WalletHold | None]:
        """The wallet first: who has it has its holds."""
        wallet = await self._wallet(tenant_id)
        return wallet, await self._session.get(WalletHold, (request_id, attempt), populate_existing=True)

    async def _wallet(self, tenant_id: str) -> Wallet | None:
        """Locked."""
        return (await locked(self._session, select(Wallet).where(Wallet.tenant_id == tenant_id))).first()

    async def _changed(self, statement) -> bool:
        done = await self._session.exec(statement)
        assert isinstance(done, CursorResult)
        return done.rowcount == 1


@dataclass(frozen=True, slots=True)
class WalletFold:
    """Resolves the holds of the records that are booked, in the transaction that books them."""

    async def fold(self, session: AsyncSession, booked: Sequence[Booked]) -> None:
        ids = {one.request.context.request_id for one in booked}
        tenants = {one.request.context.tenant_id for one in booked}
        if not ids or not await self._prepaid(session, tenants):
            return
        repository = WalletRepository(session)
        for one in sorted(booked, key=lambda each: each.request.context.tenant_id):  # wallets are locked in one order
            context, spent = one.request.context, sum(charge.amount_picousd for charge in one.charges)
            await repository.debit(context.tenant_id, context.request_id, context.attempt, spent)

    async def _prepaid(self, session: AsyncSession, tenants: set[str]) -> bool:
        connection = await session.connection()
        return (await connection.execute(_WALLETS, {"tenant_ids": sorted(tenants)})).first() is not None


def _free(wallet: Wallet, hold: WalletHold) -> None:
    hold.resolved_unix_ns, hold.gateway = time.time_ns(), ""
    wallet.reserved_picousd -= hold.amount_picousd


def _this(hold: Hold) -> tuple:
    return col(WalletHold.request_id) == hold.request_id, col(WalletHold.attempt) == hold.attempt


def _check_grant(amount_picousd: int, reference: str) -> None:
    if type(amount_picousd) is not int or not 0 < amount_picousd <= MAX_PICOUSD:
        raise InvalidValue("amount_picousd", f"is a whole number from 1 to {MAX_PICOUSD}")
    if not 0 < len(reference.encode("utf-8", "surrogatepass")) <= MAX_REFERENCE_LENGTH or not reference.isprintable():
        raise InvalidValue("reference", f"is printable text of at most {MAX_REFERENCE_LENGTH} bytes")


def _add(wallet: Wallet, amount_picousd: int) -> None:
    """Where the sum would leave BIGINT, what is spent is left out on both sides: the grants and holds still have it."""
    if wallet.granted_picousd + amount_picousd > MAX_PICOUSD:
        wallet.granted_picousd, wallet.spent_picousd = (
            max(0, wallet.granted_picousd - wallet.spent_picousd),
            max(0, wallet.spent_picousd - wallet.granted_picousd),
        )
    if wallet.granted_picousd + amount_picousd > MAX_PICOUSD:
        raise InvalidValue("amount_picousd", f"the credit that is left may be at most {MAX_PICOUSD} picousd")
    wallet.granted_picousd += amount_picousd
    wallet.num_grants += 1
