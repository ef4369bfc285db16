"""Tiles that are tried for products with weights of 8 bits."""

from collections.abc import Iterator

SIZES = ("4096→6144", "14336→4096", "4096→28672")
Tile = tuple[int, int, int, int, int]  # rows, columns, inputs of a block, warps, stages
Tried = dict[int, tuple[tuple[Tile, tuple[int, int, int]], ...]]  # by rows; programs that each of SIZES aims at
TILES: Tried = {
    16: (((16, 32, 256, 2, 3), (384, 512, 1)), ((16, 32, 128, 2, 5), (384, 512, 1))),
    32: (((32, 64, 256, 2, 3), (288, 320, 1)),),
    64: (((64, 128, 128, 8, 4), (240, 256, 1)), ((64, 64, 128, 4, 4), (288, 256, 1))),
    256: (((256, 128, 64, 8, 4), (132, 132, 1)),),
}
TMA: Tried = {
    16: (
        ((16, 64, 128, 4, 6), (384, 256, 1)),
        ((16, 64, 256, 4, 4), (288, 256, 1)),
        ((16, 128, 128, 4, 6), (192, 256, 1)),
        ((16, 32, 256, 2, 5), (384, 512, 1)),
        ((16, 128, 256, 8, 4), (144, 132, 1)),
    ),
    32: (
        ((32, 64, 128, 4, 6), (384, 256, 1)),
        ((32, 128, 128, 4, 5), (192, 256, 1)),
        ((32, 128, 128, 8, 5), (192, 256, 1)),
        ((32, 64, 256, 4, 3), (288, 256, 1)),
        ((32, 64, 256, 2, 4), (288, 256, 1)),
    ),
    64: (
        ((64, 128, 128, 4, 4), (192, 128, 1)),
        ((64, 128, 128, 8, 4), (192, 256, 1)),
        ((64, 256, 128, 8, 4), (132, 132, 1)),
        ((64, 256, 128, 16, 4), (132, 132, 1)),
        ((64, 64, 256, 4, 3), (192, 256, 1)),
    ),
    128: (
        ((128, 128, 128, 8, 3), (132, 132, 1)),
        ((128, 128, 128, 8, 4), (132, 132, 1)),
        ((128, 256, 128, 16, 3), (132, 132, 1)),
    ),
    256: (
        ((256, 128, 64, 8, 4), (132, 132, 1)),
        ((256, 128, 128, 8, 2), (132, 132, 1)),
        ((256, 128, 128, 16, 2), (132, 132, 1)),
        ((128, 128, 128, 8, 4), (132, 132, 1)),
        ((128, 256, 128, 16, 3), (132, 132, 1)),
    ),
    512: (((256, 128, 64, 8, 4), (132, 132, 1)), ((256, 128, 128, 8, 2), (132, 132, 1))),
    1024: (((256, 128, 64, 8, 4), (1, 1, 1)), ((256, 128, 128, 8, 2), (1, 1, 1))),
}
BLOCKED = (16, 32, 64)  # rows whose tiles of 128 inputs are tried on weights in blocks too
Variant = tuple[str, dict[str, dict[str, int] | list[dict[str, int]]], tuple[str, ...]]


def quantised_variants() -> list[Variant]:
    widened = {"quantised_form": {"is_widened": 1}}
    return [*_fused(), ("widened", widened, tuple(f"fp8 {size} T=512" for size in SIZES)), *_blocked()]


def _fused() -> Iterator[Variant]:
    for tma, tried in enumerate((TILES, TMA)):
        for count, forms in tried.items():
            for tile, programs in forms:
                for size, aim in zip(SIZES, programs, strict=True):
                    yield _variant(tile, aim, tma, tuple(f"{kind} {size} T={count}" for kind in ("fp8", "int8")))


def _blocked() -> Iterator[Variant]:
    for count in BLOCKED:
        for tile in ((count, 64, 128, 4, 5), (count, 128, 128, 4, 4)):
            for size, aim in zip(SIZES, (384, 256, 1), strict=True):
                yield _variant(tile, aim, 1, (f"block fp8 {size} T={count}",))


def _variant(tile: Tile, programs: int, tma: int, cases: tuple[str, ...]) -> Variant:
    m, n, k, warps, stages = tile
    row = {"block_m": m, "block_n": n, "block_k": k, "programs": programs, "pdl": 1}
    row |= {"tma": tma, "pairs": int(n >= 64 and warps >= 4), "num_warps": warps, "num_stages": stages}
    label = f"{'tma ' * tma}m{m} n{n} k{k} programs {programs} warps {warps} stages {stages}"
    return label, {"quantised_linear": row, "quantised_form": {"is_widened": 0}}, cases
