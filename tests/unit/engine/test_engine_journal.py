"""The journal: what was appended is there after any crash, in order, unchanged; what was changed is noticed."""

import random
from pathlib import Path

import pytest

from engine.journal import Journal
from engine.journal.segments import Keep
from engine.wire.journal import BASE, GENESIS, JournalCorrupt, JournalReader, read_mark, sealed_files

LOG = "journal.log"


def filled(folder: Path, groups: list[list[bytes]]) -> list[int]:
    """A closed journal of these groups; the file's size after each."""
    journal = Journal(folder)
    sizes = []
    for group in groups:
        journal.append(group)
        sizes.append(journal.size_bytes)
    journal.close()
    return sizes


def payloads(folder: Path, after: int = 0) -> list[bytes]:
    journal = Journal(folder)
    try:
        return [record.payload for record in journal.entries(after, 10_000)]
    finally:
        journal.close()


def test_records_are_numbered_from_one_and_found_after_reopening(tmp_path):
    filled(tmp_path, [[b"a", b"b"], [b""], [b"c" * 5000]])
    journal = Journal(tmp_path)
    assert [record.number for record in journal.entries(0, 10)] == [1, 2, 3, 4]
    assert [record.payload for record in journal.entries(1, 2)] == [b"b", b""]
    journal.append([b"d"])
    assert [record.payload for record in journal.entries(3, 10)] == [b"c" * 5000, b"d"]
    journal.close()


def test_every_cut_of_the_last_group_leaves_exactly_the_groups_before_it(tmp_path):
    sizes = filled(tmp_path / "whole", [[b"one"], [b"two", b"three"]])
    data = (tmp_path / "whole" / LOG).read_bytes()
    for cut in range(sizes[0], sizes[1]):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / LOG).write_bytes(data[:cut])
        kept = payloads(folder)
        assert kept in ([b"one"], [b"one", b"two"])
        assert payloads(folder) == kept, "what was cut off stays cut off"


def test_zeroes_and_noise_behind_the_last_group_are_cut_off(tmp_path):
    for seed, tail in enumerate([bytes(4096), random.Random(1).randbytes(4096), b"TJr1" * 100]):
        folder = tmp_path / str(seed)
        sizes = filled(folder, [[b"one"], [b"two"]])
        with (folder / LOG).open("ab") as file:
            file.write(tail)
        journal = Journal(folder)
        assert journal.torn_bytes == len(tail)
        assert (journal.size_bytes, journal.last) == (sizes[-1], 2)
        journal.append([b"three"])
        journal.close()
        assert payloads(folder) == [b"one", b"two", b"three"]


def test_a_hole_in_the_last_group_is_cut_off_though_its_end_was_written(tmp_path):
    sizes = filled(tmp_path, [[b"one"], [b"x" * 5000, b"three"]])
    log = tmp_path / LOG
    data = bytearray(log.read_bytes())
    data[sizes[0] + 500 : sizes[0] + 600] = bytes(100)  # a page that never came to the disk
    log.write_bytes(data)
    assert payloads(tmp_path) == [b"one"]


def test_every_changed_byte_before_the_last_group_is_noticed_and_its_record_named(tmp_path):
    sizes = filled(tmp_path / "whole", [[b"one"], [b"two"], [b"three"]])
    data = (tmp_path / "whole" / LOG).read_bytes()
    for position in range(sizes[1]):
        folder = tmp_path / f"changed{position}"
        folder.mkdir()
        changed = bytearray(data)
        changed[position] ^= 0x41
        (folder / LOG).write_bytes(changed)
        with pytest.raises(JournalCorrupt) as error:
            Journal(folder)
        assert error.value.number == (1 if position < sizes[0] else 2)


def test_a_record_that_was_cut_out_is_noticed(tmp_path):
    sizes = filled(tmp_path, [[b"one"], [b"two"], [b"three"]])
    log = tmp_path / LOG
    data = log.read_bytes()
    log.write_bytes(data[: sizes[0]] + data[sizes[1] :])
    with pytest.raises(JournalCorrupt, match="record 2"):
        Journal(tmp_path)


def test_a_record_from_another_journal_does_not_continue_the_chain(tmp_path):
    sizes = filled(tmp_path / "mine", [[b"one"], [b"two"]])
    filled(tmp_path / "other", [[b"ONE"], [b"two"]])
    mine, other = (tmp_path / "mine" / LOG).read_bytes(), (tmp_path / "other" / LOG).read_bytes()
    (tmp_path / "mine" / LOG).write_bytes(mine[: sizes[0]] + other[sizes[0] :])
    with pytest.raises(JournalCorrupt) as error:
        Journal(tmp_path / "mine")
    assert error.value.number == 2


def test_acknowledged_records_that_are_gone_are_noticed(tmp_path):
    sizes = filled(tmp_path, [[b"one"], [b"two"]])
    journal = Journal(tmp_path)
    [_, second] = journal.entries(0, 2)
    assert journal.acknowledge(2, second.hash)
    journal.save_ack()
    journal.close()
    log = tmp_path / LOG
    log.write_bytes(log.read_bytes()[: sizes[0]])
    with pytest.raises(JournalCorrupt) as error:
        Journal(tmp_path)
    assert error.value.number == 2


def test_an_ack_with_a_wrong_hash_or_of_a_future_record_moves_nothing(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"one", b"two"])
    [first, second] = journal.entries(0, 2)
    assert not journal.acknowledge(2, first.hash)
    assert not journal.acknowledge(3, second.hash)
    assert journal.acked == 0
    assert journal.acknowledge(2, second.hash)
    assert journal.acknowledge(1, first.hash), "acknowledged already"
    assert journal.acked == 2
    journal.close()


def test_the_cursor_survives_and_an_unsaved_one_only_means_delivery_twice(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"one", b"two", b"three"])
    records = journal.entries(0, 3)
    journal.acknowledge(1, records[0].hash)
    journal.save_ack()
    journal.acknowledge(3, records[2].hash)
    journal.close()
    assert payloads(tmp_path, after=0) == [b"one", b"two", b"three"]
    journal = Journal(tmp_path)
    assert journal.acked == 1
    journal.close()


def test_a_torn_cursor_file_means_that_nothing_is_acknowledged(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"one"])
    journal.acknowledge(1, journal.entries(0, 1)[0].hash)
    journal.save_ack()
    journal.close()
    (tmp_path / "journal.ack").write_bytes(b"torn")
    journal = Journal(tmp_path)
    assert journal.acked == 0
    journal.close()


def grow(journal: Journal, numbers: range) -> None:
    """Records of 1000 bytes; every third is acknowledged, with those before it."""
    for number in numbers:
        journal.append([b"%04d" % number + b"x" * 996])
        if number % 3 == 0:
            [record] = journal.entries(number - 1, 1)
            assert journal.acknowledge(record.number, record.hash)


def test_a_grown_log_is_sealed_and_goes_on_and_an_auditor_reads_all_of_it(tmp_path):
    journal = Journal(tmp_path, segment_bytes=10_000)
    grow(journal, range(1, 60))
    assert journal.size_bytes < 20_000
    unacked = journal.entries(journal.acked, 100)
    assert [record.number for record in unacked] == [58, 59]
    journal.close()
    assert len(sealed_files(tmp_path)) >= 3

    reader = JournalReader(tmp_path)
    assert [entry.payload[:4] for entry in reader.entries()] == [b"%04d" % number for number in range(1, 60)]
    assert (reader.base, reader.head.number, reader.head.hash) == (GENESIS, 59, unacked[-1].hash)

    journal = Journal(tmp_path, segment_bytes=10_000)
    assert journal.last == 59
    assert journal.acked <= 57  # the cursor is saved lazily
    assert journal.entries(57, 100) == unacked
    journal.close()


def test_segments_over_the_bound_are_deleted_and_the_chain_verifies_from_the_noted_end(tmp_path):
    journal = Journal(tmp_path, segment_bytes=10_000, keep=Keep(max_bytes=25_000))
    grow(journal, range(1, 100))
    journal.close()

    reader = JournalReader(tmp_path)
    kept = [entry.number for entry in reader.entries()]

    assert 1 < kept[0] == reader.base.number + 1
    assert kept == list(range(kept[0], 100))
    assert sum(path.stat().st_size for path in sealed_files(tmp_path)) <= 25_000


def test_segments_older_than_the_days_to_keep_are_deleted_at_the_next_sealing(tmp_path):
    import os

    journal = Journal(tmp_path, segment_bytes=10_000, keep=Keep(days=30))
    grow(journal, range(1, 40))
    old, *younger = sealed_files(tmp_path)
    os.utime(old, (0, 0))
    assert younger
    grow(journal, range(40, 60))
    journal.close()
    assert not old.exists()
    assert all(path.exists() for path in younger)
    assert [entry.number for entry in JournalReader(tmp_path).entries()][-1] == 59


def test_a_crash_at_any_point_of_sealing_loses_nothing_and_the_next_open_goes_on(tmp_path):
    import os
    import shutil

    whole = tmp_path / "whole"
    journal = Journal(whole)
    grow(journal, range(1, 20))
    journal.save_ack()
    journal.close()
    linked = tmp_path / "linked"  # the log has its second name, the new log isn't there
    shutil.copytree(whole, linked)
    os.link(linked / LOG, linked / f"journal-{1:020d}.log")
    staged = tmp_path / "staged"  # the new log was being written
    shutil.copytree(linked, staged)
    (staged / f"journal-{1:020d}.log").unlink()
    os.link(staged / LOG, staged / f"journal-{1:020d}.log")
    (staged / f"{LOG}.new").write_bytes(b"half")
    for folder in (linked, staged):
        journal = Journal(folder, segment_bytes=10_000)
        grow(journal, range(20, 40))
        journal.close()
        assert [entry.number for entry in JournalReader(folder).entries()] == list(range(1, 40)), folder


def test_without_its_cursor_a_journal_delivers_again_what_its_log_has_and_not_what_was_sealed(tmp_path):
    journal = Journal(tmp_path, segment_bytes=10_000)
    grow(journal, range(1, 60))
    journal.close()
    (tmp_path / "journal.ack").unlink()

    journal = Journal(tmp_path, segment_bytes=10_000)

    assert 0 < journal.acked < 57
    assert [entry.number for entry in journal.entries(journal.acked, 100)] == list(range(journal.acked + 1, 60))
    grow(journal, range(60, 80))
    journal.close()
    assert [entry.number for entry in JournalReader(tmp_path).entries()] == list(range(1, 80))


def test_a_log_that_was_copied_when_it_was_sealed_too_goes_on_and_loses_nothing(tmp_path):
    import shutil

    journal = Journal(tmp_path, segment_bytes=10_000)
    grow(journal, range(1, 10))
    journal.close()
    shutil.copy(tmp_path / LOG, tmp_path / f"journal-{1:020d}.log")

    journal = Journal(tmp_path, segment_bytes=10_000)
    grow(journal, range(10, 40))
    journal.close()

    assert [entry.number for entry in JournalReader(tmp_path).entries()] == list(range(1, 40))


def test_what_is_missing_or_changed_in_sealed_segments_is_found(tmp_path):
    import shutil

    journal = Journal(tmp_path / "whole", segment_bytes=10_000)
    grow(journal, range(1, 60))
    journal.save_ack()
    journal.close()

    def broken(name: str, damage) -> JournalCorrupt:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder)
        with pytest.raises(JournalCorrupt) as error:
            list(JournalReader(folder).entries())
        return error.value

    def cut_tail(folder: Path) -> None:
        path = sealed_files(folder)[0]
        path.write_bytes(path.read_bytes()[:-10])

    def change(folder: Path) -> None:
        path = sealed_files(folder)[1]
        path.write_bytes(path.read_bytes().replace(b"xxxx", b"xxxy", 1))

    assert broken("first", lambda folder: sealed_files(folder)[0].unlink()).number == 1
    assert "missing" in str(broken("middle", lambda folder: sealed_files(folder)[1].unlink()))
    assert "cut" in str(broken("tail", cut_tail))
    assert "changed" in str(broken("changed", change))
    assert "acknowledged" in str(broken("log", lambda folder: (folder / LOG).unlink()))


def test_the_end_of_a_chain_whose_old_segments_are_gone_is_noted(tmp_path):
    journal = Journal(tmp_path, segment_bytes=10_000, keep=Keep(max_bytes=0))
    grow(journal, range(1, 40))
    journal.close()
    base = read_mark(tmp_path / BASE)
    assert base.number > 1
    (tmp_path / BASE).unlink()
    with pytest.raises(JournalCorrupt, match="record 1: is missing"):
        list(JournalReader(tmp_path).entries())


def test_a_failed_write_leaves_no_trace_and_may_be_repeated(tmp_path):
    import resource
    import signal

    journal = Journal(tmp_path)
    journal.append([b"one"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size_bytes + 100, limits[1]))  # the disk is full
        with pytest.raises(OSError):
            journal.append([b"two" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert (tmp_path / LOG).stat().st_size == journal.size_bytes
    journal.append([b"two" * 100])
    journal.close()
    assert payloads(tmp_path) == [b"one", b"two" * 100]


def test_random_life_of_a_journal_matches_a_plain_list(tmp_path):
    for seed in range(8):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        model: list[bytes] = []
        saved_ack = 0
        journal = Journal(folder, segment_bytes=4000)
        for number in range(150):
            action = rng.random()
            if action < 0.5:
                group = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
                journal.append(group)
                model += group
            elif action < 0.8 and journal.last > journal.acked:
                record = rng.choice(journal.entries(journal.acked, 5))
                assert journal.acknowledge(record.number, record.hash)
            elif action < 0.9:
                journal.save_ack()
                saved_ack = journal.acked
            else:  # a crash: no close, an unfinished group behind the end
                journal.close()
                with (folder / LOG).open("ab") as file:
                    file.write(rng.randbytes(rng.randrange(300)))
                journal = Journal(folder, segment_bytes=4000)
                assert journal.acked >= saved_ack
            entries = journal.entries(journal.acked, 10_000)
            assert [record.payload for record in entries] == model[journal.acked :]
            assert journal.last == len(model)
            if action >= 0.9 or number % 10 == 9:
                assert [entry.payload for entry in JournalReader(folder).entries()] == model
        journal.close()
