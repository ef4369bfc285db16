"""Tiles that are tried for the experts' products, by the rows of a tile: a trial takes both products' rows."""

from collections.abc import Iterator

Row = dict[str, int] | list[dict[str, int]]
Variant = tuple[str, dict[str, Row], tuple[str, ...]]
Tile = tuple[int, int, int, int, int]  # columns, terms of a step, tiles of a group, warps, stages
TAILS = {128: 64}  # rows of a tile: as how many one of few rows may be computed
TILES: dict[int, tuple[tuple[Tile, ...], tuple[str, ...]]] = {
    16: (
        (
            (16, 256, 4096, 4, 4),
            (16, 512, 4096, 4, 3),
            (32, 256, 4096, 4, 3),
            (32, 256, 4096, 8, 4),
            (32, 512, 4096, 4, 2),
            (32, 128, 4096, 2, 5),
        ),
        ("Qwen3-30B-A3B T=1", "Qwen3-30B-A3B T=4", "Mixtral T=1"),
    ),
    32: (
        ((64, 128, 4096, 4, 4), (128, 128, 4096, 4, 3), (64, 64, 4096, 4, 5), (256, 128, 4096, 8, 3)),
        ("Qwen3-30B-A3B T=64", "Qwen3-30B-A3B T=256", "Mixtral T=64"),
    ),
    64: (
        ((64, 64, 64, 4, 5), (256, 64, 64, 8, 3), (128, 64, 4096, 8, 4)),
        ("Qwen3-30B-A3B T=256", "Qwen3-30B-A3B T=512", "Qwen3-30B-A3B T=1024", "Mixtral T=256"),
    ),
    128: (
        (
            (256, 64, 16, 8, 4),
            (256, 64, 16, 8, 3),
            (256, 64, 4096, 8, 4),
            (256, 64, 8, 8, 4),
            (128, 64, 16, 8, 4),
            (128, 64, 16, 4, 4),
        ),
        ("Qwen3-30B-A3B T=1024", "Qwen3-30B-A3B T=4096", "Mixtral T=1024", "Mixtral T=4096"),
    ),
}


def moe_variants() -> list[Variant]:
    return list(_products())


def _products() -> Iterator[Variant]:
    for rows, (forms, cases) in TILES.items():
        for n, k, group, warps, stages in forms:
            for tail in (0, TAILS[rows]) if rows in TAILS else (0,):
                row = {"tail": tail, "block_n": n, "block_k": k, "group": group}
                row |= {"num_warps": warps, "num_stages": stages}
                label = f"m{rows} tail {tail} n{n} k{k} group {group} warps {warps} stages {stages}"
                yield label, {"moe_plan": {"block_m": rows}, "moe_gate_up": row, "moe_down": row}, cases
        yield f"m{rows}", {"moe_plan": {"block_m": rows}}, cases
    other = {"tail": 0, "block_n": 32, "block_k": 128, "group": 4096, "num_warps": 2, "num_stages": 5}
    for product in ("moe_gate_up", "moe_down"):  # one alone
        yield f"{product} n32 k128 warps 2", {product: other}, ("Qwen3-30B-A3B T=1", "Mixtral T=1")
