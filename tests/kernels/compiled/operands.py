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
_FRAGMENT = 4  # registers of a thread that hold its part of 64 × 16 numbers of 16 bits


@dataclass(frozen=True)
class _Instruction:
    code: str
    is_guarded: bool

    @property
    def name(self) -> str:
        return self.code.split(maxsplit=1)[0]

    @property
    def operands(self) -> list[str]:
        return [part.strip() for part in self.code[len(self.name) :].split(",")]

    @property
    def read_by_wgmma(self) -> frozenset[int]:
        """Registers of a first operand."""
        first = _REGISTER.match(self.operands[1]) if self.name.startswith("HGMMA") else None
        return frozenset(range(int(first[1]), int(first[1]) + _FRAGMENT)) if first else frozenset()

    @property
    def written(self) -> frozenset[int]:
        if self.name.startswith(("HGMMA", "ST", "RED")):
            return frozenset()
        found = next((one for one in self.operands if not re.match(r"!?U?P(T|\d)", one)), "")
        register = _REGISTER.match(found)
        return frozenset(range(int(register[1]), int(register[1]) + _width(self.name))) if register else frozenset()

    @property
    def most_pending(self) -> int | None:
        """Of a wait: how many groups of products may still be under way."""
        return int(self.operands[1], 16) if self.name.startswith("WARPGROUP.DEPBAR") else None


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
        if one.read_by_wgmma
        for place in _writers(program, labels, first)
    ]


def _parse(machine_code: str) -> tuple[list[_Instruction], dict[str, int]]:
    program: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in machine_code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(program)
        elif found := _LINE.match(line):
            program.append(_Instruction(found["code"].split("&")[0].strip(), bool(found["guard"])))
    return program, labels


def _writers(program: list[_Instruction], labels: dict[str, int], first: int) -> Iterator[int]:
    """On every way from a product to the wait for it. Products are counted in groups, which ``gsb0`` ends."""
    reads = program[first].read_by_wgmma
    start = first, 0 if "gsb0" in program[first].operands else -1
    seen, ways = {start}, [start]
    while ways:
        place, groups = ways.pop()
        for following in _successors(program, labels, place):
            one = program[following]
            if one.most_pending is not None and groups >= one.most_pending:
                continue
            if one.written & reads:
                yield following
                continue
            state = following, groups + (one.name.startswith("HGMMA") and "gsb0" in one.operands)
            if state not in seen and state[1] < 64:
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
    return following + jump if one.is_guarded or "P" in one.operands[0][:2] else jump
