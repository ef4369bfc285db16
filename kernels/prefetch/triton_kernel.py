# pyright: reportIndexIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Part of other ops' kernels: what the programs do that a launch has beyond its own."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.prefetch import Prefetch


@triton.jit
def issue(
    p_next,
    i_program,
    num_programs,
    num_pieces,
    stride_piece,
    PIECE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """``i_program`` (of ``num_programs``, 64 bits) asks for its pieces, one a lane: the first lanes of all programs
    come first, since each multiprocessor has one unit that serves such requests. LANES is all that a program has;
    fewer would be copied to the others, which would then ask again."""
    for first in range(0, num_pieces, num_programs * LANES):
        i_pieces = first + tl.arange(0, LANES).to(tl.int64) * num_programs + i_program
        tl.inline_asm_elementwise(
            """{
            .reg .pred %wanted;
            setp.ne.s32 %wanted, $2, 0;
            @%wanted cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [p_next.to(tl.int64) + i_pieces * stride_piece, (i_pieces < num_pieces).to(tl.int32), PIECE_BYTES],
            dtype=tl.int32,
            is_pure=False,  # nobody reads the zero: it must not be thrown away
            pack=1,
        )


def arguments(prefetch: Prefetch | None, otherwise: Tensor, num_warps: int) -> dict[str, Any]:
    """Those of a launch that may carry a prefetch, by name; without one ``otherwise`` stands for the weight."""
    if prefetch is None:
        return {"p_next": otherwise, "num_pieces": 0, "stride_piece": 0, "PIECE_BYTES": 0, "LANES": 0}
    return {
        "p_next": prefetch.weight,
        "num_pieces": prefetch.num_pieces,
        "stride_piece": prefetch.stride_bytes,
        "PIECE_BYTES": prefetch.piece_bytes,
        "LANES": 32 * num_warps,
    }


def num_programs(prefetch: Prefetch | None) -> int:
    return 0 if prefetch is None else prefetch.num_programs
