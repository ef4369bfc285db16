"""What a model needs that no kernel of ours does on a GPU: plain torch computes it, each step with it is counted."""

import logging
from collections.abc import Iterable

import torch

from engine.models.config import ModelConfig
from kernels.paged_attention import MAX_HEAD_BYTES

logger = logging.getLogger("engine.gpu")

COSTS = {
    "head_size": f"attention of heads above {MAX_HEAD_BYTES} bytes: a sequence after the other, and no step is a graph",
}


def without_kernel(model: ModelConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of COSTS; empty for a model that has all its kernels."""
    is_wide = model.attention.head_dim * dtype.itemsize > MAX_HEAD_BYTES
    return ("head_size",) if is_wide else ()


def warn_of(reasons: Iterable[str]) -> None:
    """One line for an operator."""
    costs = "; ".join(COSTS[reason] for reason in reasons)
    if costs:
        logger.warning("no kernel, plain torch computes %s (counted by tenora_fallbacks_total)", costs)
