import json
import multiprocessing
import os
import pickle
import stat

import pytest

from tenants.errors import ForgedContext, UnsafeSecrets
from tenants.meter import RequestContext, seal, unseal
from tenants.secrets import Secret, Secrets, rotate

FIRST_NAMES = ("key_pepper", "namespace_secret", "context_key")  # of the file's first version


def test_a_secret_cannot_be_formatted_compared_hashed_or_pickled():
    secret = Secret(b"hunter2-hunter2")
    for text in (str(secret), repr(secret), f"{secret}", f"{secret:>40}", "%s" % secret, str([secret])):  # noqa: UP031
        assert "hunter2" not in text
    for action in (lambda: secret == secret, lambda: hash(secret), lambda: pickle.dumps(secret)):
        with pytest.raises(TypeError):
            action()
    assert secret.reveal() == b"hunter2-hunter2"


def test_the_file_is_made_once_for_its_owner_only_and_read_again(tmp_path):
    path = tmp_path / "home" / "secrets.json"
    first = Secrets.load_or_create(path)
    again = Secrets.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["secrets.json"]
    for name in ("key_pepper", "namespace_secret", "context_key"):
        assert getattr(first, name).reveal() == getattr(again, name).reveal()
    assert json.loads(path.read_text())["version"] == 2
    assert "reveal" not in repr(first)


def _digest(path, queue):
    queue.put(Secrets.load_or_create(path).flow_key("ten_a"))


def test_processes_that_start_together_agree_on_one_file(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_digest, args=(tmp_path / "secrets.json", queue)) for _ in range(8)]
    for process in processes:
        process.start()
    answers = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(answers) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "secrets.json"
    Secrets.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(UnsafeSecrets, match="chmod 600"):
        Secrets.load_or_create(path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"key_peppers": {"1": "zz"}},
        {"context_keys": {"1": "00"}},
        {"context_keys": {}},
        {"context_keys": None},
        {"key_peppers": {"0": "00" * 32}},
        {"key_peppers": {"first": "00" * 32}},
    ],
)
def test_a_file_of_another_version_or_shape_is_refused_and_not_quoted(tmp_path, change):
    path = tmp_path / "secrets.json"
    Secrets.load_or_create(path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | change))
    with pytest.raises(UnsafeSecrets) as caught:
        Secrets.load_or_create(path)
    assert body["namespace_secret"] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_symbolic_link_is_refused(tmp_path):
    Secrets.load_or_create(tmp_path / "real.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(UnsafeSecrets):
        Secrets.load_or_create(tmp_path / "link.json")


def test_derived_names_differ_by_tenant_by_content_and_by_purpose(secrets):
    names = {
        secrets.adapter_key("ten_a", "ab"),
        secrets.adapter_key("ten_b", "ab"),
        secrets.adapter_key("ten_a", "ac"),
        secrets.adapter_key("ten_aa", "b"),  # the same bytes, cut elsewhere
        secrets.flow_key("ten_a"),
        secrets.flow_key("ten_b"),
        secrets.cache_namespace("ten_a", "ab", "").hex(),
    }
    assert len(names) == 7
    assert secrets.adapter_key("ten_a", "ab") == secrets.adapter_key("ten_a", "ab")


def test_cache_namespaces_are_equal_only_when_every_part_is(secrets):
    parts = [
        ("ten_a", "sha", "rev", ""),
        ("ten_b", "sha", "rev", ""),
        ("ten_a", "", "rev", "sha"),  # a salt that equals an adapter's hash
        ("ten_a", "", "rev", ""),
        ("ten_a", "sha", "rev2", ""),
        ("ten_a", "sha", "re", "v"),
        ("ten_a", "shar", "ev", ""),
        ("ten_a", "sha", "rev", "\ud800"),
    ]
    namespaces = [secrets.cache_namespace(*part) for part in parts]
    assert len(set(namespaces)) == len(parts)
    assert all(len(namespace) == 32 for namespace in namespaces)
    assert namespaces[0] == secrets.cache_namespace("ten_a", "sha", "rev")


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────


def test_rotation_adds_a_pepper_and_a_context_key_and_keeps_what_was_valid(tmp_path):
    path = tmp_path / "secrets.json"
    old = Secrets.load_or_create(path)
    rotate(path)
    new = Secrets.load_or_create(path)

    assert (old.newest_pepper, new.newest_pepper) == (1, 2)
    assert new.pepper(1).reveal() == old.key_pepper.reveal()
    assert new.key_pepper.reveal() != old.key_pepper.reveal()
    assert [key.reveal() for key in new.every_context_key][1:] == [old.context_key.reveal()]
    assert new.adapter_key("ten_a", "ab") == old.adapter_key("ten_a", "ab")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secrets.json"]


def test_a_file_of_the_first_version_is_read_and_rotated(tmp_path):
    path = tmp_path / "secrets.json"
    body = {"version": 1} | {name: f"{number:064x}" for number, name in enumerate(FIRST_NAMES)}
    path.write_text(json.dumps(body))
    path.chmod(0o600)

    secrets = Secrets.load_or_create(path)
    assert (secrets.newest_pepper, secrets.key_pepper.reveal()) == (1, bytes(32))
    assert json.loads(path.read_text()) == body

    rotate(path)
    assert Secrets.load_or_create(path).pepper(1).reveal() == bytes(32)


def test_what_was_sealed_before_a_rotation_is_opened_after_it(tmp_path):
    path = tmp_path / "secrets.json"
    context = RequestContext("ten_a", "k", "r", 0, "m", "m", "", "standard", "rc", 1)
    sealed = seal(context, Secrets.load_or_create(path).context_key)
    new = rotate(path)

    assert unseal(sealed, *new.every_context_key) == context
    assert unseal(seal(context, new.context_key), *new.every_context_key) == context
    with pytest.raises(ForgedContext):
        unseal(sealed, new.context_key)


@pytest.mark.parametrize("mode", [0o644, 0o604])
def test_a_file_that_others_can_read_or_that_is_absent_is_not_rotated(tmp_path, mode):
    path = tmp_path / "secrets.json"
    with pytest.raises(UnsafeSecrets):
        rotate(path)
    Secrets.load_or_create(path)
    path.chmod(mode)
    before = path.read_bytes()
    with pytest.raises(UnsafeSecrets):
        rotate(path)
    assert path.read_bytes() == before
