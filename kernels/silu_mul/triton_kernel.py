# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""One program computes BLOCK columns of a row, in fp32, and rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.prefetch import Prefetch
from kernels.prefetch.triton_kernel import arguments, issue, num_programs
from kernels.tiles import is_early, power_of_2, tiles


@triton.jit
def silu_times(b_gate, b_up):
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def _silu_mul(
    p_gate_up,
    p_out,
    stride_row,
    p_next,
    num_pieces,
    stride_piece,
    PIECE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1).to(tl.int64)
    if PIECE_BYTES:
        i_other = i_block - (SIZE + BLOCK - 1) // BLOCK
        if i_other >= 0:
            num_rows = tl.num_programs(0)
            num_others = (tl.num_programs(1) - (SIZE + BLOCK - 1) // BLOCK) * num_rows
            issue(p_next, i_other * num_rows + i_row, num_others, num_pieces, stride_piece, PIECE_BYTES, LANES)
            return
    if PDL:
        tl.extra.cuda.gdc_wait()
    o_size = i_block * BLOCK + tl.arange(0, BLOCK)
    mask = o_size < SIZE
    p_row = p_gate_up + i_row * stride_row + o_size
    b_gate = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * SIZE + o_size, silu_times(b_gate, b_up).to(p_out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, prefetch: Prefetch | None = None) -> Tensor:
    """See the package; the columns must be dense."""
    assert gate_up.stride(1) == 1, gate_up.stride()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    row = tiles("silu_mul", gate_up.device, tokens=num_rows)
    block = min(row["block"], power_of_2(size))
    pdl = is_early("silu_mul", gate_up.device)
    if num_rows:
        others = triton.cdiv(num_programs(prefetch), num_rows)
        _silu_mul[(num_rows, triton.cdiv(size, block) + others)](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            TRIGGERS=is_early("shrink", gate_up.device),
            PDL=pdl,
            num_warps=row["num_warps"],
            **arguments(prefetch, gate_up, row["num_warps"]),
            **({"launch_pdl": True} if pdl else {}),
        )
    return out
