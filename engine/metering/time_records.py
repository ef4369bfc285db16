"""An engine process's time, record by record."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from engine.metering.stats import ACCOUNTS, EngineStats
from engine.wire import TimeRecord

Ask: TypeAlias = Callable[[Callable[[], TimeRecord], Callable[[TimeRecord], None]], None]


class Timekeeper:
    """Makes the TimeRecords of one process, each of the time since the one before. On the step thread, between steps;
    idle time counts as far as ``stats.idle`` has been told."""

    def __init__(
        self,
        engine_id: str,
        model: str,
        stats: EngineStats,
        clock: Callable[[], int] = time.monotonic_ns,
        unix_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._engine_id, self._model, self._stats = engine_id, model, stats
        self._clock, self._unix_clock = clock, unix_clock
        self._incarnation_ns = unix_clock()
        self._number = 0
        self._until_ns = stats.started_ns
        self._told = dict.fromkeys(ACCOUNTS, 0)

    def record(self) -> TimeRecord:
        now_ns, accounts, fit = self._clock(), dict(self._stats.account_ns), self._stats.fit
        passed = {f"{name}_ns": accounts[name] - self._told[name] for name in ACCOUNTS}
        record = TimeRecord(
            engine_id=self._engine_id,
            incarnation_unix_ns=self._incarnation_ns,
            number=self._number,
            model=self._model,
            until_unix_ns=self._unix_clock(),
            wall_ns=now_ns - self._until_ns,
            **passed,
            error_ppm=round(fit.error_ratio * 1e6),
            r2_ppm=round(fit.r_squared * 1e6),
        )
        self._number, self._until_ns, self._told = self._number + 1, now_ns, accounts
        return record


class TimeRecords:
    """Has a record made on the step thread every ``period_s``, its payload given to ``journal``. The event loop's."""

    def __init__(self, timekeeper: Timekeeper, ask: Ask, journal: Callable[[bytes], None], period_s: float) -> None:
        self._timekeeper, self._ask, self._journal, self._period_s = timekeeper, ask, journal, period_s
        self._is_asked = False

    async def run(self) -> None:
        """For ever. A step may take longer than a period: the next record is asked for when one has come."""
        while True:
            await asyncio.sleep(self._period_s)
            if not self._is_asked:
                self._is_asked = True
                self._ask(self._timekeeper.record, self._keep)

    def _keep(self, record: TimeRecord) -> None:
        self._is_asked = False
        self._journal(msgspec.msgpack.encode(record))
