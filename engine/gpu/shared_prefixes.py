"""Which decodes of a step read their beginning together: those whose block tables begin with the same blocks.

Sequences get a block in common through the prefix cache only, whose names begin with the namespace: no group has
members of two namespaces. A running sequence's blocks stay what they are, so a group changes when somebody comes or
leaves, and only who is new is looked at then.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.gpu.shapes import shapes_of
from engine.models.config import ModelConfig
from engine.scheduler import Chunk, StepPlan
from engine.sequence import Sequence
from kernels.paged_attention import MIN_MEMBERS, MIN_TOKENS, PrefixGroup, may_group, pays

LEAST_DECODES = 8  # of a step, for groups
_SAMPLE = 8  # members whose next blocks are looked at, for a sign that most of them share more


@dataclass(eq=False, slots=True)
class Beginning:
    """A table of blocks to compare others with: that of a sequence that had it first, running or gone.

    ``num_members``: so many, if nobody has come since, are a group that shares ``num_tokens``.
    """

    blocks: list[int]
    num_placed: int = 0  # ever
    num_members: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Place:
    """Where a running sequence stands: its table has ``num_shared`` blocks in common with ``beginning``."""

    num_preemptions: int
    beginning: Beginning
    num_shared: int


def may_share(model: ModelConfig, config: EngineConfig) -> bool:
    """Whether steps can have groups: in one, a row's last bits depend on who shares the step."""
    attention = model.attention
    fits = may_group(attention.num_heads, attention.num_kv_heads, attention.sliding_window)
    return fits and not shapes_of(config).is_fixed


class SharedPrefixes:
    """Finds the groups of steps, one after the other. Not thread-safe.

    ``token_bytes``: keys and values of a token in one layer.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, token_bytes: int) -> None:
        self._may_share = may_share(model, config)
        self._block_size, self._token_bytes = config.block_size, token_bytes
        self._least = -(-MIN_TOKENS // config.block_size)
        self._places: dict[int, Place] = {}  # of the sequences that the last step decoded
        self._beginnings: dict[tuple[int, ...], list[Beginning]] = {}  # by their first blocks
        self._groups: tuple[PrefixGroup, ...] = ()

    def groups(self, plan: StepPlan) -> tuple[PrefixGroup, ...]:
        """Of the plan's chunks, by their numbers, where it pays. To be asked for every plan, in order."""
        if self._may_share and not plan.is_next:
            found = tuple(self._find(plan.chunks)) if len(plan.chunks) >= LEAST_DECODES else ()
            self._groups = found if pays(found, self._token_bytes) else ()
        return self._groups

    def _find(self, chunks: Many[Chunk]) -> Iterator[PrefixGroup]:
        families = self._families(chunks)
        while families:
            beginning, family = families.popitem()
            if len(family) < MIN_MEMBERS:
                continue
            if len(family) == beginning.num_members:
                yield PrefixGroup(tuple(family), beginning.num_tokens)
                continue
            num_blocks, members = _largest_saving(family, self._places, chunks)
            apart = _who_share_more(members, num_blocks, chunks)
            others = [row for row in family if row not in apart] if apart else sorted({*family}.difference(members))
            if apart:  # what they are compared with is of somebody else, or gone
                families[beginning] = others
                families[self._move(apart, chunks)] = apart
            else:
                seen = min(chunks[row].start for row in members) // self._block_size
                beginning.num_tokens = min(num_blocks, seen) * self._block_size
                beginning.num_members = 0 if others else len(members)
                yield PrefixGroup(tuple(members), beginning.num_tokens)
                if len(others) >= MIN_MEMBERS:
                    families[self._move(others, chunks)] = others

    def _families(self, chunks: Many[Chunk]) -> dict[Beginning, list[int]]:
        """The numbers of the decodes that are long enough, by the beginning that they are compared with. (Looks at
        every decode: no calls that can be spared.)"""
        known, places, least_tokens = self._places, {}, self._least * self._block_size
        families: dict[Beginning, list[int]] = {}
        alone: list[tuple[Beginning, int]] = []
        for row, chunk in enumerate(chunks):
            if chunk.start < least_tokens or chunk.num_tokens > 1 or not chunk.samples:
                continue
            sequence = chunk.sequence
            seq_id = sequence.seq_id
            place = known.get(seq_id)
            if place is None or place.num_preemptions != sequence.num_preemptions:
                place = self._place(sequence)
            places[seq_id] = place
            beginning = place.beginning
            if beginning.num_placed == 1:
                alone.append((beginning, row))
            elif beginning in families:
                families[beginning].append(row)
            else:
                families[beginning] = [row]
        for beginning, row in alone:
            if beginning.num_placed > 1:  # somebody came behind it
                insort(families[beginning], row)
        self._places = places
        if len(self._beginnings) > 2 * len(places) + 64:
            self._forget_the_gone()
        return families

    def _place(self, sequence: Sequence) -> Place:
        """Beside the beginning with which it has most in common."""
        table = sequence.block_table
        similar = self._beginnings.setdefault(tuple(table[: self._least]), [])
        if not similar:
            similar.append(Beginning(list(table)))
        best = max(similar, key=lambda beginning: num_common(beginning.blocks, table))
        best.num_placed += 1
        best.num_members = 0
        return Place(sequence.num_preemptions, best, num_common(best.blocks, table))

    def _move(self, rows: list[int], chunks: Many[Chunk]) -> Beginning:
        """From now on they are compared with the first of them."""
        beginning = Beginning(list(chunks[rows[0]].sequence.block_table), len(rows))
        self._beginnings.setdefault(tuple(beginning.blocks[: self._least]), []).append(beginning)
        for row in rows:
            sequence = chunks[row].sequence
            shared = num_common(beginning.blocks, sequence.block_table)
            self._places[sequence.seq_id] = Place(sequence.num_preemptions, beginning, shared)
        return beginning

    def _forget_the_gone(self) -> None:
        self._beginnings = {}
        for beginning in {place.beginning: None for place in self._places.values()}:
            self._beginnings.setdefault(tuple(beginning.blocks[: self._least]), []).append(beginning)


def num_common(one: list[int], other: list[int]) -> int:
    """How many blocks two tables begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _largest_saving(family: list[int], places: dict[int, Place], chunks: Many[Chunk]) -> tuple[int, list[int]]:
    """The blocks, and the members that have these in common with their beginning, that spare most reads."""
    shared = [places[chunks[row].sequence.seq_id].num_shared for row in family]
    best = best_saving = num_members = 0
    for num_blocks, count in sorted(Counter(shared).items(), reverse=True):
        num_members += count
        saving = (num_members - 1) * num_blocks
        if num_members >= MIN_MEMBERS and saving > best_saving:
            best, best_saving = num_blocks, saving
    return best, [row for row, num_blocks in zip(family, shared, strict=True) if num_blocks >= best > 0]


def _who_share_more(members: list[int], num_blocks: int, chunks: Many[Chunk]) -> list[int]:
    """At least half of the members, and enough for a group, if they have the next block in common too; else nobody."""
    some = members[:: -(-len(members) // _SAMPLE)]
    if len({_block(chunks[row], num_blocks) for row in some}) == len(some):
        return []
    next_blocks = {row: _block(chunks[row], num_blocks) for row in members}
    block, count = Counter(next_blocks.values()).most_common(1)[0]
    if block < 0 or count < max(MIN_MEMBERS, len(members) // 2):
        return []
    return [row for row, own in next_blocks.items() if own == block]


def _block(chunk: Chunk, index: int) -> int:
    """-1: there is none."""
    table = chunk.sequence.block_table
    return table[index] if index < len(table) else -1
