"""One request at an engine: submitted, retried once, read to its end, closed exactly once."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine import wire
from engine.client import EngineClient, EngineLost, EngineStream, Event
from gateway.call import Call
from gateway.errors import ApiError, from_engine
from gateway.limits.tickets import Ticket
from gateway.phases import Phases
from gateway.work import Work
from tenants.pricing import Quantities, price

if TYPE_CHECKING:
    from gateway.dispatch import Dispatch

EXTEND_AHEAD_TOKENS = 64  # a grant is asked for so far ahead that no choice waits for it
UNREAD_EVENTS = 64  # of an answer that is not streamed: what the loop can take in at once
CALLER_LEFT = 499
_LAST = (wire.Finished, wire.Rejected)


@dataclass(slots=True, eq=False)
class Flight:
    """One request at an engine. ``outcome`` is how it ended for the caller: HTTP status, 499, or OUTCOME_LOST;
    times are of the monotonic clock, ``first_token_ns`` is from the body's end to the first flushed token.
    ``price_picousd`` is there once it has landed, as the ledger will have it."""

    dispatch: "Dispatch"
    call: Call
    work: Work
    ticket: Ticket
    outcome: int = 500
    usage: wire.Usage = field(default_factory=wire.Usage)
    submitted_ns: int = 0
    finished_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    output_tokens: list[int] = field(default_factory=list)  # seen so far, by choice
    surplus_tokens: int = 0  # of those, behind a stop string
    price_picousd: int = 0
    _attempt: int = 0
    _engine: EngineClient | None = None
    _stream: EngineStream | None = None
    _finished: wire.Finished | None = None
    _interruption: ApiError | None = None

    async def __aenter__(self) -> "Flight":
        await self.dispatch.begin(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.dispatch.end(self)

    async def launch(self, attempt: int = 0) -> None:
        """Submits to an engine, not to the one that just failed if there is another."""
        engine = await self.dispatch.engine(self.call, self.work, avoid=self._engine)
        self.output_tokens = [0] * self.work.total_choices
        if self._is_grant_short:
            await self._extend_grant()
        if self._interruption:
            raise self._interruption
        if attempt:
            await self.dispatch.admission.begin_attempt(self.ticket, attempt)
        submit = self.dispatch.submission(self.call, self.work, self.ticket, attempt)
        try:
            self._stream = engine.submit(submit)
        except EngineLost:
            raise ApiError("The engine was lost; try again.", code="engine_lost") from None
        self._engine, self._attempt = engine, attempt
        self.submitted_ns = self._stream.submitted_ns
        self.call.on_gone = self.abort
        if self.call.gone.is_set():
            self.abort()

    async def next(self) -> list[Event] | None:
        """Deltas and prompt scores, as they come; None behind the terminal event. Raises ApiError when that was a
        failure.

        An engine that is lost before the first token costs one retry, and the caller sees nothing of it.
        """
        if self._finished is not None:
            self._check(self._finished)
            return None
        if self._is_grant_short:
            await self._extend_grant()
        while True:
            try:
                batch = await self._next()
            except EngineLost:
                await self._relaunch()
                continue
            last = batch[-1]
            self._count(batch)
            if not isinstance(last, _LAST):
                return batch
            if isinstance(last, wire.Finished):
                self._finish(last)
                return batch[:-1]
            if not await self._went_elsewhere(last):
                self._stream, self.submitted_ns = None, 0
                raise self._failed(from_engine(last.code, last.message))

    async def _next(self) -> list[Event]:
        """Nobody is woken for each token of an answer that is read at its end."""
        assert self._stream is not None, "launched"
        style = self.work.style
        is_read_as_it_comes = style.stream or style.stops or self.ticket.is_extensible
        return await self._stream.next(1 if is_read_as_it_comes else UNREAD_EVENTS)

    def abort(self, choice: int = -1) -> None:
        """Ends one choice, or all, within two steps; the terminal events still come."""
        if self._stream is not None:
            self._stream.abort(choice)

    def leave_out(self, num_tokens: int) -> None:
        """Tokens that came behind a stop string, before the engine heard of it, are not the caller's."""
        if num_tokens:
            self.surplus_tokens = num_tokens
            self.usage = msgspec.structs.replace(self.usage, output_tokens=self.usage.output_tokens - num_tokens)

    def answered(self) -> None:
        """The answer is written to its end, or its caller has left: only now is it one to be billed."""
        self.outcome = CALLER_LEFT if self.call.gone.is_set() else 200

    def interrupt(self, error: ApiError) -> None:
        """Ends it within two steps; ``error`` is what its caller hears."""
        self._interruption = error
        self.abort()

    def revoke(self) -> None:
        """The key is not valid any more. That is the tenant's doing, as if it had left: what was made is billed."""
        self.interrupt(ApiError("This API key was revoked, or its account suspended.", code="invalid_api_key"))

    def _finish(self, finished: wire.Finished) -> None:
        assert self._stream is not None, "launched"
        self._finished, self.usage, self.finished_ns = finished, finished.usage, self._stream.finished_ns

    @property
    def is_measured(self) -> bool:
        """``usage`` is what the ledger has or will have."""
        return bool(self.finished_ns) or self.outcome == wire.OUTCOME_LOST

    def phases(self) -> Phases:
        """Where the time of a submitted request went, as its ledger has it."""
        usage = self.usage
        finished_ns = self.finished_ns or self.ended_ns
        inside_ns = usage.queue_ns + usage.prefill_ns + usage.decode_ns
        return Phases(
            queue=self.submitted_ns - self.call.read_ns + usage.queue_ns,
            prefill=usage.prefill_ns,
            decode=usage.decode_ns,
            network=max(0, finished_ns - self.submitted_ns - inside_ns),
            post=self.ended_ns - finished_ns,
        )

    def _price(self) -> int:
        used = Quantities(self.usage.prompt_tokens, self.usage.cached_tokens, self.usage.output_tokens)
        return price(self.outcome, used, self.ticket.card, self.work.target.model.name, self.work.flow_class)

    def land(self) -> None:
        """The request's last word to its engine, its ledger and its reservation."""
        self.call.on_gone = None
        self.ended_ns = time.monotonic_ns()
        if self._stream is None:
            return
        if self.finished_ns:
            self.ticket.used_tokens = self.usage.prompt_tokens + self.usage.output_tokens
        else:
            self.ticket.used_tokens = self.work.prompt_tokens + sum(self.output_tokens)
        self.ticket.kind = "exact" if self.finished_ns else "at_least"
        if self.outcome == wire.OUTCOME_LOST or not self._stream.close(self._close()):
            self._be_lost()
            self.dispatch.post_lost(self._lost_record())
        self.price_picousd = self._price()
        self.ticket.attempt, self.ticket.price_picousd = self._attempt, self.price_picousd

    def _be_lost(self) -> None:
        """What the gateway saw of a request whose engine is gone is all that is known of it."""
        self.outcome, self.finished_ns = wire.OUTCOME_LOST, 0
        self.usage = wire.Usage(
            prompt_tokens=self.work.prompt_tokens,
            output_tokens=sum(self.output_tokens) - self.surplus_tokens,
            decode_ns=self.ended_ns - self.submitted_ns,
        )

    def _check(self, finished: wire.Finished) -> None:
        if finished.error_code:
            raise self._failed(from_engine(finished.error_code, finished.error_message))
        if self._interruption and not self.call.gone.is_set():
            raise self._failed(self._interruption)

    def _failed(self, error: ApiError) -> ApiError:
        self.outcome = CALLER_LEFT if error.code == "invalid_api_key" else error.status
        if error.code == "adapter_corrupt" and self.work.target.adapter is not None:
            self.dispatch.on_corrupt(self.work.target.adapter)
        return error

    async def _relaunch(self) -> None:
        before, self.outcome = self.outcome, wire.OUTCOME_LOST
        if self._attempt or any(self.output_tokens) or self.call.gone.is_set() or self._interruption:
            raise ApiError("The engine that ran this request was lost; nothing is charged.", code="engine_lost")
        self.dispatch.count_fallback("replica", "engine_lost")
        await self.launch(attempt=1)
        self.outcome = before

    async def _went_elsewhere(self, rejected: wire.Rejected) -> bool:
        """A full or draining engine's request goes to another one, if there is one that hasn't refused it."""
        others = [engine for engine in self.work.target.model.connected() if engine is not self._engine]
        if rejected.code not in ("busy", "draining") or not others or self._attempt:
            return False
        self._stream, self.submitted_ns = None, 0
        self.dispatch.count_fallback("replica", "refused")
        try:
            await self.launch(attempt=1)
        except ApiError as error:
            raise self._failed(error) from None
        return True

    def _count(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, wire.Delta):
                self.output_tokens[event.choice] += len(event.token_ids) // 4

    @property
    def _is_grant_short(self) -> bool:
        """Nearly used up, or so small that it soon will be."""
        return self.ticket.is_extensible and max(self.output_tokens) + EXTEND_AHEAD_TOKENS >= self.ticket.granted_tokens

    async def _extend_grant(self) -> None:
        """Raised by another block for each choice, if it may be."""
        if await self.dispatch.admission.extend(self.ticket, self.work.total_choices) and self._stream is not None:
            self._stream.grant(self.ticket.granted_tokens)

    def _close(self) -> wire.Close:
        phases = self.phases()
        return wire.Close(
            request_id=f"{self.call.request_id}:{self._attempt}",
            outcome=self.outcome,
            admit_ns=self.submitted_ns - self.call.read_ns,
            network_ns=phases.network,
            post_ns=phases.post,
            first_token_ns=self.first_token_ns,
            surplus_tokens=self.surplus_tokens,
        )

    def _lost_record(self) -> wire.UsageRecord:
        """For the ledger, at no charge."""
        usage, phases = self.usage, self.phases()
        return wire.UsageRecord(
            request_id=f"{self.call.request_id}:{self._attempt}",
            context=self.dispatch.context(self.call, self.work, self.ticket, self._attempt),
            outcome=wire.OUTCOME_LOST,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            queue_ns=phases.queue,
            prefill_ns=phases.prefill,
            decode_ns=phases.decode,
            post_ns=phases.post,
            network_ns=phases.network,
            first_token_ns=self.first_token_ns,
            gpu_ns=usage.gpu_ns,
            finished_unix_ns=self.call.unix_ns(self.ended_ns),
        )
