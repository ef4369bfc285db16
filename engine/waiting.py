"""Who waits, and for what: a turn, an adapter, or the leader of its prompt. Pure."""

from collections.abc import Iterator

from engine.adapter_pool import AdapterPool
from engine.fair_queue import FairQueue
from engine.sequence import CLASS_RANK, Sequence, SequenceStatus


class WaitingRoom:
    """Every waiting sequence, each in exactly one place.

    *Queued*: all it needs can be had, the fair queue says when. *Parked*: its adapter's weights are nowhere here;
    it is no work until they come, so that its flow saves up nothing meanwhile. *Following*: a choice whose prompt
    another choice, the leader, computes first.
    """

    def __init__(self, adapters: AdapterPool) -> None:
        self.queue = FairQueue()
        self.num_sequences = dict.fromkeys(CLASS_RANK, 0)
        self.num_tokens = 0  # known tokens of the waiting
        self.num_of_adapter: dict[str, int] = {}  # waiting sequences, by adapter
        self._adapters = adapters
        self._parked: dict[str, dict[int, Sequence]] = {}
        self._followers: dict[int, dict[int, Sequence]] = {}  # leader's seq_id → its followers
        self._wanted: list[str] = []

    @property
    def can_move(self) -> bool:
        """A step could do something about it; parked sequences alone wait for somebody else."""
        return bool(len(self.queue) or self._wanted)

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def add(self, sequences: list[Sequence]) -> None:
        """All choices of a request, each leader before its followers."""
        leader = None
        for sequence in sequences:
            self._count(sequence, 1)
            if sequence.is_leader:
                leader = sequence
                self._enqueue(sequence)
            else:
                assert leader is not None, f"{sequence} has no leader"
                self._followers.setdefault(leader.seq_id, {})[sequence.seq_id] = sequence

    def pop(self) -> Sequence | None:
        """Whose turn it is; ``push_back``, ``park``, ``admit`` or ``drop`` must follow."""
        return self.queue.pop()

    def push_back(self, sequences: list[Sequence]) -> None:
        """They were looked at, don't fit yet, and keep their places."""
        for sequence in sequences:
            self.queue.push(sequence, arrived=False)

    def admit(self, sequence: Sequence) -> None:
        """A popped one runs now; it stays work of its flow."""
        self._count(sequence, -1)
        sequence.status = SequenceStatus.RUNNING

    def give_way(self, sequence: Sequence) -> None:
        """A running one waits again, in its old place of its flow."""
        sequence.status = SequenceStatus.WAITING
        self._count(sequence, 1)
        self.queue.push(sequence, arrived=False)

    def park(self, sequence: Sequence) -> None:
        """A popped one turns out to lack its adapter."""
        self.queue.leave(sequence)
        self._park(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Takes out a waiting sequence, popped or not."""
        self._count(sequence, -1)
        if not (self._take(self._parked, sequence.adapter_key, sequence) or self._take_follower(sequence)):
            self.queue.discard(sequence)
            self.queue.leave(sequence)

    def free_followers(self, leader: Sequence) -> None:
        """The leader's prompt is computed, or never will be."""
        for sequence in self._followers.pop(leader.seq_id, {}).values():
            self._enqueue(sequence)

    def adapter_ready(self, key: str) -> None:
        """A host copy is there: who waited for it queues."""
        for sequence in self._parked.pop(key, {}).values():
            self._enqueue(sequence)

    def parked(self, key: str) -> list[Sequence]:
        return list(self._parked.get(key, {}).values())

    def take_wanted(self) -> list[str]:
        """Adapters that somebody has begun to wait for since the last call, and that somebody still waits for."""
        wanted, self._wanted = [key for key in self._wanted if key in self._parked], []
        return wanted

    def sequences(self) -> Iterator[Sequence]:
        """All but the queued ones; for invariants."""
        for group in (*self._parked.values(), *self._followers.values()):
            yield from group.values()

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.adapter_key and not self._adapters.is_resident(sequence.adapter_key):
            self._park(sequence)
            return
        self.queue.join(sequence)
        self.queue.push(sequence, arrived=True)

    def _park(self, sequence: Sequence) -> None:
        if sequence.adapter_key not in self._parked:
            self._wanted.append(sequence.adapter_key)
        self._parked.setdefault(sequence.adapter_key, {})[sequence.seq_id] = sequence

    def _take_follower(self, sequence: Sequence) -> bool:
        leader = sequence.request.sequences[sequence.prompt_index * sequence.request.submit.num_choices]
        return self._take(self._followers, leader.seq_id, sequence)

    @staticmethod
    def _take(groups: dict, name: str | int, sequence: Sequence) -> bool:
        group = groups.get(name, {})
        if group.pop(sequence.seq_id, None) is None:
            return False
        if not group:
            del groups[name]
        return True

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_sequences[sequence.request.submit.flow.flow_class] += sign
        self.num_tokens += sign * len(sequence.token_ids)
        key = sequence.adapter_key
        if key:
            self.num_of_adapter[key] = self.num_of_adapter.get(key, 0) + sign
            if not self.num_of_adapter[key]:
                del self.num_of_adapter[key]
