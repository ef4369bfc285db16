"""Sealed segments of a journal, which ones are deleted, and file work that a crash doesn't tear."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from engine.wire.journal import BASE, GENESIS, HEADER_BYTES, LOG, SEALED, Mark, before_of, pack_mark, sealed_files

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Keep:
    """How long acknowledged records are kept for auditors, and how much of them at most."""

    days: int = 90
    max_bytes: int = 8 << 30


class Segments:
    def __init__(self, folder: Path, keep: Keep) -> None:
        self._folder = folder
        self._keep = keep
        log = folder / LOG
        for path in sealed_files(folder)[-1:]:
            if log.exists() and path.samefile(log):  # a crash came before the new log did
                path.unlink()

    def seal(self, first: int) -> None:
        """Gives the growing log its second, lasting name, whatever had it; it keeps both until it is replaced."""
        sealed = self._folder / SEALED.format(first)
        staged = sealed.with_suffix(".new")
        staged.unlink(missing_ok=True)
        os.link(self._folder / LOG, staged)
        staged.replace(sealed)
        staged.unlink(missing_ok=True)  # is left where both are names of one file already
        sync_folder(self._folder)

    def acked_before(self, log: bytes) -> Mark:
        """What a log behind segments begins after: that was acknowledged when they were sealed."""
        if len(log) < HEADER_BYTES or not (sealed_files(self._folder) or (self._folder / BASE).exists()):
            return GENESIS
        return before_of(log)

    def prune(self, log_start: Mark) -> None:
        """Deletes the oldest segments while they are too old or together too large, and notes from where on the chain
        is there. ``log_start`` lies before the first record of the log."""
        files = sealed_files(self._folder)
        sizes = [path.stat().st_size for path in files]
        oldest_s = time.time() - self._keep.days * _DAY_S
        for number, path in enumerate(files):
            if sum(sizes[number:]) <= self._keep.max_bytes and path.stat().st_mtime >= oldest_s:
                break
            base = _start_of(files[number + 1]) if number + 1 < len(files) else log_start
            with contextlib.suppress(OSError):
                os.close(replace_file(self._folder / BASE, pack_mark(base)))
                path.unlink()


def replace_file(path: Path, data: bytes) -> int:
    """The file's new content, all or nothing. The open file behind the path."""
    staged = path.with_name(path.name + ".new")
    handle = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_at(handle, data, 0)
        os.fsync(handle)
        staged.replace(path)
    except OSError:
        os.close(handle)
        raise
    sync_folder(path.parent)
    return handle


def write_at(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _start_of(segment: Path) -> Mark:
    with segment.open("rb") as file:
        return before_of(file.read(HEADER_BYTES))
