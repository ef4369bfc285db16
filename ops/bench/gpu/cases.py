"""What is timed, with its floor, what the best peer took on an H200 (peers/kernels, 2026-11-29), and what we want."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_attention import paged_attention, plan_attention
from kernels.qk_rope_kv import HeadNorms, qk_rope_kv
from kernels.rms_norm import add_rms_norm
from kernels.rope import rope_table
from kernels.sgmv import LoraSlice, plan_sgmv, sgmv
from kernels.silu_mul import silu_mul
from ops.bench.gpu.timing import num_sets

DEVICE = torch.device("cuda")
READ_BYTES_PER_S, FLOPS_PER_S = 4.22e12, 790e12  # as in the peers' figures; the real read ceiling is near 4.6e12
LAUNCH_US = 2.0  # of a small kernel inside a graph: for the predictions
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B
HIDDEN = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Built:
    """The op on several input sets, and the relative error of the first (run on fresh outputs)."""

    calls: Sequence[Callable[[], object]]
    verify: Callable[[], float]


@dataclass(frozen=True)
class Case:
    section: str
    name: str
    build: Callable[[], Built]
    num_bytes: float = 0.0
    flops: float = 0.0
    num_launches: int = 1
    peer_us: float | None = None
    must_us: float | None = None
    goal_us: float | None = None

    @property
    def floor_us(self) -> float:
        return max(self.num_bytes / READ_BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6

    @property
    def predicted_us(self) -> float:
        """Before the first measurement: 0.9 of the bandwidth (0.5 of the arithmetic), and the launches."""
        share = 0.9 if self.num_bytes / READ_BYTES_PER_S > self.flops / FLOPS_PER_S else 0.5
        return self.floor_us / share + LAUNCH_US * self.num_launches


def error(out: Tensor, expected: Tensor) -> float:
    found = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
    return found if math.isfinite(found) else math.inf


def random(*shape: int) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()


class Pool:
    """One key and one value cache for all attention cases; made at the first use."""

    num_blocks = 160_000  # of 16 tokens: 5.2 GB each
    _memory: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def caches(cls, block_size: int) -> tuple[Tensor, Tensor]:
        if cls._memory is None:
            keys, values = (random(cls.num_blocks, 16, KV_HEADS, HEAD_DIM) for _ in range(2))
            cls._memory = keys, values, torch.randperm(cls.num_blocks, device=DEVICE)
        shape = (-1, block_size, KV_HEADS, HEAD_DIM)
        return cls._memory[0].view(shape), cls._memory[1].view(shape)

    @classmethod
    def tables(cls, lengths: Sequence[int], block_size: int, number: int) -> Tensor:
        """Scattered blocks; sets of other numbers get other blocks as far as there are any."""
        cls.caches(16)
        assert cls._memory is not None
        scattered = (
            cls._memory[2] if block_size == 16 else torch.randperm(cls.num_blocks * 16 // block_size, device=DEVICE)
        )
        counts = [-(-length // block_size) for length in lengths]
        numbers = (torch.arange(sum(counts), device=DEVICE) + number * sum(counts)) % len(scattered)
        chosen = scattered[numbers].split(counts)
        return torch.nn.utils.rnn.pad_sequence(list(chosen), batch_first=True).contiguous()


def attention(lengths: Sequence[int], num_queries: int = 1, block_size: int = 16) -> Built:
    """Sequences of these lengths, each with its last queries."""
    keys, values = Pool.caches(block_size)
    starts = [number * num_queries for number in range(len(lengths) + 1)]
    tokens = sum(lengths)
    count = min(num_sets(tokens * KV_HEADS * HEAD_DIM * 4), max(2, Pool.num_blocks * 16 // tokens), 64)
    scale = HEAD_DIM**-0.5
    sets = []
    for number in range(count):
        plan = plan_attention(
            Pool.tables(lengths, block_size, number),
            starts,
            list(lengths),
            block_size=block_size,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
        )
        assert plan.work.launches
        sets.append((random(starts[-1], HEADS, HEAD_DIM), plan))
    calls = [
        lambda queries=queries, plan=plan: paged_attention(queries, keys, values, plan, scale=scale)
        for queries, plan in sets
    ]

    def verify() -> float:
        queries, plan = sets[0]
        out = paged_attention(queries, keys, values, plan, scale=scale)
        found = []
        for index in {0, len(lengths) // 2, len(lengths) - 1}:
            length = lengths[index]
            blocks = plan.block_tables[index, : -(-length // block_size)]
            own = [cache[blocks].view(-1, KV_HEADS, HEAD_DIM)[:length].float() for cache in (keys, values)]
            rows = sorted({0, num_queries // 3, num_queries - 1})
            asked = queries[[starts[index] + row for row in rows]].float().view(len(rows), KV_HEADS, -1, HEAD_DIM)
            scores = torch.einsum("qngd,knd->qngk", asked, own[0]) * scale
            positions = torch.tensor([length - num_queries + row for row in rows], device=DEVICE)
            hidden = torch.arange(length, device=DEVICE) > positions[:, None]
            weights = scores.masked_fill(hidden[:, None, None], -math.inf).softmax(-1)
            expected = torch.einsum("qngk,knd->qngd", weights, own[1]).flatten(1, 2)
            found.append(error(out[[starts[index] + row for row in rows]], expected))
        return max(found)

    return Built(calls, verify)


def lora(num_rows: int, ranks: Sequence[int], size_in: int = HIDDEN, sizes_out: Sequence[int] = (HIDDEN,)) -> Built:
    """Row t has adapter t % len(ranks); slots of rank 64 at least, as an engine keeps them, read at their own."""
    slots = [row % len(ranks) for row in range(num_rows)]
    most = max(64, *ranks)
    count = num_sets(sum(ranks) * 2 * (size_in * len(sizes_out) + sum(sizes_out)) + num_rows * size_in * 2, 32)
    own_ranks = torch.tensor(ranks, device=DEVICE)[:, None]
    sets = []
    for _ in range(count):
        slices, start = [], 0
        for size_out in sizes_out:
            a, b = (random(len(ranks), most, size) * size_in**-0.5 for size in (size_in, size_out))
            own = (torch.arange(most, device=DEVICE) < own_ranks)[..., None]
            slices.append(LoraSlice(a * own, b * own, tuple(ranks), start))
            start += size_out
        sets.append((random(num_rows, start), random(num_rows, size_in), slices, plan_sgmv(slots, DEVICE)))
    calls = [lambda y=y, x=x, slices=slices, plan=plan: sgmv(y, x, slices, plan) for y, x, slices, plan in sets]

    def verify() -> float:
        """Of what is added: to zeros, not to the y of the timing, which has grown by then."""
        y, x, slices, plan = sets[0]
        fresh = torch.zeros_like(y)
        sgmv(fresh, x, slices, plan)
        expected = torch.zeros(y.shape, device=DEVICE)
        for slot, rank in enumerate(ranks):
            for part in slices:
                delta = x[slot :: len(ranks)].float() @ part.a[slot, :rank].float().T @ part.b[slot, :rank].float()
                expected[slot :: len(ranks), part.start : part.start + part.b.shape[2]] = delta
        return error(fresh, expected)

    return Built(calls, verify)


def norm(num_rows: int) -> Built:
    weight = random(HIDDEN)
    count = num_sets(num_rows * HIDDEN * 8)
    sets = [(random(num_rows, HIDDEN), random(num_rows, HIDDEN)) for _ in range(count)]
    calls = [lambda x=x, residual=residual: add_rms_norm(x, residual, weight, 1e-6) for x, residual in sets]

    def verify() -> float:
        x, residual = sets[0][0], random(num_rows, HIDDEN)
        total = (x + residual).float()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
        return error(add_rms_norm(x, residual, weight, 1e-6), expected)

    return Built(calls, verify)


def rope_and_store(num_rows: int, with_norms: bool = False) -> Built:
    """Queries and keys turned, keys and values stored."""
    table = rope_table(5e5 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM), 8192)
    positions = torch.randint(0, 8192, (num_rows,), device=DEVICE)
    slots = torch.randperm((num_rows // 16 + 1) * 16, device=DEVICE)[:num_rows]
    count = num_sets(num_rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 4)
    sets = [
        (
            random(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM),
            *(random(num_rows // 16 + 1, 16, KV_HEADS, HEAD_DIM) for _ in range(2)),
        )
        for _ in range(count)
    ]

    norms = HeadNorms(random(HEAD_DIM), random(HEAD_DIM), 1e-6) if with_norms else None

    def call(heads: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return qk_rope_kv(heads, positions, table, (keys, values), slots, norms)

    def verify() -> float:
        heads, keys, _ = sets[0]
        turned = call(*sets[0])
        cosines, sines = table[positions].unsqueeze(2).unbind(1)
        own = heads[:, : HEADS + KV_HEADS].float()
        if norms is not None:
            own = own * torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + 1e-6)
            own = torch.cat((own[:, :HEADS] * norms.query.float(), own[:, HEADS:] * norms.key.float()), 1)
        first, second = own.chunk(2, -1)
        expected = own * cosines + torch.cat((-second, first), -1) * sines
        return max(
            error(turned, expected[:, :HEADS]), error(keys.view(-1, KV_HEADS, HEAD_DIM)[slots], expected[:, HEADS:])
        )

    return Built([lambda one=one: call(*one) for one in sets], verify)


def silu(num_rows: int, size: int = 14336) -> Built:
    sets = [random(num_rows, 2 * size) for _ in range(num_sets(num_rows * size * 6))]

    def verify() -> float:
        gate, up = sets[0].float().chunk(2, -1)
        return error(silu_mul(sets[0]), torch.nn.functional.silu(gate) * up)

    return Built([lambda x=x: silu_mul(x) for x in sets], verify)


def ragged_lengths() -> dict[int, list[int]]:
    """The lengths that the peers were timed with."""
    draw = torch.Generator().manual_seed(1)
    return {
        count: [int(x) for x in torch.empty(count).log_normal_(math.log(4096), 0.9, generator=draw).clamp(1024, 32768)]
        for count in (32, 64, 128)
    }


def _decode(
    name: str, lengths: list[int], peer: float, bounds: tuple[float, float] | None, block_size: int = 16
) -> Case:
    """Without bounds: 0.88 (must) and 0.97 (goal) of the peer's speed."""
    must, goal = bounds or (peer / 0.88, peer / 0.97)
    num_bytes = sum(lengths) * KV_HEADS * HEAD_DIM * 4 + len(lengths) * HEADS * HEAD_DIM * 4
    build = lambda: attention(lengths, block_size=block_size)  # noqa: E731
    return Case("decode", name, build, num_bytes, 0.0, 2, peer, must, goal)


def _lora(ranks: list[int], num_rows: int, label: str, figures: tuple[float | None, ...], **sizes: object) -> Case:
    size_in, sizes_out = sizes.get("size_in", HIDDEN), sizes.get("sizes_out", (HIDDEN,))
    assert isinstance(size_in, int)
    assert isinstance(sizes_out, tuple)
    num_bytes = sum(ranks) * 2 * (size_in * len(sizes_out) + sum(sizes_out)) + num_rows * (
        size_in * 2 + sum(sizes_out) * 4
    )
    name = f"T={num_rows} L={len(ranks)} {label}"
    return Case("lora", name, lambda: lora(num_rows, ranks, size_in, sizes_out), num_bytes, 0.0, 2, *figures)


QKV = (4096, 1024, 1024)


def cases() -> list[Case]:
    """All of them, by section."""
    return [*_decode_cases(), *_prefill_cases(), *_lora_cases(), *_norm_cases()]


def _decode_cases() -> list[Case]:
    ragged = ragged_lengths()
    found = [
        _decode("B=1 1k", [1024], 10.5, (11, 7)),
        _decode("B=1 8k", [8192], 17.3, (20, 14)),
        _decode("B=1 32k", [32768], 41.2, (48, 41)),
        _decode("B=8 1k", [1024] * 8, 17.4, None),
        _decode("B=8 4k", [4096] * 8, 40.3, None),
        _decode("B=17 4k", [4096] * 17, 104.5, (95, 75)),
        _decode("B=24 4k", [4096] * 24, 109.1, (110, 102)),
        _decode("B=32 4k", [4096] * 32, 129.1, None),
        _decode("B=32 4k, blocks of 64", [4096] * 32, 127.2, None, 64),
        _decode("B=64 4k", [4096] * 64, 248.3, None),
        _decode("B=64 8k", [8192] * 64, 480.8, None),
        _decode("B=128 4k", [4096] * 128, 487.5, None),
        _decode("B=256 1k", [1024] * 256, 271.8, None),
        _decode("B=256 4k", [4096] * 256, 967.5, None),
    ]
    for count, peer in ((32, 210.6), (64, 322.6), (128, 799.5)):
        found.append(_decode(f"B={count} ragged 1k-32k", ragged[count], peer, (peer * 1.15, peer)))
    return found


def _prefill_cases() -> list[Case]:
    found = []
    for length, peer in ((2048, 80.5), (4096, 235.1), (8192, 957.1), (16384, 3717.2)):
        flops = 2.0 * HEADS * HEAD_DIM * length * (length + 1)
        build = lambda length=length: attention([length], length)  # noqa: E731
        found.append(Case("prefill", f"{length} causal", build, 0.0, flops, 1, peer, peer / 0.6, peer / 0.8))
    found.append(
        Case("prefill", "512 after 8k", lambda: attention([8704], 512), 0.0, 4.0 * HEADS * HEAD_DIM * 512 * 8448)
    )
    return found


def _lora_cases() -> list[Case]:
    found = []
    for count, figures in (
        (1, (6.3, 5, 3.3)),
        (16, (9.1, 8, 5)),
        (32, (22, 10, 6.5)),
        (64, (18.4, 14, 10)),
        (256, (73, 33, 26)),
    ):
        found.append(_lora([16] * count, count, "r=16", figures))
    return [
        *found,
        _lora([16] * 32, 32, "r=16 q,k,v", (130, 15, 11), sizes_out=QKV),
        _lora([16] * 64, 64, "r=16 q,k,v", (273, 24, 17), sizes_out=QKV),
        _lora([64] * 64, 64, "r=64", (30, 30, 24)),
        _lora([64] * 256, 256, "r=64", (145, 82, 75)),
        _lora(
            [(8, 16, 32, 64)[slot % 4] for slot in range(64)], 64, "r=8/16/32/64", (None, 30 * 30 / 64, 24 * 30 / 64)
        ),
        _lora(
            [(8, 16, 32, 64)[slot % 4] for slot in range(256)], 256, "r=8/16/32/64", (None, 82 * 30 / 64, 75 * 30 / 64)
        ),
        _lora([16] * 8, 2048, "r=16", (39, 24, 18)),
        _lora([16], 16, "r=16", (None, None, None)),
        _lora([16] * 8, 64, "r=16", (None, None, None)),
        *(
            _lora([16] * count, 256, f"r=16{label}", (None, None, None), size_in=size_in)
            for count in (8, 64)
            for label, size_in in (("", HIDDEN), (" 14336→4096", 14336))
        ),
        _lora([16] * 64, 64, "r=16 14336→4096", (None, None, None), size_in=14336),
    ]


def _norm_cases() -> list[Case]:
    found = []
    for num_rows, figures in ((64, (3.1, 3.5, 3)), (1024, (10.1, 11, 9.5)), (4096, (35, 37, 34))):
        found.append(
            Case(
                "norm",
                f"add + rms_norm T={num_rows}",
                lambda n=num_rows: norm(n),
                num_rows * HIDDEN * 8.0,
                0.0,
                1,
                *figures,
            )
        )
    for num_rows, figures in ((64, (7.6, 5, 3)), (1024, (23.1, 12, 8)), (4096, (82.5, 40, 27))):
        num_bytes = num_rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 4.0
        found.append(
            Case("norm", f"rope + KV T={num_rows}", lambda n=num_rows: rope_and_store(n), num_bytes, 0.0, 1, *figures)
        )
        normed = lambda n=num_rows: rope_and_store(n, with_norms=True)  # noqa: E731
        found.append(Case("norm", f"norms + rope + KV T={num_rows}", normed, num_bytes, 0.0, 1, *figures))
    for num_rows in (64, 1024, 4096):
        num_bytes = num_rows * 14336 * 6.0
        found.append(Case("norm", f"silu x up 14336 T={num_rows}", lambda n=num_rows: silu(n), num_bytes, 0.0, 1))
    return found
