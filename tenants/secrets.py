"""The installation's secrets: one file for every gateway, and the names that are derived from it.

Every derived value is HMAC-SHA256 over tagged, length-prefixed fields, so that no two different inputs
meet in one message, whatever a client chose for its part.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tenants.errors import UnsafeSecrets

FILE_VERSION = 1
_NAMES = ("key_pepper", "namespace_secret", "context_key")
_NUM_BYTES = 32


class Secret:
    """Bytes that cannot be formatted, compared, hashed or pickled; only ``reveal`` shows them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    def __format__(self, spec: str) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is never pickled")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("compare digests with hmac.compare_digest, never secrets")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True, slots=True, eq=False)
class Secrets:
    """Key pepper, cache-namespace secret and context MAC key of one installation."""

    key_pepper: Secret
    namespace_secret: Secret
    context_key: Secret

    @classmethod
    def load_or_create(cls, path: Path) -> "Secrets":
        """Reads the file, or makes it (0600) if absent; of several processes that make it, one wins.

        Raises UnsafeSecrets when others can read it, it isn't ours, or its version is unknown.
        """
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                _create(path)
        return cls(**_read(path))

    def adapter_key(self, tenant_id: str, sha256: str) -> str:
        """The engine's name of an adapter version, hex: equal bytes of two tenants share nothing."""
        return self._derive(b"adapter", tenant_id.encode(), sha256.encode()).hex()

    def flow_key(self, tenant_id: str) -> str:
        """The engine's name of a tenant's queue, hex; it can't be turned back into the tenant."""
        return self._derive(b"flow", tenant_id.encode()).hex()[:32]

    def cache_namespace(self, tenant_id: str, adapter_sha256: str, model_revision: str, cache_salt: str = "") -> bytes:
        """32 bytes that seed the prefix cache's hash chain. A client's salt only divides its own tenant's space."""
        fields = (tenant_id, adapter_sha256, model_revision, cache_salt)
        return self._derive(b"cache", *(field.encode("utf-8", "surrogatepass") for field in fields))

    def idempotency_key(self, tenant_id: str, value: str) -> tuple[str, Secret]:
        """(hash, secret) of what a tenant sent as Idempotency-Key: the hash is for the database, hex; the secret, 32
        bytes, can't be had from it."""
        fields = (tenant_id.encode(), value.encode())
        return self._derive(b"idempotency hash", *fields).hex(), Secret(self._derive(b"idempotency secret", *fields))

    def _derive(self, tag: bytes, *fields: bytes) -> bytes:
        message = b"tenora\x01" + b"".join(len(field).to_bytes(4, "big") + field for field in (tag, *fields))
        return hmac.digest(self.namespace_secret.reveal(), message, hashlib.sha256)


def _create(path: Path) -> None:
    """Writes a new file beside ``path`` and links it there; raises FileExistsError if another was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = {"version": FILE_VERSION} | {name: secrets.token_hex(_NUM_BYTES) for name in _NAMES}
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(body, file)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> dict[str, Secret]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UnsafeSecrets(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
            raise UnsafeSecrets(f"{path} is not a regular file of ours")
        if found.st_mode & 0o077:
            raise UnsafeSecrets(f"{path} can be read by others: run `chmod 600 {path}`")
        return _parse(path, file.read(65536))


def _parse(path: Path, data: bytes) -> dict[str, Secret]:
    try:
        body = json.loads(data)
        if body["version"] != FILE_VERSION:
            raise UnsafeSecrets(f"{path} has version {body['version']!r}; this program knows {FILE_VERSION}")
        values = {name: bytes.fromhex(body[name]) for name in _NAMES}
    except (ValueError, KeyError, TypeError) as error:
        # `from None`: the original message could quote what the file holds
        raise UnsafeSecrets(f"{path} is not a secrets file ({type(error).__name__})") from None
    if any(len(value) < _NUM_BYTES for value in values.values()):
        raise UnsafeSecrets(f"{path} holds a secret shorter than {_NUM_BYTES} bytes")
    return {name: Secret(value) for name, value in values.items()}
