"""Rows that are tried in the place of the tables', to find better ones."""

Rows = dict[str, dict[str, int]]


def _rows(kernel: str, **row: int) -> Rows:
    return {kernel: row}


Variant = tuple[str, Rows, tuple[str, ...]]


def variants() -> dict[str, list[Variant]]:
    """By section: a label, the rows that take the place of the tables', and the cases to try them on."""
    return {"decode": _decode(), "prefill": _prefill(), "lora": _lora(), "norm": _norm()}


def _decode() -> list[Variant]:
    groups = ("grouped 64 x (4k shared + 1024 own)", "grouped 64 x (4k shared + 64 own)")
    captured = ("captured B=32 4k", "captured B=64 4k", "captured B=64 ragged 1k-32k")
    return [
        *(
            (
                f"group tile {tile} warps {warps} stages {stages}",
                _rows("attend_group", tile=tile, num_warps=warps, num_stages=stages),
                groups,
            )
            for tile, warps, stages in ((64, 4, 5), (128, 4, 3), (64, 8, 3), (32, 4, 3))
        ),
        *(
            (
                f"group chunks {chunk}",
                _rows("group_work", min_chunk=chunk, max_chunk=chunk, target_items=1),
                groups,
            )
            for chunk in (128, 256, 1024)
        ),
        *(
            (
                f"captured programs {programs} per sequence {count}",
                _rows("captured_work", programs=programs, per_sequence=count),
                captured,
            )
            for programs, count in ((264, 2), (1056, 8), (396, 1))
        ),
        (
            "captured 200 registers",
            _rows("attend_split", tile=64, num_warps=4, num_stages=5, captured_registers=224),
            captured,
        ),
        ("merge pdl", _rows("merge", chunks=32, num_warps=4, pdl=1), (*groups, "B=64 4k", "B=1 8k")),
    ]


def _prefill() -> list[Variant]:
    prefill = [
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


def _vector(k: int, shrink_warps: int, tile: int, expand_warps: int, rows: int = 4) -> tuple[str, Rows]:
    return f"k{k}/{shrink_warps} tile {tile}/{expand_warps} rows {rows}", _rows(
        "sgmv_vector",
        segment_rows=rows,
        block_k=k,
        shrink_warps=shrink_warps,
        tile=tile,
        expand_warps=expand_warps,
        pdl=1,
    )


def _lora() -> list[Variant]:
    small = ("T=1 L=1 r=16", "T=16 L=16 r=16", "T=32 L=32 r=16", "T=32 L=32 r=16 q,k,v")
    large = (
        "T=64 L=64 r=16",
        "T=256 L=256 r=16",
        "T=64 L=64 r=16 q,k,v",
        "T=64 L=64 r=64",
        "T=256 L=256 r=64",
        "T=64 L=64 r=8/16/32/64",
        "T=256 L=256 r=8/16/32/64",
        "T=64 L=8 r=16",
    )
    return [
        ("matrices", _rows("sgmv_form", is_vector=0), (*small, *large)),
        *(
            (*_vector(*sizes), small)
            for sizes in ((512, 4, 4096, 4), (256, 2, 4096, 2), (256, 4, 2048, 4), (1024, 4, 8192, 4))
        ),
        *(
            (*_vector(*sizes), large)
            for sizes in (
                (512, 4, 8192, 4),
                (1024, 8, 16384, 8),
                (2048, 8, 32768, 8),
                (512, 2, 8192, 2),
                (1024, 4, 8192, 4),
                (512, 4, 16384, 8),
                (1024, 4, 16384, 4, 1),
                (1024, 4, 16384, 4, 8),
            )
        ),
    ]


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
        *((*one, tuple(f"silu x up 14336 T={n}" for n in (64, 1024, 4096))) for one in silus),
    ]
