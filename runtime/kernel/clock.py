"""The two clocks that what is stored is counted by.

Elapsed time is counted by CLOCK_BOOTTIME: nobody sets that, and it goes on while the machine is
suspended. It begins anew with each boot, so what outlives one goes on by the wall clock. Records
therefore have moments by both; a moment by CLOCK_BOOTTIME is 0 where an older version wrote it.

The event loop's clock stands still while the machine is suspended. So whoever waits in it for a
moment looks again after ``LOOK_AGAIN`` seconds.
"""

from __future__ import annotations

import time
from typing import Final

LOOK_AGAIN: Final = 60.0
#: by which the wall clock is set, and not slewed
SET_SECONDS: Final = 0.1


def wall() -> float:
    """Seconds since the epoch."""
    return time.time()


def up() -> float:
    """Seconds since the machine booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ahead() -> float:
    """Seconds by which the wall clock is ahead of the other: another number when it is set."""
    return wall() - up()


def since(moment: float, moment_up: float) -> float:
    """Seconds that have passed since a moment of this boot, by both clocks."""
    return up() - moment_up if moment_up else wall() - moment
