"""Whether the Triton kernels are right on a GPU: against float64 on the same device, over the axes that matter.

Every check raises AssertionError. Fresh memory is NaN while they run, and so is all that a kernel must not read.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope, rope_table
from kernels.sgmv import LoraSlice, plan_sgmv, sgmv
from kernels.store_kv import store_kv

DEVICE = torch.device("cuda")
NAN = float("nan")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of ‖out - ref‖ / ‖ref‖
Span = tuple[int, int]  # first and end position of a sequence's queries


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        fresh = empty(*shape, **options)
        return fresh.fill_(NAN) if fresh.is_floating_point() else fresh

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty


def error(out: Tensor, expected: Tensor) -> float:
    """Of all together; infinite where anything is not finite."""
    distance = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return distance.item() if bool(torch.isfinite(distance)) else float("inf")


def require(out: Tensor, expected: Tensor, what: str, limits: Mapping[torch.dtype, float] = LIMITS) -> None:
    found = error(out, expected)
    assert found < limits[out.dtype], f"{what}: error {found:.2e}"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def sliced(*shape: int, dtype: torch.dtype) -> Tensor:
    """A slice of wider rows whose other columns are NaN."""
    wide = torch.full((shape[0], shape[1] + 16, *shape[2:]), NAN, device=DEVICE, dtype=dtype)
    wide[:, 8:-8] = random(*shape, dtype=dtype)
    return wide[:, 8:-8]


class Batch:
    """Sequences in a cache of which all but their own tokens is NaN."""

    def __init__(
        self,
        spans: Sequence[Span],
        heads: tuple[int, int, int],
        block_size: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self.spans, self.heads, self.window, self.block_size = list(spans), heads, window, block_size
        _, num_kv_heads, head_dim = heads
        counts = [-(-end // block_size) for _, end in spans]
        numbers = torch.randperm(sum(counts) + 1, device=DEVICE)
        shape = (sum(counts) + 1, block_size, num_kv_heads, head_dim)
        self.keys, self.values = (torch.full(shape, NAN, device=DEVICE, dtype=dtype) for _ in range(2))
        self.tables = torch.full((len(spans), max(counts)), int(numbers[-1]), device=DEVICE)
        self.own: list[tuple[Tensor, Tensor]] = []
        for index, (first, end) in enumerate(spans):
            self.tables[index, : counts[index]] = numbers[sum(counts[:index]) : sum(counts[: index + 1])]
            lowest = 0 if window is None else max(0, first + 1 - window)
            seen = torch.arange(lowest, end, device=DEVICE)
            slots = self.tables[index, seen // block_size] * block_size + seen % block_size
            new = [torch.full((end, num_kv_heads, head_dim), NAN, device=DEVICE, dtype=dtype) for _ in range(2)]
            for part, cache in zip(new, (self.keys, self.values), strict=True):
                part[lowest:] = random(end - lowest, num_kv_heads, head_dim, dtype=dtype)
                cache.view(-1, num_kv_heads, head_dim)[slots] = part[lowest:]
            self.own.append((new[0], new[1]))
        self.queries = random(sum(end - first for first, end in spans), heads[0], head_dim, dtype=dtype)

    def plan(self, order: Sequence[int]) -> AttentionPlan:
        lengths = [self.spans[index][1] - self.spans[index][0] for index in order]
        return plan_attention(
            self.tables[list(order)],
            [0, *itertools.accumulate(lengths)],
            [self.spans[index][1] for index in order],
            block_size=self.block_size,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            sliding_window=self.window,
        )

    def run(self, order: Sequence[int] | None = None) -> Tensor:
        order = range(len(self.spans)) if order is None else order
        rows = torch.cat([self.rows(index) for index in order])
        return paged_attention(self.queries[rows], self.keys, self.values, self.plan(order), scale=self.scale)

    @property
    def scale(self) -> float:
        return self.heads[2] ** -0.5

    def rows(self, index: int) -> Tensor:
        starts = [0, *itertools.accumulate(end - first for first, end in self.spans)]
        return torch.arange(starts[index], starts[index + 1], device=DEVICE)

    def expected(self) -> Tensor:
        return torch.cat([self._expected(index) for index in range(len(self.spans))])

    def _expected(self, index: int) -> Tensor:
        first, end = self.spans[index]
        lowest = 0 if self.window is None else max(0, first + 1 - self.window)
        keys, values = (part[lowest:].double() for part in self.own[index])
        num_heads, num_kv_heads, head_dim = self.heads
        grouped = self.queries[self.rows(index)].double().view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("qngd,knd->qngk", grouped, keys) * self.scale
        positions, key_positions = torch.arange(first, end, device=DEVICE), torch.arange(lowest, end, device=DEVICE)
        seen = key_positions <= positions[:, None]
        if self.window is not None:
            seen &= key_positions > positions[:, None] - self.window
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("qngk,knd->qngd", weights, values).flatten(1, 2)


SHAPES = [(32, 8, 128), (9, 3, 64), (8, 1, 256), (4, 4, 80), (28, 4, 128), (71, 1, 64)]
DECODES = [(length - 1, length) for length in (1, 15, 16, 17, 63, 64, 65, 255, 257, 1025, 4099, 20011)]
VERIFIES = [(end - count, end) for count, end in ((2, 2), (3, 17), (4, 64), (5, 1026), (8, 4100))]
CHUNKS = [(0, 9), (0, 300), (100, 140), (1000, 1513), (4000, 4010)]


def attention_against_float64(
    heads: tuple[int, int, int], settings: Sequence[tuple[torch.dtype, int, int | None]]
) -> None:
    """settings: dtype, block size, sliding window."""
    for dtype, block_size, window in settings:
        for name, spans in {"decode": DECODES, "verify": VERIFIES, "chunk": CHUNKS}.items():
            batch = Batch(spans, heads, block_size, window, dtype)
            require(batch.run(), batch.expected(), f"{name} {heads} {dtype} block {block_size} window {window}")
        mixed = Batch([*CHUNKS[:3], *DECODES[5:9], *VERIFIES[1:3]], heads, block_size, window, dtype)
        require(mixed.run(), mixed.expected(), f"mixed {heads} {dtype} block {block_size} window {window}")


def attention_is_the_same_20_times_and_in_any_order() -> None:
    for window in (None, 700):
        batch = Batch([*DECODES, *VERIFIES, *CHUNKS], SHAPES[0], 16, window, torch.bfloat16)
        first = batch.run()
        assert all(torch.equal(batch.run(), first) for _ in range(20)), "launches differ"
        order = torch.randperm(len(batch.spans)).tolist()
        rows = torch.cat([batch.rows(index) for index in order])
        assert torch.equal(batch.run(order), first[rows]), "bits depend on the order of the batch"


def decode_does_not_depend_on_its_neighbours_at_equal_shape() -> None:
    spans = [(999, 1000), (4999, 5000), (63, 64), (12_000, 12_001)]
    batch = Batch(spans, SHAPES[0], 16, None, torch.bfloat16)
    whole = batch.run()
    assert torch.equal(batch.run([1, 1, 1, 1])[0], whole[1]), "bits depend on the neighbours' lengths"


MIXED = (8, 16, 24, 64, 128, 5, 1, 0)
POPULARITIES: dict[str, Callable[[int], int]] = {
    "one adapter": lambda _: 3,
    "all distinct": lambda row: row % len(MIXED),
    "with base rows": lambda row: (-1, 0, 0, 2, -1, 4, 0, 5)[row % 8],
    "base only": lambda _: -1,
}


def lora_case(
    slots: list[int], size_in: int, sizes_out: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[LoraSlice]]:
    """x, y, slices; what lies past a slot's rank, and slots that no row has, are NaN."""
    slices, start = [], 0
    for number, size_out in enumerate(sizes_out):
        ranks = (*MIXED[number:], *MIXED[:number])
        a, b = (torch.full((len(ranks), 128, size), NAN, device=DEVICE, dtype=dtype) for size in (size_in, size_out))
        for slot in set(slots) - {-1}:
            a[slot, : ranks[slot]] = random(ranks[slot], size_in, dtype=dtype) * size_in**-0.5
            b[slot, : ranks[slot]] = random(ranks[slot], size_out, dtype=dtype) * max(ranks[slot], 1) ** -0.5
        slices.append(LoraSlice(a, b, ranks, start))
        start += size_out
    return sliced(len(slots), size_in, dtype=dtype), random(len(slots), start, dtype=dtype), slices


def lora_against_float64(size_in: int, sizes_out: Sequence[int]) -> None:
    """Half of y is zero, so that the error there is that of what was added."""
    for dtype in LIMITS:
        for num_rows, (name, slot_of) in itertools.product((1, 2, 7, 16, 17, 64, 255, 600), POPULARITIES.items()):
            slots = [slot_of(row) for row in range(num_rows)]
            x, y, slices = lora_case(slots, size_in, sizes_out, dtype)
            y[::2] = 0
            before, expected, touched = y.clone(), y.double(), torch.zeros_like(y, dtype=torch.bool)
            for part, slot in itertools.product(slices, set(slots) - {-1}):
                rank, columns = part.lora_ranks[slot], slice(part.start, part.start + part.b.shape[2])
                own = torch.tensor([row for row in range(num_rows) if slots[row] == slot], device=DEVICE)
                delta = x[own].double() @ part.a[slot, :rank].double().T @ part.b[slot, :rank].double()
                expected[own, columns] += delta
                touched[own, columns] = rank > 0
            sgmv(y, x, slices, plan_sgmv(slots, DEVICE))
            what = f"lora {size_in} {sizes_out} T={num_rows} {name} {dtype}"
            assert torch.equal(y[~touched], before[~touched]), f"{what}: rows without an adapter changed"
            for half in (slice(0, None, 2), slice(1, None, 2)):
                if touched[half].any():
                    require(y[half][touched[half]], expected[half][touched[half]], what)


def lora_is_the_same_20_times_and_in_any_order() -> None:
    for num_rows in (16, 64, 300, 1000):
        slots = [POPULARITIES["with base rows"](row) for row in range(num_rows)]
        x, y, slices = lora_case(slots, 4096, (4096, 1024), torch.bfloat16)
        outs = [y.clone() for _ in range(20)]
        for out in outs:
            sgmv(out, x, slices, plan_sgmv(slots, DEVICE))
        assert all(torch.equal(out, outs[0]) for out in outs), "launches differ"
        order = torch.randperm(num_rows)
        moved = y[order.to(DEVICE)]
        sgmv(moved, x[order.to(DEVICE)].clone(), slices, plan_sgmv([slots[row] for row in order.tolist()], DEVICE))
        assert torch.equal(moved, outs[0][order.to(DEVICE)]), "bits depend on the order of the rows"


def small_ops_against_float64() -> None:
    for dtype, num_rows in itertools.product(LIMITS, (1, 7, 64, 1000)):
        for size in (64, 576, 1000, 4096, 8192):
            x, weight, residual = (
                sliced(num_rows, size, dtype=dtype),
                random(size, dtype=dtype),
                random(num_rows, size, dtype=dtype),
            )
            require(rms_norm(x, weight, 1e-5), _norm(x, weight), f"rms_norm {num_rows} {size} {dtype}")
            total = x + residual
            require(add_rms_norm(x, residual, weight, 1e-5), _norm(total, weight), f"add_rms_norm {num_rows} {size}")
            assert torch.equal(residual, total), "the sum of add_rms_norm"
        heads = sliced(num_rows, 40, 128, dtype=dtype)
        weight = random(128, dtype=dtype)
        require(rms_norm(heads, weight, 1e-5), _norm(heads, weight), f"rms_norm of heads {num_rows} {dtype}")
        for head_dim in (64, 80, 128, 256):
            _rope_and_store(num_rows, head_dim, dtype)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rope_and_store(num_rows: int, head_dim: int, dtype: torch.dtype) -> None:
    heads, positions = sliced(num_rows, 12, head_dim, dtype=dtype), torch.randperm(9000, device=DEVICE)[:num_rows]
    table = rope_table(1e4 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), 9000)
    cosines, sines = table[positions].double().unsqueeze(2).unbind(1)
    first, second = heads.double().chunk(2, -1)
    turned = rope(heads, positions, table)
    require(turned, heads.double() * cosines + torch.cat((-second, first), -1) * sines, f"rope {num_rows} {head_dim}")
    caches = [random(num_rows // 16 + 2, 16, 4, head_dim) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    slots = torch.randperm(len(caches[0]) * 16, device=DEVICE)[:num_rows]
    for cache, new in zip(expected, (turned[:, 8:], heads[:, 8:]), strict=True):
        cache.view(-1, 4, head_dim)[slots] = new.to(cache.dtype)
    store_kv(turned[:, 8:], heads[:, 8:], caches[0], caches[1], slots)
    assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True)), "store_kv"


def offsets_past_2_to_the_31() -> None:
    """Memory of more than 2³¹ elements, used at its far end."""
    num_blocks = 2**31 // (16 * 8 * 128) + 300
    batch = Batch([(4099, 4100), (3000, 3300), (500, 504)], (32, 8, 128), 16, None, torch.bfloat16)
    expected = batch.run()
    caches = []
    for cache in (batch.keys, batch.values):
        large = torch.empty((num_blocks, *cache.shape[1:]), device=DEVICE, dtype=cache.dtype)
        large[-len(cache) :] = cache
        caches.append(large)
    batch.keys, batch.values = caches
    batch.tables += num_blocks - len(cache)
    assert torch.equal(batch.run(), expected), "attention"
    new = random(3, 8, 128)
    slots = torch.tensor([num_blocks * 16 - 1, num_blocks * 16 - 40, num_blocks * 16 - 17], device=DEVICE)
    store_kv(new, new, caches[0], caches[1], slots)
    assert all(torch.equal(cache.view(-1, 8, 128)[slots], new) for cache in caches), "store_kv"
    del caches, large, batch
    _far_rows()
    _far_slots()


def _far_rows() -> None:
    num_rows = 2**31 // 4096 + 100
    x, weight = torch.zeros(num_rows, 4096, device=DEVICE, dtype=torch.bfloat16), random(4096)
    x[-100:] = random(100, 4096)
    require(rms_norm(x, weight, 1e-5)[-100:], _norm(x[-100:], weight), "rms_norm")
    heads = x.view(num_rows, 32, 128)
    table = rope_table(1e4 ** (-torch.arange(0, 128, 2, device=DEVICE) / 128), 8)
    positions = torch.arange(num_rows, device=DEVICE) % 8
    near = rope(heads[-100:].clone(), positions[-100:], table)
    assert torch.equal(rope(heads, positions, table)[-100:], near), "rope"


def _far_slots() -> None:
    num_slots = 2**31 // (64 * 4096) + 2
    a, b = (torch.empty(num_slots, 64, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ranks = (0,) * (num_slots - 2) + (16, 64)
    for slot, rank in ((num_slots - 2, 16), (num_slots - 1, 64)):
        a[slot, :rank], b[slot, :rank] = random(rank, 4096) / 64, random(rank, 4096) / 8
    x, y = random(2, 4096), torch.zeros(2, 4096, device=DEVICE, dtype=torch.bfloat16)
    sgmv(y, x, [LoraSlice(a, b, ranks)], plan_sgmv([num_slots - 2, num_slots - 1], DEVICE))
    for row, rank in ((0, 16), (1, 64)):
        slot = num_slots - 2 + row
        require(y[row], x[row].double() @ a[slot, :rank].double().T @ b[slot, :rank].double(), "sgmv")


def a_graph_follows_its_plans_memory() -> None:
    """Replayed with the lists of another step in the memory of the first, it computes the other step."""
    batch, other = (
        Batch([(end - 1, end) for end in ends], (32, 8, 128), 16, None, torch.bfloat16)
        for ends in ((4001, 900, 70, 2000), (4010, 905, 75, 1995))
    )
    plan, wanted = batch.plan(range(4)), other.run()
    run = lambda: paged_attention(batch.queries, batch.keys, batch.values, plan, scale=batch.scale)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    new = other.plan(range(4))
    targets = [plan.work.contexts, plan.work.merges, plan.block_tables, *(part.items for part in plan.work.launches)]
    sources = [new.work.contexts, new.work.merges, new.block_tables, *(part.items for part in new.work.launches)]
    assert [part.shape for part in targets] == [part.shape for part in sources], "the steps have other shapes"
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    batch.queries.copy_(other.queries)
    batch.keys.copy_(other.keys)
    batch.values.copy_(other.values)
    graph.replay()
    assert torch.equal(out, wanted), "attention"


FLOAT, BF16 = LIMITS
FULL = [(BF16, 16, None), (BF16, 64, None), (BF16, 16, 1000), (BF16, 32, 33)]
CHECKS: dict[str, Callable[[], None]] = {
    "small ops": small_ops_against_float64,
    **{
        f"attention {'/'.join(map(str, heads))}": functools.partial(attention_against_float64, heads, settings)
        for heads, settings in zip(SHAPES, (FULL, *(FULL[::2] for _ in SHAPES[1:])), strict=True)
    },
    "attention in fp32": functools.partial(attention_against_float64, (32, 8, 128), [(FLOAT, 16, None)]),
    "attention in fp32, head size 64": functools.partial(attention_against_float64, (9, 3, 64), [(FLOAT, 16, 1000)]),
    "attention repeated and permuted": attention_is_the_same_20_times_and_in_any_order,
    "decode and its neighbours": decode_does_not_depend_on_its_neighbours_at_equal_shape,
    "lora qkv": functools.partial(lora_against_float64, 4096, (4096, 1024, 1024)),
    "lora small": functools.partial(lora_against_float64, 576, (192,)),
    "lora odd": functools.partial(lora_against_float64, 97, (41, 3)),
    "lora repeated and permuted": lora_is_the_same_20_times_and_in_any_order,
    "graph replay with another plan": a_graph_follows_its_plans_memory,
    "offsets past 2^31": offsets_past_2_to_the_31,
}
