"""The usage journal: append-only, numbered, hash-chained records that survive a crash, and how far they are acked.

File ``journal.log``: entries of a fixed header and a payload. An entry's hash is
SHA-256(hash of the entry before ‖ payload ‖ number), so no record can be changed, dropped or moved unseen.
Entries written by one ``append`` are a group with one fsync; the first carries another magic. Only a group that
never reached the disk whole may be cut off at the next open: anything else that doesn't verify is corruption.

File ``journal.ack``: number and hash of the last acknowledged entry, replaced atomically. What is acknowledged
is dropped from the log when that has grown over ``max_bytes``.

Blocking file work: ``append``, ``save_ack`` and opening belong to one writer thread; ``entries``, ``acknowledge``
and the numbers may be used from another.
"""

import hashlib
import os
import struct
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.wire import Record

_HEADER = struct.Struct(">4sQI32s32s")  # magic, number, payload bytes, hash before, hash
_FIRST_OF_GROUP, _IN_GROUP = b"TJr1", b"TJr+"
_ACK = struct.Struct(">Q32s")
GENESIS = bytes(32)
MAX_PAYLOAD_BYTES = 1 << 20
DEFAULT_MAX_BYTES = 64 << 20


class JournalCorrupt(Exception):
    """The chain is broken before its end: record ``number`` is missing or was changed."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"journal record {number}: {why}")
        self.number = number


class _Entry(NamedTuple):
    number: int
    before: bytes
    hash: bytes
    payload: bytes
    first_of_group: bool
    end: int  # offset behind it

    @property
    def record(self) -> Record:
        return Record(self.number, self.hash, self.payload)


class Journal:
    """One engine's records. Raises JournalCorrupt at construction, OSError when the disk refuses."""

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "journal.log"
        self._ack_path = folder / "journal.ack"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the file's identity and offsets, never held over a write
        self._acked, self._acked_hash = _read_ack(self._ack_path)
        data = self._path.read_bytes() if self._path.exists() else b""
        entries, self._size = _verify(data, self._acked, self._acked_hash)
        self._last = entries[-1].number if entries else self._acked
        self._last_hash = entries[-1].hash if entries else self._acked_hash
        self._first = entries[0].number if entries else self._acked + 1
        self._offsets = array("Q", [0, *(entry.end for entry in entries)])[: len(entries)]
        self.torn_bytes = len(data) - self._size
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        _sync_folder(folder)

    @property
    def last(self) -> int:
        """Number of the newest record on disk; 0 = none ever."""
        return self._last

    @property
    def acked(self) -> int:
        """Number up to which the ledger has the records."""
        return self._acked

    @property
    def size_bytes(self) -> int:
        return self._size

    def append(self, payloads: Sequence[bytes]) -> None:
        """Writes one group and makes it durable. On OSError nothing of it is kept: the same call may be repeated."""
        if self._size > self._max_bytes and self._acked >= self._first:
            self._drop_acked()
        number, before, offset = self._last, self._last_hash, self._size
        offsets, chunks = array("Q"), []
        for payload in payloads:
            assert len(payload) <= MAX_PAYLOAD_BYTES
            number += 1
            digest = _chain(before, payload, number)
            magic = _IN_GROUP if offsets else _FIRST_OF_GROUP
            offsets.append(offset)
            chunks.append(_HEADER.pack(magic, number, len(payload), before, digest) + payload)
            before, offset = digest, offset + len(chunks[-1])
        self._write(b"".join(chunks))
        with self._lock:
            self._offsets += offsets
            self._last, self._last_hash, self._size = number, before, offset

    def entries(self, after: int, limit: int) -> list[Record]:
        """Durable records ``after + 1`` … in order, at most ``limit``; what was acknowledged may be gone."""
        with self._lock:
            start = max(after + 1, self._first)
            stop = min(start + limit, self._last + 1)
            return [self._read(number).record for number in range(start, stop)]

    def acknowledge(self, number: int, digest: bytes) -> bool:
        """Moves the cursor up to ``number`` if that record's hash is ``digest``. False: no such record, nothing
        moved. True for what was acknowledged before. ``save_ack`` makes it durable."""
        with self._lock:
            if number <= self._acked:
                return True
            if number > self._last or self._read(number).hash != digest:
                return False
            self._acked, self._acked_hash = number, digest
            return True

    def save_ack(self) -> None:
        """Makes the cursor durable. If that is lost, records come twice, which the ledger ignores."""
        with self._lock:
            state = _ACK.pack(self._acked, self._acked_hash)
        os.close(_replace(self._ack_path, state + hashlib.sha256(state).digest()))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            _pwrite(self._file, data, self._size)
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise

    def _read(self, number: int) -> _Entry:
        offset = self._offsets[number - self._first]
        header = os.pread(self._file, _HEADER.size, offset)
        payload = os.pread(self._file, _HEADER.unpack(header)[2], offset + _HEADER.size)
        entry = _parse(header + payload, 0)
        if entry is None or entry.number != number:
            raise JournalCorrupt(number, "changed on disk since it was written")
        return entry

    def _drop_acked(self) -> None:
        """Starts the log anew with what isn't acknowledged, if that frees half of it. Writer thread only."""
        kept = self._acked + 1
        start = self._size if kept > self._last else self._offsets[kept - self._first]
        if start < self._max_bytes // 2:
            return
        self.save_ack()
        data = os.pread(self._file, self._size - start, start)
        fresh = _replace(self._path, data)
        with self._lock:
            stale, self._file = self._file, fresh
            self._offsets = array("Q", (offset - start for offset in self._offsets[kept - self._first :]))
            self._first, self._size = kept, len(data)
        os.close(stale)


def _chain(before: bytes, payload: bytes, number: int) -> bytes:
    return hashlib.sha256(before + payload + number.to_bytes(8, "big")).digest()


def _parse(data: bytes, offset: int) -> _Entry | None:
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
    return _Entry(number, before, digest, payload, magic == _FIRST_OF_GROUP, end)


def _verify(data: bytes, acked: int, acked_hash: bytes) -> tuple[list[_Entry], int]:
    """Entries of the log and where the whole ones end. Raises JournalCorrupt."""
    entries: list[_Entry] = []
    offset = 0
    while offset < len(data) and (entry := _parse(data, offset)) is not None:
        if entries:
            _check_follows(entry, entries[-1].number, entries[-1].hash)
        elif entry.number > acked:
            _check_follows(entry, acked, acked_hash)
        if entry.number == acked and entry.hash != acked_hash:
            raise JournalCorrupt(acked, "is not the record that was acknowledged")
        entries.append(entry._replace(payload=b""))
        offset = entry.end
    last = entries[-1].number if entries else acked
    if entries and last < acked:
        raise JournalCorrupt(last + 1, f"is missing though {acked} was acknowledged")
    if _group_starts_after(data, offset):
        raise JournalCorrupt(last + 1, "was changed or cut out: whole groups follow it")
    return entries, offset


def _check_follows(entry: _Entry, number: int, digest: bytes) -> None:
    if entry.number != number + 1:
        raise JournalCorrupt(number + 1, f"is missing: {entry.number} follows {number}")
    if entry.before != digest:
        raise JournalCorrupt(entry.number, "does not continue the chain")


def _group_starts_after(data: bytes, offset: int) -> bool:
    """Whether a group begins behind a broken entry: then the broken one had been made durable."""
    while (offset := data.find(_FIRST_OF_GROUP, offset + 1)) >= 0:
        if _parse(data, offset) is not None:
            return True
    return False


def _read_ack(path: Path) -> tuple[int, bytes]:
    """The saved cursor; the beginning when there is none or it doesn't verify: then records come again."""
    data = path.read_bytes() if path.exists() else b""
    state, digest = data[: _ACK.size], data[_ACK.size :]
    if len(state) != _ACK.size or hashlib.sha256(state).digest() != digest:
        return 0, GENESIS
    return _ACK.unpack(state)


def _replace(path: Path, data: bytes) -> int:
    """The file's new content, all or nothing. The open file behind the path."""
    staged = path.with_name(path.name + ".new")
    handle = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _pwrite(handle, data, 0)
        os.fsync(handle)
        staged.replace(path)
    except OSError:
        os.close(handle)
        raise
    _sync_folder(path.parent)
    return handle


def _pwrite(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
