"""What an engine left in its journal is booked though nobody serves it any more."""

import asyncio
import fcntl
from pathlib import Path

from gateway.left_behind import LeftBehind
from tests.journaled_home import JournaledHome


def delivered(home: Path) -> list[bytes]:
    taken: list[bytes] = []

    async def take(payload: bytes) -> None:
        taken.append(payload)

    asyncio.run(LeftBehind(home / "engines", take).deliver())
    return taken


def test_records_of_an_engine_that_is_not_served_any_more_are_handed_to_the_ledger(tmp_path: Path):
    home = JournaledHome(tmp_path / "home", segment_bytes=4_000)
    for _ in range(3):
        home.book(home.run(10, group=1))
        home.acknowledge()
    left = home.run(3)
    home.journal.close()

    assert delivered(home.home) == left
    assert home.book(left) == 3
    assert home.book(delivered(home.home)) == 0, "the next start hands them on again, and changes nothing"


def test_a_journal_whose_engine_lives_is_that_engines_to_deliver(tmp_path: Path):
    home = JournaledHome(tmp_path / "home")
    home.run(3)
    home.journal.close()
    with (home.home / "engines" / "e0-tiny" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert delivered(home.home) == []


def test_a_journal_that_is_broken_keeps_nobody_elses_records_back(tmp_path: Path):
    home = JournaledHome(tmp_path / "home", engine_id="e1-tiny")
    left = home.run(2)
    home.journal.close()
    broken = home.home / "engines" / "e0-old" / "journal.log"
    broken.parent.mkdir()
    data = (home.home / "engines" / "e1-tiny" / "journal.log").read_bytes()
    broken.write_bytes(b"x" + data[1:] + data)
    assert delivered(home.home) == left
