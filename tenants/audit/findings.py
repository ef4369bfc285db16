"""What an audit found: for each invariant how much was looked at, and what breaks it."""

from dataclasses import dataclass, field

MAX_EXAMPLES = 20
TITLES = {
    "I1": "tokens of the journals = quantities of the ledger",
    "I2": "amounts of the ledger = lines of the invoices",
    "I3": "lines + rounding = total",
    "I4": "amount = quantity × price of the version in force",
    "I5": "each reservation resolved at most once",
    "I6": "nothing negative where it cannot be",
    "I7": "no entry for 4xx, 5xx and lost, one set for 200 and 499",
    "I8": "replaying the journals changes nothing",
    "I9": "cached ≤ input, and from the tenant's own blocks",
    "I10": "the accounts of every replica = its wall time within 1 %",
    "I11": "append-only chains unchanged",
}


@dataclass(slots=True)
class Finding:
    """``checked`` rows or records; ``examples`` are the first breaches, in words."""

    invariant: str
    checked: int = 0
    breaches: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return TITLES[self.invariant]

    def breach(self, words: str) -> None:
        self.breaches += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(words)


class Findings:
    def __init__(self) -> None:
        self._found = {name: Finding(name) for name in TITLES}

    def __getitem__(self, invariant: str) -> Finding:
        return self._found[invariant]

    def all(self) -> list[Finding]:
        return list(self._found.values())
