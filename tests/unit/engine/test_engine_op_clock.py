"""Time by op, on one step in many: outermost ops only, and nothing on the other steps."""

from collections import Counter

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.op_clock import OpClock
from engine.metering.device_counters import TIMED_STEPS
from engine.models.decoder import Decoder
from engine.runner import Runner
from kernels.timing import timed
from tests.live_engine import submit
from tests.tiny import tiny_config, tiny_weights

CPU = torch.device("cpu")


@timed("inner")
def inner(number: int) -> int:
    return number + 1


@timed("outer")
def outer(number: int) -> int:
    return inner(inner(number))


def test_each_outermost_op_of_a_timed_step_is_timed():
    op_ns: Counter[str] = Counter()

    with OpClock(op_ns, CPU, every=1).step():
        assert outer(1) == 3

    assert set(op_ns) == {"outer"}
    assert op_ns["outer"] > 0


def test_an_op_that_fails_leaves_the_clock_in_order():
    @timed("broken")
    def broken() -> None:
        raise ValueError("no")

    op_ns: Counter[str] = Counter()
    with OpClock(op_ns, CPU, every=1).step():
        with pytest.raises(ValueError, match="no"):
            broken()
        inner(1)

    assert "inner" in op_ns


def test_one_step_in_so_many_is_timed_and_nothing_outside_of_steps():
    op_ns: Counter[str] = Counter()
    clock = OpClock(op_ns, CPU, every=3)
    seen = []
    for _ in range(6):
        with clock.step():
            inner(1)
        seen.append(op_ns["inner"])
    inner(1)

    assert seen[0] == seen[1] == 0 < seen[2] == seen[3] == seen[4] < seen[5] == op_ns["inner"]


def test_an_engine_tells_its_time_by_op_its_shapes_and_its_memory():
    config = EngineConfig(block_size=4, num_blocks=64, context_tokens=128, max_step_tokens=64, max_running=8)
    engine = Engine(config, Runner(Decoder(tiny_config(), tiny_weights()), config, peak_bytes_s=1e9))
    engine.add(submit("r", [5, 6, 7], max_tokens=TIMED_STEPS + 2))
    while engine.has_work:
        engine.step()

    told = {family.name: family.samples for family in engine.stats.families()}

    seconds = {labels["op"]: value for _, labels, value in told["tenora_kernel_seconds"]}
    assert set(seconds) == {"linear", "attention", "rope", "norm", "silu_mul", "head", "sampling"}
    assert min(seconds.values()) > 0
    shapes = {labels["bucket"]: value for _, labels, value in told["tenora_batch_shape"]}
    assert shapes == {"tokens 4": 1, "decode 1": TIMED_STEPS + 1}
    ((_, _, ratio),) = told["tenora_memory_bandwidth_ratio"]
    assert ratio > 0
    assert ("_count", {}, 0) in told["tenora_collective_seconds"]
