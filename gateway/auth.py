"""Who is calling: the bearer key of a request → Principal."""

from gateway.call import Call
from gateway.errors import invalid_key
from tenants.directory import Directory, Principal

_MAX_KEY_CHARS = 128


def authenticate(directory: Directory, call: Call) -> Principal:
    """Raises ApiError 401, the same for every reason. No query: the directory is in memory."""
    scheme, _, key = (call.header(b"authorization") or "").partition(" ")
    text = key.strip() if scheme.lower() == "bearer" else ""
    principal = directory.authenticate(text if len(text) <= _MAX_KEY_CHARS else "")
    if principal is None:
        raise invalid_key()
    return principal
