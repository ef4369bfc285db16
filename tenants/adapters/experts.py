"""LoRA on fused experts (PEFT's ``target_parameters``) → one pair an expert and module, as per-expert keys give them.

PEFT stores one pair for a parameter of all E experts: A [E·r, ·] with the expert slowest, B [·, E·r] with the expert
fastest. From 0.20 on, A's last size is the parameter's input and B's first its output; before, it was the other way
round, and each expert's delta is (B·A) transposed. Names don't say which parameter it is, nor which way round; the
sizes do, but for a square parameter, where ``peft_version`` must.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from tenants.adapters.bounded_json import clip, clip_all
from tenants.adapters.config import AdapterSettings
from tenants.adapters.header import ITEM_BYTES, TensorEntry
from tenants.adapters.shape import AdapterShape, ExpertShape, expert_module
from tenants.adapters.tensor_names import Pair

Raw: TypeAlias = np.ndarray[Any, np.dtype[Any]]  # items as bits: nothing is computed with them


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a fused tensor: a view of the file, copied when it is written."""

    dtype: str
    items: Raw

    @property
    def shape(self) -> tuple[int, ...]:
        return self.items.shape

    @property
    def num_bytes(self) -> int:
        return self.items.nbytes

    def turned(self) -> "Slice":
        return Slice(self.dtype, self.items.T)


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """One expert's part of a fused pair, shaped as a ``Pair``: A [r, in], B [out, r]."""

    layer: int
    module: str
    halves: dict[str, Slice]

    @property
    def lora_rank(self) -> int:
        return self.halves["A"].shape[0]


@dataclass(frozen=True, slots=True)
class Fused:
    """A fused pair that is understood. ``path`` is the parameter's; ``is_swapped``: of before PEFT 0.20."""

    pair: Pair
    parameter: str
    is_swapped: bool
    num_experts: int

    @property
    def path(self) -> str:
        return f"{self.pair.path.removesuffix('.base_layer')}.{self.parameter}"

    @property
    def halves(self) -> dict[str, TensorEntry]:
        return self.pair.halves

    @property
    def lora_rank(self) -> int:
        return self.pair.lora_rank // self.num_experts


@dataclass(slots=True)
class Reading:
    fused: list[Fused]
    reasons: list[str]
    warnings: list[str]


def read_fused(pairs: list[Pair], settings: AdapterSettings, shape: AdapterShape) -> Reading:
    """Which parameter each pair belongs to and which way round it is, or why that can't be known."""
    found = Reading([], [], [])
    targets = settings.target_parameters
    if shape.experts is None:
        found.reasons += [f"target_parameters: the model has no experts, {clip_all(targets)}"] if targets else []
        return found
    unfit, unknown, other_way = [], [], False
    for pair in pairs:
        readings = _readings(pair, shape.experts)
        if len(readings) == 2 and settings.is_swapped is not None:
            readings = [each for each in readings if each.is_swapped is settings.is_swapped]
        if len(readings) == 1:
            found.fused += readings
            other_way |= readings[0].is_swapped is (not settings.is_swapped) and settings.is_swapped is not None
        else:
            (unknown if readings else unfit).append(_described(pair))
    if unfit:
        found.reasons.append(f"shapes that don't fit the model's experts: {clip_all(unfit)}")
    if unknown:
        found.reasons.append(f"peft_version is needed to tell input from output: {clip_all(unknown)}")
    if other_way:
        found.warnings.append("peft_version and the shapes of expert tensors disagree; the tensors count")
    found.reasons += _target_reasons(found.fused, targets)
    return found


def expert_pairs(file: BinaryIO, fused: Fused, shape: AdapterShape) -> Iterator[ExpertPair]:
    """One pair for each expert and module, as views of ``file``, which must not change."""
    assert shape.experts is not None, "without experts nothing is read as fused"
    first, second = fused.pair.halves["A"], fused.pair.halves["B"]
    firsts = _map(file, first).reshape(fused.num_experts, fused.lora_rank, -1)
    seconds = _map(file, second).reshape(-1, fused.lora_rank, fused.num_experts)
    for expert in range(fused.num_experts):
        low, high = Slice(first.dtype, firsts[expert]), Slice(second.dtype, seconds[:, :, expert])
        if fused.is_swapped:
            low, high = high.turned(), low.turned()
        for part, rows in _parts(fused.parameter, shape.experts.width):
            ranks = _live(high.items[rows])
            halves = {"A": Slice(low.dtype, low.items[ranks]), "B": Slice(high.dtype, high.items[rows, ranks])}
            yield ExpertPair(fused.pair.layer, expert_module(expert, part), halves)


def _readings(pair: Pair, experts: ExpertShape) -> list[Fused]:
    """All that the sizes allow: none, one, or both ways round of a square parameter."""
    a, b = pair.halves["A"], pair.halves["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] % experts.num_experts:
        return []
    hidden, width = experts.hidden_size, experts.width
    sizes = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    return [
        Fused(pair, parameter, is_swapped, experts.num_experts)
        for parameter, (num_in, num_out) in sizes.items()
        for is_swapped in (False, True)
        if (a.shape[1], b.shape[0]) == ((num_out, num_in) if is_swapped else (num_in, num_out))
    ]


def _target_reasons(fused: list[Fused], targets: list[str]) -> list[str]:
    """The config must agree where it speaks: tensors of a parameter that it doesn't name are another adapter's."""
    others = [name for name in targets if name.rpartition(".")[2] not in ("gate_up_proj", "down_proj")]
    reasons = [f"target_parameters: only experts' gate_up_proj and down_proj, not {clip_all(others)}"] if others else []
    strange = [each.path for each in fused if not any(f".{each.path}".endswith(f".{name}") for name in targets)]
    if targets and strange:
        reasons.append(f"target_parameters doesn't name what the tensors are of: {clip_all(strange)}")
    places = [(each.pair.layer, each.parameter) for each in fused]
    twice = sorted({each.path for each in fused if places.count((each.pair.layer, each.parameter)) > 1})
    if twice:
        reasons.append(f"two fused pairs for one parameter: {clip_all(twice)}")
    return reasons


def _map(file: BinaryIO, entry: TensorEntry) -> Raw:
    return np.memmap(file, f"<u{ITEM_BYTES[entry.dtype]}", "r", entry.start, entry.shape)


def _parts(parameter: str, width: int) -> tuple[tuple[str, slice], ...]:
    if parameter == "down_proj":
        return (("down_proj", slice(None)),)
    return ("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width))


def _live(high: Raw) -> slice:
    """The ranks that B [out, r] uses: PEFT merges gate and up of ranks r into one of 2r, block by block."""
    used = np.flatnonzero(high.any(axis=0))
    return slice(used[0], used[-1] + 1) if len(used) else slice(0, 1)


def _described(pair: Pair) -> str:
    shapes = " and ".join(f"{side} {list(pair.halves[side].shape)}" for side in ("A", "B"))
    return f"{clip(pair.path)} {shapes}"
