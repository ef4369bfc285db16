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
    # by the books: whether a caller saw it before it left is chance
    assert all(each.num_lost_rows for each in done if each.victim == "engine"), table(done)
