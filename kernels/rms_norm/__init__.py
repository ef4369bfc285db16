"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from torch import Tensor

from kernels.rms_norm import reference
from kernels.sgmv import Low, PartialLow, expand
from kernels.tiles import power_of_2, tiles
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


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, low: Low | None = None) -> Tensor:
    """Adds x to ``residual`` in place, rounded to its dtype, and gives ``rms_norm`` of the sum. Both [T, H].

    x [P, T, H] fp32: parts (``linear_parts``) that are added up in their order and rounded first. ``low``: what
    adapters add to x before (``kernels.sgmv.shrink``), one slice of H columns; x may have changed then. A GPU adds it
    on its way, before x is rounded, where the tables say so; else by ``expand``, to ``residual`` where x is in parts.
    """
    assert x.shape[-2:] == residual.shape, (x.shape, residual.shape)
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    if isinstance(low, PartialLow) and _adds_on_its_way(low, residual):
        return _with_adapters(x, residual, weight, eps, low)
    if low is not None:
        expand(x if x.dim() == residual.dim() else residual, low)
    return _alone(x, residual, weight, eps)


def _adds_on_its_way(low: PartialLow, residual: Tensor) -> bool:
    num_rows, size = residual.shape
    sizes = {"tokens": num_rows, "size": power_of_2(size), "rank": low.lora_rank}
    return low.segment_rows == 1 and bool(tiles("norm_low", residual.device, **sizes)["fused"])


@timed("norm")
def _alone(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        from kernels.rms_norm import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(residual.add_(reference.whole(x, residual)), weight, eps)


@timed("norm")
def _with_adapters(x: Tensor, residual: Tensor, weight: Tensor, eps: float, low: PartialLow) -> Tensor:
    from kernels.rms_norm import triton_low

    return triton_low.add_rms_norm(x, residual, weight, eps, low)
