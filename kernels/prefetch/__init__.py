"""The beginning of the weight that the next product reads, brought into the L2 cache beside a small op before it.

Between two products the memory is idle, and a product needs microseconds until it reads as fast as it can. So an op
that knows the weight that comes next (``next_weight``) gives its launch a few programs more, which ask for a part of it
(PTX: cp.async.bulk.prefetch.L2) and end; nothing waits for the bytes. No result depends on any of it.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.tiles import tiles

PIECE_BYTES = 1 << 14  # that a lane asks for at once, where rows are taken whole


@dataclass(frozen=True, slots=True)
class Prefetch:
    """``num_pieces`` of ``piece_bytes`` each, ``stride_bytes`` from one to the next, from the beginning of ``weight``;
    asked for by ``num_programs`` programs. Addresses and sizes are multiples of 16 bytes, as the instruction wants."""

    weight: Tensor
    num_pieces: int
    piece_bytes: int
    stride_bytes: int
    num_programs: int


def prefetch_beside(op: str, weight: Tensor | None, num_tokens: int) -> Prefetch | None:
    """What an ``op`` of so many tokens brings in of ``weight`` [out, in], by the table ``prefetch_<op>`` of this GPU.
    None: nothing, as always on a CPU and on GPUs before sm_90, which lack the instruction."""
    if weight is None or not _has_instruction(weight.device):
        return None
    row = tiles(f"prefetch_{op}", weight.device, tokens=num_tokens)
    return prefetch_of(weight, row["mib"] << 20, row["row_bytes"], row["programs"])


def prefetch_of(weight: Tensor, num_bytes: int, row_bytes: int, num_programs: int) -> Prefetch | None:
    """At most ``num_bytes`` of ``weight``: its first rows; or, with ``row_bytes``, the first bytes of as many rows as
    that makes, since a product begins with many rows at once. None where there is nothing to ask for."""
    whole = weight.shape[1] * weight.itemsize
    is_whole = not 0 < row_bytes < whole
    piece, stride = (PIECE_BYTES, PIECE_BYTES) if is_whole else (row_bytes, whole)
    most = weight.nbytes // PIECE_BYTES if is_whole else weight.shape[0]
    count = min(num_bytes // piece, most)
    if count < 1 or not weight.is_contiguous() or weight.data_ptr() % 16 or piece % 16 or stride % 16:
        return None
    return Prefetch(weight, count, piece, stride, num_programs)


@lru_cache
def _has_instruction(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
