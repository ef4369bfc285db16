"""When it pays that decodes read the blocks of their common beginning once."""

from collections.abc import Sequence

from kernels.paged_attention.plan import PrefixGroup
from kernels.paged_attention.work import GROUP_ROWS

MIN_TOKENS = 512  # shared, for a group
MIN_MEMBERS = 4
MIN_SPARED_BYTES = 60_000_000  # of keys and values of a layer: from there on measured as a gain (ops/bench/NOTES.md)


def may_group(num_heads: int, num_kv_heads: int, sliding_window: int | None) -> bool:
    """Whether a model's decodes can be in groups at all: a window cuts what is shared, and the query heads of a
    key/value head go into one program."""
    return sliding_window is None and num_heads // num_kv_heads <= GROUP_ROWS


def pays(groups: Sequence[PrefixGroup], token_bytes: int) -> bool:
    """Whether a step is faster with these groups than without any. token_bytes: keys and values of a token, a layer."""
    return sum(group.num_spared for group in groups) * token_bytes >= MIN_SPARED_BYTES
