"""Decodes as a captured step has them, alone and in groups that share a prefix."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.paged_attention import (
    DecodeShape,
    PrefixGroup,
    captured_plan,
    fill_plan,
    paged_attention,
    plan_attention,
    plan_numbers,
)
from kernels.sampling import SamplingRows, highest, sample
from ops.bench.gpu.cases import DEVICE, HEAD_DIM, HEADS, KV_HEADS, Built, Case, Pool, error, ragged_lengths, random
from ops.bench.gpu.timing import num_sets


def captured_decode(lengths: Sequence[int], max_tokens: int, shared: int = 0) -> Built:
    """Decodes through plans over memory, as a captured step has them; the first ``shared`` tokens in common blocks."""
    keys, values = Pool.caches(16)
    shape = DecodeShape(len(lengths), max_tokens, 16, HEADS, KV_HEADS, DEVICE, has_groups=shared > 0)
    groups = [PrefixGroup(tuple(range(len(lengths))), shared)] if shared else []
    tokens = sum(lengths) - shared * (len(lengths) - 1)
    sets = []
    for number in range(min(num_sets(tokens * KV_HEADS * HEAD_DIM * 4), max(2, Pool.num_blocks * 16 // tokens), 64)):
        tables = Pool.tables(lengths, 16, number)
        tables[:, : shared // 16] = tables[0, : shared // 16].clone()
        host = np.zeros(plan_numbers(shape), dtype=np.int32)
        fill_plan(host, lengths, shape, groups)
        plan = captured_plan(torch.from_numpy(host).to(DEVICE), tables, shape)
        sets.append((random(len(lengths), HEADS, HEAD_DIM), plan))
    scale = HEAD_DIM**-0.5
    calls = [
        lambda queries=queries, plan=plan: paged_attention(queries, keys, values, plan, scale=scale)
        for queries, plan in sets
    ]

    def verify() -> float:
        queries, plan = sets[0]
        plain = plan_attention(
            plan.block_tables,
            list(range(len(lengths) + 1)),
            list(lengths),
            block_size=16,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
        )
        return error(calls[0](), paged_attention(queries, keys, values, plain, scale=scale))

    return Built(calls, verify)


# sequences, shared tokens, own ones: the smaller tell from where on groups pay (groups.MIN_SPARED_BYTES)
SHARED = (
    (64, 4096, 1024), (64, 4096, 64), (16, 4096, 1024), (16, 4096, 64), (8, 4096, 64), (8, 2048, 64), (16, 1024, 64),
    (64, 512, 64), (192, 1024, 64),
)  # fmt: skip


def captured_cases() -> list[Case]:
    """Plans over memory for contexts up to 32k; sequences with a shared beginning, read by each and together."""
    size = KV_HEADS * HEAD_DIM * 4
    steps = {
        "B=32 192": [192] * 32,
        "B=1 1k": [1024],
        "B=8 4k": [4096] * 8,
        "B=32 4k": [4096] * 32,
        "B=64 4k": [4096] * 64,
    }
    steps["B=64 ragged 1k-32k"] = ragged_lengths()[64]
    found = [
        Case("decode", f"captured {name}", lambda n=lengths: captured_decode(n, 32768), sum(lengths) * size, 0.0, 2)
        for name, lengths in steps.items()
    ]
    for count, shared, own in SHARED:
        whole = [shared + own] * count
        label = f"{shared // 1024}k" if shared >= 1024 else str(shared)
        num_bytes, name = float(size * (shared + own * count)), f"{count} x ({label} shared + {own} own)"
        found += [
            Case("decode", f"plain {name}", lambda n=whole: captured_decode(n, 32768), sum(whole) * size, 0.0, 2),
            Case(
                "decode", f"grouped {name}", lambda n=whole, m=shared: captured_decode(n, 32768, m), num_bytes, 0.0, 3
            ),
        ]
    return found


def sampling_cases() -> list[Case]:
    """Rows of Llama-3's 128,256 logits."""
    kinds = {"greedy": (0.0, 0, 1.0), "temperature": (1.0, 0, 1.0), "top-k 50, top-p 0.9": (0.8, 50, 0.9)}
    highs = [
        Case("norm", f"highest logit T={n}", lambda n=n: highest_logit(n), n * 128_256 * 2.0) for n in (1, 32, 64, 256)
    ]
    return highs + [
        Case("norm", f"sample {name} T={count}", lambda n=count, kind=kind: sampling(n, *kind), count * 128_256 * 4.0)
        for name, kind in kinds.items()
        for count in (64, 256)
    ]


def highest_logit(count: int) -> Built:
    sets = [random(count, 128_256) for _ in range(num_sets(count * 128_256 * 2))]
    return Built(
        [lambda logits=logits: highest(logits) for logits in sets],
        lambda: float((highest(sets[0]) != sets[0].argmax(-1)).float().mean()),
    )


def sampling(count: int, temperature: float, top_k: int, top_p: float) -> Built:
    sets = [torch.randn(count, 128_256, device=DEVICE) * 2 for _ in range(num_sets(count * 128_256 * 4))]
    ones = torch.ones(count, device=DEVICE)
    rows = SamplingRows(
        ones * temperature, (ones * top_k).int(), ones * top_p, ones * 0, torch.rand(count, device=DEVICE)
    )

    def verify() -> float:
        best = sample(sets[0], SamplingRows(ones * 0, rows.top_ks, ones, ones * 0, rows.numbers))
        return float((best != sets[0].argmax(-1)).float().mean())

    return Built([lambda logits=logits: sample(logits, rows) for logits in sets], verify)
