"""Plain torch."""

from torch import Tensor


def rope(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    cosines, sines = table.index_select(0, positions).unsqueeze(2).unbind(dim=1)  # [T, 1, D] each
    half = heads.shape[-1] // 2
    wide = heads.float()
    turned = wide * cosines
    sines = sines[..., :half]  # both halves are equal
    turned[..., :half].addcmul_(wide[..., half:], sines, value=-1)
    turned[..., half:].addcmul_(wide[..., :half], sines)
    return turned.to(heads.dtype)
