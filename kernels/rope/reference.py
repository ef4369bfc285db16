"""Plain torch."""

from torch import Tensor


def rope(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    cosines, sines = table[positions].unsqueeze(2).unbind(dim=1)  # [T, 1, D] each
    half = heads.shape[-1] // 2
    wide = heads.float()
    turned = wide * cosines
    turned[..., :half] -= wide[..., half:] * sines[..., :half]
    turned[..., half:] += wide[..., :half] * sines[..., half:]
    return turned.to(heads.dtype)
