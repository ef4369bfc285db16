"""Which products of this machine's CPU give a row the same bits alone and among others: tried once a size.

Libraries choose a kernel by processor, number of rows and sizes: torch takes another for a product of up to 4,096
multiplications, oneDNN another for a single row of many inputs. Sums are rounded to bf16, which hides another order of
adding in all but one of some ten thousand; so what is tried is sums whose terms cancel: of them nothing is left but the
rounding of each step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import onednn

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 33)
_MOST_ROWS = 64
_MOST_COLUMNS = 4096  # tell as much as all of a wider product, and cost milliseconds


@lru_cache(maxsize=256)
def packed_is_exact(in_size: int, out_size: int, num_threads: int) -> bool:
    """Whether oneDNN's product of a packed weight in fp32 is, whatever the number of rows."""
    rows, weight = cancelling(in_size, out_size, torch.float32)
    packed = onednn.pack(weight)
    return not _unequal(lambda x: onednn.linear(x, packed, None), rows, _COUNTS)


@lru_cache(maxsize=256)
def least_rows(in_size: int, out_size: int, dtype: torch.dtype, num_threads: int) -> int:
    """How many rows a product of torch's must have at least: with that many or more each row has the same bits."""
    rows, weight = cancelling(in_size, out_size, dtype)
    unequal = _unequal(lambda x: F.linear(x, weight), rows, _COUNTS)
    return next(least for least in (1, 2, 4, 8, 16, 32, _MOST_ROWS) if least > max(unequal, default=0))


def cancelling(in_size: int, out_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [64, in] and a weight [out or less, in] whose products are 0 but for what each step rounds."""
    draw, half = torch.Generator().manual_seed(in_size), in_size // 2
    rows, weight = torch.zeros(_MOST_ROWS, in_size), torch.zeros(min(out_size, _MOST_COLUMNS), in_size)
    rows[:, :half] = torch.randn(_MOST_ROWS, half, generator=draw)
    weight[:, :half] = torch.randn(len(weight), half, generator=draw)
    order = torch.randperm(half, generator=draw)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = rows[:, order], -weight[:, order]
    return rows.to(dtype), weight.to(dtype)


def _unequal(product: Callable[[Tensor], Tensor], rows: Tensor, counts: Sequence[int]) -> list[int]:
    """The numbers of rows with which some row has other bits than among all of them."""
    whole = product(rows)
    return [
        count
        for count in counts
        if not all(torch.equal(product(rows[first : first + count]), whole[first : first + count]) for first in (0, 3))
    ]
