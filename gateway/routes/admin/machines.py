"""/admin/v1/models and /engines: what is served, and by what."""

from litestar import Controller, get
from litestar.datastructures import State

from gateway.administration import needs
from gateway.views.rows import Body, listed


class Machines(Controller):
    @get("/models", guards=[needs("read")])
    async def models(self, state: State) -> Body:
        return listed(state.fleet.models())

    @get("/engines", guards=[needs("read")])
    async def engines(self, state: State) -> Body:
        await state.fleet.pull()
        return listed(await state.fleet.engines())
