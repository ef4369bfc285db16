"""How long usage records have waited, by a clock of the test's."""

import asyncio
from pathlib import Path

from engine import wire
from engine.journal import Journal
from engine.serve.record_delivery import RecordDelivery


class Gateway:
    """Takes records, and acknowledges when it is told to."""

    name, buffered_bytes = "g", 0

    def __init__(self) -> None:
        self.taken: list[wire.Record] = []

    def send(self, record: wire.Record) -> None:
        self.taken.append(record)


def test_records_stall_from_the_first_that_waits_until_one_is_acknowledged(tmp_path: Path):
    now, seen = 1000.0, {}

    async def main() -> None:
        nonlocal now
        delivery = RecordDelivery(Journal(tmp_path), lambda: now)
        running, gateway = asyncio.create_task(delivery.run()), Gateway()
        now += 500
        seen["nothing waits"] = delivery.stalled_s
        delivery.append(b"one")
        seen["just now"] = delivery.stalled_s
        now += 7
        delivery.append(b"two")
        delivery.connected(gateway)
        while len(gateway.taken) < 2:
            await asyncio.sleep(0)
        for _ in range(5):  # delivered anew again and again, it still waits
            now += 10
            delivery.tick()
            await asyncio.sleep(0)
        seen["nobody acknowledges"] = delivery.stalled_s
        delivery.acked(wire.Ack(1, gateway.taken[0].hash))
        while delivery.num_unacked == 2:
            await asyncio.sleep(0)
        now += 3
        seen["one is left"] = delivery.stalled_s
        delivery.acked(wire.Ack(2, gateway.taken[1].hash))
        while delivery.num_unacked:
            await asyncio.sleep(0)
        seen["all are booked"] = delivery.stalled_s
        delivery.end()
        await running
        delivery.close()

    asyncio.run(main())

    assert seen == {
        "nothing waits": 0,
        "just now": 0,
        "nobody acknowledges": 57,
        "one is left": 3,
        "all are booked": 0,
    }
