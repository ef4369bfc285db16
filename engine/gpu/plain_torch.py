"""What a model needs that no kernel of ours does on a GPU: plain torch computes it, each step with it is counted."""

import logging
from collections.abc import Iterable

import torch

from engine.models.config import ModelConfig
from kernels.paged_attention import MAX_HEAD_BYTES

logger = logging.getLogger("engine.gpu")

COSTS = {
    "head_size": f"attention of heads above {MAX_HEAD_BYTES} bytes: a sequence after the other, and no step is a graph",
    "experts": "experts: each of their layers waits for its router, so no step is a graph and the host sets the pace",
}


def without_kernel(model: ModelConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of COSTS; empty for a model that has all its kernels."""
    is_wide = model.attention.head_dim * dtype.itemsize > MAX_HEAD_BYTES
    found = {"head_size": is_wide, "experts": model.moe is not None}
    return tuple(reason for reason, is_so in found.items() if is_so)


def warn_of(reasons: Iterable[str]) -> None:
    """One line for an operator."""
    costs = "; ".join(COSTS[reason] for reason in reasons)
    if costs:
        logger.warning("no kernel, plain torch computes %s (counted by tenora_fallbacks_total)", costs)
