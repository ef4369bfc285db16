"""Plain torch."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = wide.square().sum(dim=-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return weight * (wide * scale).to(x.dtype)
