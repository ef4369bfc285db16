"""Tensors go to a device whole, however they lie in the buffers."""

import pytest
import torch

from engine.weights.staging import Staging


@pytest.mark.parametrize("shape", [(), (0,), (1,), (31,), (32,), (33,), (7, 40), (3, 5, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_tensor_larger_than_a_buffer_arrives_bit_by_bit(shape: tuple[int, ...], dtype: torch.dtype):
    staging = Staging(torch.device("cpu"), buffer_bytes=64)
    tensors = [torch.randn(shape).mul(50).to(dtype) for _ in range(5)]

    sent = [staging.send(tensor) for tensor in tensors]

    assert all(one.dtype == dtype and one.shape == shape for one in sent)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(sent, tensors, strict=True))
    assert all(one.data_ptr() != other.data_ptr() for one, other in zip(sent, tensors, strict=True) if one.numel())


def test_a_part_of_a_tensor_is_sent_and_no_more():
    whole = torch.arange(24.0).view(4, 6)

    assert torch.equal(Staging(torch.device("cpu"), buffer_bytes=16).send(whole[1:3, ::2]), whole[1:3, ::2])
