"""The journal: what was appended is there after any crash, in order, unchanged; what was changed is noticed."""

import random
from pathlib import Path

import pytest

from engine.journal import Journal, JournalCorrupt

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


def test_the_log_drops_what_is_acknowledged_and_the_chain_goes_on(tmp_path):
    journal = Journal(tmp_path, max_bytes=10_000)
    for round_number in range(1, 60):
        journal.append([b"x" * 1000])
        if round_number % 3 == 0:
            [record] = journal.entries(round_number - 1, 1)
            assert journal.acknowledge(record.number, record.hash)
    assert journal.size_bytes < 20_000
    unacked = journal.entries(journal.acked, 100)
    assert [record.number for record in unacked] == [58, 59]
    journal.close()
    journal = Journal(tmp_path)
    assert (journal.last, journal.acked) == (59, 57) or journal.acked < 57  # the cursor is saved lazily
    assert journal.entries(57, 100) == unacked
    journal.close()


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
        journal = Journal(folder, max_bytes=4000)
        for _ in range(150):
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
                journal = Journal(folder, max_bytes=4000)
                assert journal.acked >= saved_ack
            entries = journal.entries(journal.acked, 10_000)
            assert [record.payload for record in entries] == model[journal.acked :]
            assert journal.last == len(model)
        journal.close()
