"""Plain torch on a CPU, padded so that a row's bits do not depend on its neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.exactness import least_rows


def padded_rows(num_rows: int, weight: Tensor) -> int:
    """Rows to compute so that one kernel takes them all, whatever their number.

    fp32: MKL's sgemm needs a multiple of 4, at least 4 a thread (measured with AVX2 and AVX-512, 1 … 8 threads: with
    fewer, also in the rest that a thread gets of 9 rows, another kernel sums in another order). Other types: as tried
    on this machine.
    """
    num_threads = torch.get_num_threads()
    if weight.dtype == torch.float32:
        return max(-(-num_rows // 4) * 4, 4 * num_threads)
    out_size, in_size = weight.shape
    return max(num_rows, least_rows(in_size, out_size, weight.dtype, num_threads))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.shape[0]
    missing = padded_rows(num_rows, weight) - num_rows
    if not missing:
        return F.linear(x, weight, bias)
    return F.linear(torch.cat((x, x.new_zeros(missing, x.shape[1]))), weight, bias)[:num_rows]
