"""GET /v1/requests/{id}: a request's receipt."""

from litestar import Request, get
from litestar.params import FromPath

from gateway.access import needs
from gateway.errors import ApiError
from gateway.parts import parts_of, principal_of
from gateway.resources import Receipt
from gateway.views.receipts import receipt_of

_PREFIXES = ("chatcmpl-", "cmpl-")


@get("/v1/requests/{request_id:str}", opt=needs("usage"))
async def get_request(request: Request, request_id: FromPath[str]) -> Receipt:
    """As soon as the ledger has it. Raises ApiError 404 for absent and for another tenant's."""
    principal, parts = principal_of(request), parts_of(request)
    bare = request_id
    for prefix in _PREFIXES:  # the id of an answer's body serves as well
        bare = bare.removeprefix(prefix)
    async with parts.database.session() as session:
        receipt = await receipt_of(session, principal.tenant_id, bare)
    if receipt is None:
        raise ApiError(f"No request `{request_id}` is known.", code="not_found", param="request_id")
    return receipt


handlers = [get_request]
