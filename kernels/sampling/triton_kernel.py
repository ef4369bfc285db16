# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""One program draws one row. It sorts nothing: a threshold (the lowest key that is kept, and how many of those equal
to it) is found two bits at a time, by counting or weighing what is at least each of three candidates.

A key is a float's bits as an int32 of the same order. All sums are taken in one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import Edits, SamplingRows
from kernels.tiles import tiles


@triton.jit
def _key(b_values):
    b_bits = (b_values + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 = 0.0
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(p_row, o_ids, size, temperature):
    b_logits = tl.load(p_row + o_ids, mask=o_ids < size, other=float("-inf")).to(tl.float32)
    return tl.where(b_logits != b_logits, float("-inf"), b_logits) / temperature  # noqa: PLR0124


@triton.jit
def _threshold(p_row, size, temperature, best, wanted, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key such that what is at least it counts (WEIGHED: weighs) ``wanted``; LOWEST if none does."""
    LOWEST: tl.constexpr = -2147483648  # pyright: ignore[reportAssignmentType]
    threshold = tl.full((), LOWEST, tl.int32)
    for i_pass in tl.static_range(16):
        first_step = threshold + (1 << (30 - 2 * i_pass))  # over the sign they wrap, which is meant
        second_step = first_step + (1 << (30 - 2 * i_pass))
        third_step = second_step + (1 << (30 - 2 * i_pass))
        b_first = tl.zeros((BLOCK,), tl.float32)
        b_second = tl.zeros((BLOCK,), tl.float32)
        b_third = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            b_scaled = _scaled(p_row, first + tl.arange(0, BLOCK), size, temperature)
            b_weights = tl.exp(b_scaled - best) if WEIGHED else tl.where(b_scaled > float("-inf"), 1.0, 0.0)
            b_keys = _key(b_scaled)
            b_first += tl.where(b_keys >= first_step, b_weights, 0.0)
            b_second += tl.where(b_keys >= second_step, b_weights, 0.0)
            b_third += tl.where(b_keys >= third_step, b_weights, 0.0)
        threshold = tl.where(tl.sum(b_first, 0) >= wanted, first_step, threshold)
        threshold = tl.where(tl.sum(b_second, 0) >= wanted, second_step, threshold)
        threshold = tl.where(tl.sum(b_third, 0) >= wanted, third_step, threshold)
    return threshold


@triton.jit
def _above(p_row, size, temperature, best, threshold, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The count (WEIGHED: the weight) of what is above a key."""
    b_found = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        b_scaled = _scaled(p_row, first + tl.arange(0, BLOCK), size, temperature)
        b_weights = tl.exp(b_scaled - best) if WEIGHED else tl.where(b_scaled > float("-inf"), 1.0, 0.0)
        b_found += tl.where(_key(b_scaled) > threshold, b_weights, 0.0)
    return tl.sum(b_found, 0)


@triton.jit
def _draw(p_row, size, temperature, best, threshold, most_equal, mark, BLOCK: tl.constexpr):
    """The first id, of those above the key and the first ``most_equal`` equal to it, whose running sum passes the
    mark; the last of them if none does."""
    i_token = tl.full((), -1, tl.int32)
    i_last = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float32)
    num_equal = tl.full((), 0, tl.int32)
    for first in range(0, size, BLOCK):
        o_ids = first + tl.arange(0, BLOCK)
        b_scaled = _scaled(p_row, o_ids, size, temperature)
        b_keys = _key(b_scaled)
        b_equal = (b_keys == threshold).to(tl.int32)
        m_kept = (b_keys > threshold) | ((b_equal > 0) & (num_equal + tl.cumsum(b_equal, 0) <= most_equal))
        m_kept = m_kept & (b_scaled > float("-inf"))
        b_weights = tl.where(m_kept, tl.exp(b_scaled - best), 0.0)
        b_sums = total + tl.cumsum(b_weights, 0)
        i_passed = tl.min(tl.where(m_kept & (b_sums > mark), o_ids, size), 0)
        i_token = tl.where((i_token < 0) & (i_passed < size), i_passed, i_token)
        i_last = tl.maximum(i_last, tl.max(tl.where(m_kept, o_ids, 0), 0))
        total += tl.sum(b_weights, 0)
        num_equal += tl.sum(b_equal, 0)
    return tl.where(i_token < 0, i_last, i_token)


@triton.jit
def _best(p_row, size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """The highest logit and its lowest id; AT_ONCE blocks are on their way from memory together."""
    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    b_ids = tl.arange(0, BLOCK)
    for first in range(0, size, BLOCK * AT_ONCE):
        for i_block in tl.static_range(AT_ONCE):
            o_ids = first + i_block * BLOCK + tl.arange(0, BLOCK)
            b_logits = _scaled(p_row, o_ids, size, 1.0)
            b_ids = tl.where(b_logits > b_best, o_ids, b_ids)
            b_best = tl.maximum(b_best, b_logits)
    best = tl.max(b_best, 0)
    return best, tl.min(tl.where(b_best == best, b_ids, size), 0)


@triton.jit
def _sample(
    p_logits,
    p_temperatures,
    p_top_ks,
    p_top_ps,
    p_min_ps,
    p_numbers,
    p_tokens,
    stride_row,
    size,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * stride_row
    temperature = tl.load(p_temperatures + i_row)
    best, i_best = _best(p_row, size, BLOCK, 1)
    tl.store(p_tokens + i_row, i_best.to(tl.int64))
    if (temperature <= 0.0) | (tl.abs(best) == float("inf")):
        return
    best = best / temperature
    top_k = tl.load(p_top_ks + i_row)
    top_p = tl.load(p_top_ps + i_row)
    min_p = tl.load(p_min_ps + i_row)
    LOWEST: tl.constexpr = -2147483648
    threshold = tl.full((), LOWEST, tl.int32)
    most_equal = tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < size):
        threshold = _threshold(p_row, size, temperature, best, top_k.to(tl.float32), False, BLOCK)
        above = _above(p_row, size, temperature, best, threshold, False, BLOCK)
        most_equal = top_k - above.to(tl.int32)
    if min_p > 0.0:
        least = _key(best + tl.log(min_p)) - 1
        most_equal = tl.where(least >= threshold, 0, most_equal)
        threshold = tl.maximum(threshold, least)
    weight = tl.where((most_equal > 0) & (threshold > LOWEST), tl.exp(_value(threshold) - best), 0.0)
    total = _above(p_row, size, temperature, best, threshold, True, BLOCK) + most_equal.to(tl.float32) * weight
    if top_p < 1.0:
        wanted = top_p * total
        head = tl.maximum(threshold, _threshold(p_row, size, temperature, best, wanted, True, BLOCK))
        above = _above(p_row, size, temperature, best, head, True, BLOCK)
        weight = tl.where(head > LOWEST, tl.exp(_value(head) - best), 0.0)
        needed = tl.where(weight > 0.0, tl.maximum(tl.ceil((wanted - above) / weight), 1.0), 0.0)
        needed = tl.where(head == threshold, tl.minimum(needed, most_equal.to(tl.float32)), needed)
        threshold, most_equal = head, needed.to(tl.int32)
        total = above + needed * weight
    mark = tl.load(p_numbers + i_row) * total
    i_token = _draw(p_row, size, temperature, best, threshold, most_equal, mark, BLOCK)
    tl.store(p_tokens + i_row, i_token.to(tl.int64))


@triton.jit
def _highest(p_logits, p_tokens, stride_row, size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    _, i_best = _best(p_logits + i_row * stride_row, size, BLOCK, AT_ONCE)
    tl.store(p_tokens + i_row, i_best.to(tl.int64))


@triton.jit(do_not_specialize=["num_edits"])
def _edit(p_logits, p_rows, p_tokens, p_biases, p_repetitions, p_minus, num_edits, stride_row, BLOCK: tl.constexpr):
    o_edits = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_edits < num_edits
    i_rows = tl.load(p_rows + o_edits, mask=mask, other=-1).to(tl.int64)
    mask = mask & (i_rows >= 0)
    i_tokens = tl.load(p_tokens + o_edits, mask=mask, other=0)
    p_own = p_logits + i_rows * stride_row + i_tokens
    b_biased = tl.load(p_own, mask=mask, other=0.0) + tl.load(p_biases + o_edits, mask=mask, other=0.0)
    b_repetition = tl.load(p_repetitions + o_edits, mask=mask, other=1.0)
    b_edited = tl.where(b_biased > 0.0, tl.div_rn(b_biased, b_repetition), b_biased * b_repetition)
    tl.store(p_own, b_edited - tl.load(p_minus + o_edits, mask=mask, other=0.0), mask=mask)


def edit_logits(logits: Tensor, edits: Edits) -> None:
    """See the package."""
    num_edits, block = len(edits.rows), 128
    if num_edits:
        _edit[(triton.cdiv(num_edits, block),)](
            logits,
            edits.rows,
            edits.tokens,
            edits.biases,
            edits.repetitions,
            edits.minus,
            num_edits,
            logits.stride(0),
            BLOCK=block,
        )


def highest(logits: Tensor, out: Tensor) -> None:
    """See the package."""
    row = tiles("highest", logits.device, tokens=len(out))
    if len(out):
        _highest[(len(out),)](
            logits,
            out,
            logits.stride(0),
            logits.shape[1],
            BLOCK=row["block"],
            AT_ONCE=row["at_once"],
            num_warps=row["num_warps"],
        )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See the package."""
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    row = tiles("sample", logits.device, tokens=num_rows)
    if num_rows:
        _sample[(num_rows,)](
            logits,
            rows.temperatures,
            rows.top_ks,
            rows.top_ps,
            rows.min_ps,
            rows.numbers,
            tokens,
            logits.stride(0),
            size,
            BLOCK=row["block"],
            num_warps=row["num_warps"],
        )
    return tokens
