"""Plain torch."""

import functools

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = wide.square().sum(dim=-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return weight * (wide * scale).to(x.dtype)


def whole(x: Tensor, residual: Tensor) -> Tensor:
    """x [T, H], or its parts [P, T, H] added up in their order and rounded to ``residual``'s dtype."""
    return x if x.dim() == residual.dim() else functools.reduce(torch.add, x.unbind()).to(residual.dtype)
