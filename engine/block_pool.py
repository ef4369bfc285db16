"""Which KV blocks are free, in use, or only kept for reuse. Numbers only: the runner owns the memory."""

from collections import OrderedDict
from collections.abc import Callable, Iterable


def _nobody(_block: int) -> None:
    return None


class BlockPool:
    """``num_blocks`` blocks with reference counts; every operation is O(1) a block.

    A block is *used* (someone holds it), *cached* (nobody holds it, its content may be found again) or *free*.
    ``allocate`` takes free blocks first, then the cached one that was released longest ago; ``on_evict`` is told
    before a cached block is given away, so that it is never found again with another's content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _nobody
        self.num_reused = 0  # retains of a block through the prefix cache, ever
        self._references = [0] * num_blocks
        self._findable = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds: retaining them takes that many from the available ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, each held once. The caller has looked at ``num_available``."""
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def retain(self, block: int) -> None:
        """Another holder of a block that was found in the prefix cache."""
        assert self._findable[block], f"block {block} is in no cache"
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1
        self.num_reused += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up a table of blocks, last one first: heads of prefixes are evicted after their tails."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} is released more often than held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._rest(block)

    def set_findable(self, block: int, findable: bool) -> None:
        """The prefix cache says whether the content of a block can be found."""
        if self._findable[block] == findable:
            return
        self._findable[block] = findable
        if self._references[block] == 0 and not findable:
            del self._cached[block]
            self._free.append(block)

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Asserts that ``tables`` hold exactly the references counted, and that each block is in one state."""
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from the tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            states = (counted[block] > 0, block in cached, block in free)
            assert sum(states) == 1, f"block {block}: used, cached, free = {states}"
            assert not (block in free and self._findable[block]), f"free block {block} can be found"
            assert block not in cached or self._findable[block], f"cached block {block} can't be found"

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.on_evict(block)
            self._findable[block] = False
        self._references[block] = 1
        return block

    def _rest(self, block: int) -> None:
        if self._findable[block]:
            self._cached[block] = None
        else:
            self._free.append(block)
