# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""A program multiplies BLOCK_N rows of the weight, over a part of ``in``, with up to BLOCK_M rows of x: weights are
read once, widened in registers, and scaled after the product: a channel's scale at the end, a block's after its block.

With few columns there are more parts than one, so that all of the GPU reads: their sums are stored, and added in their
order by a second launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.quantised_linear import QuantisedWeight
from kernels.quantised_linear.reference import BLOCK
from kernels.tiles import power_of_2, tiles

# two numbers of int8, each behind 0x43: as bf16 128 plus the lower seven bits, minus 128 plus the eighth bit's 128
PAIR_TO_BF16 = tl.constexpr("""{
    .reg .b32 pair, low;
    cvt.u32.u16 pair, $2;
    prmt.b32 pair, pair, 0x43434343, 0x4140;
    and.b32 low, pair, 0xff7fff7f;
    and.b32 pair, pair, 0xff80ff80;
    sub.rn.bf16x2 pair, low, pair;
    mov.b32 {$0, $1}, pair;
}""")


@triton.jit
def _tile(
    p_matrix,
    first_row,
    first,
    num_rows,
    stride_row,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
):
    """ROWS × BLOCK numbers of a matrix; zeros past num_rows, and past SIZE, which a part of PART columns may pass where
    it does not divide SIZE. TMA: p_matrix is a tensor's descriptor."""
    if TMA:
        b_tile = p_matrix.load([first_row.to(tl.int32), first.to(tl.int32)])
    else:
        i_rows = first_row.to(tl.int64) + tl.arange(0, ROWS)
        o_in = first + tl.arange(0, BLOCK)
        m_in = o_in < SIZE if SIZE % PART else tl.full((BLOCK,), True, tl.int1)
        mask = (i_rows < num_rows)[:, None] & m_in[None, :]
        b_tile = tl.load(p_matrix + (i_rows * stride_row)[:, None] + o_in[None, :], mask=mask, other=0.0)
    return b_tile


@triton.jit
def _wide(b_data, dtype: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The numbers as they are. IN_PAIRS: of int8, read two at a time; bytes would each be taken out of what a thread
    loads and put back into pairs."""
    if IN_PAIRS:
        b_even, b_odd = tl.inline_asm_elementwise(
            PAIR_TO_BF16, "=h,=h,h", [b_data], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
        b_wide = tl.join(b_even, b_odd).reshape(b_data.shape[0], 2 * b_data.shape[1])
    else:
        b_wide = b_data.to(tl.float32).to(dtype)  # fp8 straight to bf16 takes longer (measured)
    return b_wide


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
    PDL: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    TMA: tl.constexpr,
):
    """PART: columns of the weight of one program, whole blocks; no part begins past the last column. SCALED: rows and
    columns that share a scale; 0: a scale a row. IS_SPLIT: out is partials [parts, num_rows, SIZE_OUT] fp32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M  # the programs of the same weights follow each other
    first_out = tl.program_id(1).to(tl.int64) * BLOCK_N
    i_part = tl.program_id(2).to(tl.int64)
    i_rows = first_row + tl.arange(0, BLOCK_M)
    o_out = first_out + tl.arange(0, BLOCK_N)
    m_out = o_out < SIZE_OUT
    m_rows = i_rows < num_rows
    PAIR: tl.constexpr = 2 if IN_PAIRS else 1
    SIZE: tl.constexpr = SIZE_IN // PAIR
    b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_step in range(0, PART, BLOCK_K):
        first = i_part * PART + i_step
        b_x = _tile(p_x, first_row, first, num_rows, stride_x, SIZE_IN, PART, BLOCK_M, BLOCK_K, TMA)
        b_data = _tile(
            p_weight, first_out, first // PAIR, SIZE_OUT, SIZE, SIZE, PART // PAIR, BLOCK_N, BLOCK_K // PAIR, TMA
        )
        b_wide = _wide(b_data, b_x.dtype, IN_PAIRS)
        if SCALED:
            p_scale = p_scales + o_out // SCALED * ((SIZE_IN + SCALED - 1) // SCALED) + first // SCALED
            b_scale = tl.load(p_scale, mask=m_out & (first < SIZE_IN), other=0.0)
            b_sum += tl.dot(b_wide, tl.trans(b_x), input_precision="ieee") * b_scale[:, None]
        else:
            b_sum = tl.dot(b_wide, tl.trans(b_x), b_sum, input_precision="ieee")
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
    pdl = {"launch_pdl": True} if row["pdl"] else {}
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
        PDL=bool(row["pdl"]),
        num_warps=4,
        **pdl,
    )
    return out


def _part(row: dict[str, int], num_rows: int, sizes: tuple[int, int], block_k: int) -> int:
    """Columns of a part: as many parts as make the programs that the row asks for, of four blocks and more."""
    size_out, size_in = sizes
    num_tiles = triton.cdiv(num_rows, row["block_m"]) * triton.cdiv(size_out, row["block_n"])
    parts = max(1, min(row["programs"] // num_tiles, size_in // (4 * block_k)))
    return triton.cdiv(size_in, parts * block_k) * block_k


def _launch(x: Tensor, weight: QuantisedWeight, row: dict[str, int], steps: tuple[int, int], out: Tensor) -> None:
    """``steps``: columns of a part and of a block; several parts are told apart in ``out``."""
    part, block_k = steps
    num_rows, (size_out, size_in) = x.shape[0], weight.data.shape
    num_parts = triton.cdiv(size_in, part)
    block_m = min(max(16, power_of_2(num_rows)), row["block_m"])
    is_int8 = weight.data.dtype == torch.int8
    in_pairs = bool(row["pairs"]) and is_int8 and x.dtype == torch.bfloat16 and size_in % 2 == 0
    data = weight.data.view(torch.int16) if in_pairs else weight.data
    tma = bool(row["tma"]) and all(map(_has_descriptor, (x, data)))
    columns = block_k // 2 if in_pairs else block_k
    _multiply[(triton.cdiv(num_rows, block_m), triton.cdiv(size_out, row["block_n"]), num_parts)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if tma else x,
        TensorDescriptor.from_tensor(data, [row["block_n"], columns]) if tma else data,
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
        PDL=num_parts > 1 and bool(row["pdl"]),
        IN_PAIRS=in_pairs,
        TMA=tma,
        num_warps=row["num_warps"],
        num_stages=row["num_stages"],
    )


def _has_descriptor(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator can read it."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
