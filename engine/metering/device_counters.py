"""What a runner counts of its device. Plain numbers, no torch; the runner writes, the engine's statistics read."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.wire import Family

TIMED_STEPS = 64
FALLBACKS = (
    ("graph", "too_many_sequences"),
    ("graph", "head_size"),
    ("kernel", "head_size"),
)


@dataclass
class DeviceCounters:
    """``num_bytes``: what the steps so far had to move at least: weights, keys and values that are seen, adapters in
    use. ``peak_bytes_s`` is what the device's memory can move, 0 where nobody has measured that. ``fallbacks`` by kind
    and reason: launches that did not take the way that is meant for them. ``shapes``: steps by the bucket that computed
    them. ``num_grouped``: decodes that read their beginning together with others. ``op_ns``: time by op on one step in
    TIMED_STEPS."""

    peak_bytes_s: float = 0.0
    num_bytes: int = 0
    fallbacks: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(FALLBACKS, 0)))
    shapes: Counter[str] = field(default_factory=Counter)
    num_grouped: int = 0
    op_ns: Counter[str] = field(default_factory=Counter)

    def families(self) -> Iterable[Family]:
        fell = [
            ("_total", {"kind": kind, "reason": reason}, float(count))
            for (kind, reason), count in tuple(self.fallbacks.items())
        ]
        yield Family("tenora_fallbacks", "counter", "Steps and launches that took another way than is meant", fell)
        steps = [("_total", {"bucket": bucket}, float(count)) for bucket, count in tuple(self.shapes.items())]
        yield Family("tenora_batch_shape", "counter", "Steps by the size that computed them", steps)
        grouped = [("_total", {}, float(self.num_grouped))]
        help_text = "Decodes that read the blocks of their beginning once for several"
        yield Family("tenora_grouped_decodes", "counter", help_text, grouped)
        spent = [("_total", {"op": op}, op_ns / 1e9) for op, op_ns in tuple(self.op_ns.items())]
        yield Family("tenora_kernel_seconds", "counter", f"Time by op, on one step in {TIMED_STEPS}", spent)
