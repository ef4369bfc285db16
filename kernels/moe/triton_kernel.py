# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""A program multiplies the rows of a tile, which all go to one expert, with BLOCK_N rows of that expert's weight.

Programs are numbered so that those of an expert's tiles stand together and share its weight in the L2: GROUP tiles of
the plan side by side, then their next columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.plan import ExpertPlan
from kernels.moe.triton_plan import tile_at
from kernels.silu_mul.triton_kernel import silu_times
from kernels.tiles import early, power_of_2, tiles


@triton.jit
def _place(num_tiles, num_columns, GROUP: tl.constexpr):
    """This program's tile and column."""
    i_program = tl.program_id(0).to(tl.int64)
    per_group = num_columns * GROUP
    i_first = i_program // per_group * GROUP
    i_own = i_program % per_group
    size = tl.minimum(num_tiles - i_first, GROUP)
    return i_first + i_own % size, i_own // size


@triton.jit
def _product(
    p_x,
    p_weight,
    m_rows,
    m_out,
    SIZE_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """p_x [BLOCK_M], p_weight [BLOCK_N]: where rows of x and of the weight begin → [BLOCK_M, BLOCK_N] fp32."""
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, SIZE_IN, BLOCK_K):
        o_in = first + tl.arange(0, BLOCK_K)
        m_in = o_in < SIZE_IN if SIZE_IN % BLOCK_K else tl.full((BLOCK_K,), True, tl.int1)
        b_x = tl.load(p_x[:, None] + o_in[None, :], mask=m_rows[:, None] & m_in[None, :], other=0.0)
        b_weight = tl.load(p_weight[:, None] + o_in[None, :], mask=m_out[:, None] & m_in[None, :], other=0.0)
        b_sum = tl.dot(b_x, tl.trans(b_weight), b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _gate_up_rows(
    p_x,
    p_weight,
    p_out,
    p_pairs,
    i_first,
    num_own,
    i_column,
    stride_x,
    TOP_K: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    IS_FUSED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """p_weight: of the expert. BLOCK_N: rows of gate and of up, one of each in turn, so that a column and its partner
    are one thread's."""
    o_rows = tl.arange(0, ROWS)
    m_rows = o_rows < num_own
    i_tokens = tl.load(p_pairs + i_first + o_rows, mask=m_rows, other=0).to(tl.int64) // TOP_K
    o_both = i_column * BLOCK_N + tl.arange(0, BLOCK_N)
    p_own = p_weight + (o_both % 2 * SIZE + o_both // 2) * SIZE_IN
    m_both = o_both < 2 * SIZE if 2 * SIZE % BLOCK_N else tl.full((BLOCK_N,), True, tl.int1)
    b_both = _product(p_x + i_tokens * stride_x, p_own, m_rows, m_both, SIZE_IN, ROWS, BLOCK_N, BLOCK_K)
    kind = p_out.dtype.element_ty
    b_gate, b_up = tl.split(b_both.to(kind).to(tl.float32).reshape(ROWS, BLOCK_N // 2, 2))
    o_out = i_column * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    m_own = m_rows[:, None] & (o_out < SIZE)[None, :]
    if IS_FUSED:
        p_rows = p_out + ((i_first + o_rows) * SIZE)[:, None] + o_out[None, :]
        tl.store(p_rows, silu_times(b_gate, b_up).to(kind), mask=m_own)
    else:
        p_rows = p_out + ((i_first + o_rows) * (2 * SIZE))[:, None] + o_out[None, :]
        tl.store(p_rows, b_gate.to(kind), mask=m_own)
        tl.store(p_rows + SIZE, b_up.to(kind), mask=m_own)


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(
    p_x,
    p_weight,
    p_out,
    p_pairs,
    p_table,
    num_tiles,
    stride_x,
    TOP_K: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    IS_FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAIL: a tile of at most so many rows is computed as one of so many; 0: all are of BLOCK_M. IS_FUSED: out is
    silu(gate) · up, else gate and behind it up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_tile, i_column = _place(num_tiles, (2 * SIZE + BLOCK_N - 1) // BLOCK_N, GROUP)
    i_expert, i_first, num_own = tile_at(p_table, i_tile)
    p_own = p_weight + i_expert * (2 * SIZE * SIZE_IN)
    if num_own > TAIL:
        _gate_up_rows(
            p_x, p_own, p_out, p_pairs, i_first, num_own, i_column, stride_x,
            TOP_K, SIZE_IN, SIZE, IS_FUSED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif TAIL:  # noqa: SIM102 - known when it is compiled
        if num_own > 0:
            _gate_up_rows(
                p_x, p_own, p_out, p_pairs, i_first, num_own, i_column, stride_x,
                TOP_K, SIZE_IN, SIZE, IS_FUSED, TAIL, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _down_rows(
    p_x,
    p_weight,
    p_out,
    i_first,
    num_own,
    i_column,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    o_rows = tl.arange(0, ROWS)
    m_rows = o_rows < num_own
    o_out = i_column * BLOCK_N + tl.arange(0, BLOCK_N)
    m_out = o_out < SIZE if SIZE % BLOCK_N else tl.full((BLOCK_N,), True, tl.int1)
    p_rows = p_x + (i_first + o_rows) * SIZE_IN
    b_y = _product(p_rows, p_weight + o_out * SIZE_IN, m_rows, m_out, SIZE_IN, ROWS, BLOCK_N, BLOCK_K)
    p_own = p_out + ((i_first + o_rows) * SIZE)[:, None] + o_out[None, :]
    tl.store(p_own, b_y.to(p_out.dtype.element_ty), mask=m_rows[:, None] & m_out[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down(
    p_x,
    p_weight,
    p_out,
    p_table,
    num_tiles,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_tile, i_column = _place(num_tiles, (SIZE + BLOCK_N - 1) // BLOCK_N, GROUP)
    i_expert, i_first, num_own = tile_at(p_table, i_tile)
    p_own = p_weight + i_expert * (SIZE * SIZE_IN)
    if num_own > TAIL:
        _down_rows(p_x, p_own, p_out, i_first, num_own, i_column, SIZE_IN, SIZE, BLOCK_M, BLOCK_N, BLOCK_K)
    elif TAIL:  # noqa: SIM102 - known when it is compiled
        if num_own > 0:
            _down_rows(p_x, p_own, p_out, i_first, num_own, i_column, SIZE_IN, SIZE, TAIL, BLOCK_N, BLOCK_K)


def grouped_silu_mul(x: Tensor, weights: Tensor, plan: ExpertPlan) -> Tensor:
    """x [T, in], weights [E, 2 · out, in]; see the package."""
    return _gate_and_up(x, weights, plan, is_fused=True)


def grouped_gate_up(x: Tensor, weights: Tensor, plan: ExpertPlan) -> Tensor:
    """x [T, in], weights [E, 2 · out, in]; see the package."""
    return _gate_and_up(x, weights, plan, is_fused=False)


def _gate_and_up(x: Tensor, weights: Tensor, plan: ExpertPlan, *, is_fused: bool) -> Tensor:
    assert plan.tiled is not None
    assert x.stride(1) == 1, x.stride()
    assert weights.is_contiguous(), weights.stride()
    (_, both, size_in), table, block_m = weights.shape, plan.tiled.table, plan.tiled.block_m
    out = torch.empty((len(plan.pairs), both // 2 if is_fused else both), dtype=x.dtype, device=x.device)
    row = tiles("moe_gate_up", x.device, rows=block_m, pairs=len(plan.pairs))
    block_n, block_k = _blocks(row, both, size_in, x.dtype)
    if len(table):
        _gate_up[(len(table) * triton.cdiv(both, block_n),)](
            x,
            weights,
            out,
            plan.pairs,
            table,
            len(table),
            x.stride(0),
            TOP_K=plan.top_k,
            SIZE_IN=size_in,
            SIZE=both // 2,
            IS_FUSED=is_fused,
            BLOCK_M=block_m,
            TAIL=row["tail"],
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=row["group"],
            num_warps=row["num_warps"],
            num_stages=row["num_stages"],
            **early("moe", x.device),
        )
    return out


def grouped_linear(x: Tensor, weights: Tensor, plan: ExpertPlan) -> Tensor:
    """x [T·K, in], weights [E, out, in]; see the package."""
    assert plan.tiled is not None
    assert x.is_contiguous(), x.stride()
    assert weights.is_contiguous(), weights.stride()
    (_, size, size_in), table, block_m = weights.shape, plan.tiled.table, plan.tiled.block_m
    out = torch.empty((len(plan.pairs), size), dtype=x.dtype, device=x.device)
    row = tiles("moe_down", x.device, rows=block_m, pairs=len(plan.pairs))
    block_n, block_k = _blocks(row, size, size_in, x.dtype)
    if len(table):
        _down[(len(table) * triton.cdiv(size, block_n),)](
            x,
            weights,
            out,
            table,
            len(table),
            SIZE_IN=size_in,
            SIZE=size,
            BLOCK_M=block_m,
            TAIL=row["tail"],
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP=row["group"],
            num_warps=row["num_warps"],
            num_stages=row["num_stages"],
            **early("moe", x.device),
        )
    return out


def _blocks(row: dict[str, int], size_out: int, size_in: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns and terms of a tile's step; a step of fp32 has as many bytes as one of bf16."""
    block_k = row["block_k"] * 2 // dtype.itemsize
    return min(row["block_n"], max(16, power_of_2(size_out))), min(block_k, max(16, power_of_2(size_in)))
