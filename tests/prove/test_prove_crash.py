"""``./run prove crash [--seed N --rounds N]``: rounds of SIGKILL to a gateway, the engine, the store, the supervisor or
PostgreSQL while at least eight streams run; after each the audit passes."""

import random
from pathlib import Path

import pytest

from tests.crashes import MIN_RUNNING, Round, crashing, table, victims

pytestmark = pytest.mark.long
ROUNDS = 200
MIN_LOSING = 0.3


def test_no_crash_of_any_process_makes_the_books_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, rounds: int | None
):
    draw = random.Random(seed)
    done: list[Round] = []
    try:
        with crashing(tmp_path) as installation:
            for number, victim in enumerate(victims(draw, rounds or ROUNDS)):
                done.append(installation.round(number, victim, draw))
    finally:
        with capsys.disabled():
            print(f"\n{table(done)}")
    assert all(each.num_running >= MIN_RUNNING for each in done)
    assert sum(each.lost_a_request for each in done) >= MIN_LOSING * len(done)
