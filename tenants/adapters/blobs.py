"""Content-addressed files of tenants in one directory: ``ROOT/tenants/TENANT/SHA256`` and ``ROOT/staging``.

A file appears under its final name whole and fsynced, or not at all. All folders are 0700, all files 0600.
Whoever reads bytes back checks their hash: the name says what they must be. A blob comes before the row that names
it and goes after it, so that a crash leaves at most a blob without a row; ``older_than`` finds those.
"""

import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobStore:
    """Blobs under a root that several processes (or hosts, through a mount) may share. Calls block: use a thread.

    Raises ValueError for a tenant id, hash or staged path that isn't one, OSError for the disk's own trouble.
    """

    def __init__(self, root: Path) -> None:
        self._tenants = root / "tenants"
        self._staging = root / "staging"
        for folder in (root, self._tenants, self._staging):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stage(self) -> Path:
        """A new empty file of ours; ``publish`` or ``discard`` it."""
        path = self._staging / secrets.token_hex(16)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return path

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """``stage`` for a block: what the block didn't publish is gone after it, whatever happened."""
        path = self.stage()
        try:
            yield path
        finally:
            self.discard(path)

    def discard(self, staged: Path) -> None:
        """Removes a staged file; one that is published or gone already is fine."""
        self._check_staged(staged)
        staged.unlink(missing_ok=True)

    def sweep(self, older_than_s: float) -> int:
        """Removes what is staged and nobody has touched for that long; returns how many. For after a crash."""
        old = _older(self._staging, older_than_s)
        for path in old:
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(old)

    def older_than(self, age_s: float) -> list[tuple[str, str]]:
        """(tenant, sha256) of every blob that is at least so old; what is younger may be about to get its row."""
        return [
            (folder.name, path.name)
            for folder in self._tenants.iterdir()
            for path in _older(folder, age_s)
            if _TENANT.fullmatch(folder.name) and _SHA256.fullmatch(path.name)
        ]

    def publish(self, tenant_id: str, sha256: str, staged: Path) -> Path:
        """Makes the staged bytes the blob ``sha256`` of the tenant, durably. The same blob again is a no-op."""
        self._check_staged(staged)
        folder = self._folder(tenant_id)
        _checked(_SHA256, sha256, "sha256")
        _sync_file(staged)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(self._tenants)
        descriptor = os.open(folder, _DIRECTORY)
        try:
            os.rename(staged, sha256, dst_dir_fd=descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return folder / sha256

    def place(self, tenant_id: str, sha256: str) -> Path:
        """Where the blob lies, if there is one."""
        return self._folder(tenant_id) / _checked(_SHA256, sha256, "sha256")

    def path(self, tenant_id: str, sha256: str) -> Path | None:
        """Where the blob lies; None when the tenant has no such regular file."""
        path = self.place(tenant_id, sha256)
        with suppress(OSError):
            folder, file = path.parent.lstat(), path.lstat()
            if stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode):
                return path
        return None

    def delete(self, tenant_id: str, sha256: str) -> bool:
        """Removes the blob; False when there was none. Other tenants' equal bytes are files of their own.

        Not made durable: one that a crash brings back has no row, and is collected again."""
        _checked(_SHA256, sha256, "sha256")
        try:
            descriptor = os.open(self._folder(tenant_id), _DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            os.unlink(sha256, dir_fd=descriptor)
        except FileNotFoundError:
            return False
        finally:
            os.close(descriptor)
        return True

    def delete_tenant(self, tenant_id: str) -> int:
        """Removes all blobs of a tenant, and its folder; how many there were."""
        folder = self._folder(tenant_id)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return 0
        for name in names:
            (folder / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            folder.rmdir()
        _sync_directory(self._tenants)
        return len(names)

    def _folder(self, tenant_id: str) -> Path:
        return self._tenants / _checked(_TENANT, tenant_id, "tenant id")

    def _check_staged(self, path: Path) -> None:
        if path.parent != self._staging:
            raise ValueError("not a staged file of this store")


def _older(folder: Path, age_s: float) -> list[Path]:
    """What lies in a folder and was last changed so long ago; another process may be removing it meanwhile."""
    limit, found = time.time() - age_s, []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime <= limit:
                found.append(path)
    return found


def _checked(form: re.Pattern[str], text: str, what: str) -> str:
    if not form.fullmatch(text):
        raise ValueError(f"not a {what}: {text[:80]!r}")
    return text


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("a staged path must be a regular file")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
