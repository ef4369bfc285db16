"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from torch import Tensor

from kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] → x · rsqrt(mean(x²) + eps) · weight, [T, H] in x's dtype.

    The mean and the root are fp32; the result is rounded to x's dtype before the weight, as Llama does. A row
    depends on itself only.
    """
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    return reference.rms_norm(x, weight, eps)
