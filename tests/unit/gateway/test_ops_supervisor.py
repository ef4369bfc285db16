"""What the supervisor decides before it starts anything: engines, sockets, folders, the banner."""

import os
import shlex
import tempfile
from pathlib import Path

import pytest

from gateway.serve.bootstrap import Credentials, Start, TenantCredentials
from gateway.serve.supervisor import Model, banner, engine_specs, listen, only_one, prepare_folders
from gateway.settings import CannotStart
from tests.ops_server import settings_of


def test_every_engine_has_an_id_a_folder_and_its_share_of_the_cores(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "", "--engines", "2", "--kv-blocks", "64")
    models = [Model("a", "/m/a.gguf"), Model("org/b", "/m/b")]

    specs = engine_specs(settings, models)

    assert [spec.engine_id for spec in specs] == ["e0-a", "e1-a", "e2-org-b", "e3-org-b"]
    assert len({spec.directory for spec in specs}) == 4
    for spec in specs:
        assert spec.flags[spec.flags.index("--kv-blocks") + 1] == "64"
        assert int(spec.flags[spec.flags.index("--threads") + 1]) == max(1, (os.cpu_count() or 1) // 4)


def test_a_lone_engine_chooses_its_own_threads(tmp_path: Path) -> None:
    (spec,) = engine_specs(settings_of(tmp_path, ""), [Model("a", "/m/a.gguf")])
    assert "--threads" not in spec.flags


def test_a_port_that_is_taken_names_the_option() -> None:
    with listen("127.0.0.1", 0, "--port") as taken, pytest.raises(CannotStart, match="choose another --ops-port"):
        listen("127.0.0.1", taken.getsockname()[1], "--ops-port")


def test_an_address_that_is_not_this_machines_names_the_option() -> None:
    with pytest.raises(CannotStart, match="choose another --ops-host"):
        listen("192.0.2.1", 0, "--ops-port")


@pytest.fixture
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a long path has its sockets there: under the machine's, an earlier run's would be in the way."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("_own_temporary_folder")
def test_the_folder_of_sockets_is_ours_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "home", "")
    settings.run_dir.mkdir(parents=True, mode=0o777)

    prepare_folders(settings)

    assert settings.run_dir.stat().st_mode & 0o077 == 0


def test_a_home_is_one_supervisors_at_a_time(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(CannotStart, match="another --home"), only_one(tmp_path):
        pass
    with only_one(tmp_path):
        pass


@pytest.mark.usefixtures("_own_temporary_folder")
def test_a_link_in_place_of_the_folder_of_sockets_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "home", "")
    settings.home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    settings.run_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotStart, match="remove it"):
        prepare_folders(settings)


def test_the_banners_command_is_one_that_a_shell_understands(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "", "--port", "1234")
    credentials = Credentials("tn_ops_x", {"acme": TenantCredentials("ten_1", "tn_live_x")})
    start = Start(None, credentials, {"acme": "support"})  # pyright: ignore[reportArgumentType] (no store is asked)

    lines = banner(settings, start, [Model("smol", "/m")])

    (command,) = [line for line in lines if line.startswith("curl ")]
    words = shlex.split(command)
    assert "http://127.0.0.1:1234/v1/chat/completions" in words
    assert "Authorization: Bearer tn_live_x" in words
    assert any("support" in line for line in lines)
    assert not any("tn_ops" in line for line in lines)
