"""/admin/v1/rollups: the sums that reports are made of, held against the ledger and made anew."""

from litestar import Controller, Request, get, post
from litestar.datastructures import State

from gateway.administration import change, needs, session_of
from gateway.views.rows import Body
from tenants.audit_log import Change
from tenants.database import BOOKS_S
from tenants.usage.rollup_check import differences, rebuild


class Rollups(Controller):
    """Both read all records and entries: minutes, where there are millions. While they are made anew, booking waits."""

    path = "/rollups"

    @get(guards=[needs("billing")])
    async def check(self, state: State) -> Body:
        """How many sums are not those of the ledger: 0, unless somebody changed the database by hand."""
        async with session_of(state, BOOKS_S) as session:
            return _body(await differences(session))

    @post("/rebuild", guards=[needs("admin")], status_code=200)
    async def rebuild(self, request: Request) -> Body:
        async def work(session) -> tuple[Body, Change]:
            before = _body(await differences(session))
            await rebuild(session)
            after = _body(await differences(session))
            return after, Change("rollups.rebuild", "rollups", before, after)

        return await change(request, work, BOOKS_S)


def _body(num_differences: int) -> Body:
    return {"object": "rollups", "num_differences": num_differences}
