"""`tenora audit` and `tenora backup` on a home with journals: what was journaled is in the ledger, also in a copy."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine.journal import Journal
from engine.wire.journal import sealed_files
from gateway.cli import main
from tenants.secrets import Secrets
from tests.journaled_home import JournaledHome


def tenora(*arguments: str) -> tuple[int, str]:
    """The exit code and what was printed; its error is one line."""
    result = CliRunner().invoke(main, list(arguments), standalone_mode=False)
    if isinstance(result.exception, click.ClickException):
        return result.exception.exit_code, result.exception.format_message()
    assert result.exception is None, result.exception
    return 0, result.stdout


@pytest.fixture
def home(tmp_path: Path) -> Iterator[JournaledHome]:
    """Forty booked and acknowledged requests, in several segments, and two on their way."""
    made = JournaledHome(tmp_path / "home", segment_bytes=4_000)
    for _ in range(4):
        made.book(made.run(10, group=1))
        made.acknowledge()
    made.run(2)
    yield made
    made.journal.close()


def audited(home: Path, *arguments: str) -> dict:
    result = CliRunner().invoke(main, ["audit", "--home", str(home), "--json", *arguments], standalone_mode=False)
    return json.loads(result.stdout)


def test_the_audit_reads_every_segment_and_records_on_their_way_are_no_breach(home: JournaledHome):
    found = audited(home.home)

    assert found["ok"], found
    assert [(each["journal"], each["records"], each["acknowledged"]) for each in found["journals"]] == [
        ("e0-tiny", 42, 40)
    ]
    assert {each["id"]: each["checked"] for each in found["invariants"]}["I8"] == 42
    assert len(sealed_files(home.home / "engines" / "e0-tiny")) > 1


def test_a_record_that_was_acknowledged_and_never_booked_is_found(home: JournaledHome):
    home.acknowledge()
    code, message = tenora("audit", "--home", str(home.home))
    assert (code, "I8: record 41 of e0-tiny was acknowledged and is not in the ledger" in message) == (1, True)


def test_a_record_that_others_sealed_is_found(home: JournaledHome, tmp_path: Path):
    home.run(1, secrets=Secrets.load_or_create(tmp_path / "other.json"))
    code, message = tenora("audit", "--home", str(home.home))
    assert (code, "I1: journal e0-tiny: record 43 is in no ledger" in message) == (1, True)


def test_the_printed_head_of_a_journal_must_lie_on_it(home: JournaledHome):
    code, printed = tenora("audit", "--home", str(home.home), "--head")
    _, journal = printed.splitlines()
    assert code == 0
    assert journal.startswith("e0-tiny=42:")
    home.run(1)
    assert audited(home.home, "--expect", journal)["ok"]
    log = home.home / "engines" / "e0-tiny" / "journal.log"
    home.journal.close()
    log.write_bytes(b"")  # the log written anew from the last acknowledged record on, as nobody else could tell
    home.journal = Journal(log.parent)
    home.run(9)
    code, message = tenora("audit", "--home", str(home.home))
    assert (code, "record 42, once its head, is not on the chain" in message) == (1, True)


def test_a_backup_taken_while_serving_holds_and_what_it_lacks_is_delivered_again(home: JournaledHome, tmp_path: Path):
    blob = home.home / "blobs" / "tenants" / "ten_a" / ("a" * 64)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"weights")
    code, message = tenora("backup", str(tmp_path / "copy"), "--home", str(home.home))
    assert code == 0, message
    copy = tmp_path / "copy"
    late = home.run(3)
    home.book(late)

    assert audited(copy)["ok"]
    assert (copy / blob.relative_to(home.home)).read_bytes() == b"weights"
    assert all(path.stat().st_mode & 0o077 == 0 for path in [copy, *copy.rglob("*")])
    restored = JournaledHome(copy)
    again = [record.payload for record in restored.journal.entries(0, 100)]
    assert restored.book(again) == 2, "the two that were on their way"
    assert restored.book(again) == 0, "a delivery that is tried again changes nothing"
    restored.acknowledge()
    restored.journal.close()
    assert audited(copy)["ok"]


def test_a_backup_into_a_folder_that_has_something_is_refused(home: JournaledHome, tmp_path: Path):
    code, message = tenora("backup", str(home.home), "--home", str(home.home))
    assert (code, "is not empty" in message) == (1, True)


def test_a_backup_that_fails_leaves_nothing_that_could_be_taken_for_one(home: JournaledHome, tmp_path: Path):
    away = "postgresql://127.0.0.1:1/tenora"
    code, message = tenora("backup", str(tmp_path / "copy"), "--home", str(home.home), "--database-url", away)

    assert (code, "pg_dump" in message) == (1, True)
    assert not (tmp_path / "copy").exists()
