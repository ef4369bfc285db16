"""No kernel touches memory past the end of a tensor, not even in lanes that it throws away."""

import faulthandler
import os
import signal
import traceback

import pytest

from tests.kernels.interpreted.guarded import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the copy computes on one thread


def _status_of(case: str) -> int:
    """0, or by what a copy of this process ended that ran the case: a signal is negative."""
    copy = os.fork()
    if copy == 0:
        faulthandler.disable()
        try:
            CASES[case]()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])


@pytest.mark.parametrize("case", sorted(set(CASES) - {"past_an_end"}))
def test_nothing_past_an_end_is_touched(case):
    assert _status_of(case) == 0


def test_what_touches_memory_past_an_end_dies():
    assert _status_of("past_an_end") == -signal.SIGSEGV
