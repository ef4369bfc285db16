"""GET /health: whether this process takes requests. No key."""

from litestar import Request, Response, get

from gateway.access import needs_no_key
from gateway.parts import parts_of
from gateway.resources import Health


@get("/health", opt=needs_no_key())
async def health(request: Request) -> Response[Health]:
    """503 while draining; engines that are away don't make the gateway unhealthy."""
    draining = parts_of(request).pipeline.admission.closed
    return Response(Health("draining" if draining else "ok"), status_code=503 if draining else 200)


handlers = [health]
