"""Decode steps as CUDA graphs: one for each size of a batch, without adapters and with them, alone and in groups.

All that differs between two steps of one size stands in memory that the graph reads: token ids (or the row of the
step ahead that draws one), positions, places in the cache, block tables, attention's pieces, rows by adapter slot.
A step fills one pinned array and copies it; what a smaller batch leaves over computes nothing that anybody reads.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Rows
from engine.config import EngineConfig
from engine.gpu.shapes import Form, form_of, shapes_of
from engine.gpu.shared_prefixes import LEAST_DECODES, may_share
from engine.models.attention import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lora_slots import LoraSlots
from engine.models.moe import token_numbers
from engine.scheduler import Chunk, StepPlan
from engine.sequence import PENDING
from kernels.paged_attention import DecodeShape, PrefixGroup, captured_plan, fill_plan, may_capture, plan_numbers
from kernels.sampling import highest
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from kernels.timing import timed
from kernels.upload import spans, upload

GRAPH_BYTES = 6 << 20  # of one captured step, in the driver; as much again for experts in all layers
_BUFFERS = 3  # pinned arrays in turn: a step's is read by the device while the next one's is filled


class Kind(NamedTuple):
    """Of steps that one graph holds: at most so many decodes, of adapters up to a rank, with groups that read their
    beginning together or without; adapters on experts are served, or there is none."""

    size: int
    rank: int
    has_groups: bool
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [size, V]


class DecodeGraphs:
    """``drawn`` [most sequences] int64 is where steps leave the tokens that they draw. Not thread-safe."""

    def __init__(
        self, model: Decoder, kv: KVCache, slots: LoraSlots, drawn: Tensor, config: EngineConfig, pool: Any
    ) -> None:
        self._model, self._kv, self._slots, self.drawn = model, kv, slots, drawn
        self.sizes = shapes_of(config).decodes
        self._kinds = graph_kinds(model.config, config)
        self._device = model.embedding.device
        self._tables = BlockTables(self.sizes[-1], -(-config.context_tokens // config.block_size), self._device)
        self._graphs: dict[Kind, Captured] = {}
        self._pool = pool
        self._forms: dict[tuple[int, bool], list[Form]] = {}
        for kind in self._kinds:
            self._forms.setdefault((kind.size, kind.has_groups), []).append(Form(kind.rank, kind.has_experts))
        self._layouts = {
            (size, has_groups): Layout(decode_shape(model.config, config, self._device, size, has_groups=has_groups))
            for size, has_groups in self._forms
        }
        self._numbers = Numbers(max(layout.length for layout in self._layouts.values()), self._device)

    def launch(self) -> None:
        """Everything once, so that kernels are loaded, and tables of tiles and of addresses made."""
        for kind in self._largest_first():
            self._empty_step(kind)()
            self._numbers.wait()

    def capture(self) -> None:
        """All graphs, when everything has been launched: a capture gives what launches before it have left in the
        allocator's cache back to the driver, and those behind it would take it anew."""
        for kind in self._largest_first():
            self._graphs[kind] = self._capture(kind)

    def _largest_first(self) -> list[Kind]:
        """Whose memory the smaller ones share."""
        return sorted(self._kinds, reverse=True)

    def fits(self, plan: StepPlan) -> bool:
        """All of its chunks are decodes that draw, and a size holds them."""
        return len(plan.chunks) <= self.sizes[-1] and all(
            chunk.num_tokens == 1 and chunk.samples and not chunk.scores for chunk in plan.chunks
        )

    def replay(self, plan: StepPlan, ahead: Rows, groups: Many[PrefixGroup] = ()) -> Tensor:
        """Launches the step → logits [chunks, V], good until the next replay; the highest ones' ids are in ``drawn``,
        row i for chunk i."""
        kind = self._kind(plan, has_groups=bool(groups))
        self._tables.update(plan.chunks)
        layout = self._layouts[kind.size, kind.has_groups]
        step = Step(plan.chunks, ahead, groups)
        layout.fill(self._numbers.begin(layout.places), step, self._slots.num_slots, with_lora=kind.rank > 0)
        self._numbers.send()
        captured = self._graphs[kind]
        replay(captured.graph)
        return captured.logits[: len(plan.chunks)]

    def size(self, num_sequences: int) -> int:
        """The smallest that holds so many."""
        return next(size for size in self.sizes if size >= num_sequences)

    def _kind(self, plan: StepPlan, *, has_groups: bool) -> Kind:
        """The one of the lowest rank that serves all adapters."""
        used = {chunk.sequence.adapter_slot for chunk in plan.chunks}
        size = self.size(len(plan.chunks))
        form = form_of(self._slots, self._forms[size, has_groups], used)
        return Kind(size, form.rank, has_groups, form.has_experts)

    def _empty_step(self, kind: Kind) -> Callable[[], Tensor]:
        """A step without a decode, over the memory of all steps of its kind → its logits."""
        layout = self._layouts[kind.size, kind.has_groups]
        layout.fill(self._numbers.begin(layout.places), Step((), {}), self._slots.num_slots, with_lora=True)
        self._numbers.send()
        tables = self._tables.tables[: kind.size]
        batch = layout.batch(self._numbers.memory, tables, self._slots.num_slots, kind.rank)
        return partial(self._compute, batch, kind)

    def _capture(self, kind: Kind) -> Captured:
        compute = self._empty_step(kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()
        return Captured(graph, logits)

    def _compute(self, batch: Batch, kind: Kind) -> Tensor:
        batch = resolve(batch, self.drawn)
        hidden = self._model.forward(batch, self._kv, self._slots, kind.rank, has_experts=kind.has_experts)
        logits = self._model.product_with_head(hidden)
        highest(logits, self.drawn[: kind.size])
        return logits


@timed("graph")
def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Whatever ops it holds: on the device they are one."""
    graph.replay()


def graph_kinds(model: ModelConfig, config: EngineConfig) -> tuple[Kind, ...]:
    """All that are captured, of each size those of fewer launches first; may be none. Steps with groups take adapters
    of any rank in one graph."""
    shapes, attention = shapes_of(config), model.attention
    sizes = shapes.decodes if may_capture(attention.num_heads, attention.num_kv_heads) else ()
    larger = [size for size in sizes if size >= LEAST_DECODES] if may_share(model, config) else []
    return (
        *(Kind(size, form.rank, False, form.has_experts) for size in sizes for form in shapes.forms),
        *(
            Kind(size, form.rank, True, form.has_experts)
            for size in larger
            for form in shapes.forms
            if form.rank in {0, shapes.ranks[-1]}
        ),
    )


def graph_bytes(model: ModelConfig, config: EngineConfig, device: torch.device) -> int:
    """What the graphs take in the driver, and in the largest, whose memory all share, attention's partial results and
    what a layer's experts hand each other."""
    rank = config.max_expert_rank if config.expert_adapter_slots else 0
    experts = shapes_of(config).tokens[-1] * token_numbers(model, rank)[0] * torch.float32.itemsize
    kinds, attention = graph_kinds(model, config), model.attention
    if not kinds:
        return experts
    largest = max((kind.size, kind.has_groups) for kind in kinds)
    shape = decode_shape(model, config, device, largest[0], has_groups=largest[1])
    partials = shape.most_partials * attention.num_kv_heads * (attention.head_dim + 2) * torch.float32.itemsize
    layers_with_experts = len(model.moe.layers) if model.moe else 0
    graphs = len(kinds) * GRAPH_BYTES * (model.num_layers + layers_with_experts) // model.num_layers
    return graphs + partials + experts


def decode_shape(
    model: ModelConfig, config: EngineConfig, device: torch.device, size: int, *, has_groups: bool
) -> DecodeShape:
    attention = model.attention
    return DecodeShape(
        size,
        -(-config.context_tokens // config.block_size) * config.block_size,
        config.block_size,
        attention.num_heads,
        attention.num_kv_heads,
        device,
        sliding_window=attention.sliding_window,
        has_groups=has_groups,
    )


def resolve(batch: Batch, drawn: Tensor) -> Batch:
    """The batch with ids for all tokens: those of the step ahead are ``drawn`` by now."""
    ids = batch.token_ids
    known = torch.where(ids < 0, drawn.index_select(0, (~ids).clamp(min=0)).to(ids.dtype), ids)
    return replace(batch, token_ids=known)


@dataclass(frozen=True, slots=True)
class Step:
    """Decodes, the rows of those whose token the step ahead draws, and who of them read their beginning together."""

    chunks: Many[Chunk]
    ahead: Rows
    groups: Many[PrefixGroup] = ()


class Layout:
    """Where the numbers of a step of one size stand in the flat array."""

    def __init__(self, shape: DecodeShape) -> None:
        self.shape = shape
        size = shape.num_sequences
        self.places = spans([size, size, size, 1, plan_numbers(shape), segment_numbers(size)])
        self.length = self.places[-1].stop

    def fill(self, out: Many[NDArray[np.int32]], step: Step, empty_slot: int, *, with_lora: bool) -> None:
        """The step into ``out``, the arrays of ``places``; rows past its decodes are at position 0, nowhere in the
        cache, without a context."""
        tokens, positions, mapping, count, attention, segments = out
        chunks, block_size = step.chunks, self.shape.block_size
        count[0] = num = len(chunks)
        tokens[:num] = [_token(chunk, step.ahead) for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        positions[:num] = starts
        blocks = [chunk.sequence.block_table[chunk.start // block_size] for chunk in chunks]
        mapping[:num] = np.array(blocks, dtype=np.int32) * block_size + positions[:num] % block_size
        tokens[num:], positions[num:], mapping[num:] = 0, 0, -1
        fill_plan(attention, [start + 1 for start in starts], self.shape, step.groups)
        if with_lora:
            fill_segments(segments, [chunk.sequence.adapter_slot for chunk in chunks], len(tokens), empty_slot)

    def batch(self, memory: Tensor, tables: Tensor, empty_slot: int, rank: int) -> Batch:
        """A step over ``memory``, whatever stands there."""
        tokens, positions, mapping, count, attention, segments = (memory[place] for place in self.places)
        size = self.shape.num_sequences
        lora = CapturedSgmv(segments, size, empty_slot) if rank else None
        return Batch(tokens, positions, mapping, captured_plan(attention, tables, self.shape), lora, tokens, count)


def _token(chunk: Chunk, ahead: Rows) -> int:
    token = chunk.sequence.token_ids[chunk.start]
    return ~ahead[chunk.sequence.seq_id] if token == PENDING else token


class Numbers:
    """``memory``: int32 on the device that graphs read, filled from pinned arrays in turn: the device may still read a
    step's while the next one's is filled."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.memory = torch.zeros(length, dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(_BUFFERS)
        ]
        self._length = 0

    def begin(self, places: Many[slice]) -> list[NDArray[np.int32]]:
        """The next step's arrays, to be filled and then sent."""
        self._hosts.append(self._hosts.pop(0))
        self._length = places[-1].stop
        host = self._hosts[-1].numpy()
        return [host[place] for place in places]

    def wait(self) -> None:
        """Until the device has read all that was sent: for who sends more steps than there are arrays at once."""
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)

    def send(self) -> None:
        self.memory[: self._length].copy_(self._hosts[-1][: self._length], non_blocking=True)


class BlockTables:
    """[rows, blocks] int32 on the device, row i for the i-th sequence of a step; only what changed is sent."""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        self._held = [(-1, -1, 0)] * num_rows  # sequence, its preemptions, blocks of it that are there

    def update(self, chunks: Many[Chunk]) -> None:
        places: list[int] = []
        blocks: list[int] = []
        num_columns = self.tables.shape[1]
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            seq_id, num_preemptions, known = self._held[row]
            table = sequence.block_table
            if (seq_id, num_preemptions) != (sequence.seq_id, sequence.num_preemptions):
                known = 0
            if known < len(table):
                places += range(row * num_columns + known, row * num_columns + len(table))
                blocks += table[known:]
                self._held[row] = sequence.seq_id, sequence.num_preemptions, len(table)
        if places:
            where, values = upload([places, blocks], self.tables.device)
            self.tables.view(-1).index_copy_(0, where.long(), values)
