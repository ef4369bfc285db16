"""/admin/v1/models and /engines: what is served, by what, and out of which memory."""

from litestar import Controller, get
from litestar.datastructures import State
from litestar.params import FromPath

from engine.client import EngineLost
from gateway.administration import found, needs
from gateway.errors import ApiError
from gateway.views.rows import Body, listed


class Machines(Controller):
    @get("/models", guards=[needs("read")])
    async def models(self, state: State) -> Body:
        return listed(state.fleet.models())

    @get("/engines", guards=[needs("read")])
    async def engines(self, state: State) -> Body:
        await state.fleet.pull()
        return listed(await state.fleet.engines())

    @get("/engines/{engine_id:str}/kv", guards=[needs("read")])
    async def kv(self, state: State, engine_id: FromPath[str]) -> Body:
        """503 while the engine does not answer."""
        try:
            return found(await state.fleet.kv(engine_id), f"no engine {engine_id}")
        except EngineLost as error:
            raise ApiError(f"The engine {engine_id} does not answer; try again.", code="engine_lost") from error
