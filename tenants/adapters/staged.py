"""Files that a tenant has sent ahead of a commit: ``ROOT/uploads/TENANT/NAME/FILE``, beside the blobs.

Bounded in number (``MAX_STAGED_ADAPTERS`` names of a tenant; whoever sends bounds the bytes of each) and in age. Not
fsynced: what a crash takes is sent again. A commit *claims* a name's files: they move out of everybody's reach in one
rename, so that two commits never read the same ones, and come back when it may be tried again.
"""

import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from tenants.errors import LimitExceeded, NotFound

MAX_STAGED_ADAPTERS = 4
MAX_AGE_S = 3600.0
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
_FILE = re.compile(r"[a-z_]{1,40}\.[a-z]{1,20}")


class StagedUploads:
    """The staged files of all tenants under a blob store's root, which several processes share. Calls block.

    Raises ValueError for a tenant id or a name that isn't one, OSError for the disk's own trouble.
    """

    def __init__(self, root: Path) -> None:
        self._uploads = root / "uploads"
        self._staging = root / "staging"
        for folder in (root, self._uploads, self._staging):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, tenant_id: str, name: str, file: str, staged: Path) -> None:
        """Takes a whole staged file (of ``BlobStore.stage``) as ``name``'s ``file``, in place of an earlier one.

        Raises LimitExceeded when the tenant has too many names here."""
        folder = self._folder(tenant_id, name)
        if not _FILE.fullmatch(file):
            raise ValueError(f"not a file's name: {file[:80]!r}")
        self._make_room(folder)
        try:
            self._take_in(folder, file, staged)
        except FileNotFoundError:  # a commit has claimed the folder meanwhile
            self._take_in(folder, file, staged)

    def claim(self, tenant_id: str, name: str) -> Path:
        """The folder of a name's files, now the caller's alone: ``restore`` or ``drop`` it. Raises NotFound."""
        claimed = self._staging / secrets.token_hex(16)
        try:
            os.rename(self._folder(tenant_id, name), claimed)
        except FileNotFoundError:
            raise NotFound(f"nothing is staged for {name!r}") from None
        os.utime(claimed)  # its age begins anew: no sweep takes it from under the commit
        return claimed

    def restore(self, tenant_id: str, name: str, claimed: Path) -> None:
        """Gives claimed files back for another try, unless others of that name have come meanwhile."""
        try:
            os.rename(claimed, self._folder(tenant_id, name))
        except OSError:
            self.drop(claimed)

    def drop(self, claimed: Path) -> None:
        shutil.rmtree(claimed, ignore_errors=True)

    def sweep(self) -> None:
        """Removes everybody's files that no commit has come for."""
        for tenant in self._uploads.iterdir():
            _expire(tenant)
            with suppress(OSError):
                tenant.rmdir()

    def _take_in(self, folder: Path, file: str, staged: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.rename(staged, folder / file)

    def _make_room(self, folder: Path) -> None:
        """Counted with the newcomer's own folder there: of two that come at once, at most one is the last."""
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        _expire(folder.parent)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(1 for _ in folder.parent.iterdir()) > MAX_STAGED_ADAPTERS:
            with suppress(OSError):  # it isn't empty: it was here before
                folder.rmdir()
                raise LimitExceeded("the number of uploads that wait for their commit", MAX_STAGED_ADAPTERS)

    def _folder(self, tenant_id: str, name: str) -> Path:
        if not _TENANT.fullmatch(tenant_id) or not _NAME.fullmatch(name):
            raise ValueError(f"not a tenant or a name: {tenant_id[:80]!r}, {name[:80]!r}")
        return self._uploads / tenant_id / name


def _expire(tenant: Path) -> None:
    limit = time.time() - MAX_AGE_S
    for folder in tenant.iterdir():
        with suppress(FileNotFoundError):
            if folder.lstat().st_mtime <= limit:
                shutil.rmtree(folder, ignore_errors=True)
