"""``./run prove churn``: fifty rounds of upload → use → replace under the same name → delete, with two slots and
streams that never rest. Prints how long deletions took to answer, and what the processes' memory did."""

from pathlib import Path

import pytest

from tests.churn import churn
from tests.served import serving
from tests.tiny import write_hf_dir

pytestmark = pytest.mark.long
ROUNDS = 50
GROWTH_BYTES = 12 << 20  # from the first quarter's end to the last's, of all processes together


def test_fifty_lives_of_a_name_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--dtype", "float32", "--block-size", "4", "--kv-blocks", "256", "--context", "128")
    model = write_hf_dir(tmp_path / "model")
    with serving(
        tmp_path / "home", "--model", f"tiny={model}", "--gateways", "2", "--adapter-slots", "2", *options
    ) as served:
        run, memory = churn(served, tmp_path, "churn", ROUNDS)
    deletes = sorted(run.deletes_s)
    with capsys.disabled():
        megabytes = ", ".join(f"{each / 1e6:.1f}" for each in memory)
        print(f"\n{len(deletes)} deletions: median {deletes[len(deletes) // 2] * 1e3:.0f} ms, at most", end=" ")
        print(f"{deletes[-1] * 1e3:.0f} ms; {run.num_background} background streams; PSS by quarter: {megabytes} MB")

    assert memory[-1] - memory[1] < GROWTH_BYTES
