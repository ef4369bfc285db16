"""Whether a compiled kernel writes to registers that a matrix instruction still reads.

A wgmma that takes its first operand from registers reads them until a wait says that it has ended. Triton 3.6 leaves
all of a loop's such products but one under way at the loop's end, and ptxas before 13.3 may give their registers to
what the next turn converts (triton-lang/triton, issue 9433): the sums are then of mixed turns, and no two launches
are alike. Neither an interpreter nor a table of resources shows it; the machine code does.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\S+\s+)?(?P<code>[A-Z][^;]*);", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_\w+):", re.MULTILINE)
_REGISTER = re.compile(r"R(\d+)\b")
_MOST_GROUPS = 64  # that are counted
_FRAGMENT = 4  # registers of a thread that hold its part of 64 × 16 numbers of 16 bits


@dataclass(frozen=True)
class _Instruction:
    """``reads``: registers of a product's first operand; ``writes``: registers of any other instruction's result;
    ``most_pending``: of a wait, how many groups of products may go on; ``ends_group``: of products."""

    code: str
    name: str
    is_guarded: bool
    reads: frozenset[int]
    writes: frozenset[int]
    most_pending: int | None
    ends_group: bool


def _instruction(code: str, is_guarded: bool) -> _Instruction:
    name, _, rest = code.partition(" ")
    operands = [part.strip() for part in rest.split(",")]
    is_product = name.startswith("HGMMA")
    reads = _registers(operands[1], _FRAGMENT) if is_product else frozenset()
    target = next((one for one in operands if not re.match(r"!?U?P(T|\d)", one)), "")
    writes = frozenset() if is_product or name.startswith(("ST", "RED")) else _registers(target, _width(name))
    pending = int(operands[1], 16) if name.startswith("WARPGROUP.DEPBAR") else None
    return _Instruction(code, name, is_guarded, reads, writes, pending, is_product and "gsb0" in operands)


def _registers(operand: str, count: int) -> frozenset[int]:
    found = _REGISTER.match(operand)
    return frozenset(range(int(found[1]), int(found[1]) + count)) if found else frozenset()


def _width(name: str) -> int:
    if ".128" in name or (name.startswith("LDSM") and name.endswith("4")):
        return 4
    return 2 if ".64" in name or "WIDE" in name or (name.startswith("LDSM") and name.endswith("2")) else 1


def overwritten(machine_code: str) -> list[str]:
    """The instructions, from nvdisasm, that write to what a product under way reads."""
    program, labels = _parse(machine_code)
    return [
        program[place].code
        for first, one in enumerate(program)
        if one.reads
        for place in _writers(program, labels, first)
    ]


def _parse(machine_code: str) -> tuple[list[_Instruction], dict[str, int]]:
    program: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in machine_code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(program)
        elif found := _LINE.match(line):
            program.append(_instruction(found["code"].split("&")[0].strip(), bool(found["guard"])))
    return program, labels


def _writers(program: list[_Instruction], labels: dict[str, int], first: int) -> Iterator[int]:
    """On every way from a product to the wait for it. Products are counted in groups, which ``gsb0`` ends."""
    start = first, 0 if program[first].ends_group else -1
    seen, ways = {start}, [start]
    while ways:
        place, groups = ways.pop()
        for following in _successors(program, labels, place):
            one = program[following]
            if one.most_pending is not None and groups >= one.most_pending:
                continue
            if one.writes & program[first].reads:
                yield following
                continue
            state = following, min(groups + one.ends_group, _MOST_GROUPS)
            if state not in seen:
                seen.add(state)
                ways.append(state)


def _successors(program: list[_Instruction], labels: dict[str, int], place: int) -> list[int]:
    one, following = program[place], [place + 1] if place + 1 < len(program) else []
    if one.name.startswith("EXIT") and not one.is_guarded:
        return []
    target = re.search(r"`\((\.L_\w+)\)", one.code) if one.name.startswith("BRA") else None
    if target is None:
        return following
    jump = [labels[target[1]]]
    return following + jump if one.is_guarded or "," in one.code else jump
