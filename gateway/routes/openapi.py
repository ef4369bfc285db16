"""GET /v1/openapi.json: what this API is, for machines. No key."""

from litestar import Response, get

from gateway.access import needs_no_key
from gateway.openapi.document import PATH, document


@get(PATH, sync_to_thread=False, opt=needs_no_key())
def openapi() -> Response[bytes]:
    """The same for everyone, as long as this process lives."""
    return Response(document(), media_type="application/json", headers={"cache-control": "public, max-age=300"})


handlers = [openapi]
