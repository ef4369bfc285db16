"""Messages about adapters: their bytes, their end, where they lie. The rest of the wire, and the framing: wire.py."""

from typing import Literal, TypeAlias

from msgspec import Struct

ADAPTER_CHUNK_BYTES = 1 << 20

Tier: TypeAlias = Literal["device", "cpu", "disk"]


class AdapterWanted(Struct, frozen=True, tag="adapter_wanted"):
    """The engine has no copy of this adapter: answer with AdapterChunks or AdapterUnavailable."""

    adapter_key: str


class AdapterChunk(Struct, frozen=True, tag="adapter_chunk"):
    """A piece (≤ 1 MiB) of a canonical adapter file; ``sha256`` is the whole file's, hex."""

    adapter_key: str
    offset: int
    total_bytes: int
    sha256: str
    data: bytes


class AdapterUnavailable(Struct, frozen=True, tag="adapter_unavailable"):
    """The gateway can't give that adapter: ``code`` is adapter_unavailable (deleted), adapter_corrupt (its file is
    damaged) or adapter_delayed (its store fails: worth another try)."""

    adapter_key: str
    code: str
    message: str


class AdapterForget(Struct, frozen=True, tag="adapter_forget"):
    """A deleted version: drop it from every tier as soon as nobody uses it. Requests accepted before finish, but for
    those that wait for its bytes still: they end with adapter_unavailable."""

    adapter_key: str


class ResidencyRequest(Struct, frozen=True, tag="residency"):
    """Which tiers hold these adapters? ``keys`` None: all that any tier holds."""

    seq: int
    keys: list[str] | None = None


class ResidencyReply(Struct, frozen=True, tag="residency_reply"):
    """Adapter key → tiers, fastest first; a key that no tier holds is left out."""

    seq: int
    tiers: dict[str, list[Tier]]
