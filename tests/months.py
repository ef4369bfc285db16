"""For tests that spend, and then look at what this month has."""

import time
from calendar import monthrange


def stay_within_a_month(seconds: float = 60.0) -> None:
    """Returns at a time of UTC from which the month goes on for so long; in its last minute that is in the next one."""
    now = time.gmtime()
    days_after = monthrange(now.tm_year, now.tm_mon)[1] - now.tm_mday
    left = days_after * 86_400 + 86_400 - (now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec)
    if left < seconds:
        time.sleep(left)
