"""The replicas' time: records of the engines' journals in, one row each, once for ever."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import insert_new
from tenants.errors import InvalidRecord
from tenants.tables import MAX_NAME_LENGTH, ReplicaTime

_MAX_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class ReplicaSpan:
    """A row of ``replica_time``. Raises InvalidRecord, so that a batch never fails on one."""

    engine_id: str
    incarnation_unix_ns: int
    number: int
    model: str
    until_unix_ns: int
    wall_ns: int
    attributed_ns: int
    load_ns: int
    recompute_ns: int
    lost_ns: int
    idle_ns: int
    overhead_ns: int
    error_ppm: int
    r2_ppm: int

    def __post_init__(self) -> None:
        for name in ("engine_id", "model"):
            if not 0 < len(getattr(self, name)) <= MAX_NAME_LENGTH:
                raise InvalidRecord(f"{name} is {getattr(self, name)!r}")
        for name in _NUMBERS:
            if not 0 <= getattr(self, name) <= _MAX_NS:
                raise InvalidRecord(f"{name} is {getattr(self, name)}")
        if abs(self.r2_ppm) > _MAX_NS:
            raise InvalidRecord(f"r2_ppm is {self.r2_ppm}")


COLUMNS = tuple(field.name for field in fields(ReplicaSpan))
_NUMBERS = tuple(name for name in COLUMNS if name not in ("engine_id", "model", "r2_ppm"))


async def post(session: AsyncSession, spans: Sequence[ReplicaSpan]) -> int:
    """Books them in the caller's transaction; any of them any number of times is the same row. How many were new."""
    return await insert_new(session, ReplicaTime, COLUMNS, sorted(astuple(span) for span in spans))
