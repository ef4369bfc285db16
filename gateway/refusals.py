"""Requests that no engine took, for their tenants' SLO reports: counted here, written every few seconds.

A shed request is bad and leaves no record; one that its caller got wrong is shown. What a crash takes with it is what
the last FLUSH_S counted.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.call import Call
from gateway.work import Work
from tenants.database import Database
from tenants.slo.objectives import MINUTE_S, minute_of
from tenants.slo.refusals import Refusal, write_refusals
from tenants.slo.sums import CountResult, model_name
from tenants.slo.verdict import judge_refusal

FLUSH_S = 3.0
_KEPT_S = 5 * MINUTE_S  # a count of so long ago is not raised any more
_log = logging.getLogger("gateway.refusals")


@dataclass(slots=True)
class Refusals:
    """``count_result`` is told of those that are bad."""

    database: Database
    count_result: CountResult
    now_ns: Callable[[], int] = time.time_ns
    _process_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _counts: dict[Refusal, int] = field(default_factory=dict)
    _unwritten: set[Refusal] = field(default_factory=set)
    _worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._keep_writing(), name="refusals")

    async def close(self) -> None:
        """Writes what is left, if the database takes it."""
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        await self.write()

    def count(self, call: Call, work: Work | None, status: int, code: str) -> None:
        """A request ended before an engine took it. One of nobody we know is nobody's."""
        if call.principal is None:
            return
        model, base_model, flow_class = "", "", call.principal.flow_class
        if work is not None:
            model, base_model, flow_class = model_name(work.target.name), work.target.model.name, work.flow_class
        minute_s = minute_of(self.now_ns())
        refusal = Refusal(call.principal.tenant_id, minute_s, model, base_model, flow_class, status, code)
        self._counts[refusal] = self._counts.get(refusal, 0) + 1
        self._unwritten.add(refusal)
        for sli, (_version, good) in judge_refusal(status, code, {}).results.items():
            self.count_result(base_model, flow_class, sli, good)

    async def write(self) -> None:
        """What has changed since the last time. A failure is logged, and tried again the next time."""
        changed, self._unwritten = self._unwritten, set()
        if not changed:
            return
        try:
            async with self.database.transaction() as session:
                counts = {refusal: self._counts[refusal] for refusal in changed}
                await write_refusals(session, self._process_id, counts)
        except Exception as error:
            self._unwritten |= changed
            _log.warning("%d counts of refusals are not written yet: %s", len(changed), type(error).__name__)
        else:
            self._forget_old()

    def _forget_old(self) -> None:
        oldest_s = minute_of(self.now_ns()) - _KEPT_S
        for refusal in [each for each in self._counts if each.minute_s < oldest_s and each not in self._unwritten]:
            del self._counts[refusal]

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.write()
