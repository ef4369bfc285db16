"""The usage journal: append-only, numbered, hash-chained records that survive a crash, and how far they are acked.

How records lie in the files is ``wire/journal.py``'s, which auditors read too. Only a group that never reached the
disk whole may be cut off at the next open: anything else that doesn't verify is corruption.

What is acknowledged is kept: a log grown over ``segment_bytes`` is sealed, and goes on in a new file that begins with
what was not acknowledged yet. Sealed segments are deleted when they are older or larger than ``Keep`` says.

Blocking file work: ``append``, ``save_ack`` and opening belong to one writer thread; ``entries``, ``acknowledge``
and the numbers may be used from another.
"""

import os
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

from engine.journal.segments import Keep, Segments, replace_file, sync_folder, write_at
from engine.wire import Record
from engine.wire.journal import (
    ACK,
    HEADER_BYTES,
    LOG,
    Entry,
    JournalCorrupt,
    Mark,
    pack,
    pack_mark,
    parse,
    parse_all,
    payload_bytes,
    read_mark,
)

SEGMENT_BYTES = 16 << 20


class Journal:
    """One engine's records. Raises JournalCorrupt at construction, OSError when the disk refuses."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, keep: Keep = Keep()) -> None:  # noqa: B008
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG
        self._ack_path = folder / ACK
        self._segment_bytes = segment_bytes
        self._segments = Segments(folder, keep)
        self._lock = threading.Lock()  # guards the file's identity and offsets, never held over a write
        data = self._path.read_bytes() if self._path.exists() else b""
        self._acked = max(read_mark(self._ack_path), self._segments.acked_before(data))
        entries = _verify(data, self._acked)
        self._size = entries[-1].end if entries else 0
        self._last = entries[-1].mark if entries else self._acked
        self._first = entries[0].number if entries else self._acked.number + 1
        self._offsets = array("Q", [0, *(entry.end for entry in entries)])[: len(entries)]
        self.torn_bytes = len(data) - self._size
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        sync_folder(folder)

    @property
    def last(self) -> int:
        """Number of the newest record on disk; 0 = none ever."""
        return self._last.number

    @property
    def acked(self) -> int:
        """Number up to which the ledger has the records."""
        return self._acked.number

    @property
    def size_bytes(self) -> int:
        """Of the log that grows."""
        return self._size

    def append(self, payloads: Sequence[bytes]) -> None:
        """Writes one group and makes it durable. On OSError nothing of it is kept: the same call may be repeated."""
        if self._size > self._segment_bytes and self.acked >= self._first:
            self._seal()
        last, offset = self._last, self._size
        offsets, chunks = array("Q"), []
        for payload in payloads:
            chunk, last = pack(payload, last, first_of_group=not offsets)
            offsets.append(offset)
            chunks.append(chunk)
            offset += len(chunk)
        self._write(b"".join(chunks))
        with self._lock:
            self._offsets += offsets
            self._last, self._size = last, offset

    def entries(self, after: int, limit: int) -> list[Record]:
        """Durable records ``after + 1`` … in order, at most ``limit``; of what was acknowledged only the newest."""
        with self._lock:
            start = max(after + 1, self._first)
            stop = min(start + limit, self.last + 1)
            found = (self._read(number) for number in range(start, stop))
            return [Record(entry.number, entry.hash, entry.payload) for entry in found]

    def acknowledge(self, number: int, digest: bytes) -> bool:
        """Moves the cursor up to ``number`` if that record's hash is ``digest``. False: no such record, nothing
        moved. True for what was acknowledged before. ``save_ack`` makes it durable."""
        with self._lock:
            if number <= self.acked:
                return True
            if number > self.last or self._read(number).hash != digest:
                return False
            self._acked = Mark(number, digest)
            return True

    def save_ack(self) -> None:
        """Makes the cursor durable. If that is lost, records come twice, which the ledger ignores."""
        with self._lock:
            acked = self._acked
        os.close(replace_file(self._ack_path, pack_mark(acked)))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            write_at(self._file, data, self._size)
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise

    def _read(self, number: int) -> Entry:
        offset = self._offsets[number - self._first]
        header = os.pread(self._file, HEADER_BYTES, offset)
        payload = os.pread(self._file, payload_bytes(header), offset + HEADER_BYTES)
        entry = parse(header + payload, 0)
        if entry is None or entry.number != number:
            raise JournalCorrupt(number, "changed on disk since it was written")
        return entry

    def _seal(self) -> None:
        """The log becomes a segment; a new one begins with what isn't acknowledged, if that is the lesser part.
        Writer thread only. A disk that refuses leaves it as it is, to be tried at the next append."""
        with self._lock:
            acked = self._acked
        kept = acked.number + 1
        start = self._size if kept > self.last else self._offsets[kept - self._first]
        if start < self._segment_bytes // 2:
            return
        data = os.pread(self._file, self._size - start, start)
        try:
            self.save_ack()
            self._segments.seal(self._first)
            fresh = replace_file(self._path, data)
        except OSError:
            return
        with self._lock:
            sealed, self._file = self._file, fresh
            self._offsets = array("Q", (offset - start for offset in self._offsets[kept - self._first :]))
            self._first, self._size = kept, len(data)
        os.close(sealed)
        self._segments.prune(acked)


def _verify(data: bytes, acked: Mark) -> list[Entry]:
    """Entries of the log, without their payloads. Raises JournalCorrupt."""
    entries: list[Entry] = []
    for entry in parse_all(data):
        if not entries and entry.number > acked.number:
            entry.check_follows(acked)
        if entry.number == acked.number and entry.hash != acked.hash:
            raise JournalCorrupt(acked.number, "is not the record that was acknowledged")
        entries.append(entry._replace(payload=b""))
    if entries and entries[-1].number < acked.number:
        raise JournalCorrupt(entries[-1].number + 1, f"is missing though {acked.number} was acknowledged")
    return entries
