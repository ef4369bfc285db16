"""The blob store: whole files under checked names, or nothing."""

import os
import stat
from pathlib import Path

import pytest

from tenants.adapters.blobs import BlobStore

SHA = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def stage(store: BlobStore, content: bytes) -> Path:
    path = store.stage()
    path.write_bytes(content)
    return path


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_a_published_blob_is_found_by_its_owner_only(store: BlobStore):
    published = store.publish("ten_a", SHA, stage(store, b"weights"))

    assert store.path("ten_a", SHA) == published
    assert published.read_bytes() == b"weights"
    assert store.path("ten_b", SHA) is None
    assert store.path("ten_a", "cd" * 32) is None


def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path):
    previous = os.umask(0)
    try:
        store = BlobStore(tmp_path / "blobs")
        published = store.publish("ten_a", SHA, stage(store, b"x"))
    finally:
        os.umask(previous)

    folders = [path for path in [tmp_path / "blobs", *(tmp_path / "blobs").rglob("*")] if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert stat.S_IMODE(published.stat().st_mode) == 0o600


def test_bytes_and_folders_are_on_the_disk_before_and_after_the_name_is(store: BlobStore, monkeypatch):
    """fsync of the file, rename, fsync of the folder: a power cut leaves the whole blob or none."""
    done: list[str] = []

    def noting(name: str, call):
        def noted(first, *others, **more):
            target = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            done.append(f"{name} {Path(target).name}")
            return call(first, *others, **more)

        return noted

    staged = stage(store, b"weights")
    monkeypatch.setattr(os, "fsync", noting("fsync", os.fsync))
    monkeypatch.setattr(os, "rename", noting("rename", os.rename))

    store.publish("ten_a", SHA, staged)

    assert done == [f"fsync {staged.name}", "fsync tenants", f"rename {staged.name}", "fsync ten_a"]


def test_publishing_moves_the_staged_file_and_the_same_again_changes_nothing(store: BlobStore, tmp_path: Path):
    store.publish("ten_a", SHA, stage(store, b"x"))
    store.publish("ten_a", SHA, stage(store, b"x"))

    assert files(tmp_path / "blobs") == {f"tenants/ten_a/{SHA}"}


@pytest.mark.parametrize("tenant_id", ["", "..", "../x", "a/b", "a\0b", "a" * 65, ".", "ten_ä", "a\n"])
def test_a_tenant_id_outside_the_grammar_reaches_no_folder(store: BlobStore, tenant_id: str, tmp_path: Path):
    staged = stage(store, b"x")

    for call in (lambda: store.publish(tenant_id, SHA, staged), lambda: store.path(tenant_id, SHA)):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError):
        store.delete(tenant_id, SHA)
    assert files(tmp_path) == {f"blobs/staging/{staged.name}"}


@pytest.mark.parametrize("sha256", ["", "../x", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "a/" * 32])
def test_a_name_that_is_no_hash_is_refused(store: BlobStore, sha256: str):
    staged = stage(store, b"x")

    with pytest.raises(ValueError):
        store.publish("ten_a", sha256, staged)
    with pytest.raises(ValueError):
        store.path("ten_a", sha256)


def test_only_files_of_the_staging_folder_are_published(store: BlobStore, tmp_path: Path):
    outside = tmp_path / "secret"
    outside.write_bytes(b"secret")

    with pytest.raises(ValueError):
        store.publish("ten_a", SHA, outside)
    with pytest.raises(ValueError):
        store.discard(outside)
    assert outside.read_bytes() == b"secret"


def test_a_symbolic_link_is_never_published_read_or_followed(store: BlobStore, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    link = store.stage()
    link.unlink()
    link.symlink_to(secret)

    with pytest.raises(OSError):
        store.publish("ten_a", SHA, link)

    (tmp_path / "blobs" / "tenants" / "ten_b").mkdir()
    (tmp_path / "blobs" / "tenants" / "ten_b" / SHA).symlink_to(secret)
    assert store.path("ten_b", SHA) is None

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SHA).write_bytes(b"theirs")
    (tmp_path / "blobs" / "tenants" / "ten_c").symlink_to(elsewhere)
    assert store.path("ten_c", SHA) is None
    with pytest.raises(OSError):
        store.delete("ten_c", SHA)
    with pytest.raises(OSError):
        store.publish("ten_c", SHA, stage(store, b"x"))
    assert (elsewhere / SHA).read_bytes() == b"theirs"


def test_deleting_takes_one_tenants_copy_and_says_whether_there_was_one(store: BlobStore):
    store.publish("ten_a", SHA, stage(store, b"x"))
    store.publish("ten_b", SHA, stage(store, b"x"))

    assert store.delete("ten_a", SHA) is True
    assert store.delete("ten_a", SHA) is False
    assert store.delete("ten_never", SHA) is False
    assert store.path("ten_a", SHA) is None
    assert store.path("ten_b", SHA) is not None


def test_staging_is_clean_after_a_failure(store: BlobStore, tmp_path: Path):
    def upload() -> None:
        with store.staged() as path:
            path.write_bytes(b"half")
            raise RuntimeError("the client left")

    with pytest.raises(RuntimeError):
        upload()
    assert files(tmp_path) == set()


def test_a_blob_published_inside_the_block_stays(store: BlobStore):
    with store.staged() as path:
        path.write_bytes(b"whole")
        store.publish("ten_a", SHA, path)

    assert store.path("ten_a", SHA) is not None


def test_the_sweep_takes_what_a_crash_left_and_spares_what_is_being_written(store: BlobStore):
    old, new = stage(store, b"old"), stage(store, b"new")
    os.utime(old, (0, 0))

    assert store.sweep(older_than_s=3600) == 1
    assert not old.exists()
    assert new.exists()
