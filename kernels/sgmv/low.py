"""What the two halves of ``sgmv`` hand each other, and the modules that they work on."""

from dataclasses import dataclass

from torch import Tensor

from kernels.sgmv.plan import Group, Segments


@dataclass(frozen=True)
class LoraSlice:
    """One module of a packed projection: its columns begin at ``start`` of the output.

    a [S, R, in] and b [S, R, out] hold a slot's pair in their first ``lora_ranks[slot]`` ranks and zeros in the
    rest; the scale is in b. A rank of 0 says that the slot does not have this module. R is a multiple of
    RANK_MULTIPLE. ``rank_table`` is lora_ranks as int32 [S] on the device, for who keeps one up to date there (a
    captured graph reads it at replay); without it the kernels make their own.
    """

    a: Tensor
    b: Tensor
    lora_ranks: tuple[int, ...]
    start: int = 0
    rank_table: Tensor | None = None


@dataclass(frozen=True)
class TiledLow:
    """On a CPU: for each slice and each group of tiles their rows times A, [tiles, TILE_ROWS, group.lora_rank] fp32."""

    products: tuple[tuple[LoraSlice, Group, Tensor], ...]


@dataclass(frozen=True)
class PartialLow:
    """On a GPU: ``partials`` [slices, split, rows, ranks] fp32, sums over parts of ``in`` of the rows in the order of
    ``segments``. ``table`` has the slices' addresses; no rank in use is above ``lora_rank``."""

    slices: tuple[LoraSlice, ...]
    segments: Segments
    table: Tensor
    lora_rank: int
    partials: Tensor

    @property
    def is_aligned(self) -> bool:
        """Every slice begins and ends at a multiple of 16 columns, in y and in b."""
        return all(part.start % 16 == 0 and part.b.shape[2] % 16 == 0 for part in self.slices)


Low = TiledLow | PartialLow
