"""Steps that compute prompts too, as graphs between their attentions.

Attention's launches depend on the chunks of a step; all else depends on its number of tokens only. So each layer's
part behind attention and the next one's before it are one graph, and attention is launched between two of them.
Without that, such a step takes as long as the host needs for some six hundred launches.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, Flat, on_device
from engine.config import EngineConfig
from engine.gpu.decode_graphs import Numbers, replay, resolve
from engine.gpu.shapes import Form, form_of, shapes_of
from engine.models.attention import KVCache
from engine.models.decoder import Decoder
from engine.models.linear import LoraStep
from engine.models.lora_slots import LoraSlots
from kernels.paged_attention import plan_attention
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from kernels.upload import spans


@dataclass(frozen=True, slots=True)
class Buffers:
    """What graphs and attention hand each other: residual and hidden [T, H], queries and seen [T, N_q, D]."""

    residual: Tensor
    queries: Tensor
    seen: Tensor
    hidden: Tensor

    def first(self, num_tokens: int) -> "Buffers":
        return Buffers(*(part[:num_tokens] for part in (self.residual, self.queries, self.seen, self.hidden)))


class PieceGraphs:
    """``drawn`` is where the step ahead has left its tokens. Not thread-safe."""

    def __init__(
        self, model: Decoder, kv: KVCache, slots: LoraSlots, drawn: Tensor, config: EngineConfig, pool: Any
    ) -> None:
        self._model, self._kv, self._slots, self._drawn, self._pool = model, kv, slots, drawn, pool
        self._shapes = shapes_of(config)
        self._pieces: dict[tuple[int, Form], list[torch.cuda.CUDAGraph]] = {}
        device, most, attention = model.embedding.device, self._shapes.tokens[-1], model.config.attention
        self._numbers = Numbers(_places(most)[-1].stop, device)
        heads = (most, attention.num_heads, attention.head_dim)
        shapes = ((most, model.config.hidden_size), heads, heads, (most, model.config.hidden_size))
        self._buffers = Buffers(*(model.embedding.new_zeros(shape) for shape in shapes))

    def launch(self) -> None:
        """Everything once, so that kernels are loaded, and tables of tiles and of addresses made."""
        for size, form in self._largest_first():
            work = self._empty_step(size, form)
            for number in range(len(self._model.layers) + 1):
                work.piece(number)
            self._numbers.wait()

    def capture(self) -> None:
        """All graphs, when everything has been launched: see ``DecodeGraphs.capture``."""
        for size, form in self._largest_first():
            self._pieces[size, form] = self._capture(size, form)

    def _largest_first(self) -> list[tuple[int, Form]]:
        return [(size, form) for size in reversed(self._shapes.tokens) for form in self._shapes.forms]

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self._shapes.tokens[-1]

    def replay(self, flat: Flat) -> Tensor:
        """Launches the step → hidden [T, H], good until the next replay."""
        num_tokens = len(flat.token_ids)
        size = self.size(num_tokens)
        form = form_of(self._slots, self._shapes.forms, np.unique(flat.slots).tolist())
        tokens, positions, mapping, count, segments = self._numbers.begin(_places(size))
        count[0] = num_tokens
        for place, numbers, rest in (
            (tokens, flat.token_ids, 0),
            (positions, flat.positions, 0),
            (mapping, flat.slot_mapping, -1),
        ):
            place[:num_tokens], place[num_tokens:] = numbers, rest
        if form.rank:
            fill_segments(segments, flat.slots.tolist(), size, self._slots.num_slots)
        self._numbers.send()
        (tables,) = on_device(self._drawn.device, flat.tables)
        plan = flat.attention(tables, self._kv.block_size, self._model.config.attention, is_fixed=self._shapes.is_fixed)
        used = self._buffers.first(num_tokens)
        *pieces, last = self._pieces[size, form]
        for layer, piece in zip(self._model.layers, pieces, strict=True):
            replay(piece)
            used.seen.copy_(layer.attention.attend(used.queries, plan, self._kv))
        replay(last)
        return used.hidden

    def size(self, num_tokens: int) -> int:
        """The smallest that holds so many."""
        return next(size for size in self._shapes.tokens if size >= num_tokens)

    def _empty_step(self, size: int, form: Form) -> "_Work":
        """A step of tokens of nobody, over the memory of all steps of its size."""
        tokens, positions, mapping, count, segments = self._numbers.begin(_places(size))
        tokens[:], positions[:], mapping[:], count[:] = 0, 0, -1, 0
        fill_segments(segments, [], size, self._slots.num_slots)
        self._numbers.send()
        ids, places, slots, count, segments = (self._numbers.memory[place] for place in _places(size))
        lora = CapturedSgmv(segments, size, self._slots.num_slots) if form.rank else None
        nothing = plan_attention(ids[None][:0], [0], [], block_size=1, num_heads=1, num_kv_heads=1)
        batch = Batch(ids, places, slots, replace(nothing), lora, ids, count)
        step = LoraStep(self._slots, lora, form.rank, count, form.has_experts)
        return _Work(self._model, self._kv, self._drawn, self._buffers.first(size), batch, step)

    def _capture(self, size: int, form: Form) -> list[torch.cuda.CUDAGraph]:
        work = self._empty_step(size, form)
        pieces = []
        for number in range(len(self._model.layers) + 1):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work.piece(number)
            pieces.append(graph)
        return pieces


@dataclass(frozen=True)
class _Work:
    """What the pieces of a step of one size compute."""

    model: Decoder
    kv: KVCache
    drawn: Tensor
    buffers: Buffers
    batch: Batch
    lora: LoraStep

    def piece(self, number: int) -> None:
        """Layer ``number`` - 1 behind its attention, layer ``number`` before it."""
        residual, layers, x = self.buffers.residual, self.model.layers, None
        if number == 0:
            residual.copy_(F.embedding(resolve(self.batch, self.drawn).token_ids, self.model.embedding))
        else:
            x = layers[number - 1].finish(self.buffers.seen, residual, self.lora)
        if number == len(layers):
            self.buffers.hidden.copy_(self.model.norm(x, residual))
            return
        queries = layers[number].queries(x, residual, self.batch, self.kv, self.lora, self.model.rope_table)
        self.buffers.queries.copy_(queries)


def _places(size: int) -> Many[slice]:
    """Of token ids, positions, places in the cache, how many there are, rows by slot."""
    return spans([size, size, size, 1, segment_numbers(size)])
