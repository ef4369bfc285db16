"""Checks of what a captured step runs: plans over memory, groups, and the fused small ops."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import (
    DecodeShape,
    PrefixGroup,
    captured_plan,
    fill_plan,
    paged_attention,
    plan_numbers,
)
from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.quantised_linear import QuantisedWeight, quantised_linear
from kernels.quantised_linear.reference import dequantised
from kernels.rms_norm import rms_norm
from kernels.rope import rope, rope_table
from kernels.sampling import SamplingRows, highest, sample
from kernels.sampling import reference as sampling_reference
from kernels.sgmv import LoraSlice, plan_sgmv, sgmv
from kernels.sgmv.captured import CapturedSgmv, fill_segments, segment_numbers
from kernels.silu_mul import silu_mul
from kernels.store_kv import store_kv
from ops.bench.gpu.checks import DEVICE, LIMITS, NAN, SHAPES, Batch, random, require, sliced


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def silu_mul_against_float64() -> None:
    for dtype in LIMITS:
        for num_rows, size in ((1, 97), (64, 14336), (1000, 1536), (7, 1 << 20)):
            x = sliced(num_rows, 2 * size, dtype=dtype)
            gate, up = x.double().chunk(2, -1)
            require(silu_mul(x), torch.nn.functional.silu(gate) * up, f"silu_mul {num_rows} {size} {dtype}")


def qk_rope_kv_is_its_parts() -> None:
    """Like the norm, rope and store of the other kernels, whose checks are against float64; slots of -1."""
    for dtype in LIMITS:
        for num_heads, num_kv_heads, head_dim in SHAPES:
            for num_rows in (1, 64, 1000):
                _qk_rope_kv(num_rows, (num_heads, num_kv_heads, head_dim), dtype)


def _qk_rope_kv(num_rows: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    packed = sliced(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    x, values = packed[:, :-num_kv_heads], packed[:, -num_kv_heads:]
    table = rope_table(1e4 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), 9000)
    positions = torch.randperm(9000, device=DEVICE)[:num_rows]
    caches = [random(num_rows // 16 + 2, 16, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(len(caches[0]) * 16, device=DEVICE)[:num_rows]
    slots[1::5] = -1
    expected = [cache.clone() for cache in caches]
    kept = slots >= 0
    for norms in (None, HeadNorms(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), 1e-6)):
        queries = qk_rope_kv(packed, positions, table, (caches[0], caches[1]), slots, norms)
        if norms is not None:
            x = torch.cat(
                (rms_norm(x[:, :num_heads], norms.query, 1e-6), rms_norm(x[:, num_heads:], norms.key, 1e-6)), 1
            )
        turned = rope(x, positions, table)
        store_kv(turned[kept][:, num_heads:], values[kept].contiguous(), expected[0], expected[1], slots[kept])
        what = f"qk_rope_kv {num_rows} {heads} {dtype} norms {norms is not None}"
        for out, wanted in zip((queries, *caches), (turned[:, :num_heads], *expected), strict=True):
            require(out, wanted.double(), what)


def captured_decode_follows_its_memory() -> None:
    """One graph, steps of other lengths and of fewer sequences: right, with the bits of the step without a graph."""
    for heads, window, queries in ((SHAPES[0], None, 1), (SHAPES[1], 700, 1), (SHAPES[0], None, 4)):
        shape = DecodeShape(24, 21_000, 16, heads[0], heads[1], DEVICE, queries, window)
        host = np.full(plan_numbers(shape), 2**30, dtype=np.int32)
        fill_plan(host, [], shape)
        memory = torch.from_numpy(host).to(DEVICE)
        tables = torch.zeros(24, 1400, dtype=torch.int32, device=DEVICE)
        caches = [torch.full((20_000, 16, *heads[1:]), float("nan"), device=DEVICE).bfloat16() for _ in range(2)]
        asked = random(24 * queries, heads[0], heads[2])
        plan = captured_plan(memory, tables, shape)
        run = lambda: paged_attention(asked, caches[0], caches[1], plan, scale=heads[2] ** -0.5)  # noqa: E731, B023
        graph, out = captured(run)
        for step in range(3):
            ends = torch.randint(queries, 6000, (24 - step,)).tolist() + [20_011] * step
            batch = Batch([(end - queries, end) for end in ends], heads, 16, window, torch.bfloat16)
            fill_plan(host, ends, shape)
            memory.copy_(torch.from_numpy(host))
            tables.zero_()
            tables[: len(ends), : batch.tables.shape[1]] = batch.tables.int()
            for cache, own in zip(caches, (batch.keys, batch.values), strict=True):
                cache[: len(own)] = own
            asked[: len(batch.queries)] = batch.queries
            graph.replay()
            require(out[: len(batch.queries)], batch.expected(), f"captured decode {heads} step {step}")
            if len(ends) == 24:
                assert torch.equal(out, batch.run()), "captured and plain decode differ"


def shared_batch(sizes: Sequence[tuple[int, int]], alone: int, heads: tuple[int, int, int]) -> tuple[Batch, list[int]]:
    """Groups (members, shared tokens) of decodes, then some alone, in a mixed order: the batch, its order."""
    ends, owner = [], []
    for number, (members, tokens) in enumerate(sizes):
        ends += torch.randint(tokens + 1, tokens + 1500, (members,)).tolist()
        owner += [number] * members
    ends += torch.randint(1, 3000, (alone,)).tolist()
    batch = Batch([(end - 1, end) for end in ends], heads, 16, None, torch.bfloat16)
    for number, (_, tokens) in enumerate(sizes):
        first, *others = [index for index, one in enumerate(owner) if one == number]
        for other in others:
            stale = batch.tables[other, : tokens // 16].clone()
            batch.keys[stale], batch.values[stale] = float("nan"), float("nan")
            batch.tables[other, : tokens // 16] = batch.tables[first, : tokens // 16]
            for mine, lent in zip(batch.own[other], batch.own[first], strict=True):
                mine[:tokens] = lent[:tokens]
    return batch, torch.randperm(len(ends)).tolist()


def groups_of(sizes: Sequence[tuple[int, int]], order: Sequence[int]) -> tuple[PrefixGroup, ...]:
    """Those of a ``shared_batch``."""
    owner = [number for number, (members, _) in enumerate(sizes) for _ in range(members)]
    places = [
        [place for place, index in enumerate(order) if owner[index : index + 1] == [number]]
        for number in range(len(sizes))
    ]
    return tuple(PrefixGroup(tuple(members), tokens) for members, (_, tokens) in zip(places, sizes, strict=True))


def groups_equal_no_groups() -> None:
    """Grouped, captured or not, against float64; the stale blocks of members are NaN; 20 times bit-equal."""
    for heads in SHAPES[:3]:
        sizes = [(40, 4096), (5, 528), (6, 1600)]
        batch, order = shared_batch(sizes, 9, heads)
        plan = batch.plan(order)
        ends = [batch.spans[index][1] for index in order]
        groups = groups_of(sizes, order)
        queries, expected = batch.queries[order], batch.expected()[order]
        object.__setattr__(plan, "groups", groups)
        run = lambda plan=plan: paged_attention(queries, batch.keys, batch.values, plan, scale=batch.scale)  # noqa: E731, B023
        out = run()
        require(out, expected, f"groups {heads}")
        assert all(torch.equal(run(), out) for _ in range(20)), "launches differ"
        shape = DecodeShape(len(ends), 8192, 16, heads[0], heads[1], DEVICE, has_groups=True)
        host = np.full(plan_numbers(shape), 2**30, dtype=np.int32)
        fill_plan(host, ends, shape, groups)
        memory = torch.from_numpy(host).to(DEVICE)
        graph, got = captured(lambda: run(captured_plan(memory, plan.block_tables, shape)))  # noqa: B023
        graph.replay()
        assert torch.equal(got, out), "captured and plain groups differ"
        fill_plan(host, ends, shape, [PrefixGroup(groups[0].members[:7], groups[0].num_tokens // 2 // 16 * 16)])
        memory.copy_(torch.from_numpy(host))
        graph.replay()
        require(got, expected, f"other groups {heads}")


def captured_lora_follows_its_memory() -> None:
    """One graph of each form, steps of other mixes of adapters and of other ranks in the slots, against float64."""
    for num_rows in (64, 100):
        _captured_lora(num_rows)


def _captured_lora(num_rows: int) -> None:
    sizes_out, ranks = (4096, 1024, 1024), [8, 16, 24, 64, 5, 1, 0, 40]
    a, b = ([random(8, 64, size) / 64 for size in sizes] for sizes in ((4096,) * 3, sizes_out))
    tables = [torch.zeros(9, dtype=torch.int32, device=DEVICE) for _ in sizes_out]  # slot 8 is empty
    starts = (0, 4096, 5120)
    parts = [LoraSlice(*part) for part in zip(a, b, [(*[0] * 8, 64)] * 3, starts, tables, strict=True)]
    host = np.full(segment_numbers(num_rows), 2**30, dtype=np.int32)
    memory = torch.zeros(len(host), dtype=torch.int32, device=DEVICE)
    fill_segments(host, [-1], num_rows, 8)
    memory.copy_(torch.from_numpy(host))
    x, y = random(num_rows, 4096), random(num_rows, 6144)
    plan = CapturedSgmv(memory, num_rows, 8)

    def run() -> Tensor:
        sgmv(y, x, parts, plan)
        return y

    graph, _ = captured(run)
    for step, some in enumerate(([row % 8 for row in range(64)], [3] * 40 + [-1] * 20, [-1, 7, 7, 0], [])):
        own = [ranks[(slot + step) % 8] for slot in range(8)]
        for table in tables:
            table[:8] = torch.tensor(own)
        fill_segments(host, some, num_rows, 8)
        memory.copy_(torch.from_numpy(host))
        before, expected = y.clone(), y.double()
        for row, slot in enumerate(some):
            for part in parts if slot >= 0 else ():
                rank, columns = own[slot], slice(part.start, part.start + part.b.shape[2])
                low = x[row].double() @ part.a[slot, :rank].double().T
                expected[row, columns] += low @ part.b[slot, :rank].double()
        graph.replay()
        require(y, expected, f"captured lora {num_rows} step {step}")
        idle = [row for row in range(num_rows) if row >= len(some) or some[row] < 0 or own[some[row]] == 0]
        assert torch.equal(y[idle], before[idle]), "rows without an adapter changed"


def a_tiny_step() -> None:
    """Every kernel once, on shapes small enough for the tools that watch each access."""
    _qk_rope_kv(3, (4, 2, 64), torch.bfloat16)
    x = random(3, 96)
    require(silu_mul(x), torch.nn.functional.silu(x[:, :48].double()) * x[:, 48:].double(), "silu_mul")
    batch = Batch([(69, 70), (16, 17), (3, 40)], (4, 2, 64), 16, None, torch.bfloat16)
    require(batch.run(), batch.expected(), "attention")
    batch, order = shared_batch([(5, 64)], 1, (4, 2, 64))
    plan = batch.plan(order)
    object.__setattr__(plan, "groups", groups_of([(5, 64)], order))
    out = paged_attention(batch.queries[order], batch.keys, batch.values, plan, scale=batch.scale)
    require(out, batch.expected()[order], "groups")
    a, b, y = random(2, 24, 64) / 8, random(2, 24, 48), torch.zeros(9, 48, device=DEVICE, dtype=torch.bfloat16)
    x = random(9, 64)
    for slots in ([0, 1, -1, 0, 1, -1, -1, -1, -1], [1] * 9):
        y.zero_()
        sgmv(y, x, [LoraSlice(a, b, (24, 24))], plan_sgmv(slots, DEVICE))
        expected = [
            x[row].double() @ a[slot].double().T @ b[slot].double() * (slot >= 0) for row, slot in enumerate(slots)
        ]
        require(y, torch.stack(expected), "lora")
    logits, ones = torch.randn(2, 3000, device=DEVICE), torch.ones(2, device=DEVICE)
    rows = SamplingRows(ones, (ones * 20).int(), ones * 0.9, ones * 0.01, ones * 0.5)
    on_host = SamplingRows(*(getattr(rows, name).cpu() for name in SamplingRows.__slots__))
    assert sample(logits, rows).tolist() == sampling_reference.sample(logits.cpu(), on_host).tolist()
    weight = QuantisedWeight(
        torch.randint(-99, 99, (48, 256), device=DEVICE).to(torch.int8), torch.rand(48, device=DEVICE)
    )
    x = random(3, 256)
    require(quantised_linear(x, weight), x.double() @ dequantised(weight).double().T, "quantised")


def sampling_as_by_sorting() -> None:
    """Rows of 128,256 logits, each kind of setting, some with many equal logits: the tokens of the reference; a few
    draws may fall on the border between two tokens, where sums in another order decide."""
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.8, 40, 0.9, 0.02)]
    count = 64
    for tied in (False, True):
        logits = torch.randn(count, 128_256, device=DEVICE) * 2
        logits = logits.round() if tied else logits
        columns = list(zip(*(settings[row % len(settings)] for row in range(count)), strict=True))
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
        own = [torch.tensor(column, dtype=kind, device=DEVICE) for column, kind in zip(columns, kinds, strict=True)]
        rows = SamplingRows(own[0], own[1], own[2], own[3], torch.rand(count, device=DEVICE))
        found, expected = (
            sample(logits, rows),
            sampling_reference.sample(
                logits.cpu(), SamplingRows(*(getattr(rows, name).cpu() for name in SamplingRows.__slots__))
            ).to(DEVICE),
        )
        assert int((found != expected).sum()) <= 2, (found, expected)
        assert all(torch.equal(sample(logits, rows), found) for _ in range(20)), "launches differ"
        order = torch.randperm(count, device=DEVICE)
        moved = SamplingRows(*(getattr(rows, name)[order] for name in SamplingRows.__slots__))
        assert torch.equal(sample(logits[order], moved), found[order]), "a draw depends on its batch"


def the_highest_of_a_row() -> None:
    """As torch finds it, among many equal ones; NaN and -inf among them, rows of any size."""
    for dtype in LIMITS:
        for size in (5, 1000, 128_256, 151_936):
            logits = (torch.randn(300, size, device=DEVICE) * 2).round().to(dtype)
            logits[:, ::7], logits[:100, ::3], logits[0] = NAN, float("-inf"), float("-inf")
            wanted = logits.nan_to_num(nan=float("-inf"), neginf=float("-inf")).argmax(-1)
            assert torch.equal(highest(logits), wanted), f"{size} {dtype}"


CHECKS: dict[str, Callable[[], None]] = {
    "silu_mul": silu_mul_against_float64,
    "qk_rope_kv": qk_rope_kv_is_its_parts,
    "captured decode": captured_decode_follows_its_memory,
    "groups": groups_equal_no_groups,
    "tiny": a_tiny_step,
    "sampling": sampling_as_by_sorting,
    "highest": the_highest_of_a_row,
    "captured lora": captured_lora_follows_its_memory,
}
