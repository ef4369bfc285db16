"""What lets the suites of whole installations run on a GPU too: how equal answers are there, and that kernels ran."""

import pytest

from tests import fallbacks
from tests.exactness import assert_close
from tests.served import parse_metrics

METRICS = """# TYPE tenora_fallbacks counter
tenora_fallbacks_total{kind="graph",reason="too_many_sequences",model="tiny"} 0
tenora_fallbacks_total{kind="graph",reason="head_size",model="moe"} 7
tenora_fallbacks_total{kind="kernel",reason="head_size",model="tiny"} 2
tenora_fallbacks_total{kind="kernel",reason="head_size",model="other"} 1
tenora_fallbacks_total{kind="store",reason="away"} 5
# TYPE tenora_batch_shape counter
tenora_batch_shape_total{bucket="decode 8",model="tiny"} 30
"""


def test_steps_without_their_kernels_are_found_and_the_gateways_left_out():
    samples = parse_metrics(METRICS)

    assert fallbacks.unmeant(samples) == {"graph head_size": 7, "kernel head_size": 3}
    assert fallbacks.counted(samples) == {"graph too_many_sequences": 0, "graph head_size": 7, "kernel head_size": 3}
    assert fallbacks.steps(samples) == {"decode 8": 30}


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (("text", ["a", "b"], [None, -1.23456]), True),
        (("text", ["a", "b"], [None, -1.2347]), False),
        (("text", ["a", "c"], [None, -1.2345]), False),
        (("text", ["a", "b"], [None]), False),
    ],
)
def test_close_answers_have_the_same_words_and_nearly_the_same_numbers(other: tuple, is_same: bool):
    answer = ("text", ["a", "b"], [None, -1.2345])

    if is_same:
        assert_close(other, answer)
    else:
        with pytest.raises(AssertionError):
            assert_close(other, answer)
