"""The kernels on shapes small enough for the tools that watch each access: compute-sanitizer's memcheck and racecheck.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 -m ops.bench.gpu_kernels --check NAME

("tiny", in checks_captured.py, is one more of them.)
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from kernels.paged_attention import DecodeShape, captured_plan, fill_plan, paged_attention, plan_numbers
from kernels.quantised_linear import quantised_linear
from kernels.sampling import highest
from ops.bench.gpu import checks_moe_lora
from ops.bench.gpu.cases_quantised import FORMS, exact, weight_of
from ops.bench.gpu.changes import other_rows
from ops.bench.gpu.checks import DEVICE, LIMITS, lora_case, random, require
from ops.bench.gpu.checks_captured import groups_of, shared_batch
from ops.bench.gpu.checks_lora import early_launches, expected_of_silu, into_silu
from ops.bench.gpu.checks_lora_way import BY_ROWS, Heads, heads_of_adapters
from ops.bench.gpu.checks_moe import against_float64


def small_lora_into_silu() -> None:
    """Both forms: rows of several adapters one by one, many rows of one in segments."""
    for is_early, dtype in itertools.product((0, 1), LIMITS):
        for slots in ([0, 3, -1, 1, 2], [3] * 20 + [-1] * 3):
            x, gate_up, slices = lora_case(slots, 128, (96, 96), dtype)
            with early_launches(is_early):
                out = into_silu(x, gate_up, slices, slots)
            require(out, expected_of_silu(x, gate_up, slices, slots), f"small silu {len(slots)} {dtype} {is_early}")


def small_highest() -> None:
    for dtype, size in itertools.product(LIMITS, (5, 9000)):
        logits = torch.randn(3, size, device=DEVICE).to(dtype)
        logits[1, 2] = float("nan")
        wanted = logits.nan_to_num(nan=float("-inf")).argmax(-1)
        assert torch.equal(highest(logits), wanted), f"small highest {size} {dtype}"


def small_quantised() -> None:
    """Every row of the table for the smallest weights, with parts, and the weight multiplied out."""
    for (_, kind, is_blocked), num_rows in itertools.product(FORMS, (1, 17, 33, 65, 257)):
        weight = weight_of(200, 1024, kind, is_blocked=is_blocked, bias=torch.bfloat16)
        x = random(num_rows, 1024)
        require(quantised_linear(x, weight), exact(x, weight), f"small {kind} blocks {is_blocked} {num_rows}")


def small_groups() -> None:
    """Groups through a captured plan, which has room for more sequences than there are."""
    sizes = [(3, 64), (4, 128)]
    batch, order = shared_batch(sizes, 1, (4, 2, 64))
    shape = DecodeShape(12, 4096, 16, 4, 2, DEVICE, has_groups=True)
    host = np.zeros(plan_numbers(shape), dtype=np.int32)
    fill_plan(host, [batch.spans[index][1] for index in order], shape, groups_of(sizes, order))
    tables = torch.zeros(12, 256, dtype=torch.int32, device=DEVICE)
    tables[: len(order), : batch.tables.shape[1]] = batch.tables[order]
    queries = torch.zeros(12, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    queries[: len(order)] = batch.queries[order]
    plan = captured_plan(torch.from_numpy(host).to(DEVICE), tables, shape)
    out = paged_attention(queries, batch.keys, batch.values, plan, scale=batch.scale)
    require(out[: len(order)], batch.expected()[order], "small groups")


def small_heads() -> None:
    """What adapters add to heads on their way into rope and the cache, which may begin early."""
    for is_early, has_norms, dtype in itertools.product((0, 1), (False, True), LIMITS):
        step = Heads([0, 3, -1, 1, 2], (4, 2, 64), dtype, slice(0, 3))
        with early_launches(is_early), other_rows(BY_ROWS):
            low = step.shrunk()
            assert low is not None, "nobody has anything to add"
            heads_of_adapters(step, step.norms if has_norms else None, low, f"small heads {dtype} {is_early}")


def small_experts() -> None:
    """Few and several tiles of an expert, experts without any, rows that fill up; launched in turn, and early."""
    for dtype, is_early, num_rows in itertools.product(LIMITS, (0, 1), (1, 40)):
        with early_launches(is_early):
            against_float64(num_rows, (7, 3), (97, 41), dtype)


def small_adapters_on_experts() -> None:
    """Both forms: pairs one by one, and runs of pairs of one adapter; launched in turn, and early."""
    for dtype, is_early, num_rows in itertools.product(LIMITS, (0, 1), (5, 70)):
        with early_launches(is_early):
            checks_moe_lora.against_float64(num_rows, (7, 3), (97, 41), dtype)


CHECKS: dict[str, Callable[[], None]] = {
    "small lora into silu": small_lora_into_silu,
    "small heads": small_heads,
    "small highest": small_highest,
    "small quantised": small_quantised,
    "small groups": small_groups,
    "small experts": small_experts,
    "small experts adapters": small_adapters_on_experts,
}
