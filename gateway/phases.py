"""A request's five durations, by the gateway's clock and the engine's."""

from dataclasses import dataclass

from gateway.call import Call
from gateway.dispatch import Flight


@dataclass(frozen=True, slots=True)
class Phases:
    """A request's time in ns, from the body's end to the last byte; they sum to ``total``."""

    queue: int
    prefill: int
    decode: int
    network: int
    post: int

    @property
    def total(self) -> int:
        return self.queue + self.prefill + self.decode + self.network + self.post


def phases_of(call: Call, flight: Flight) -> Phases:
    """As the ledger has them: the engine's durations inside the gateway's clock."""
    usage = flight.usage
    finished_ns = flight.finished_ns or flight.ended_ns
    inside = usage.queue_ns + usage.prefill_ns + usage.decode_ns
    return Phases(
        queue=flight.submitted_ns - call.read_ns + usage.queue_ns,
        prefill=usage.prefill_ns,
        decode=usage.decode_ns,
        network=max(0, finished_ns - flight.submitted_ns - inside),
        post=flight.ended_ns - finished_ns,
    )
