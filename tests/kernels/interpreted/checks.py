"""What every Triton kernel must do, as checks of a kernel's module: the tests run them on ours, and on copies of ours
into which a fault was planted."""

import dataclasses
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from kernels import tiles
from kernels.paged_attention import AttentionPlan, DecodeShape, PrefixGroup, captured_plan, fill_plan, plan_numbers
from kernels.qk_rope_kv import HeadNorms
from kernels.qk_rope_kv import reference as qk_rope_kv_reference
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.rope import rope_table
from kernels.sgmv import LoraSlice, SgmvPlan, plan_sgmv
from kernels.sgmv import triton_kernel as sgmv_kernel
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from kernels.silu_mul import reference as silu_mul_reference
from kernels.silu_mul import triton_kernel as silu_mul_kernel
from kernels.testing import (
    NAN,
    Heads,
    RaggedKv,
    SequenceKv,
    assert_matches_reference,
    dense_attention,
    lora_delta,
    lora_memory,
)

Spans = Sequence[tuple[int, int, int]]
_numbers = itertools.count()


def planted(module: ModuleType, fault: tuple[str, str], folder: Path) -> ModuleType:
    """A copy of a kernel's module in which the text fault[0], which stands there once, is fault[1]."""
    source = Path(module.__file__).read_text()
    if source.count(fault[0]) != 1:
        raise LookupError(f"{source.count(fault[0])} times in {module.__name__}: {fault[0]}")
    path = folder / f"planted_{next(_numbers)}.py"
    path.write_text(source.replace(*fault))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sliced(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers as a slice of wider rows whose other columns are NaN."""
    wide = torch.full((shape[0], *(size + 3 for size in shape[1:2]), *shape[2:]), NAN, dtype=dtype)
    wide[:, 2:-1] = draw(*shape, dtype=dtype, seed=seed)
    return wide[:, 2:-1]


def check_rms_norm(kernel: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = sliced(*shape, dtype=dtype)
    weight = draw(shape[-1], dtype=dtype, seed=1)
    expected = rms_norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_matches_reference(kernel.rms_norm(x, weight, 1e-5), expected)


def check_add_rms_norm(kernel: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = sliced(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    residual = draw(*shape, dtype=dtype, seed=2)
    total = x + residual
    out = kernel.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    assert_matches_reference(out, rms_norm_reference.rms_norm(total.double(), weight.double(), 1e-5))


def check_add_parts_rms_norm(kernel: ModuleType, num_parts: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = draw(num_parts, *shape, seed=3), draw(shape[-1], dtype=dtype, seed=1)
    residual = draw(*shape, dtype=dtype, seed=2)
    total = residual + rms_norm_reference.whole(x, residual)
    out = kernel.rms_norm(x, weight, 1e-5, residual)
    assert out.dtype == dtype
    assert torch.equal(residual, total)
    assert_matches_reference(out, rms_norm_reference.rms_norm(total.double(), weight.double(), 1e-5))


def check_rope(kernel: ModuleType, num_tokens: int, heads: Heads, dtype: torch.dtype) -> None:
    x = sliced(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype)
    positions = torch.randperm(num_tokens * 5, generator=torch.Generator().manual_seed(0))[:num_tokens]
    table = rope_table(1e4 ** (-torch.arange(0, heads.head_dim, 2) / heads.head_dim), num_tokens * 5)
    unseen = torch.ones(len(table), dtype=torch.bool).index_fill(0, positions, False)
    table[unseen] = NAN
    expected = rope_reference.rope(x.double(), positions, table.double())
    assert_matches_reference(kernel.rope(x, positions, table), expected)


def check_store_kv(kernel: ModuleType, num_tokens: int, heads: Heads, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    size = (num_tokens, heads.num_kv_heads, heads.head_dim)
    keys, values = sliced(*size, dtype=dtypes[0]), sliced(*size, dtype=dtypes[0], seed=1)
    num_blocks = num_tokens // heads.block_size + 3  # the last of them stays free: a fault may write into it
    caches = [draw(num_blocks, heads.block_size, *size[1:], dtype=dtypes[1], seed=seed) for seed in (2, 3)]
    slots = torch.randperm((num_blocks - 1) * heads.block_size, generator=torch.Generator().manual_seed(4))[:num_tokens]
    expected = [cache.clone() for cache in caches]
    for cache, new in zip(expected, (keys, values), strict=True):
        cache.view(-1, *size[1:])[slots] = new.to(dtypes[1])
    kernel.store_kv(keys, values, *caches, slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def check_silu_mul(kernel: ModuleType, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x = sliced(num_rows, 2 * size, dtype=dtype)
    assert_matches_reference(kernel.silu_mul(x), silu_mul_reference.silu_mul(x.double()))


def check_silu_low(
    kernel: ModuleType, slots: list[int], slices: list[LoraSlice], dtype: torch.dtype, room: int | None = None
) -> None:
    """Of gate and up, each as wide as a slice; rows that no adapter touches get the bits of silu_mul alone. With
    ``room`` through a captured plan."""
    size = slices[0].b.shape[2]
    x = sliced(len(slots) + (room or 0), slices[0].a.shape[2], dtype=dtype)
    gate_up = sliced(len(x), 2 * size, dtype=dtype, seed=9)
    expected = gate_up.double()
    for part, (row, slot) in itertools.product(slices, enumerate(slots)):
        if slot >= 0 and part.lora_ranks[slot]:
            delta = lora_delta(x[row], part.a[slot], part.b[slot], part.lora_ranks[slot])
            expected[row, part.start : part.start + size] += delta
    given, plan = slices, plan_sgmv(slots, x.device)
    if room is not None:
        given, plan = captured_sgmv(slots, slices, room)
    out = kernel.silu_mul(gate_up, sgmv_kernel.shrink(x, given, plan))
    assert_matches_reference(out, silu_mul_reference.silu_mul(expected))
    idle = [row for row in range(len(x)) if row >= len(slots) or slots[row] < 0]
    assert torch.equal(out[idle], silu_mul_kernel.silu_mul(gate_up)[idle])


def check_qk_rope_kv(kernel: ModuleType, num_tokens: int, heads: Heads, dtype: torch.dtype, *, norms: bool) -> None:
    """Every third token fills up the step: its slot is -1. Angles of other positions and all else are NaN."""
    num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
    x = sliced(num_tokens, heads.num_heads + num_kv_heads, head_dim, dtype=dtype)
    values = sliced(num_tokens, num_kv_heads, head_dim, dtype=dtype, seed=1)
    positions = torch.randperm(num_tokens * 5, generator=torch.Generator().manual_seed(0))[:num_tokens]
    table = rope_table(1e4 ** (-torch.arange(0, head_dim, 2) / head_dim), num_tokens * 5)
    table[torch.ones(len(table), dtype=torch.bool).index_fill(0, positions, False)] = NAN
    weights = HeadNorms(draw(head_dim, dtype=dtype, seed=5), draw(head_dim, dtype=dtype, seed=6), 1e-5)
    num_blocks = num_tokens // heads.block_size + 3
    shape = (num_blocks + 1, heads.block_size, num_kv_heads, head_dim)
    memory = [draw(*shape, dtype=dtype, seed=seed) for seed in (2, 3)]
    caches = [blocks[1:] for blocks in memory]  # a slot of -1 that was stored would stand before them
    slots = torch.randperm((num_blocks - 1) * heads.block_size, generator=torch.Generator().manual_seed(4))[:num_tokens]
    slots[2::3] = -1
    before, expected = [blocks[0].clone() for blocks in memory], [cache.double() for cache in caches]
    wide = HeadNorms(weights.query.double(), weights.key.double(), 1e-5)
    queries = qk_rope_kv_reference.qk_rope_kv(
        x.double(), values.double(), positions, table.double(), *expected, slots, wide if norms else None
    )
    out = kernel.qk_rope_kv(x, values, positions, table, *caches, slots, weights if norms else None)
    for actual, wanted in zip((out, *caches), (queries, *expected), strict=True):
        assert_matches_reference(actual, wanted)
    assert all(torch.equal(blocks[0], block) for blocks, block in zip(memory, before, strict=True))


def attend(
    kernel: ModuleType,
    batch: RaggedKv,
    spans: Spans,
    groups: Sequence[PrefixGroup] = (),
    *,
    is_fixed: bool = False,
) -> Tensor:
    queries, plan = batch.step(spans)
    plan = dataclasses.replace(plan, groups=tuple(groups), is_fixed=is_fixed)
    return kernel.paged_attention(queries, batch.key_cache, batch.value_cache, plan, batch.heads.head_dim**-0.5)


def captured_step(
    batch: RaggedKv, spans: Spans, room: int, groups: Sequence[PrefixGroup] = ()
) -> tuple[Tensor, AttentionPlan]:
    """The spans' queries (equally many each) and a plan over filled memory, with room for ``room`` sequences more."""
    queries, plan = batch.step(spans)
    count, num_queries = len(spans) + room, spans[0][2] - spans[0][1]
    heads = batch.heads
    shape = DecodeShape(
        count,
        max(plan.context_lens) + 100,
        heads.block_size,
        heads.num_heads,
        heads.num_kv_heads,
        queries.device,
        num_queries,
        heads.sliding_window,
        has_groups=bool(groups),
    )
    memory = torch.full((plan_numbers(shape),), 2**30, dtype=torch.int32)  # what a step before might have left there
    fill_plan(memory.numpy(), plan.context_lens, shape, groups)
    tables = torch.cat((plan.block_tables, plan.block_tables[:1].expand(room, -1))).int()
    rest = torch.full((room * num_queries, *queries.shape[1:]), NAN, dtype=queries.dtype)
    return torch.cat((queries, rest)), captured_plan(memory, tables, shape)


def attend_captured(
    kernel: ModuleType, batch: RaggedKv, spans: Spans, room: int, groups: Sequence[PrefixGroup] = ()
) -> Tensor:
    queries, plan = captured_step(batch, spans, room, groups)
    out = kernel.paged_attention(queries, batch.key_cache, batch.value_cache, plan, batch.heads.head_dim**-0.5)
    num_rows = sum(end - first for _, first, end in spans)
    assert out[num_rows:].isnan().all(), "rows without a sequence were written"
    return out[:num_rows]


def share_prefix(batch: RaggedKv, members: Sequence[int], num_tokens: int) -> None:
    """The members' first tokens become the first member's, in its blocks; the blocks they had become NaN."""
    lender = batch.sequences[members[0]]
    count = num_tokens // batch.heads.block_size
    for member in members[1:]:
        own = batch.sequences[member]
        for cache in (batch.key_cache, batch.value_cache):
            cache[own.blocks[:count]] = NAN
        keys, values = (
            torch.cat((shared[:num_tokens], part[num_tokens:]))
            for shared, part in ((lender.keys, own.keys), (lender.values, own.values))
        )
        batch.sequences[member] = SequenceKv(own.queries, keys, values, lender.blocks[:count] + own.blocks[count:])


def check_attention(
    kernel: ModuleType,
    batch: RaggedKv,
    spans: Spans,
    groups: Sequence[PrefixGroup] = (),
    *,
    room: int | None = None,
    is_fixed: bool = False,
) -> None:
    """All that a query must not see is NaN (kernels.testing), and so are the sequence's own later positions. With
    ``room`` through a captured plan."""
    scale = batch.heads.head_dim**-0.5
    expected = torch.cat(
        [
            dense_attention(batch.sequences[index], scale, batch.heads.sliding_window)[first:end]
            for index, first, end in spans
        ]
    )
    hidden = hide_unseen(batch, spans)
    if room is None:
        assert_matches_reference(attend(kernel, hidden, spans, groups, is_fixed=is_fixed), expected)
    else:
        assert_matches_reference(attend_captured(kernel, hidden, spans, room, groups), expected)


def hide_unseen(batch: RaggedKv, spans: Spans) -> RaggedKv:
    """The same cache with NaN wherever no query of the spans may look: behind them, and before their windows."""
    seen = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    window = batch.heads.sliding_window
    for index, first, end in spans:
        positions = torch.arange(0 if window is None else max(0, first + 1 - window), end)
        blocks = torch.tensor(batch.sequences[index].blocks)[positions // batch.heads.block_size]
        seen[blocks, positions % batch.heads.block_size] = True
    keys, values = (cache.masked_fill(~seen[..., None, None], NAN) for cache in (batch.key_cache, batch.value_cache))
    return RaggedKv(batch.heads, batch.sequences, keys, values)


def small_tiles(monkeypatch) -> None:
    """Chunks of 32 keys, so that short sequences are split, merged two at a time; tiles of 16 keys; 32 rows of a
    prompt a program."""
    attend = [{"tile": 16, "num_warps": 4, "num_stages": 2}]
    table = {
        **tiles._table("default"),
        "split_work": [{"min_chunk": 32, "max_chunk": 32, "target_items": 1}],
        "group_work": [{"min_chunk": 32, "max_chunk": 32, "target_items": 1}],
        "captured_work": [{"programs": 4, "per_sequence": 1}],
        "captured_group_work": [{"programs": 4, "per_sequence": 0}],
        "chunk_work": [{"block_m": 32, "max_chunk": 32}],
        "fixed_work": [{"block_m": 32, "max_chunk": 32}],
        "merge": [{"chunks": 2, "num_warps": 4, "pdl": 0}],
        "attend_split": attend,
        "attend_chunk": attend,
        "attend_group": attend,
    }
    monkeypatch.setattr(tiles, "_table", lambda _: table)


def lora_slices(
    lora_ranks: Sequence[Sequence[int]], num_in: int, num_outs: Sequence[int], dtype: torch.dtype, used: set[int]
) -> list[LoraSlice]:
    """One slice for each of ``num_outs``; slots outside ``used`` and ranks past a slot's own are NaN."""
    slices, start = [], 0
    for index, (ranks, num_out) in enumerate(zip(lora_ranks, num_outs, strict=True)):
        a, b = lora_memory(ranks, num_in, num_out, dtype, seed=index)
        for slot, rank in enumerate(ranks):
            a[slot, rank if slot in used else 0 :] = NAN
            b[slot, rank if slot in used else 0 :] = NAN
        slices.append(LoraSlice(a, b, tuple(ranks), start))
        start += num_out
    return slices


def captured_sgmv(slots: list[int], slices: list[LoraSlice], room: int) -> tuple[list[LoraSlice], SgmvPlan]:
    """The slices with their true ranks in memory alone, and a plan over filled memory for ``room`` rows more."""
    num_rows, num_slots = len(slots) + room, len(slices[0].lora_ranks)
    memory = torch.full((segment_numbers(num_rows),), 2**30, dtype=torch.int32)  # of a step before, as it might be
    fill_segments(memory.numpy(), slots, num_rows, num_slots)
    bounds = (*[0] * num_slots, 64)
    tables = [torch.tensor((*part.lora_ranks, 0), dtype=torch.int32) for part in slices]
    slices = [LoraSlice(part.a, part.b, bounds, part.start, table) for part, table in zip(slices, tables, strict=True)]
    return slices, CapturedSgmv(memory, num_rows, num_slots)


def add_lora(kernel: ModuleType, y: Tensor, x: Tensor, slices: list[LoraSlice], plan: SgmvPlan) -> None:
    """Both halves of ``sgmv``."""
    low = kernel.shrink(x, slices, plan)
    if low is not None:
        kernel.expand(y, low)


def check_sgmv(
    kernel: ModuleType,
    slots: list[int],
    slices: list[LoraSlice],
    dtype: torch.dtype,
    room: int | None = None,
) -> None:
    """With ``room`` through a captured plan."""
    real = len(slots)
    slots = slots + [-1] * (room or 0)
    num_columns = slices[-1].start + slices[-1].b.shape[2]
    x = sliced(len(slots), slices[0].a.shape[2], dtype=dtype)
    y = draw(len(slots), num_columns, dtype=dtype, seed=9)
    before = y.clone()
    expected = y.double()
    touched = torch.zeros_like(y, dtype=torch.bool)
    for part, (row, slot) in itertools.product(slices, enumerate(slots)):
        if slot >= 0 and part.lora_ranks[slot]:
            columns = slice(part.start, part.start + part.b.shape[2])
            expected[row, columns] += lora_delta(x[row], part.a[slot], part.b[slot], part.lora_ranks[slot])
            touched[row, columns] = True
    if room is None:
        add_lora(kernel, y, x, slices, plan_sgmv(slots, x.device))
    else:
        given, plan = captured_sgmv(slots[:real], slices, room)
        add_lora(kernel, y, x, given, plan)
    assert torch.equal(y[~touched], before[~touched])
    assert_matches_reference(y[touched], expected[touched])
