"""A request's five durations: the engine's inside what the gateway's clock framed."""

from msgspec import Struct


class Phases(Struct, frozen=True):
    """A request's time in ns, from the body's end to the last byte; they sum to ``total``."""

    queue: int
    prefill: int
    decode: int
    network: int
    post: int

    @property
    def total(self) -> int:
        return self.queue + self.prefill + self.decode + self.network + self.post
