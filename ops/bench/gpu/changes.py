"""What a variant changes while it is built and timed: rows of the tables, or text of a kernel's module."""

import hashlib
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

from kernels import tiles

Rows = dict[str, dict[str, int] | list[dict[str, int]]]  # of a kernel: one for all sizes, or a table
Edit = tuple[str, str, str]  # a module, text that stands there once, and what takes its place


@contextmanager
def changed(edits: Sequence[Edit], rows: Rows) -> Iterator[None]:
    """Both of the below."""
    with edited(edits), other_rows(rows):
        yield


@contextmanager
def other_rows(rows: Rows) -> Iterator[None]:
    """These rows in the place of the tables'."""
    original, given = tiles._table, {kernel: row if isinstance(row, list) else [row] for kernel, row in rows.items()}
    tiles._table = lambda gpu: {**original(gpu), **given}
    try:
        yield
    finally:
        tiles._table = original


@contextmanager
def edited(edits: Sequence[Edit]) -> Iterator[None]:
    """Copies of the modules with these edits in the place of the originals, wherever those are known by name."""
    with ExitStack() as stack:
        for name in dict.fromkeys(module for module, _, _ in edits):
            original = importlib.import_module(name)
            stack.enter_context(_in_place_of(original, copy_of(original, edits)))
        yield


def copy_of(module: ModuleType, edits: Sequence[Edit]) -> ModuleType:
    """The module with its edits. Equal edits make a copy of an equal name, so that what one process compiles another
    finds. Raises LookupError where a text does not stand once."""
    source = Path(str(module.__file__)).read_text()
    for name, old, new in edits:
        if name == module.__name__:
            if source.count(old) != 1:
                raise LookupError(f"{source.count(old)} times in {name}: {old}")
            source = source.replace(old, new)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"tenora_{module.__name__.replace('.', '_')}_{digest}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@contextmanager
def _in_place_of(original: ModuleType, copy: ModuleType) -> Iterator[None]:
    places = [
        (vars(module), name)
        for module in list(sys.modules.values())
        if module.__name__.startswith(("kernels", "ops.bench"))
        for name, value in vars(module).items()
        if value is original
    ]
    for names, name in places:
        names[name] = copy
    try:
        yield
    finally:
        for names, name in places:
            names[name] = original
