"""Ten quick rounds of `./run prove crash` with a fixed seed, without the supervisor, whose rounds take longest."""

import random
from pathlib import Path

from tests.crashes import MIN_RUNNING, crashing, table

VICTIMS = ["gateway", "engine", "database", "gateway", "store", "gateway", "database", "engine", "gateway", "store"]


def test_ten_crashes_lose_no_record_and_bill_nothing_twice(tmp_path: Path):
    draw = random.Random(7)
    with crashing(tmp_path) as installation:
        done = [installation.round(number, victim, draw, quick=True) for number, victim in enumerate(VICTIMS)]

    assert all(each.num_running >= MIN_RUNNING for each in done), table(done)
    assert all(each.lost_a_request for each in done if each.victim == "engine"), table(done)
