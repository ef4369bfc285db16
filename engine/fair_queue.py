"""Whose turn it is: classes first, then flows of a class, then first come, first served. Pure, deterministic.

Virtual counters after VTC (Sheng et al., arXiv 2401.00588), on two levels: each class and each flow has a counter
of the tokens it was served, scaled by its weight; the smallest counter among those with waiting sequences is next.
Who comes back to wait is lifted to those who wait already or, when all other work is running, to those who run: an
idle time is no credit. Charges are never given back.
"""

import heapq
from collections.abc import Callable

from engine.sequence import CLASS_RANK, Sequence

CLASS_WEIGHTS = {"interactive": 8, "standard": 4, "batch": 1}
SCALE = 1 << 16  # counters are integers: tokens × SCALE ÷ weight
MAX_IDLE = 4096  # accounts without work that are remembered because they are ahead


class Account:
    """One competitor's counter; ``num_work`` counts its sequences that wait or run."""

    __slots__ = ("counter", "key", "num_work", "order", "queued", "waiting", "weight")

    def __init__(self, key: str, order: int, counter: int) -> None:
        self.key = key
        self.order = order  # breaks ties: who is known longer
        self.counter = counter
        self.weight = 1
        self.num_work = 0
        self.waiting = False
        self.queued: set[str] = set()  # heaps that hold an entry of this account

    def charge(self, num_tokens: int) -> None:
        """It is served so many. Whole numbers: less than 1/SCALE of a token is lost at a time."""
        self.counter += num_tokens * SCALE // self.weight


class _LazyHeap:
    """Accounts by counter. Counters only grow, so an entry's number is a lower bound and is corrected when it
    comes to the top; an account that no longer belongs is dropped there. One entry an account: O(log n)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: list[tuple[int, int, Account]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, account: Account) -> None:
        if self._name not in account.queued:
            account.queued.add(self._name)
            heapq.heappush(self._entries, (account.counter, account.order, account))

    def pop(self) -> None:
        account = heapq.heappop(self._entries)[2]
        account.queued.discard(self._name)

    def top(self) -> Account | None:
        """The account with the smallest counter; the caller says with ``pop`` when it doesn't belong."""
        while self._entries:
            counter, order, account = self._entries[0]
            if counter == account.counter:
                return account
            heapq.heapreplace(self._entries, (account.counter, order, account))
        return None

    def prune(self, belongs: Callable[[Account], bool]) -> None:
        """Drops all that don't belong, also below the top."""
        for _counter, _order, account in self._entries:
            if not belongs(account):
                account.queued.discard(self._name)
        self._entries = [entry for entry in self._entries if self._name in entry[2].queued]
        heapq.heapify(self._entries)


class Turns:
    """One level of competition: accounts, of which some wait.

    ``join``/``leave`` bracket each sequence's life (waiting or running), ``wait``/``rest`` say whether an account
    has a waiting one. Accounts without work are forgotten as soon as a newcomer would start no lower than they
    stand: nobody gains by being forgotten.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._waiting, self._working, self._idle = _LazyHeap("waiting"), _LazyHeap("working"), _LazyHeap("idle")
        self._num_work = 0
        self._num_made = 0
        self._floor = 0  # newcomers start here; never falls
        self._last_left: Account | None = None  # whose waiting ended last

    def __len__(self) -> int:
        return len(self._accounts)

    def join(self, key: str, weight: int) -> Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(key, self._num_made, self._floor)
            self._num_made += 1
        account.weight = weight
        account.num_work += 1
        self._num_work += 1
        self._working.push(account)
        return account

    def leave(self, account: Account) -> None:
        account.num_work -= 1
        self._num_work -= 1
        assert account.num_work >= 0, f"{account.key} leaves more often than it joined"
        if self._num_work == 0:
            self._start_anew()
        elif account.num_work == 0:
            self._idle.push(account)
            self._forget_idle()
            self._prune()

    def wait(self, account: Account, *, arrived: bool) -> None:
        """The account has a waiting sequence. ``arrived``: a new one, not one that gave way."""
        if account.waiting:
            return
        if arrived:
            self._floor = max(self._floor, self._level(account))
            account.counter = max(account.counter, self._floor)
            self._forget_idle()
        account.waiting = True
        self._waiting.push(account)

    def rest(self, account: Account) -> None:
        account.waiting = False
        self._last_left = account

    def first(self) -> Account | None:
        """Who is next among the waiting."""
        while (account := self._waiting.top()) is not None and not account.waiting:
            self._waiting.pop()
        return account

    def check_invariants(self) -> None:
        assert self._num_work == sum(account.num_work for account in self._accounts.values())
        for account in self._accounts.values():
            assert account.num_work > 0 or account.counter > self._floor or "idle" in account.queued
            assert not account.waiting or ("waiting" in account.queued and account.num_work > 0)
        bound = 2 * len(self._accounts) + 16
        assert max(len(self._waiting), len(self._working)) <= bound + self._num_work, "forgotten accounts pile up"
        assert sum(account.num_work == 0 for account in self._accounts.values()) <= MAX_IDLE

    def _level(self, account: Account) -> int:
        """Where somebody who comes to wait is lifted to: the least served of the waiting others; without any, the
        least served of the working others, and no lower than the one whose waiting ended last."""
        first = self.first()
        if first is not None:
            return first.counter
        others = self._least_working(account)
        last = self._last_left if self._last_left is not account else None
        return max(others.counter if others else 0, last.counter if last and last.num_work else 0)

    def _least_working(self, account: Account) -> Account | None:
        put_back = False
        while (least := self._working.top()) is not None and (least is account or not least.num_work):
            put_back |= least is account
            self._working.pop()
        if put_back:
            self._working.push(account)
        return least

    def _forget_idle(self) -> None:
        while (account := self._idle.top()) is not None:
            if not account.num_work:
                if account.counter > self._floor and len(self._idle) <= MAX_IDLE:
                    return
                self._floor = max(self._floor, account.counter)
                del self._accounts[account.key]
            self._idle.pop()

    def _prune(self) -> None:
        """Keeps the heaps in proportion to the accounts; amortised O(1) a sequence."""
        bound = 2 * len(self._accounts) + 16
        if len(self._working) > bound:
            self._working.prune(lambda account: account.num_work > 0)
        if len(self._waiting) > bound:
            self._waiting.prune(lambda account: account.waiting)

    def _start_anew(self) -> None:
        """Nobody has work: nobody is owed anything. Newcomers start where the most served of all stands."""
        self._floor = max(self._floor, *(account.counter for account in self._accounts.values()))
        self._accounts.clear()
        self._waiting, self._working, self._idle = _LazyHeap("waiting"), _LazyHeap("working"), _LazyHeap("idle")
        self._last_left = None


class _Line:
    """A flow's waiting sequences, oldest first; one that comes back takes its old place."""

    __slots__ = ("_order", "_waiting", "account")

    def __init__(self, account: Account) -> None:
        self.account = account
        self._waiting: dict[int, Sequence] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._waiting, f"{sequence} waits twice"
        self._waiting[sequence.seq_id] = sequence
        heapq.heappush(self._order, sequence.seq_id)

    def pop(self) -> Sequence:
        while True:
            sequence = self._waiting.pop(heapq.heappop(self._order), None)
            if sequence is not None:
                return sequence

    def discard(self, seq_id: int) -> bool:
        if self._waiting.pop(seq_id, None) is None:
            return False
        if len(self._order) > 2 * len(self._waiting) + 8:
            self._order = sorted(self._waiting)
        return True


class FairQueue:
    """The waiting sequences of an engine. Each sequence ``join``s when it becomes work and ``leave``s when it ends;
    between, it is pushed and popped as often as it waits. Every operation is O(log of waiting + working flows)."""

    def __init__(self) -> None:
        self._classes = Turns()
        self._flows = {name: Turns() for name in CLASS_RANK}
        self._lines: dict[tuple[str, str], _Line] = {}
        self._members: dict[int, tuple[Account, Account]] = {}  # seq_id → its class's and its flow's account
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def num_members(self) -> int:
        """Sequences that joined and have not left."""
        return len(self._members)

    def join(self, sequence: Sequence) -> None:
        flow = sequence.request.submit.flow
        members = (
            self._classes.join(flow.flow_class, CLASS_WEIGHTS[flow.flow_class]),
            self._flows[flow.flow_class].join(flow.key, max(1, flow.weight)),
        )
        self._members[sequence.seq_id] = members

    def leave(self, sequence: Sequence) -> None:
        in_class, in_flow = self._members.pop(sequence.seq_id)
        self._flows[in_class.key].leave(in_flow)
        self._classes.leave(in_class)

    def push(self, sequence: Sequence, *, arrived: bool) -> None:
        """The sequence waits. ``arrived``: for the first time, so that its flow is lifted if it comes back."""
        in_class, in_flow = self._members[sequence.seq_id]
        self._flows[in_class.key].wait(in_flow, arrived=arrived)
        self._classes.wait(in_class, arrived=arrived)
        name = (in_class.key, in_flow.key)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(in_flow)
        line.push(sequence)
        self._length += 1

    def pop(self) -> Sequence | None:
        """Takes out the sequence whose turn it is. It may be pushed back, and is then charged nothing."""
        in_class = self._classes.first()
        if in_class is None:
            return None
        in_flow = self._flows[in_class.key].first()
        assert in_flow is not None, f"class {in_class.key} waits without a flow"
        sequence = self._lines[in_class.key, in_flow.key].pop()
        self._taken(in_class, in_flow)
        return sequence

    def discard(self, sequence: Sequence) -> bool:
        """Takes a sequence out wherever it stands; False when it doesn't wait here."""
        members = self._members.get(sequence.seq_id)
        line = self._lines.get((members[0].key, members[1].key)) if members else None
        if members is None or line is None or not line.discard(sequence.seq_id):
            return False
        self._taken(*members)
        return True

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence is served ``num_tokens``, waiting or running."""
        for account in self._members[sequence.seq_id]:
            account.charge(num_tokens)

    def charge_each(self, sequences: list[Sequence]) -> None:
        """Each of them is served one token: as ``charge`` of each, without its calls."""
        members = self._members
        for sequence in sequences:
            in_class, in_flow = members[sequence.seq_id]
            in_class.counter += SCALE // in_class.weight
            in_flow.counter += SCALE // in_flow.weight

    def check_invariants(self) -> None:
        assert self._length == sum(len(line) for line in self._lines.values())
        assert all(len(line) for line in self._lines.values()), "an empty line is kept"
        for turns in (self._classes, *self._flows.values()):
            turns.check_invariants()
        for (flow_class, _key), line in self._lines.items():
            assert line.account.waiting, f"a line of {flow_class} waits for no turn"

    def _taken(self, in_class: Account, in_flow: Account) -> None:
        self._length -= 1
        name = (in_class.key, in_flow.key)
        if self._lines[name]:
            return
        del self._lines[name]
        flows = self._flows[in_class.key]
        flows.rest(in_flow)
        if flows.first() is None:
            self._classes.rest(in_class)
