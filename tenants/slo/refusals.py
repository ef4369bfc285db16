"""Requests that no engine took: counted in each gateway process, written by the minute."""

from collections.abc import Mapping
from typing import NamedTuple

from sqlmodel.ext.asyncio.session import AsyncSession

from tenants.bulk import put
from tenants.tables import RefusalMinute


class Refusal(NamedTuple):
    """``model`` is '' where the request was not understood; ``reason`` is the error's code, ``status`` HTTP's or
    499."""

    tenant_id: str
    minute_s: int
    model: str
    base_model: str
    flow_class: str
    status: int
    reason: str


async def write_refusals(session: AsyncSession, process_id: str, counts: Mapping[Refusal, int]) -> None:
    """Each count as it stands now in that process, whole: writing it twice is writing it once."""
    rows = [(*refusal, process_id, counts[refusal]) for refusal in sorted(counts)]
    await put(session, RefusalMinute, (*Refusal._fields, "process_id"), ("num_requests",), rows)
