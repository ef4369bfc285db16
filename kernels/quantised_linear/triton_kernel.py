# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""A program multiplies BLOCK_N rows of the weight, over a part of ``in``, with up to BLOCK_M rows of x: weights are
read once, widened in registers, and scaled after the product: a channel's scale at the end, a block's after its block.

With few columns there are more parts than one, so that all of the GPU reads: their sums are stored, and added in their
order by a second launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantised_linear import QuantisedWeight
from kernels.quantised_linear.reference import BLOCK
from kernels.tiles import pdl, power_of_2, tiles


@triton.jit
def _finish(b_sum, p_scales, p_bias, o_out, m_out, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """b_sum [BLOCK_N, BLOCK_M], the whole product: a channel's scale, the bias."""
    if not SCALED:
        b_sum *= tl.load(p_scales + o_out, mask=m_out, other=0.0)[:, None]
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_out, mask=m_out, other=0.0).to(tl.float32)[:, None]
    return b_sum


@triton.jit
def _multiply(
    p_x,
    p_weight,
    p_scales,
    p_bias,
    p_out,
    num_rows,
    stride_x,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WAITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """PART: columns of the weight of one program, whole blocks; no part begins past the last column. SCALED: rows and
    columns that share a scale; 0: a scale a row. IS_SPLIT: out is partials [parts, num_rows, SIZE_OUT] fp32. WAITS: no
    product goes on into the next step (see ``_launch``)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # same weights: one after the other
    o_out = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_part = tl.program_id(2).to(tl.int64)
    m_out = o_out < SIZE_OUT
    m_rows = i_rows < num_rows
    b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_step in range(0, PART, BLOCK_K):
        first = i_part * PART + i_step
        o_in = first + tl.arange(0, BLOCK_K)
        m_in = o_in < SIZE_IN if SIZE_IN % PART else tl.full((BLOCK_K,), True, tl.int1)
        b_weight = tl.load(
            p_weight + (o_out * SIZE_IN)[:, None] + o_in[None, :], mask=m_out[:, None] & m_in[None, :], other=0.0
        )
        b_x = tl.load(
            p_x + (i_rows * stride_x)[:, None] + o_in[None, :], mask=m_rows[:, None] & m_in[None, :], other=0.0
        )
        b_wide = b_weight.to(tl.float32).to(b_x.dtype)  # fp8 straight to bf16 takes longer (measured)
        if SCALED:
            p_scale = p_scales + o_out // SCALED * ((SIZE_IN + SCALED - 1) // SCALED) + first // SCALED
            b_scale = tl.load(p_scale, mask=m_out & (first < SIZE_IN), other=0.0)
            b_sum += tl.dot(b_wide, tl.trans(b_x), input_precision="ieee") * b_scale[:, None]
        else:
            b_sum = tl.dot(b_wide, tl.trans(b_x), b_sum, input_precision="ieee")
            if WAITS:
                b_sum = tl.where(num_rows > 0, b_sum, 0.0)  # always: a use, for which the product is waited for
    if not IS_SPLIT:
        b_sum = _finish(b_sum, p_scales, p_bias, o_out, m_out, SCALED, HAS_BIAS)
    p_own = p_out + ((i_part * num_rows + i_rows) * SIZE_OUT)[None, :] + o_out[:, None]
    tl.store(p_own, b_sum.to(p_out.dtype.element_ty), mask=m_out[:, None] & m_rows[None, :])


@triton.jit
def _add_parts(
    p_partials,
    p_scales,
    p_bias,
    p_out,
    num_rows,
    SIZE_OUT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    o_out = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_row = tl.program_id(1).to(tl.int64)
    m_out = o_out < SIZE_OUT
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i_part in tl.static_range(NUM_PARTS):
        b_sum += tl.load(p_partials + (i_part * num_rows + i_row) * SIZE_OUT + o_out, mask=m_out, other=0.0)
    b_sum = _finish(b_sum[:, None], p_scales, p_bias, o_out, m_out, SCALED, HAS_BIAS).reshape(BLOCK_N)
    tl.store(p_out + i_row * SIZE_OUT + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_out)


def quantised_linear(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """See the package; worth it for few rows."""
    assert weight.data.is_contiguous(), weight.data.stride()
    assert weight.scales.is_contiguous(), weight.scales.stride()
    assert x.stride(1) == 1, x.stride()
    num_rows, (size_out, size_in) = x.shape[0], weight.data.shape
    out = torch.empty((num_rows, size_out), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    row = tiles("quantised_linear", x.device, tokens=num_rows, out=size_out, blocked=weight.is_blocked)
    block_k = min(row["block_k"], BLOCK) if weight.is_blocked else row["block_k"]
    part = _part(row, num_rows, (size_out, size_in), block_k)
    num_parts = -(-size_in // part)
    if num_parts == 1:
        _launch(x, weight, row, (part, block_k), out)
        return out
    partials = torch.empty((num_parts, num_rows, size_out), dtype=torch.float32, device=x.device)
    _launch(x, weight, row, (part, block_k), partials)
    block_n = min(1024, power_of_2(size_out))
    _add_parts[(triton.cdiv(size_out, block_n), num_rows)](
        partials,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        out,
        num_rows,
        SIZE_OUT=size_out,
        NUM_PARTS=num_parts,
        BLOCK_N=block_n,
        SCALED=BLOCK if weight.is_blocked else 0,
        HAS_BIAS=weight.bias is not None,
        num_warps=4,
        **pdl(row["pdl"]),
    )
    return out


def _part(row: dict[str, int], num_rows: int, sizes: tuple[int, int], block_k: int) -> int:
    """Columns of a part: as many parts as make the programs that the row asks for, of four blocks and more."""
    size_out, size_in = sizes
    num_tiles = -(-num_rows // row["block_m"]) * -(-size_out // row["block_n"])
    parts = max(1, min(row["programs"] // num_tiles, size_in // (4 * block_k)))
    return -(-size_in // (parts * block_k)) * block_k


def _launch(x: Tensor, weight: QuantisedWeight, row: dict[str, int], steps: tuple[int, int], out: Tensor) -> None:
    """``steps``: columns of a part and of a block; several parts are told apart in ``out``.

    Where a tile's product is a wgmma, whose widened weights are in registers, a step waits for its own: Triton would
    let it go on, and ptxas writes the next step's weights into registers that it still reads (triton-lang/triton, issue
    9433; a tile of 256 rows got wrong sums so). A block's scale, behind each product, is such a wait too.
    """
    part, block_k = steps
    num_rows, (size_out, size_in) = x.shape[0], weight.data.shape
    num_parts = triton.cdiv(size_in, part)
    block_m = min(max(16, power_of_2(num_rows)), row["block_m"])
    _multiply[(triton.cdiv(num_rows, block_m), triton.cdiv(size_out, row["block_n"]), num_parts)](
        x,
        weight.data,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        out,
        num_rows,
        x.stride(0),
        SIZE_IN=size_in,
        SIZE_OUT=size_out,
        PART=part,
        BLOCK_M=block_m,
        BLOCK_N=row["block_n"],
        BLOCK_K=block_k,
        SCALED=BLOCK if weight.is_blocked else 0,
        HAS_BIAS=weight.bias is not None,
        IS_SPLIT=num_parts > 1,
        WAITS=row["num_warps"] >= 4 and row["block_n"] >= 64,
        PDL=num_parts > 1 and bool(row["pdl"]),
        num_warps=row["num_warps"],
        num_stages=row["num_stages"],
    )
