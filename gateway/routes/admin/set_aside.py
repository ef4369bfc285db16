"""/admin/v1/set-aside: usage records that could not be booked, settled or written off."""

import contextlib
from typing import Annotated

import msgspec
from litestar import Controller, Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import change, needs, optional_body, session_of
from gateway.views.rows import Body, listed
from tenants.audit_log import Change
from tenants.errors import StoreUnavailable
from tenants.ledger import Ledger
from tenants.quota.alerts import AlertFold
from tenants.quota.budgets import Spend
from tenants.quota.quota import Reservation
from tenants.quota.wallet import WalletFold
from tenants.slo.sums import SloFold
from tenants.tables import RequestRecord, UnbookedRecord
from tenants.unbooked import State as RecordState
from tenants.unbooked import UnbookedRepository, settled_of

MAX_RECORDS = 200


Attempt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Settling(msgspec.Struct, forbid_unknown_fields=True):
    attempt: Attempt = 0


class WriteOff(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    attempt: Attempt = 0


class SetAside(Controller):
    """``tenora audit`` names each that is open."""

    path = "/set-aside"

    @get(guards=[needs("billing")])
    async def newest(self, state: State) -> Body:
        """The last MAX_RECORDS; the audit names more."""
        async with session_of(state) as session:
            found = await UnbookedRepository(session).page(MAX_RECORDS + 1)
        return listed([_body(row, now) for row, now in found[:MAX_RECORDS]], has_more=len(found) > MAX_RECORDS)

    @post("/{request_id:str}/settle", guards=[needs("admin")], status_code=200)
    async def settle(self, request: Request, request_id: FromPath[str]) -> Body:
        """Books it, once the rate card that it names is there."""
        attempt = (await optional_body(request, Settling)).attempt

        async def work(session) -> tuple[tuple[UnbookedRecord, int], Change | None]:
            repository = UnbookedRepository(session)
            row = await repository.lock(request_id, attempt)
            done = await repository.settle(row, Ledger((SloFold(), WalletFold(), AlertFold())))
            record = await session.get(RequestRecord, (request_id, attempt))
            return (row, record.price_picousd), done

        row, price_picousd = await change(request, work)
        await _tell_the_store(request, row, price_picousd)
        return _body(row, "settled")

    @post("/{request_id:str}/write-off", guards=[needs("admin")], status_code=200)
    async def write_off(self, request: Request, request_id: FromPath[str], data: JSONBody[WriteOff]) -> Body:
        """Nobody is charged for it, ever; the audit takes that for an answer."""

        async def work(session) -> tuple[UnbookedRecord, Change | None]:
            repository = UnbookedRepository(session)
            row = await repository.lock(request_id, data.attempt)
            return row, await repository.write_off(row, data.reason)

        row = await change(request, work)
        await _tell_the_store(request, row, 0)
        return _body(row, "written_off")


async def _tell_the_store(request: Request, row: UnbookedRecord, picousd: int) -> None:
    """What the request still holds of its tenant's month; a store that is away counts the month anew."""
    key_id = settled_of(row).context.key_id
    spent = Reservation(row.request_id, 0, row.tenant_id, key_id, 0, (), Spend(picousd, ()))
    with contextlib.suppress(StoreUnavailable):
        await request.app.state.ops.quota.book(spent, row.attempt)


def _body(row: UnbookedRecord, state: RecordState) -> Body:
    settled = settled_of(row)
    return {
        "object": "set_aside",
        "request_id": row.request_id,
        "attempt": row.attempt,
        "tenant_id": row.tenant_id,
        "state": state,
        "reason": row.reason,
        "rate_card_id": settled.context.rate_card_id,
        "status": settled.outcome,
        "input_tokens": settled.prompt_tokens,
        "output_tokens": settled.output_tokens,
        "set_aside_at": row.set_aside_unix_ns // 1_000_000_000,
    }
