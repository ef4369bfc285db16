"""Finds blocks whose keys and values were computed for the same tokens in the same namespace.

A block's name is a SHA-256 over the name before it and its own tokens; the chain starts from the namespace,
length-prefixed and tagged. Equal names therefore mean equal namespace and equal tokens from position 0 on; a
block of another tenant, adapter version or model can't be found. Only full, computed blocks are published.
"""

import hashlib
from array import array

from engine.block_pool import BlockPool
from engine.sequence import Sequence


class PrefixCache:
    """Names of blocks ↔ blocks of one pool. Holds no reference: a block that nobody uses stays evictable."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks, in order, of the longest known prefix; never all known tokens, since the last one is to be
        computed to draw the next. Takes no reference. A leader whose prompt is to be scored matches nothing."""
        if sequence.wants_scores:
            return []
        found: list[int] = []
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            block = self._block_of.get(self._name(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the full blocks of the first ``num_tokens`` findable, which are computed and known. Where two sequences
        computed the same, the first block stays the known one."""
        for index in range(sequence.num_published_blocks, num_tokens // self._block_size):
            name, block = self._name(sequence, index), sequence.block_table[index]
            if name not in self._block_of:
                assert block not in self._name_of, f"block {block} already has another name"
                self._block_of[name] = block
                self._name_of[block] = name
                self._pool.set_findable(block, True)
            sequence.num_published_blocks = index + 1

    def forget(self, block: int) -> None:
        """The block will get another content."""
        del self._block_of[self._name_of.pop(block)]

    def check_invariants(self) -> None:
        assert len(self._block_of) == len(self._name_of)
        for name, block in self._block_of.items():
            assert self._name_of[block] == name, f"block {block} has two names"

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """Name of the block of full tokens ``index``; computed once a sequence, kept over preemptions."""
        names = sequence.block_hashes
        while len(names) <= index:
            parent = names[-1] if names else namespace_root(sequence.request.submit.cache_namespace)
            start = len(names) * self._block_size
            tokens = array("i", sequence.token_ids[start : start + self._block_size])
            names.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return names[index]


def namespace_root(namespace: bytes) -> bytes:
    """Where the chain of a namespace starts: 32 bytes."""
    return hashlib.sha256(b"tenora-kv-1" + len(namespace).to_bytes(4, "little") + namespace).digest()
