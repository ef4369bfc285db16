"""The journals of a home, as `tenora audit` reads them: unsealed, while their engines may be writing."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import msgspec

from engine import wire
from engine.wire.journal import Entry, JournalCorrupt, JournalReader
from tenants.audit.journals import USAGE, Journaled
from tenants.audit.replicas import SPAN, JournaledTime
from tenants.errors import ForgedContext
from tenants.meter import unseal
from tenants.secrets import Secret

_of_usage, _of_time = attrgetter(*USAGE), attrgetter(*SPAN)


class HomeJournal:
    """A tenants.audit.Journal. ``expected`` are heads that were printed before (number → hash, hex)."""

    def __init__(self, folder: Path, context_keys: tuple[Secret, ...], expected: Mapping[int, str]) -> None:
        self._reader = JournalReader(folder)
        self._context_keys = context_keys
        self._expected = dict(expected)
        self.name = folder.name
        self.num_entries = 0
        self.broken: list[str] = []
        self.unfit: list[str] = []

    @property
    def is_whole(self) -> bool:
        return self._reader.base.number == 0

    @property
    def head(self) -> tuple[int, str]:
        return self._reader.head.number, self._reader.head.hash.hex()

    @property
    def acked(self) -> int:
        return self._reader.acked.number

    def __iter__(self) -> Iterator[Journaled | JournaledTime]:
        try:
            for entry in self._reader.entries():
                self.num_entries += 1
                self._check_expected(entry)
                if record := self._record(entry):
                    yield record
        except JournalCorrupt as error:
            self.broken.append(str(error))
        kept = (number for number in self._expected if number > self._reader.base.number)
        self.broken += [f"record {number}, once its head, is not on the chain" for number in sorted(kept)]

    def _check_expected(self, entry: Entry) -> None:
        if self._expected.get(entry.number) == entry.hash.hex():
            del self._expected[entry.number]

    def _record(self, entry: Entry) -> Journaled | JournaledTime | None:
        try:
            usage = wire.read_record(entry.payload)
            if isinstance(usage, wire.TimeRecord):
                return JournaledTime(entry.number, entry.number <= self.acked, _of_time(usage))
            context = unseal(usage.context, *self._context_keys)
        except (msgspec.MsgspecError, ForgedContext) as error:
            self.unfit.append(f"record {entry.number} is in no ledger: {error}")
            return None
        return Journaled(entry.number, entry.number <= self.acked, context, _of_usage(usage))


def home_journals(
    home: Path, context_keys: Callable[[], tuple[Secret, ...]], expected: Mapping[str, Mapping[int, str]]
) -> list[HomeJournal]:
    """Of all engines that ever served this home, also of models that it serves no more."""
    folders = sorted(path for path in (home / "engines").glob("*") if path.is_dir())
    keys = context_keys() if folders else ()
    return [HomeJournal(folder, keys, expected.get(folder.name, {})) for folder in folders]
