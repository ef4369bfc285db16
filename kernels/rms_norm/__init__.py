"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from torch import Tensor

from kernels.rms_norm import reference
from kernels.timing import timed


@timed("norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] → x · rsqrt(mean(x²) + eps) · weight, [T, H] in x's dtype.

    The mean and the root are fp32; the result is rounded to x's dtype before the weight, as Llama does. A row
    depends on itself only.
    """
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    if x.is_cuda:
        from kernels.rms_norm import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


@timed("norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to ``residual`` in place, rounded to its dtype, and gives ``rms_norm`` of the sum. Both [T, H].

    x [P, T, H] fp32: parts (``linear_parts``) that are added up in their order and rounded first.
    """
    assert x.shape[-2:] == residual.shape, (x.shape, residual.shape)
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    if x.is_cuda:
        from kernels.rms_norm import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(residual.add_(reference.whole(x, residual)), weight, eps)
