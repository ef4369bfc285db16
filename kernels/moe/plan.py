"""What the parts of the op hand each other: the rule of a router, and the order of a step's pairs."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How logits become weights: softmax over all experts and then the best of them (``renormalize``: divided by
    their sum), or, without ``softmax_first``, softmax over the logits of the best, which sums to 1 anyway."""

    softmax_first: bool = True
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class Tiled:
    """A plan as launches on a GPU read it; nothing of it is known to the host but its sizes.

    ``places`` [T·K] int32: where each pair stands in the order. ``table`` [tiles, 4] int32: expert, first place, number
    of places (at most ``block_m``), unused; a tile without places has expert -1. ``topk_ids``: what was planned.
    ``num_tokens`` [1] int32: rows from there on belong to no expert; None: all are tokens.
    """

    places: Tensor
    table: Tensor
    block_m: int
    topk_ids: Tensor
    num_tokens: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The T·K (token, choice) pairs of a step ordered by expert, pairs of one expert by token.

    ``pairs`` [T·K] int64, int32 on a GPU: token · K + choice, in that order; behind the last real token's pairs stands
    anything. ``counts`` [E] int64: pairs of each expert.
    """

    pairs: Tensor
    counts: Tensor
    top_k: int
    tiled: Tiled | None = None
