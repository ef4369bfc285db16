"""Rows that are tried in the place of the tables', to find better ones."""

Rows = dict[str, dict[str, int]]


def _rows(kernel: str, **row: int) -> Rows:
    return {kernel: row}


Variant = tuple[str, Rows, tuple[str, ...]]


def variants() -> dict[str, list[Variant]]:
    """By section: a label, the rows that take the place of the tables', and the cases to try them on."""
    return {"decode": _decode(), "prefill": _prefill(), "lora": _lora(), "norm": _norm()}


def _decode() -> list[Variant]:
    cases = ("B=1 1k", "B=1 8k", "B=1 32k", "B=17 4k", "B=32 4k", "B=128 4k", "B=64 ragged 1k-32k")
    decode = (
        [
            (
                f"tile {tile} warps {warps} stages {stages}",
                _rows("attend_split", tile=tile, num_warps=warps, num_stages=stages),
            )
            for tile, warps, stages in (
                (64, 4, 3),
                (64, 8, 5),
                (32, 4, 3),
                (32, 4, 5),
                (32, 2, 5),
                (128, 8, 5),
                (64, 4, 7),
                (16, 2, 7),
            )
        ]
        + [
            (
                f"chunks {low}-{high} items {items}",
                _rows("split_work", min_chunk=low, max_chunk=high, target_items=items),
            )
            for low, high, items in (
                (64, 1024, 264),
                (64, 1024, 1056),
                (128, 1024, 528),
                (64, 512, 528),
                (64, 2048, 396),
                (64, 4096, 396),
            )
        ]
        + [
            ("merge 32 chunks", _rows("merge", chunks=32, num_warps=4, pdl=0)),
            ("merge pdl", _rows("merge", chunks=16, num_warps=4, pdl=1)),
        ]
    )
    return [(*one, cases) for one in decode]


def _prefill() -> list[Variant]:
    prefill = [
        (
            f"rows {rows} tile {tile} warps {warps} stages {stages}",
            {
                "attend_chunk": {"tile": tile, "num_warps": warps, "num_stages": stages},
                "chunk_work": {"block_m": rows, "max_chunk": 16384},
            },
        )
        for rows, tile, warps, stages in (
            (128, 64, 8, 3),
            (128, 128, 8, 3),
            (128, 128, 8, 5),
            (128, 32, 8, 5),
            (64, 64, 4, 3),
            (64, 64, 4, 5),
            (64, 128, 4, 3),
            (128, 64, 4, 3),
        )
    ]
    return [(*one, ("2048 causal", "8192 causal")) for one in prefill]


def _lora() -> list[Variant]:
    cases = (
        "T=1 L=1 r=16",
        "T=16 L=16 r=16",
        "T=64 L=64 r=16",
        "T=256 L=256 r=16",
        "T=64 L=64 r=16 q,k,v",
        "T=64 L=64 r=64",
        "T=256 L=256 r=64",
        "T=256 L=256 r=8/16/32/64",
        "T=2048 L=8 r=16",
    )
    shrink = [
        (
            f"shrink k{k} split {split} warps {warps} stages {stages}",
            _rows("sgmv_shrink", block_m=16, block_k=k, split=split, num_warps=warps, num_stages=stages),
        )
        for k, split, warps, stages in (
            (256, 16, 4, 2),
            (256, 8, 4, 3),
            (256, 4, 4, 3),
            (256, 2, 4, 3),
            (128, 16, 4, 3),
            (128, 8, 4, 4),
            (128, 32, 4, 2),
            (512, 8, 4, 2),
            (128, 8, 2, 4),
        )
    ] + [
        (
            f"shrink 64 rows k{k} split {split}",
            _rows("sgmv_shrink", block_m=64, block_k=k, split=split, num_warps=4, num_stages=3),
        )
        for k, split in ((128, 2), (64, 8))
    ]
    expand = [
        (f"expand n{n} warps {warps} pdl {pdl}", _rows("sgmv_expand", block_n=n, num_warps=warps, pdl=pdl))
        for n, warps, pdl in ((64, 4, 0), (128, 4, 0), (256, 4, 0), (512, 8, 0), (64, 2, 0), (128, 4, 1), (256, 4, 1))
    ]
    return [(*one, cases) for one in (*shrink, *expand)]


def _norm() -> list[Variant]:
    norms = [(f"norm warps {warps}", _rows("rms_norm", num_warps=warps)) for warps in (2, 4, 16)]
    ropes = [
        (f"rope heads {heads} warps {warps}", _rows("rope", heads=heads, num_warps=warps))
        for heads, warps in ((4, 2), (8, 2), (16, 4), (64, 4), (64, 8))
    ] + [(f"store warps {warps}", _rows("store_kv", num_warps=warps)) for warps in (1, 2)]
    return [
        *((*one, ("add + rms_norm T=64", "add + rms_norm T=4096")) for one in norms),
        *((*one, ("rope + KV T=64", "rope + KV T=4096")) for one in ropes),
    ]
