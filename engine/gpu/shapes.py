"""Which sizes of steps a GPU computes; the one place that knows what a deterministic engine does otherwise.

Every sum of ours has a fixed order, but which one is a matter of a step's size: cuBLAS, the tables of tiles and the
forms of LoRA go by the number of rows or by the largest rank of a step, attention by who shares it. So a row's last
bits depend on the size of its step. A deterministic engine computes every step as one; then they depend on

- embedding, rope, norms, silu_mul, the write into the cache: the row, which is a program or a lane of its own;
- products by cuBLAS: the row and the weight, since one shape is one algorithm, which adds each output's terms in one
  order. The head's rows are filled up to that shape too. Products of 8 bits: the same, by our own kernel;
- experts: the row's logits choose them, a product adds up the terms of a row and its expert's weight in one order for a
  number of rows (all tiles of one size, ``tail`` 0 of the tables), and the sums are in the order of choices;
- LoRA: the row and its adapter. Adapters of all ranks have one graph, and a row without one has in it the bits that it
  has in the graph of steps without;
- attention: the row's position and what it sees (``is_fixed``; kernels/paged_attention/work.py says why);
- edits, draws and log-probabilities: the row's logits, which are read by a program of their own at aligned addresses.

So keys and values are the same whenever and beside whom they were computed, and with them all that comes after: how a
prompt is cut, a prefix that is found, a recompute behind a preemption, a slot or a block changes nothing. That cuBLAS
keeps one order for all rows of a shape is seen, not promised: by check_deterministic_… of ops/bench/gpu_engine_checks.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.config import EngineConfig
from engine.models.lora_slots import LoraSlots
from kernels.tiles import power_of_2

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # above, the GPU takes longer than the host
RANKS = (16, 32, 64, 128, 256)  # a graph serves adapters up to one of these ranks
ONE_SHAPE = 256  # tokens of a deterministic step, where nobody has asked for others
_LEAST = 64  # tokens of one: fewer cost as much


class Form(NamedTuple):
    """Adapters that a captured step serves: up to ``rank``, 0: none; on experts too, or such as have nothing there."""

    rank: int
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class Shapes:
    """``decodes``: sequences of the graphs of steps that only decode. ``tokens``: of the graphs of all other steps.
    ``forms``: both are there for each of these, that of the fewest launches first. ``head_rows``: rows of a product
    with the head, 0: as many as are wanted. ``is_fixed``: how attention is planned."""

    decodes: tuple[int, ...]
    tokens: tuple[int, ...]
    forms: tuple[Form, ...]
    head_rows: int = 0
    is_fixed: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({form.rank for form in self.forms}))


def shapes_of(config: EngineConfig) -> Shapes:
    bounds, has_experts = rank_bounds(config), bool(config.expert_adapter_slots)
    whole = Form(bounds[-1] if bounds else 0, has_experts)
    if config.deterministic:
        size = _one_shape(config)
        return Shapes((), (size,), (Form(0), whole) if whole.rank else (Form(0),), size, is_fixed=True)
    forms = tuple(Form(rank) for rank in (0, *bounds)) + ((whole,) if has_experts else ())
    return Shapes(graph_sizes(config.max_sequences), TOKENS, forms)


def form_of(slots: LoraSlots, forms: Iterable[Form], used: Collection[int]) -> Form:
    """The first that serves a step whose rows have these slots, -1: none."""
    own = [slot for slot in used if slot >= 0]
    rank, has_experts = max(map(slots.lora_rank, own), default=0), slots.have_experts(own)
    return next(form for form in forms if form.rank >= rank and form.has_experts >= has_experts)


def in_one_shape(config: EngineConfig) -> EngineConfig:
    """With no more tokens a step than a deterministic engine's one shape has."""
    return replace(config, max_step_tokens=min(config.max_step_tokens, _one_shape(config)))


def _one_shape(config: EngineConfig) -> int:
    """Holds all decodes and the tokens of a step, up to the largest graph."""
    return min(TOKENS[-1], power_of_2(max(_LEAST, config.max_running, config.max_step_tokens)))


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Up to the first that holds so many sequences; what no size holds is launched kernel by kernel."""
    smaller = tuple(size for size in SIZES if size < max_sequences)
    return SIZES[: len(smaller) + 1]


def rank_bounds(config: EngineConfig) -> tuple[int, ...]:
    """Up to the first that no adapter is above."""
    smaller = tuple(rank for rank in RANKS if rank < config.max_lora_rank)
    return RANKS[: len(smaller) + 1] if config.adapter_slots else ()
