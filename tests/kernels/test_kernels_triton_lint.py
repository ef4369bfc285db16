"""What the source of every Triton kernel must and must not hold; the rules are tested on planted lines too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "kernels").glob("*/triton_*.py"))
WIDE = "to(tl.int64)"


def complaints(source: str) -> list[str]:
    """What breaks a rule, with its line."""
    return [
        f"{node.lineno}: {text}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node, text in [*_of_all(function), *(_of_kernel(function) if _is_kernel(function) else ())]
    ]


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _of_all(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"item", "tolist", "cpu", "synchronize"}:
                yield node, f"waits for the device: .{node.func.attr}()"
            if node.func.attr in {"autotune", "make_block_ptr"}:
                yield node, f"{node.func.attr} is not used here"


def _of_kernel(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    wide = _wide_names(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            named = {keyword.arg for keyword in node.keywords}
            if called == "tl.load" and "mask" in named and "other" not in named:
                yield node, "a masked load without other"
            if called == "tl.load" and len(node.args) > 1:
                yield node, "mask and other are named"
            if called.startswith("tl.atomic"):
                yield node, "an atomic"
            if called == "tl.program_id" and f"{ast.unparse(node)}.{WIDE}" not in ast.unparse(function):
                yield node, "a program's number of 32 bits"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            strides = [side for side in sides if isinstance(side, ast.Name) and side.id.startswith("stride_")]
            others = [side for side in sides if side not in strides]
            if strides and not any(_is_wide(other, wide) for other in others):
                yield node, f"an offset of 32 bits: {ast.unparse(node)}"


def _wide_results(sources: list[Path]) -> dict[str, set[int]]:
    """Of each kernel's function that gives several results at once: which of them have 64 bits."""
    functions = [
        node
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and _is_kernel(node) and isinstance(node.body[-1], ast.Return)
    ]
    return {
        function.name: {number for number, part in enumerate(function.body[-1].value.elts) if WIDE in ast.unparse(part)}
        for function in functions
        if isinstance(function.body[-1].value, ast.Tuple)
    }


WIDE_RESULTS = _wide_results(SOURCES)


def _is_wide(node: ast.AST, wide: set[str]) -> bool:
    return WIDE in ast.unparse(node) or any(isinstance(part, ast.Name) and part.id in wide for part in ast.walk(node))


def _wide_names(function: ast.FunctionDef) -> set[str]:
    """Names that hold 64 bits: of a cast, or of what was computed with one."""
    wide: set[str] = set()
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    for node in assigned:
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call):
            results = WIDE_RESULTS.get(ast.unparse(node.value.func), set())
            wide.update(ast.unparse(node.targets[0].elts[number]) for number in results)
    for _ in assigned:
        for node in assigned:
            if _is_wide(node.value, wide):
                wide.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return wide


@pytest.mark.parametrize("path", SOURCES, ids=[f"{path.parent.name}/{path.stem}" for path in SOURCES])
def test_a_kernel_keeps_the_rules(path):
    assert complaints(path.read_text()) == []


def test_there_are_kernels_to_look_at():
    assert {path.parent.name for path in SOURCES} >= {
        "paged_attention",
        "qk_rope_kv",
        "rms_norm",
        "rope",
        "sgmv",
        "silu_mul",
        "store_kv",
    }


PLANTED = {
    "a masked load without other": "b_x = tl.load(p_x, mask=m_x)",
    "mask and other are named": "b_x = tl.load(p_x, m_x, 0.0)",
    "an atomic": "tl.atomic_add(p_x, 1)",
    "a program's number of 32 bits": "i_x = tl.program_id(0)",
    "an offset of 32 bits": "o_x = tl.arange(0, 4) * stride_x",
    "waits for the device": "most = counts.item()",
    "make_block_ptr is not used here": "p_x = tl.make_block_ptr(p_y)",
}


@pytest.mark.parametrize(("text", "line"), PLANTED.items(), ids=PLANTED)
def test_a_planted_line_is_reported(text, line):
    found = complaints(f"@triton.jit\ndef _kernel(p_x, stride_x):\n    {line}\n")
    assert len(found) == 1
    assert text in found[0]


def test_an_offset_of_64_bits_is_not_reported():
    body = "i_x = tl.load(p_x).to(tl.int64)\n    o_x = (i_x // 2)[:, None] * stride_x"
    assert complaints(f"@triton.jit\ndef _kernel(p_x, stride_x):\n    {body}\n") == []


def test_an_offset_of_32_bits_that_a_function_gave_is_reported():
    body = "i_rows, m_rows = rows_at(p_x, 0, 4, 4)\n    o_x = m_rows * stride_x"
    found = complaints(f"@triton.jit\ndef _kernel(p_x, stride_x):\n    {body}\n")
    assert found == ["4: an offset of 32 bits: m_rows * stride_x"]
