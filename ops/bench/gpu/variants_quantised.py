"""Tiles that are tried for products with weights of 8 bits."""

from collections.abc import Iterator

SIZES = ("4096→6144", "14336→4096", "4096→28672")
TILES = {  # by rows: rows and columns of a tile, inputs of a block, warps, stages; parts of the first two sizes, last
    16: (
        ((16, 64, 128, 4, 5), (4, 1)),
        ((16, 64, 128, 4, 5), (2, 2)),
        ((16, 64, 256, 4, 4), (4, 1)),
        ((16, 128, 128, 4, 4), (4, 1)),
        ((16, 128, 128, 4, 4), (8, 2)),
        ((16, 128, 128, 8, 4), (4, 1)),
        ((16, 32, 256, 2, 4), (4, 1)),
        ((16, 32, 256, 2, 4), (2, 1)),
        ((16, 64, 256, 2, 4), (4, 1)),
        ((16, 64, 128, 2, 6), (4, 1)),
    ),
    32: (
        ((32, 128, 128, 4, 4), (4, 1)),
        ((32, 128, 128, 8, 4), (4, 2)),
        ((32, 256, 64, 8, 6), (4, 1)),
        ((32, 64, 128, 4, 5), (2, 1)),
        ((32, 64, 128, 2, 5), (4, 1)),
        ((32, 64, 256, 2, 4), (4, 1)),
        ((32, 32, 256, 2, 4), (4, 1)),
    ),
    64: (
        ((64, 256, 64, 8, 5), (4, 1)),
        ((64, 128, 64, 4, 6), (4, 1)),
        ((64, 128, 64, 8, 6), (2, 2)),
        ((64, 256, 128, 8, 4), (4, 1)),
        ((64, 256, 64, 8, 5), (2, 2)),
    ),
    128: (
        ((128, 128, 64, 8, 4), (2, 1)),
        ((128, 128, 64, 8, 4), (4, 1)),
        ((128, 256, 64, 8, 4), (4, 1)),
        ((128, 128, 128, 8, 3), (2, 1)),
        ((64, 128, 128, 8, 4), (1, 1)),
    ),
    256: (
        ((256, 128, 64, 8, 4), (2, 1)),
        ((256, 128, 64, 8, 4), (4, 1)),
        ((128, 128, 64, 8, 4), (1, 1)),
        ((128, 256, 64, 8, 4), (2, 1)),
        ((64, 128, 128, 8, 4), (1, 1)),
    ),
    1024: (((256, 128, 64, 8, 4), (1, 1)), ((128, 256, 64, 8, 4), (1, 1))),
}
Variant = tuple[str, dict[str, dict[str, int] | list[dict[str, int]]], tuple[str, ...]]


def quantised_variants() -> list[Variant]:
    widened = {"quantised_form": {"is_widened": 1}}
    return [
        *_fused(),
        *(("widened", widened, tuple(f"fp8 {size} T={count}" for size in SIZES)) for count in (128, 256)),
        *_widening(),
    ]


def _fused() -> Iterator[Variant]:
    for count, forms in TILES.items():
        for (m, n, k, warps, stages), both in forms:
            for sizes, parts in zip((SIZES[:2], SIZES[2:]), both, strict=True):
                row = {"block_m": m, "block_n": n, "block_k": k, "parts": parts, "pdl": 1, "pairs": int(n >= 64)}
                row |= {"num_warps": warps, "num_stages": stages}
                label = f"m{m} n{n} k{k} parts {parts} warps {warps} stages {stages}"
                kinds = ("fp8", "int8") if count <= 32 else ("fp8",)
                cases = tuple(f"{kind} {size} T={count}" for kind in kinds for size in sizes)
                yield label, {"quantised_linear": row, "quantised_form": {"is_widened": 0}}, cases


def _widening() -> Iterator[Variant]:
    for n, k, warps in ((32, 256, 4), (128, 128, 8), (16, 512, 4), (64, 256, 8)):
        row = {"block_n": n, "block_k": k, "num_warps": warps}
        cases = tuple(f"{kind} 4096→28672 widened" for kind in ("fp8", "block fp8"))
        yield f"rows {n} columns {k} warps {warps}", {"quantised_widen": row}, cases
