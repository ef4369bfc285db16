"""The installation's secrets: one file for every gateway, and the names that are derived from it.

The file holds numbered peppers and context keys: the newest makes new keys and contexts, the older ones still prove
what they made. ``rotate`` adds one of each. The namespace secret stays: it never leaves this installation, and what
engines keep of adapters and prefixes is named by it.

Every derived value is HMAC-SHA256 over tagged, length-prefixed fields, so that no two different inputs
meet in one message, whatever a client chose for its part.
"""

import contextlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tenants.errors import UnsafeSecrets

FILE_VERSION = 2
_NUM_BYTES = 32
_NUMBERED = ("key_peppers", "context_keys")
_Values: TypeAlias = dict[str, Any]


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
    """Key peppers and context MAC keys by number, and the cache-namespace secret, of one installation."""

    key_peppers: Mapping[int, Secret]
    context_keys: Mapping[int, Secret]
    namespace_secret: Secret

    @classmethod
    def load_or_create(cls, path: Path) -> "Secrets":
        """Reads the file, or makes it (0600) if absent; of several processes that make it, one wins.

        Raises UnsafeSecrets when others can read it, it isn't ours, or its version is unknown.
        """
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                _create(path)
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> "Secrets":
        """Reads the file. Raises UnsafeSecrets, also when it is absent."""
        return cls(**_read(path))

    @property
    def newest_pepper(self) -> int:
        """The number of the pepper that new keys are made with."""
        return max(self.key_peppers)

    @property
    def key_pepper(self) -> Secret:
        return self.key_peppers[self.newest_pepper]

    @property
    def context_key(self) -> Secret:
        return self.context_keys[max(self.context_keys)]

    @property
    def every_context_key(self) -> tuple[Secret, ...]:
        """The newest first: journals hold contexts from before a rotation."""
        return tuple(self.context_keys[number] for number in sorted(self.context_keys, reverse=True))

    def pepper(self, number: int) -> Secret:
        """The pepper of that number; the newest for one that this file doesn't know: nothing matches it then."""
        return self.key_peppers.get(number, self.key_pepper)

    def adapter_key(self, tenant_id: str, sha256: str) -> str:
        """The engine's name of an adapter version, hex: equal bytes of two tenants share nothing."""
        return self._derive(b"adapter", tenant_id.encode(), sha256.encode()).hex()

    def flow_key(self, tenant_id: str) -> str:
        """The engine's name of a tenant's queue, hex; it can't be turned back into the tenant."""
        return _kept(self, b"flow", tenant_id).hex()[:32]

    def cache_namespace(self, tenant_id: str, adapter_sha256: str, model_revision: str, cache_salt: str = "") -> bytes:
        """32 bytes that seed the prefix cache's hash chain. A client's salt only divides its own tenant's space."""
        return _kept(self, b"cache", tenant_id, adapter_sha256, model_revision, cache_salt)

    def idempotency_key(self, tenant_id: str, value: str) -> tuple[str, Secret]:
        """(hash, secret) of what a tenant sent as Idempotency-Key: the hash is for the database, hex; the secret, 32
        bytes, can't be had from it."""
        fields = (tenant_id.encode(), value.encode())
        return self._derive(b"idempotency hash", *fields).hex(), Secret(self._derive(b"idempotency secret", *fields))

    def new_webhook_secret_name(self) -> str:
        """The name of a secret that no endpoint has had; made with the newest context key."""
        return f"{max(self.context_keys)}.{secrets.token_hex(16)}"

    def webhook_secret(self, endpoint_id: str, name: str) -> Secret:
        """The 32 bytes of that name. Raises KeyError for a context key that this file doesn't have."""
        key = self.context_keys[int(name.partition(".")[0])]
        return Secret(_digest(key, b"webhook", endpoint_id.encode(), name.encode()))

    def _derive(self, tag: bytes, *fields: bytes) -> bytes:
        return _digest(self.namespace_secret, tag, *fields)


@lru_cache(1024)
def _kept(secrets: Secrets, tag: bytes, *fields: str) -> bytes:
    """Names that every request has: those of the last tenants and adapters are not derived anew."""
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return _digest(secrets.namespace_secret, tag, *encoded)


def _digest(key: Secret, *fields: bytes) -> bytes:
    message = b"tenora\x01" + b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.digest(key.reveal(), message, "sha256")


def rotate(path: Path) -> Secrets:
    """Adds a pepper and a context key to an existing file, in one move; what was valid stays valid.

    Every process takes them up when it starts: keys that it makes from then on have the new pepper, and are unknown
    to a process that still runs on the old file. Raises UnsafeSecrets, OSError.
    """
    values = _read(path)
    for name in _NUMBERED:
        values[name] |= {max(values[name]) + 1: Secret(secrets.token_bytes(_NUM_BYTES))}
    with _draft(path, values) as draft:
        draft.replace(path)
    _sync_folder(path.parent)
    return Secrets(**values)


def _create(path: Path) -> None:
    """Writes a new file beside ``path`` and links it there; raises FileExistsError if another was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    values: _Values = {name: {1: Secret(secrets.token_bytes(_NUM_BYTES))} for name in _NUMBERED}
    values["namespace_secret"] = Secret(secrets.token_bytes(_NUM_BYTES))
    with _draft(path, values) as draft:
        os.link(draft, path)


@contextlib.contextmanager
def _draft(path: Path, values: _Values) -> Iterator[Path]:
    """A file of these values beside ``path``, on the disk; gone after the block unless it was moved."""
    body: dict[str, Any] = {"version": FILE_VERSION, "namespace_secret": values["namespace_secret"].reveal().hex()}
    for name in _NUMBERED:
        body[name] = {str(number): secret.reveal().hex() for number, secret in sorted(values[name].items())}
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(body, file)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> _Values:
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
        return _parse(path, file.read(1 << 20))


def _parse(path: Path, data: bytes) -> _Values:
    try:
        body = json.loads(data)
        if body["version"] == 1:  # one of each, not numbered
            body |= {"version": 2, "key_peppers": {1: body["key_pepper"]}, "context_keys": {1: body["context_key"]}}
        if body["version"] != FILE_VERSION:
            raise UnsafeSecrets(f"{path} has version {body['version']!r}; this program knows {FILE_VERSION}")
        values: _Values = {name: _numbered(body[name]) for name in _NUMBERED}
        values["namespace_secret"] = _secret(body["namespace_secret"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # `from None`: the original message could quote what the file holds
        raise UnsafeSecrets(f"{path} is not a secrets file ({type(error).__name__})") from None
    return values


def _numbered(values: dict[str, str]) -> dict[int, Secret]:
    found = {int(number): _secret(text) for number, text in values.items()}
    if not found or min(found) < 1:
        raise ValueError("no secret")
    return found


def _secret(text: str) -> Secret:
    value = bytes.fromhex(text)
    if len(value) < _NUM_BYTES:
        raise ValueError("short secret")
    return Secret(value)
