"""GET /v1/organization/invoices: the caller's own."""

from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath

from gateway.access import needs
from gateway.errors import ApiError
from gateway.parts import parts_of, principal_of
from gateway.resources import Listed
from gateway.views.documents import format_of
from gateway.views.invoices import INVOICE_FORMATS, InvoiceHead, invoice_answer, invoice_head
from tenants.invoices.invoices import InvoiceRepository


@get("/v1/organization/invoices", opt=needs("usage"))
async def list_invoices(request: Request) -> Listed[InvoiceHead]:
    async with parts_of(request).database.session() as session:
        every = await InvoiceRepository(session).list_all(principal_of(request).tenant_id)
    return Listed(data=[invoice_head(invoice) for invoice in every])


@get("/v1/organization/invoices/{invoice_id:str}", opt=needs("usage"))
async def get_invoice(request: Request, invoice_id: FromPath[str]) -> Response[Any]:
    """Raises ApiError 404 for absent and for another tenant's."""
    wanted = format_of(request, *INVOICE_FORMATS)
    async with parts_of(request).database.session() as session:
        issued = await InvoiceRepository(session).get(invoice_id, principal_of(request).tenant_id)
    if issued is None:
        raise ApiError(f"No invoice `{invoice_id}` is known.", code="not_found", param="invoice_id")
    return invoice_answer(issued, wanted)


handlers = [list_invoices, get_invoice]
