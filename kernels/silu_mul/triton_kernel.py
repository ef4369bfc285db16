# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""One program computes BLOCK columns of a row, in fp32, and rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import early, is_early, power_of_2, tiles


@triton.jit
def silu_times(b_gate, b_up):
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


@triton.jit
def _silu_mul(
    p_gate_up,
    p_out,
    stride_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIGGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    if TRIGGERS:
        tl.extra.cuda.gdc_launch_dependents()
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    o_size = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_size < SIZE
    p_row = p_gate_up + i_row * stride_row + o_size
    b_gate = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * SIZE + o_size, silu_times(b_gate, b_up).to(p_out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See the package; the columns must be dense."""
    assert gate_up.stride(1) == 1, gate_up.stride()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    row = tiles("silu_mul", gate_up.device, tokens=num_rows)
    block = min(row["block"], power_of_2(size))
    if num_rows:
        _silu_mul[(num_rows, triton.cdiv(size, block))](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            TRIGGERS=is_early("shrink", gate_up.device),
            num_warps=row["num_warps"],
            **early("silu_mul", gate_up.device),
        )
    return out
