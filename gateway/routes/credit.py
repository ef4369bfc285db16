"""GET /v1/organization/credit: what is left of the caller's prepaid credit."""

from litestar import Request, get

from gateway.access import needs
from gateway.errors import ApiError
from gateway.parts import parts_of, principal_of
from gateway.resources import CreditBody
from tenants.quota.wallet import WalletRepository


@get("/v1/organization/credit", opt=needs("usage"))
async def credit(request: Request) -> CreditBody:
    """404 for an account that pays later."""
    async with parts_of(request).database.session() as session:
        wallet = await WalletRepository(session).get(principal_of(request).tenant_id)
    if wallet is None:
        raise ApiError("This account has no prepaid credit.", code="not_found")
    return CreditBody(
        granted_picousd=wallet.granted_picousd,
        spent_picousd=wallet.spent_picousd,
        reserved_picousd=wallet.reserved_picousd,
        free_picousd=wallet.granted_picousd - wallet.spent_picousd - wallet.reserved_picousd,
    )


handlers = [credit]
