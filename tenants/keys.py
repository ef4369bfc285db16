"""API and operator keys: ``tn_live_`` or ``tn_ops_``, 30 base62 characters, 6 base62 characters of CRC32.

The first 10 of the 30 are the public key id, the other 20 (119 bits) the secret part. Only the HMAC of the
whole text is kept. The CRC lets a scanner tell a leaked key from noise; it proves nothing.
"""

import hmac
import secrets as random
import string
import zlib
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tenants.secrets import Secret, Secrets

KeyKind: TypeAlias = Literal["live", "ops"]

KEY_ID_LENGTH = 10
MAX_KEY_LENGTH = len("tn_live_") + 36
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PREFIXES: dict[KeyKind, str] = {"live": "tn_live_", "ops": "tn_ops_"}
_BODY_LENGTH = 30
_CHECK_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Minted:
    """A new key. ``text`` is shown to its owner once and kept nowhere."""

    key_id: str
    text: str = field(repr=False)
    last4: str


@dataclass(frozen=True, slots=True)
class NewKey:
    """A minted key with what is stored of it: its digest, made with the pepper of that number."""

    minted: Minted
    digest: bytes
    pepper: int


def issue(kind: KeyKind, secrets: Secrets) -> NewKey:
    """A new random key under the installation's newest pepper."""
    minted = mint(kind)
    return NewKey(minted, digest(minted.text, secrets.key_pepper), secrets.newest_pepper)


def mint(kind: KeyKind) -> Minted:
    """A new random key."""
    body = _PREFIXES[kind] + "".join(random.choice(_ALPHABET) for _ in range(_BODY_LENGTH))
    text = body + _checksum(body)
    return Minted(key_id=_key_id(text, kind), text=text, last4=text[-4:])


def parse(text: str) -> str | None:
    """The public key id of a well-formed key of either kind, else None."""
    for kind, prefix in _PREFIXES.items():
        if text.startswith(prefix) and len(text) == len(prefix) + _BODY_LENGTH + _CHECK_LENGTH and text.isascii():
            body = text[:-_CHECK_LENGTH]
            return _key_id(text, kind) if text[-_CHECK_LENGTH:] == _checksum(body) else None
    return None


def digest(text: str, pepper: Secret) -> bytes:
    """HMAC-SHA256 of the whole key, 32 bytes. Longer input is cut: it can't match, and must cost no more."""
    return hmac.digest(pepper.reveal(), text[: MAX_KEY_LENGTH + 1].encode("utf-8", "surrogatepass"), "sha256")


def _key_id(text: str, kind: KeyKind) -> str:
    start = len(_PREFIXES[kind])
    return text[start : start + KEY_ID_LENGTH]


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(_CHECK_LENGTH):
        value, digit = divmod(value, 62)
        digits = _ALPHABET[digit] + digits
    return digits
