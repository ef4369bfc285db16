"""Plain torch, padded so that a row's bits do not depend on its neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_rows(num_rows: int) -> int:
    """Rows to compute so that MKL's sgemm takes one kernel for all: a multiple of 4, at least 4 a thread.

    Measured with AVX2 and AVX-512, 1 … 8 threads: with fewer than 4 rows a thread (also in the rest that a thread
    gets of 9 rows) another kernel sums in another order.
    """
    return max(-(-num_rows // 4) * 4, 4 * torch.get_num_threads())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or padded_rows(num_rows) == num_rows:
        return F.linear(x, weight, bias)  # bf16 rows are equal without padding
    padding = x.new_zeros(padded_rows(num_rows) - num_rows, x.shape[1])
    return F.linear(torch.cat((x, padding)), weight, bias)[:num_rows]
