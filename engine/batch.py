"""A step's plan as flat tensors: all chunks one behind the other, no padding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.config import AttentionConfig
from engine.scheduler import Chunk, StepPlan
from engine.sequence import PENDING
from kernels.paged_attention import AttentionPlan, PrefixGroup, plan_attention
from kernels.sgmv import SgmvPlan, plan_sgmv
from kernels.upload import ALIGNED, upload

Numbers = NDArray[np.int64]
Rows = Mapping[int, int]  # seq_id → its row among the tokens that the step ahead draws


@dataclass(frozen=True)
class Batch:
    """T tokens of N chunks. token_ids, positions, slot_mapping [T], int64 on a CPU and int32 on a GPU.

    A token id below 0 is one that the step ahead draws: ~row of its tokens. ``attention`` holds block tables, query
    starts and context lengths; ``lora`` the slot of each token as tiles, None when no token has one; ``logits_rows``
    the last row of each chunk that samples. ``num_tokens`` [1] int32 on the device: in a captured step, how many of the
    T are tokens, the rest fills it up; None: all.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionPlan
    lora: SgmvPlan | None
    logits_rows: Tensor
    num_tokens: Tensor | None = None


@dataclass(frozen=True)
class Flat:
    """The numbers of a Batch on the host: token_ids, positions, slot_mapping and slots [T], starts [N + 1],
    context_lens [N], tables [N, most blocks]; logits_rows as in Batch. ``groups``: decodes that read their beginning
    together."""

    token_ids: Numbers
    positions: Numbers
    slot_mapping: Numbers
    slots: Numbers
    starts: Numbers
    context_lens: Numbers
    tables: Numbers
    logits_rows: Numbers
    groups: tuple[PrefixGroup, ...] = ()

    def attention(
        self, tables: Tensor, block_size: int, attention: AttentionConfig, *, is_fixed: bool = False
    ) -> AttentionPlan:
        """``tables`` are those of this step, on the device."""
        plan = plan_attention(
            tables,
            self.starts.tolist(),
            self.context_lens.tolist(),
            block_size=block_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            sliding_window=attention.sliding_window,
            groups=self.groups,
        )
        return replace(plan, is_fixed=is_fixed)


def flatten(plan: StepPlan, block_size: int, ahead: Rows | None = None, groups: tuple[PrefixGroup, ...] = ()) -> Flat:
    """Every block that the chunks' tokens need must stand in their sequences' block tables."""
    chunks = plan.chunks
    starts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
    counts = np.diff(starts)
    firsts = np.array([chunk.start for chunk in chunks])
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) + (firsts - starts[:-1])[owners]
    tables = _block_tables(chunks)
    return Flat(
        token_ids=np.array([token for chunk in chunks for token in tokens_of(chunk, ahead or {})]),
        positions=positions,
        slot_mapping=tables[owners, positions // block_size] * block_size + positions % block_size,
        slots=np.array([chunk.sequence.adapter_slot for chunk in chunks])[owners],
        starts=starts,
        context_lens=firsts + counts,
        tables=tables,
        logits_rows=np.array(
            [stop - 1 for chunk, stop in zip(chunks, starts[1:], strict=True) if chunk.samples], np.int64
        ),
        groups=groups,
    )


def build_batch(
    plan: StepPlan, block_size: int, attention: AttentionConfig, device: torch.device, ahead: Rows | None = None
) -> Batch:
    """The plan on the device."""
    return to_batch(flatten(plan, block_size, ahead), block_size, attention, device)


def to_batch(flat: Flat, block_size: int, attention: AttentionConfig, device: torch.device) -> Batch:
    """One transfer to a GPU for all but attention's pieces and the adapters' tiles."""
    tokens, positions, mapping, rows, tables = on_device(
        device, flat.token_ids, flat.positions, flat.slot_mapping, flat.logits_rows, flat.tables
    )
    lora = plan_sgmv(flat.slots.tolist(), device) if flat.slots.max() >= 0 else None
    return Batch(tokens, positions, mapping, flat.attention(tables, block_size, attention), lora, rows)


def tokens_of(chunk: Chunk, ahead: Rows) -> list[int]:
    """The chunk's token ids; one that is not known yet stands for the row that draws it."""
    tokens = chunk.sequence.token_ids[chunk.start : chunk.end]
    if tokens[-1] == PENDING:
        tokens[-1] = ~ahead[chunk.sequence.seq_id]
    return tokens


def _block_tables(chunks: tuple[Chunk, ...]) -> Numbers:
    """[N, most blocks]; short tables are filled with block 0, which is never read through them. Rows are whole lines
    of memory: kernels are compiled for that, and not again for a step whose longest table has another length."""
    tables = [chunk.sequence.block_table for chunk in chunks]
    most = -(-max(map(len, tables)) // ALIGNED) * ALIGNED
    found = np.zeros((len(tables), most), dtype=np.int64)
    for row, table in zip(found, tables, strict=True):
        row[: len(table)] = table
    return found


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """In one transfer to a GPU, as int32."""
    if device.type == "cpu":
        return [torch.from_numpy(numbers) for numbers in arrays]
    flat = upload([numbers.ravel() for numbers in arrays], device)
    return [numbers.view(array.shape) for numbers, array in zip(flat, arrays, strict=True)]
