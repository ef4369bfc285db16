"""Which decodes share the blocks of their beginning."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention.plan import PrefixGroup

MIN_TOKENS = 512  # shared, for a group: below it a launch of its own costs more than it saves
MIN_MEMBERS = 4


def prefix_groups(
    block_tables: NDArray[np.integer],
    context_lens: Sequence[int],
    block_size: int,
    *,
    min_tokens: int = MIN_TOKENS,
    min_members: int = MIN_MEMBERS,
) -> tuple[PrefixGroup, ...]:
    """Groups of the sequences (each with one query, block_tables [N, most blocks]) whose first ``min_tokens`` stand in
    the same blocks, with all that its members have in common.

    Who shares no block with another is in no group: where a cache never gives two namespaces one block, no group
    crosses them.
    """
    lengths = np.asarray(context_lens)
    least = max(1, -(-min_tokens // block_size))
    if block_tables.shape[1] < least:
        return ()
    by_block: dict[bytes, list[int]] = {}
    for sequence in (lengths > least * block_size).nonzero()[0].tolist():
        by_block.setdefault(block_tables[sequence, :least].tobytes(), []).append(sequence)
    found = []
    for members in by_block.values():
        if len(members) >= min_members:
            most = (int(lengths[members].min()) - 1) // block_size
            same = (block_tables[members, :most] == block_tables[members[0], :most]).all(axis=0)
            found.append(PrefixGroup(tuple(members), (most if same.all() else int(same.argmin())) * block_size))
    return tuple(found)
