"""What each sequence of a step cost: a step's measured nanoseconds, shared without losing or inventing one.

The step model: T = step + Σ sequences (sequence + token · tokens + key · keys + pair · pairs + lora · MiB · tokens)
+ Σ adapters in use (adapter + adapter_mib · MiB). *keys* are the positions that a chunk reads, *pairs* those that its
tokens attend to, one by one; an adapter's MiB stand for its rank over its modules: what is multiplied for each token,
and read once a step. Who shares a cost pays it in equal parts with the others; that is the model's Shapley value, in
closed form, since each term is a sum over sequences or a cost that any of its users causes alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduler import Chunk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEATURES = ("step", "sequence", "token", "key", "pair", "lora", "adapter", "adapter_mib")
_SEQUENCE, _TOKEN, _KEY, _PAIR, _LORA, _ADAPTER, _ADAPTER_MIB = range(1, len(FEATURES))
_WEIGHTS_PER_NS = 1024
_MAX_STEP_NS = 1 << 52  # floats hold the bounds of the shares exactly up to here: 52 days


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, by chunk [N]: its first position, its tokens, and its adapter's MiB (0: none) with the
    adapter's slot (-1: none)."""

    starts: Ints
    tokens: Ints
    slots: Ints
    mib: Floats

    @property
    def keys(self) -> Ints:
        return self.starts + self.tokens

    @property
    def num_sharing(self) -> Ints:
        """Chunks that use the same adapter, or none as this one does."""
        return np.bincount(self.slots + 1)[self.slots + 1]

    @property
    def pairs(self) -> Ints:
        """Each token attends to those before it and to itself."""
        return self.tokens * (2 * self.starts + self.tokens + 1) // 2


def shape_of(chunks: Sequence[Chunk], slot_mib: Floats) -> StepShape:
    """``slot_mib`` [slots + 1]: MiB of the adapter in each slot; the last one, 0, is that of no adapter."""
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    tokens = np.array([chunk.num_tokens for chunk in chunks], np.int64)
    slots = np.array([chunk.sequence.adapter_slot for chunk in chunks], np.int64)
    return StepShape(starts, tokens, slots, slot_mib[slots])


def features(shape: StepShape) -> Floats:
    """What the coefficients multiply, in the order of FEATURES: their product is the step's time in ns."""
    own = (len(shape.tokens), shape.tokens.sum(), shape.keys.sum(), shape.pairs.sum(), shape.mib @ shape.tokens)
    part = (shape.slots >= 0) / shape.num_sharing  # of its adapter
    return np.array([1.0, *own, part.sum(), part @ shape.mib])


def weights(shape: StepShape, coefficients: Floats) -> Ints:
    """Each chunk's Shapley value of the modelled time, [N], in 1,024ths of a ns, and at least one of them.
    ``coefficients`` (≥ 0) as FEATURES."""
    c = coefficients
    cost = c[_TOKEN] * shape.tokens + c[_KEY] * shape.keys + c[_PAIR] * shape.pairs
    cost += c[_SEQUENCE] + c[0] / len(shape.tokens)
    if shape.slots.max() >= 0:
        shared = c[_ADAPTER] + c[_ADAPTER_MIB] * shape.mib
        cost += np.where(shape.slots >= 0, shared / shape.num_sharing, 0.0) + c[_LORA] * shape.mib * shape.tokens
    return np.rint(cost * _WEIGHTS_PER_NS).astype(np.int64) + 1


def split(step_ns: int, weights: Ints) -> list[int]:
    """``step_ns`` in proportion to ``weights`` (each ≥ 0, their sum > 0, unless there is nothing to split).

    Each share is the difference of two floors of the cumulative share, so that the shares sum to ``step_ns``
    exactly and each is within 1 ns of its exact value.
    """
    assert 0 <= step_ns < _MAX_STEP_NS, f"a step of {step_ns} ns"
    assert weights.size == 0 or weights.min() >= 0, "a negative weight"
    parts = weights.cumsum()
    if parts.size == 0 or parts[-1] == 0:
        assert step_ns == 0, "time without anybody who used it"
        return [0] * weights.size
    bounds = (parts / parts[-1] * step_ns).astype(np.int64)  # of the last: exactly step_ns
    bounds[1:] -= bounds[:-1].copy()
    return bounds.tolist()
