"""y = x · Wᵀ + b whose rows do not depend on how many rows there are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import onednn, reference
from kernels.linear.exactness import packed_is_exact
from kernels.tiles import tiles
from kernels.timing import timed


class LinearWeight:
    """A weight [out, in] with an optional bias [out], laid out for ``linear``.

    On a CPU in fp32 it is packed once for oneDNN, where that was seen to be exact by row on this machine; in bf16
    products are filled up to as many rows as were seen to make them so. The argument is copied or kept, never changed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_size, self.in_size = weight.shape
        self.bias = bias
        exact = _may_be_packed(weight) and packed_is_exact(self.in_size, self.out_size, torch.get_num_threads())
        self.is_packed = exact
        self.data = onednn.pack(weight) if exact else weight

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in]: a copy when it is packed."""
        return onednn.unpack(self.data) if self.is_packed else self.data


@timed("linear")
def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """x [T, in] → [T, out] in x's dtype. On a CPU a row's bits depend on that row and the weight only: neither on
    T nor on the number of threads."""
    assert x.shape[-1] == weight.in_size, (x.shape, weight.in_size)
    if weight.is_packed:
        return onednn.linear(x, weight.data, weight.bias)
    if x.is_cuda:
        return F.linear(x, weight.data, weight.bias)
    return reference.linear(x, weight.data, weight.bias)


@timed("linear")
def linear_parts(x: Tensor, weight: LinearWeight, num_parts: int) -> Tensor:
    """x [T, in] → [P, T, out] fp32, whose sum over P is ``linear`` without a bias: one of each of P equal parts of the
    inputs. For ``add_rms_norm`` to add up; see ``parts_of``."""
    (num_rows, size_in), size_out = x.shape, weight.out_size
    parts = x.view(num_rows, num_parts, size_in // num_parts).transpose(0, 1)
    columns = weight.weight.view(size_out, num_parts, size_in // num_parts).permute(1, 2, 0)
    if x.is_cuda:
        return torch.bmm(parts, columns, out_dtype=torch.float32)
    return parts.float() @ columns.float()


def parts_of(x: Tensor, weight: LinearWeight) -> int:
    """Into how many parts a product had better be cut; 1: left whole.

    A product of few rows has too few tiles for a GPU, so the library cuts it anyway, and adds up by a launch of its own
    that can be spared. By the tables; a CPU never does.
    """
    if not x.is_cuda or weight.bias is not None:
        return 1
    sizes = {"tokens": x.shape[0], "size_in": weight.in_size, "size_out": weight.out_size}
    num_parts = tiles("linear_parts", x.device, **sizes)["parts"]
    return num_parts if weight.in_size % (64 * num_parts) == 0 else 1


def _may_be_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and onednn.is_available()
