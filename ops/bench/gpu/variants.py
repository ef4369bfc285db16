"""Rows that are tried in the place of the tables', to find better ones."""

import json

from kernels.tiles import CONFIGS
from ops.bench.gpu.cases_shapes import shape_cases
from ops.bench.gpu.changes import Rows
from ops.bench.gpu.variants_moe import moe_variants
from ops.bench.gpu.variants_quantised import quantised_variants


def _rows(kernel: str, **row: int) -> Rows:
    return {kernel: row}


Variant = tuple[str, Rows, tuple[str, ...]]


def variants() -> dict[str, list[Variant]]:
    """By section: a label, the rows that take the place of the tables', and the cases to try them on."""
    found = {
        "decode": _decode(),
        "prefill": _prefill(),
        "lora": _lora(),
        "lora_step": _lora_step(),
        "norm": _norm(),
        "quantised": quantised_variants(),
        "moe": moe_variants(),
    }
    return {**found, "shapes": _shapes()}


def _shapes() -> list[Variant]:
    """As a GPU without a table of its own would run."""
    default = json.loads((CONFIGS / "default.json").read_text())
    return [("default", default, tuple(case.name for case in shape_cases()))]


def _decode() -> list[Variant]:
    groups = ("grouped 64 x (4k shared + 1024 own)", "grouped 64 x (4k shared + 64 own)")
    programs = ((264, 0), (1056, 0), (1056, 8))  # the last: as those of no group
    captured = (
        "captured B=32 192",
        "captured B=1 1k",
        "captured B=8 4k",
        "captured B=32 4k",
        "captured B=64 4k",
        "captured B=64 ragged 1k-32k",
    )
    return [
        *(
            (f"group chunks {chunk}", _rows("group_work", min_chunk=chunk, max_chunk=chunk, target_items=1), groups)
            for chunk in (384, 640)
        ),
        *(
            (f"group programs {n} + {each}", _rows("captured_group_work", programs=n, per_sequence=each), groups)
            for n, each in programs
        ),
        *(
            (f"captured programs {n} + {each}", _rows("captured_work", programs=n, per_sequence=each), captured)
            for n, each in ((264, 1), (264, 4), (528, 2))
        ),
        *(
            (
                f"captured registers {registers}",
                _rows("attend_split", tile=64, num_warps=4, num_stages=5, captured_registers=registers),
                captured,
            )
            for registers in (168, 255)
        ),
        (
            "captured 3 stages",
            _rows("attend_split", tile=64, num_warps=4, num_stages=3, captured_registers=224),
            captured,
        ),
        *(
            (
                f"captured tile {tile} warps {warps} stages {stages}",
                _rows("attend_split", tile=tile, num_warps=warps, num_stages=stages, captured_registers=224),
                captured[:1],
            )
            for tile, warps, stages in ((32, 2, 5), (32, 4, 5), (64, 8, 3), (128, 8, 2))
        ),
        *(
            (
                f"captured chunks {chunk}",
                _rows("split_work", min_chunk=chunk, max_chunk=chunk, target_items=1),
                captured[:1],
            )
            for chunk in (64, 128)
        ),
    ]


def _prefill() -> list[Variant]:
    prefill: list[tuple[str, Rows]] = [
        (
            f"rows {rows} tile {tile} warps {warps} stages {stages}",
            {
                "attend_chunk": {"tile": tile, "num_warps": warps, "num_stages": stages},
                "chunk_work": {"block_m": rows, "max_chunk": 16384},
            },
        )
        for rows, tile, warps, stages in ((128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 4), (64, 128, 4, 3))
    ]
    return [(*one, ("2048 causal", "4096 causal", "8192 causal")) for one in prefill]


def _vector(k: int, shrink_warps: int, n: int, expand_warps: int) -> tuple[str, Rows]:
    return f"k{k}/{shrink_warps} n{n}/{expand_warps}", _rows(
        "sgmv_vector", block_k=k, shrink_warps=shrink_warps, block_n=n, expand_warps=expand_warps, pdl=1
    )


def _lora() -> list[Variant]:
    cases = tuple(f"T={count} L={count} {label}" for count in (64, 256) for label in ("r=16", "r=64", "r=8/16/32/64"))
    alone = (
        "each row by itself",
        _rows("sgmv_form", rows_of_slot=1000),
        ("T=16 L=1 r=16", "T=64 L=8 r=16", "T=256 L=8 r=16"),
    )
    several = tuple(f"T=256 L={count} r=16{label}" for count in (8, 64) for label in ("", " 14336→4096"))
    return [
        alone,
        *(
            (
                f"split {split} stages {stages}",
                _rows("sgmv_shrink", block_m=16, block_k=256, split=split, num_warps=4, num_stages=stages),
                several,
            )
            for split, stages in ((2, 4), (4, 4), (8, 3), (16, 3))
        ),
        *(
            (*_vector(*sizes), cases)
            for sizes in (
                (2048, 8, 512, 2),
                (2048, 4, 512, 2),
                (4096, 16, 512, 2),
                (2048, 8, 1024, 4),
                (1024, 4, 512, 2),
            )
        ),
    ]


def _lora_step() -> list[Variant]:
    """Prompts: rows of a segment, then what each half does with them."""
    prompts = ("q,k,v", "gate,up", "down")
    found: list[Variant] = []
    for m, k, split, warps, stages in (
        (64, 128, 1, 4, 4),
        (64, 64, 2, 4, 5),
        (128, 64, 2, 8, 4),
    ):
        cases = tuple(f"shrink T=8192 L=8 {name}" for name in prompts)
        found.append((f"m{m} k{k} split {split} {warps}/{stages}", _segments(m, k, split, warps, stages), cases))
    for m, n, warps in ((32, 64, 2), (32, 128, 8), (32, 128, 2)):
        expand = _segments(m) | _rows("sgmv_expand", block_n=n, num_warps=warps, pdl=1)
        found.append((f"m{m} n{n}/{warps}", expand, tuple(f"expand T=8192 L=8 {name}" for name in prompts)))
    for m, n, warps in ((16, 64, 2), (16, 128, 2), (32, 64, 2), (32, 64, 4), (32, 128, 8)):
        fused = _segments(m) | _rows("silu_low_matrix", block_n=n, num_warps=warps)
        found.append((f"m{m} n{n}/{warps}", fused, ("expand, silu T=8192 L=8 fused",)))
    decodes = tuple(
        f"product + lora T=32 L={count} {name} behind"
        for count in (8, 32)
        for name in ("q,k,v", "o", "gate,up", "down")
    )
    rows = tuple(f"expand, silu T=32 L={count} fused" for count in (8, 32))
    early = _rows("pdl", silu_mul=1, shrink=1, rope_low=1, attend=1)
    found += [
        ("all early", early, decodes),
        ("none early", _rows("pdl", silu_mul=0, shrink=0, rope_low=0, attend=0), decodes),
    ]
    for k, shrink_warps, n, expand_warps in ((512, 4, 512, 2), (256, 2, 256, 1), (1024, 4, 256, 1), (256, 2, 128, 1)):
        found.append((*_vector(k, shrink_warps, n, expand_warps), decodes))
    for n, warps in ((64, 1), (256, 1), (128, 1)):
        found.append((f"n{n}/{warps} early", _rows("silu_low_vector", block_n=n, num_warps=warps) | early, rows))
    matrices = _rows("sgmv_form", rows_of_slot=0)
    found.append(("matrices", matrices, decodes))
    for n, warps in ((64, 2), (128, 4), (256, 4), (128, 2)):
        found.append((f"matrices n{n}/{warps}", matrices | _rows("silu_low_matrix", block_n=n, num_warps=warps), rows))
    return [*found, *_lora_on_its_way()]


def _lora_on_its_way() -> list[Variant]:
    """Into rope and the cache."""
    heads = tuple(f"q,k,v, rope T=32 L={count} r=16 fused" for count in (8, 32))
    found: list[Variant] = [("late", _rows("pdl", silu_mul=1, shrink=1, rope_low=0, attend=1), heads)]
    for number, warps in ((4, 2), (4, 4), (2, 1), (1, 1), (16, 4)):
        row = _rows("qk_rope_kv", heads=number, num_warps=warps)
        found.append((f"heads {number} warps {warps}", row, (*heads, "q,k,v, rope T=32 base")))
    return found


def _segments(m: int, k: int = 128, split: int = 1, warps: int = 4, stages: int = 3) -> Rows:
    return _rows("sgmv_shrink", block_m=m, block_k=k, split=split, num_warps=warps, num_stages=stages)


def _norm() -> list[Variant]:
    norms = [(f"norm warps {warps}", _rows("rms_norm", num_warps=warps)) for warps in (2, 4, 16)]
    fused = [
        (f"heads {heads} warps {warps}", _rows("qk_rope_kv", heads=heads, num_warps=warps))
        for heads, warps in ((4, 2), (8, 2), (8, 1), (16, 4), (32, 4), (4, 1), (32, 8))
    ]
    silus = [
        (f"block {block} warps {warps}", _rows("silu_mul", block=block, num_warps=warps))
        for block, warps in ((512, 2), (1024, 4), (2048, 4), (4096, 8))
    ]
    return [
        *((*one, ("add + rms_norm T=64", "add + rms_norm T=4096")) for one in norms),
        *(
            (*one, tuple(f"{name} T={n}" for n in (64, 1024, 4096) for name in ("rope + KV", "norms + rope + KV")))
            for one in fused
        ),
        *(
            (
                f"sample block {block} warps {warps}",
                _rows("sample", block=block, num_warps=warps),
                tuple(f"sample {name} T=64" for name in ("greedy", "temperature", "top-k 50, top-p 0.9")),
            )
            for block, warps in ((4096, 16), (8192, 32), (16384, 32), (4096, 8))
        ),
        *(
            (
                f"highest block {block} at once {at_once} warps {warps}",
                _rows("highest", block=block, at_once=at_once, num_warps=warps),
                tuple(f"highest logit T={n}" for n in (1, 32, 256)),
            )
            for block, at_once, warps in ((4096, 8, 16), (8192, 2, 32), (8192, 8, 32), (16384, 2, 32))
        ),
        *((*one, tuple(f"silu x up 14336 T={n}" for n in (64, 1024, 4096))) for one in silus),
    ]
