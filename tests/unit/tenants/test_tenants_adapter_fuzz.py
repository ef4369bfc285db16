"""A small sample of ``./run prove fuzz``: a mutated upload is refused with reasons or bound right."""

from pathlib import Path

import pytest
import torch

from tests.adapter_fuzz import Fuzz, nothing_written_outside
from tests.adapter_mutants import mutant

NUM = 500


def test_mutated_uploads_are_refused_with_reasons_or_equal_the_merged_reference(tmp_path: Path, monkeypatch):
    torch.set_num_threads(1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fuzz = Fuzz(tmp_path)

    with nothing_written_outside(fuzz.root):
        for index in range(NUM):
            fuzz.run(mutant(1, index))

    assert fuzz.tally.num_past_gate >= 0.2 * NUM
    assert fuzz.tally.num_accepted >= 0.02 * NUM
    assert fuzz.tally.num_forwards > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "elsewhere"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_written_outside_is_seen(tmp_path: Path):
    with pytest.raises(AssertionError, match="elsewhere"), nothing_written_outside(tmp_path / "root"):
        (tmp_path / "elsewhere").write_text("x")
