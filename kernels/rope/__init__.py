"""Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split layout of Hugging Face's Llama."""

import torch
from torch import Tensor

from kernels.rope import reference


def rope_table(inverse_frequencies: Tensor, num_positions: int) -> Tensor:
    """inverse_frequencies [D/2] fp32 → [num_positions, 2, D] fp32: cosines and sines, each repeated for both halves."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rope(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """heads [T, N, D] (query and key heads together), positions [T] int64, table of ``rope_table`` → [T, N, D].

    Computed in fp32 and rounded once. The input is left as it is.
    """
    assert heads.shape[-1] == table.shape[-1], (heads.shape, table.shape)
    assert heads.shape[0] == positions.shape[0], (heads.shape, positions.shape)
    if heads.is_cuda:
        from kernels.rope import triton_kernel

        return triton_kernel.rope(heads, positions, table)
    return reference.rope(heads, positions, table)
