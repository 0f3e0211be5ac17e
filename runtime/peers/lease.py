"""The lease under which a host runs what a lead has placed there: both sides of it, pure.

The host asks for it again and again, and counts from when it asked; the lead grants it, and counts
from when it granted. A grant says the last operation that was recorded before it, and holds only
when that one is done: so a lead that told a host to stop an agent has that agent stopped, or the
lease ends. Times are seconds of CLOCK_BOOTTIME, each of its own machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from runtime.kernel.handover import Handed

#: clocks of two machines differ by so much, of which one may be slewed
RATE: Final = 1.2
#: seconds beyond lease and grace in which a host ends what it runs, however loaded it is
SLACK: Final = 10.0
#: of the lease: how often a host asks; and seconds until it asks again if no answer came
_ASKS: Final = 3
_AGAIN_SECONDS: Final = 1.0
#: that a host has not heard an answer to, or that wait for an operation; it forgets older ones
_OPEN_MAX: Final = 64


def bound(lease: float, grace: float) -> float:
    """Seconds in which whatever runs under a lease is gone, by the clock of any machine."""
    return (lease + grace + SLACK) * RATE


class Lease(Handed):
    """A host's, for all that it runs of a registration; seconds of CLOCK_BOOTTIME.

    ``end`` only grows, until it is over for good: 0. It is what monitors read. The next agents
    then get a new lease, and so a new object.
    """

    HANDED = ("seconds", "end", "reached", "_asked", "_held", "_next")

    def __init__(self, seconds: float, reached: int, end: float | None = None) -> None:
        """``reached``: the operation that was done last, or is held in memory as long as the disk
        is full; ``end``: None until the first grant."""
        self.seconds = seconds
        self.reached = reached
        self.end = end
        #: when each request was sent that is not answered, by number
        self._asked: dict[int, float] = {}
        #: grants that hold once an operation is done: that, and the end
        self._held: list[Sequence[float]] = []
        self._next = 0.0

    def is_over(self, now: float) -> bool:
        return self.end is not None and now >= self.end

    def due(self) -> float:
        """When it is to be asked for again."""
        return self._next

    def ask(self, number: int, now: float) -> None:
        self._asked[number] = now
        if len(self._asked) > _OPEN_MAX:
            del self._asked[next(iter(self._asked))]
        self._next = now + min(_AGAIN_SECONDS, self.seconds / _ASKS)

    def reconnected(self) -> None:
        """Forgets what was asked on an earlier connection, and is answered no more."""
        self._asked.clear()
        self._held.clear()
        self._next = 0.0

    def granted(self, number: int, after: int, now: float) -> None:
        """Takes a grant, unless it answers what was asked for a lease that is over since."""
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        self._next = max(now, asked + self.seconds / _ASKS)
        self._held = [*self._held[1 - _OPEN_MAX :], (after, asked + self.seconds)]
        self.reach(self.reached, now)

    def reach(self, number: int, now: float) -> None:
        """An operation is done: grants that waited for it hold, unless the lease has ended."""
        self.reached = max(self.reached, number)
        while self._held and self._held[0][0] <= self.reached:
            _, end = self._held.pop(0)
            if not self.is_over(now):
                self.end = max(self.end or 0.0, end)

    def stop(self) -> None:
        """It is over, at once and for good."""
        self.end = 0.0


class Grants:
    """A lead's side of a lease: what it granted, and when all of it is gone; CLOCK_BOOTTIME too.

    A daemon that starts does not know what the one before it granted last: it assumes a grant in
    that moment. ``seconds`` and ``grace`` are the greatest that the host may still count with.
    """

    def __init__(self, seconds: float, grace: float, now: float) -> None:
        self.seconds = seconds
        self.grace = grace
        self._granted = now
        #: how many operations are decided and not recorded yet, since the disk is full: what is
        #: granted before them holds once they are done
        self.behind: Callable[[], int] = lambda: 0
        #: once it said that all is lost: the last operation of which that is true
        self.over: int | None = None

    def lost_at(self) -> float:
        """When whatever was placed under it is gone."""
        return self._granted + bound(self.seconds, self.grace)

    def left(self, now: float) -> int:
        """Seconds for which the host need not ask again."""
        return 0 if self.over is not None else max(0, int(self._granted + self.seconds - now))

    def begin(self, now: float) -> None:
        """From now on there may be grants again, for agents that are put where none was."""
        self._granted = max(self._granted, now)

    def answer(self, number: int, after: int, now: float) -> dict[str, Any]:
        """An answer to a host that asks, if ``after`` is the last operation recorded."""
        if self.over is not None:
            return {"op": "over", "upto": self.over}
        self._granted = now
        return {"op": "grant", "ask": number, "after": after + self.behind()}
