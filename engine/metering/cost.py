"""What each sequence of a step cost: a step's measured nanoseconds, shared without losing or inventing one.

The step model: T = step + Σ sequences (sequence + token · tokens + key · keys + pair · pairs + lora · MiB · tokens)
+ Σ adapters in use (adapter + adapter_mib · MiB) + Σ experts woken (expert). *keys* are the positions that a chunk
reads, *pairs* those that its tokens attend to, one by one; an adapter's MiB stand for its rank over its modules: what
is multiplied for each token, and read once a step. An expert is one of one layer, and woken by any token that its
router sends there; all of a model are of one size, hence one coefficient; what their tokens take is in ``token``.

Who shares a cost pays it in equal parts with the others: φᵢ = mᵢ + F / n + G_a / n_a + Σ_e H / n_e, with n_a that use
the adapter and n_e that wake the expert in this very step, as the routers decided. That is the model's Shapley value,
in closed form, since each term is a sum over sequences or a cost that any of its users causes alone.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduler import Chunk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEATURES = ("step", "sequence", "token", "key", "pair", "lora", "adapter", "adapter_mib", "expert")
_STEP, _SEQUENCE, _TOKEN, _KEY, _PAIR, _LORA, _ADAPTER, _ADAPTER_MIB, EXPERT = range(len(FEATURES))
WEIGHTS = 1 << 31  # what a step's weights sum to at most: with so many, products with ns can be cut to fit 63 bits
_MAX_STEP_NS = WEIGHTS * WEIGHTS  # 146 years


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, by chunk [N]: its first position, its tokens, and its adapter's slot (-1: none)."""

    starts: Ints
    tokens: Ints
    slots: Ints


def shape_of(chunks: Sequence[Chunk], num_tokens: int) -> StepShape:
    """``num_tokens`` of all chunks: where it is one each, nobody is asked."""
    starts = _ints([chunk.start for chunk in chunks])
    is_one_each = num_tokens == len(chunks)
    tokens = np.ones_like(starts) if is_one_each else _ints([chunk.num_tokens for chunk in chunks])
    return StepShape(starts, tokens, _ints([chunk.sequence.adapter_slot for chunk in chunks]))


def _ints(numbers: list[int]) -> Ints:
    return np.frombuffer(array("q", numbers), np.int64)  # in a third of the time of np.array


def parts(shape: StepShape, slot_mib: Floats) -> Floats:
    """Each chunk's part of each feature, [FEATURES, N]: what is its own in whole, of what is shared its part. A row's
    sum is what the coefficient multiplies; coefficients · column is a chunk's Shapley value in ns.

    ``slot_mib`` [slots + 1]: MiB of the adapter in each slot; the last one, 0, is that of no adapter. Row EXPERT is 0:
    who woke which is known when the step has landed.
    """
    starts, tokens, slots = shape.starts, shape.tokens, shape.slots
    found = np.zeros((len(FEATURES), len(tokens)))
    found[_STEP] = 1 / len(tokens)
    found[_SEQUENCE] = 1.0
    found[_TOKEN] = tokens
    found[_KEY] = starts + tokens
    found[_PAIR] = tokens * (2 * starts + tokens + 1) // 2  # each token attends to those before it and to itself
    if slots.max() >= 0:
        part = 1 / np.maximum(np.bincount(slots + 1, minlength=len(slot_mib)), 1)  # by slot, 0: of no adapter
        part[0] = 0.0
        found[_LORA] = slot_mib[slots] * tokens
        found[_ADAPTER] = part[slots + 1]
        found[_ADAPTER_MIB] = found[_ADAPTER] * slot_mib[slots]
    return found


def one_token_later(parts: Floats) -> Floats:
    """The parts of a step whose chunks were of one token each and are now the next one."""
    later = parts.copy()
    later[_KEY : _PAIR + 1] += 1.0
    return later


def features(parts: Floats) -> Floats:
    """What the coefficients multiply, in the order of FEATURES: their product is the step's time in ns."""
    return np.add.reduce(parts, axis=1)


def weights(costs: Floats) -> Ints:
    """``costs`` [N] ≥ 0 as whole numbers in their proportion, each at least 1 and all together at most WEIGHTS: a
    part of a step is rounded by less than a 2,000,000,000th of it."""
    total = np.add.reduce(costs)
    if not total > 0:
        return np.ones(len(costs), np.int64)
    return (costs * ((WEIGHTS - len(costs)) / total)).astype(np.int64) + 1


def split(step_ns: int, weights: Ints) -> list[int]:
    """``step_ns`` in proportion to ``weights`` (each ≥ 0, their sum > 0, unless there is nothing to split, and at most
    WEIGHTS).

    Each share is the difference of two floors of the exact cumulative share, so that the shares sum to ``step_ns``
    and each is within 1 ns of its exact value. All in whole numbers below 2⁶³: a step above 2 s in two parts.
    """
    assert 0 <= step_ns < _MAX_STEP_NS, f"a step of {step_ns} ns"
    assert weights.size == 0 or weights.min() >= 0, "a negative weight"
    sums = weights.cumsum()
    total = int(sums[-1]) if sums.size else 0
    assert total <= WEIGHTS, f"weights of {total} together"
    if total == 0:
        assert step_ns == 0, "time without anybody who used it"
        return [0] * weights.size
    high, low = divmod(step_ns, WEIGHTS)
    if high == 0:
        bounds = sums * low // total
    else:
        whole, rest = np.divmod(sums * high, total)
        bounds = whole * WEIGHTS + (rest * WEIGHTS + sums * low) // total
    bounds[1:] -= bounds[:-1].copy()
    return bounds.tolist()
