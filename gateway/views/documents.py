"""Answers that are documents for people and spreadsheets: pages that run nothing, and CSV."""

from litestar import Request, Response

from gateway.errors import invalid
from tenants.page import PAGE_CSP

CSV, HTML = "text/csv", "text/html"
_SAFE = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


def format_of(request: Request, *formats: str) -> str:
    """The query parameter ``format``; the first one by default. Raises ApiError 400."""
    wanted = request.query_params.get("format", formats[0])
    if wanted not in formats:
        raise invalid(f"'format' is one of {', '.join(formats)}.", "format")
    return wanted


def page_answer(document: str) -> Response[str]:
    """A page of ``tenants.page``: whatever is in it, it may load, run and send nothing."""
    policy = f"{PAGE_CSP}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Response(document, media_type=HTML, headers=_SAFE | {"content-security-policy": policy})


def csv_answer(text: str, name: str) -> Response[str]:
    """A file to save; ``name`` is ours."""
    saved = {"content-disposition": f'attachment; filename="{name}.csv"'}
    return Response(text, media_type=CSV, headers=_SAFE | saved)
