"""How usage records lie in files: what an engine's journal writes, and what an auditor reads, apart from the engine.

A folder holds ``journal.log`` (the file that grows), sealed segments ``journal-<first number>.log`` before it,
``journal.ack`` (how far the ledger has them) and ``journal.base`` (behind which record the oldest file begins, once
old segments were deleted). Entries are a fixed header and a payload. An entry's hash is SHA-256(hash of the entry
before ‖ payload ‖ number), through all files: no record can be changed, dropped or moved unseen. Entries written
together are a group with one fsync; the first carries another magic. Only the last group of ``journal.log`` may be
unfinished. A file may begin with entries that the one before ends with: they were not acknowledged when it was sealed.
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct(">4sQI32s32s")  # magic, number, payload bytes, hash before, hash
HEADER_BYTES = _HEADER.size
_FIRST_OF_GROUP, _IN_GROUP = b"TJr1", b"TJr+"
_MARK = struct.Struct(">Q32s")
MAX_PAYLOAD_BYTES = 1 << 20
LOG, ACK, BASE, SEALED = "journal.log", "journal.ack", "journal.base", "journal-{:020d}.log"
_READ_ATTEMPTS = 5


class JournalCorrupt(Exception):
    """The chain is broken before its end: record ``number`` is missing or was changed."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"journal record {number}: {why}")
        self.number = number


class Mark(NamedTuple):
    """A place on the chain: the number and hash of a record."""

    number: int
    hash: bytes


GENESIS = Mark(0, bytes(32))


class Entry(NamedTuple):
    """A record as it lies in a file; ``end`` is the offset behind it."""

    number: int
    before: bytes
    hash: bytes
    payload: bytes
    end: int

    @property
    def mark(self) -> Mark:
        return Mark(self.number, self.hash)

    def check_follows(self, last: Mark) -> None:
        """Raises JournalCorrupt."""
        if self.number != last.number + 1:
            raise JournalCorrupt(last.number + 1, f"is missing: {self.number} follows {last.number}")
        if self.before != last.hash:
            raise JournalCorrupt(self.number, "does not continue the chain")


def pack(payload: bytes, last: Mark, *, first_of_group: bool) -> tuple[bytes, Mark]:
    """The entry behind ``last``, as bytes and as the new end of the chain."""
    assert len(payload) <= MAX_PAYLOAD_BYTES
    number = last.number + 1
    digest = _chain(last.hash, payload, number)
    magic = _FIRST_OF_GROUP if first_of_group else _IN_GROUP
    return _HEADER.pack(magic, number, len(payload), last.hash, digest) + payload, Mark(number, digest)


def payload_bytes(header: bytes) -> int:
    return _HEADER.unpack(header)[2]


def before_of(header: bytes) -> Mark:
    """What lies before the entry that has this header."""
    _, number, _, before, _ = _HEADER.unpack_from(header)
    return Mark(number - 1, before)


def parse(data: bytes, offset: int) -> Entry | None:
    """The entry at ``offset`` if it is whole and its own hash holds."""
    if offset + _HEADER.size > len(data):
        return None
    magic, number, num_bytes, before, digest = _HEADER.unpack_from(data, offset)
    end = offset + _HEADER.size + num_bytes
    if magic not in (_FIRST_OF_GROUP, _IN_GROUP) or num_bytes > MAX_PAYLOAD_BYTES or end > len(data):
        return None
    payload = data[end - num_bytes : end]
    if _chain(before, payload, number) != digest:
        return None
    return Entry(number, before, digest, payload, end)


def parse_all(data: bytes) -> Iterator[Entry]:
    """A file's whole entries, each following the one before. Raises JournalCorrupt, also when whole groups lie behind
    a broken entry: then that one had been made durable."""
    offset, last = 0, None
    while offset < len(data) and (entry := parse(data, offset)) is not None:
        if last is not None:
            entry.check_follows(last)
        yield entry
        offset, last = entry.end, entry.mark
    if _group_starts_after(data, offset):
        raise JournalCorrupt(last.number + 1 if last else 1, "was changed or cut out: whole groups follow it")


def pack_mark(mark: Mark) -> bytes:
    state = _MARK.pack(*mark)
    return state + hashlib.sha256(state).digest()


def read_mark(path: Path) -> Mark:
    """A saved mark; the chain's beginning when there is none or it doesn't verify: then records come again."""
    data = path.read_bytes() if path.exists() else b""
    state, digest = data[: _MARK.size], data[_MARK.size :]
    if len(state) != _MARK.size or hashlib.sha256(state).digest() != digest:
        return GENESIS
    return Mark(*_MARK.unpack(state))


def sealed_files(folder: Path) -> list[Path]:
    """Oldest first: their names sort as their numbers."""
    return sorted(folder.glob("journal-*.log"))


class JournalReader:
    """An engine's records, read while it may be writing. ``acked`` is as of the construction: those records were in
    the ledger then. ``base`` and ``head`` are the chain's ends, once ``entries`` has been read through."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._folder = folder
        self.acked = read_mark(folder / ACK)
        self.base = self.head = GENESIS

    def entries(self) -> Iterator[Entry]:
        """Every record that is kept, in order, once. Raises JournalCorrupt, OSError."""
        self.base, files = self._consistent_files()
        self.head = self.base
        for number, path in enumerate(files, 1):
            data = path.read_bytes() if isinstance(path, Path) else path
            yield from self._new_entries(data, is_last=number == len(files))
        if self.head.number < self.acked.number:
            raise JournalCorrupt(self.head.number + 1, f"is missing though {self.acked.number} was acknowledged")

    def unacknowledged(self) -> list[Entry]:
        """What the ledger may lack; segments are sealed only as far as it has them. Raises JournalCorrupt, OSError."""
        log = self._folder / LOG
        found = parse_all(log.read_bytes()) if log.exists() else ()
        return [entry for entry in found if entry.number > self.acked.number]

    def _new_entries(self, data: bytes, is_last: bool) -> Iterator[Entry]:
        end = 0
        for entry in parse_all(data):
            end = entry.end
            if entry.number <= self.head.number:
                self._check_known(entry)
                continue
            entry.check_follows(self.head)
            self.head = entry.mark
            self._check_known(entry)
            yield entry
        if end < len(data) and not is_last:
            raise JournalCorrupt(self.head.number + 1, "was cut off in a sealed segment")

    def _check_known(self, entry: Entry) -> None:
        for mark, what in ((self.head, "was there before"), (self.acked, "was acknowledged")):
            if entry.number == mark.number and entry.hash != mark.hash:
                raise JournalCorrupt(entry.number, f"is not the record that {what}")

    def _consistent_files(self) -> tuple[Mark, list[Path | bytes]]:
        """The growing file first: should it be sealed meanwhile, its records only come twice."""
        for _ in range(_READ_ATTEMPTS):
            log = self._folder / LOG
            growing = log.read_bytes() if log.exists() else b""
            sealed = sealed_files(self._folder)
            base = read_mark(self._folder / BASE)
            if all(path.exists() for path in sealed):
                return base, [*sealed, growing]
        raise OSError(f"the journal {self.name} changes faster than it can be read")


def _chain(before: bytes, payload: bytes, number: int) -> bytes:
    return hashlib.sha256(before + payload + number.to_bytes(8, "big")).digest()


def _group_starts_after(data: bytes, offset: int) -> bool:
    while (offset := data.find(_FIRST_OF_GROUP, offset + 1)) >= 0:
        if parse(data, offset) is not None:
            return True
    return False
