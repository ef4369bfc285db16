"""Tiles that are tried for products with weights of 8 bits."""

from collections.abc import Iterator

SIZES = ("4096→6144", "14336→4096", "4096→28672")
Tile = tuple[int, int, int, int, int]  # rows, columns, inputs of a block, warps, stages
TILES: dict[int, tuple[tuple[Tile, tuple[int, int, int]], ...]] = {  # by rows; programs that each of SIZES aims at
    1: (((16, 64, 256, 2, 4), (384, 256, 1)), ((16, 32, 256, 2, 4), (384, 384, 1))),
    16: (((16, 32, 256, 2, 3), (384, 512, 1)), ((16, 32, 128, 2, 5), (384, 512, 1))),
    32: (((32, 64, 256, 2, 3), (288, 320, 1)), ((32, 64, 256, 2, 4), (192, 192, 1))),
    64: (((64, 128, 128, 8, 4), (240, 256, 1)), ((64, 64, 128, 4, 4), (288, 256, 1))),
    128: (((128, 128, 256, 8, 2), (132, 132, 1)),),
    256: (((128, 128, 64, 8, 4), (240, 264, 1)),),
}
Row = dict[str, int] | list[dict[str, int]]
Variant = tuple[str, dict[str, Row], tuple[str, ...]]


def quantised_variants() -> list[Variant]:
    widened: dict[str, Row] = {"quantised_form": {"is_widened": 1}}
    return [*_fused(), ("widened", widened, tuple(f"fp8 {size} T=512" for size in SIZES))]


def _fused() -> Iterator[Variant]:
    for count, forms in TILES.items():
        for (m, n, k, warps, stages), programs in forms:
            for size, aim in zip(SIZES, programs, strict=True):
                row = {"block_m": m, "block_n": n, "block_k": k, "programs": aim, "pdl": 1}
                row |= {"num_warps": warps, "num_stages": stages}
                label = f"m{m} n{n} k{k} programs {aim} warps {warps} stages {stages}"
                cases = tuple(f"{kind} {size} T={count}" for kind in ("fp8", "int8"))
                yield label, {"quantised_linear": row, "quantised_form": {"is_widened": 0}}, cases
