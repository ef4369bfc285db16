"""/admin/v1/rate-cards: the versions of the prices. A version never changes; a new one takes effect in the future."""

import time
from typing import Annotated, Literal

import msgspec
from litestar import Controller, Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.administration import Instant, change, found, needs, session_of
from gateway.errors import ApiError
from gateway.views.rows import Body, listed, rate_card_body
from tenants.audit_log import Change
from tenants.errors import InvalidValue
from tenants.pricing import ANY
from tenants.repositories import RateCardRepository
from tenants.tables import MAX_NAME_LENGTH

_NS = 10**9


class NewPrice(msgspec.Struct, forbid_unknown_fields=True):
    """``price_picousd`` None takes the item away: a more general one holds then."""

    meter: str
    price_picousd: int | None
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)] = ANY
    flow_class: Literal["interactive", "standard", "batch", "*"] = msgspec.field(default=ANY, name="class")


class NewRateCard(msgspec.Struct, forbid_unknown_fields=True):
    """Items that are not named stay as they are in the newest version. ``effective_from`` in Unix seconds."""

    effective_from: Instant
    items: Annotated[list[NewPrice], msgspec.Meta(max_length=1000)] = []


class RateCards(Controller):
    path = "/rate-cards"

    @get(guards=[needs("billing")])
    async def list_all(self, state: State) -> Body:
        async with session_of(state) as session:
            cards = await RateCardRepository(session).list_all()
        return listed([rate_card_body(card) for card in cards])

    @get("/{rate_card_id:str}", guards=[needs("billing")])
    async def show(self, state: State, rate_card_id: FromPath[str]) -> Body:
        async with session_of(state) as session:
            card = await RateCardRepository(session).get(rate_card_id)
        return rate_card_body(found(card, f"no rate card {rate_card_id}"))

    @post(guards=[needs("admin")])
    async def publish(self, request: Request, data: JSONBody[NewRateCard]) -> Body:
        """The next version. Requests admitted before it takes effect keep the prices that they were admitted at."""
        changes = {(item.meter, item.model, item.flow_class): item.price_picousd for item in data.items}

        async def work(session) -> tuple[Body, Change]:
            cards = RateCardRepository(session)
            before = (await cards.list_all())[-1:]
            card = rate_card_body(await cards.revise(changes, data.effective_from * _NS, time.time_ns()))
            return card, Change("rate_card.create", card["id"], rate_card_body(before[0]) if before else None, card)

        try:
            return await change(request, work)
        except InvalidValue as error:
            raise ApiError(str(error), code="invalid_rate_card", param=error.field) from None
