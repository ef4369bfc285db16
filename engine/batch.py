"""A step's plan as flat tensors: all chunks one behind the other, no padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import AttentionConfig
from engine.scheduler import Chunk, StepPlan
from kernels.paged_attention import AttentionPlan, plan_attention
from kernels.sgmv import SgmvPlan, plan_sgmv


@dataclass(frozen=True)
class Batch:
    """T tokens of N chunks. token_ids, positions, slot_mapping [T] int64.

    ``attention`` holds block tables, query starts and context lengths; ``adapter_slots`` [T] the slot of each
    token (-1 = base), ``lora`` the same as tiles, None when no token has one; ``logits_rows`` the last row of each
    chunk that samples.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionPlan
    adapter_slots: list[int]
    lora: SgmvPlan | None
    logits_rows: list[int]


def build_batch(plan: StepPlan, block_size: int, attention: AttentionConfig, device: torch.device) -> Batch:
    """Every block that the chunks' tokens need must stand in their sequences' block tables."""
    starts = _query_starts(plan.chunks)
    token_ids = [token for chunk in plan.chunks for token in _tokens(chunk)]
    positions = torch.tensor(
        [position for chunk in plan.chunks for position in range(chunk.start, chunk.start + chunk.num_tokens)],
        device=device,
    )
    tables = _block_tables(plan.chunks).to(device)
    counts = torch.tensor([chunk.num_tokens for chunk in plan.chunks], device=device)
    owners = torch.repeat_interleave(torch.arange(len(plan.chunks), device=device), counts)
    slots = [chunk.sequence.adapter_slot for chunk in plan.chunks for _ in range(chunk.num_tokens)]
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=positions,
        slot_mapping=tables[owners, positions // block_size] * block_size + positions % block_size,
        attention=plan_attention(
            tables,
            starts,
            [chunk.start + chunk.num_tokens for chunk in plan.chunks],
            block_size=block_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            sliding_window=attention.sliding_window,
        ),
        adapter_slots=slots,
        lora=plan_sgmv(slots, device) if max(slots) >= 0 else None,
        logits_rows=[stop - 1 for chunk, stop in zip(plan.chunks, starts[1:], strict=True) if chunk.samples],
    )


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]


def _query_starts(chunks: tuple[Chunk, ...]) -> list[int]:
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.num_tokens)
    return starts


def _block_tables(chunks: tuple[Chunk, ...]) -> Tensor:
    """[N, most blocks]; short tables are filled with block 0, which is never read through them."""
    tables = [chunk.sequence.block_table for chunk in chunks]
    most = max(map(len, tables))
    return torch.tensor([table + [0] * (most - len(table)) for table in tables])
