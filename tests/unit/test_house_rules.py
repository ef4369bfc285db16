"""House rules that a machine can hold: sizes, names that must not collide, one reader of the environment."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "engine", "kernels", "tenants", "migrations", "ops")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_classes_and_files_stay_small(path: Path):
    text = path.read_text()
    limit = 120 if "kernels" in path.parts else 60
    tree = list(ast.walk(ast.parse(text)))
    functions = [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in tree if isinstance(node, ast.ClassDef)]

    assert text.count("\n") <= 400
    assert [node.name for node in functions if length(node) > limit] == []
    assert [node.name for node in classes if length(node) > 250] == []


def test_kernels_init_is_empty():
    """Another package of the ecosystem has this import name and reads attributes of it."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_only_settings_reads_the_environment():
    readers = [relative(path) for path in SOURCES if "os.environ" in path.read_text() or "getenv" in path.read_text()]

    assert [path for path in readers if not path.startswith("ops/")] == ["gateway/settings.py"]


@pytest.mark.parametrize("package", ["gateway", "engine", "kernels", "tenants", "migrations"])
def test_each_package_has_a_short_readme(package: str):
    lines = (ROOT / package / "README.md").read_text().splitlines()

    assert 5 <= len(lines) <= 60


def test_a_gateway_process_imports_neither_torch_nor_transformers():
    probe = (
        "import sys, gateway.main, gateway.app\n"
        "heavy = {'torch', 'triton', 'transformers', 'kernels'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
        "assert not [name for name in sys.modules if name.startswith('engine.')\n"
        "            and not name.startswith(('engine.wire', 'engine.wire.framing', 'engine.client'))]\n"
    )
    result = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
