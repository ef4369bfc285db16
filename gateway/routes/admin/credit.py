"""/admin/v1/tenants/{id}/credit: prepaid credit, granted once a reference."""

import msgspec
from litestar import Controller, Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import change, found, needs, session_of
from gateway.errors import ApiError
from gateway.views.rows import Body
from tenants.audit_log import Change
from tenants.errors import GrantDiffers
from tenants.quota.wallet import WalletRepository
from tenants.repositories import TenantRepository
from tenants.tables import Wallet


class NewGrant(msgspec.Struct, forbid_unknown_fields=True):
    """``reference`` is the payment's: sent again it grants nothing more."""

    amount_picousd: int
    reference: str


class Credit(Controller):
    path = "/tenants/{tenant_id:str}/credit"

    @get(guards=[needs("billing")])
    async def show(self, state: State, tenant_id: FromPath[str]) -> Body:
        """404 for a tenant that pays later."""
        async with session_of(state) as session:
            wallet = await WalletRepository(session).get(tenant_id)
        return credit_body(found(wallet, f"no prepaid credit of tenant {tenant_id}"))

    @post(guards=[needs("admin")])
    async def grant(self, request: Request, tenant_id: FromPath[str], data: JSONBody[NewGrant]) -> Body:
        """The first grant makes the tenant a prepaid one: from then on it runs what its credit can hold."""

        async def work(session) -> tuple[Body, Change | None]:
            wallets = WalletRepository(session)
            tenant = await TenantRepository(session).lock(tenant_id)
            wallet = await wallets.get(tenant_id)
            before = credit_body(wallet) if wallet else None
            after = credit_body(await wallets.grant(tenant, data.amount_picousd, data.reference))
            granted = Change("credit.grant", tenant_id, before, after | {"reference": data.reference})
            had = before["granted_picousd"] if before else 0
            return after, granted if after["granted_picousd"] > had else None  # None: that reference has, before

        try:
            return await change(request, work)
        except GrantDiffers as error:
            raise ApiError(f"{error}.", "idempotency_mismatch", "reference") from None


def credit_body(wallet: Wallet) -> Body:
    """What is free may be below zero: what was used is debited in full."""
    free = wallet.granted_picousd - wallet.spent_picousd - wallet.reserved_picousd
    return {
        "object": "credit",
        "tenant_id": wallet.tenant_id,
        "currency": "USD",
        "granted_picousd": wallet.granted_picousd,
        "spent_picousd": wallet.spent_picousd,
        "reserved_picousd": wallet.reserved_picousd,
        "free_picousd": free,
    }
