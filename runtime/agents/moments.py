"""The moments at which something becomes of records by itself: timers and deadlines.

They count by CLOCK_BOOTTIME (``runtime.kernel.clock``). What was due while no daemon ran comes
first, in its order.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

import trio

from runtime import crashpoints
from runtime.authority.facts import Facts, Part
from runtime.ids import ItemIndex
from runtime.kernel import clock
from runtime.kernel.linux import boot_id
from runtime.records.change import Change, Subscriber
from runtime.records.items import Item, Timed
from runtime.records.model import Agent
from runtime.texts.names import is_duration, parse_moment

log = logging.getLogger("ctxd.moments")

_T = TypeVar("_T", bound=Timed)


def expiry(text: str) -> dict[str, float]:
    """The fields of a record whose deadline begins to count now: a duration by both clocks, a time
    by the wall clock alone; zeros for no text. ``MalformedError``."""
    if not text:
        return {"expires": 0.0, "expires_up": 0.0}
    now = clock.wall()
    moment = parse_moment(text, now)
    up = clock.up() + moment - now if is_duration(text) else 0.0
    return {"expires": moment, "expires_up": up}


class Moments(Part, Subscriber, Generic[_T]):
    """The moments of all records of one kind, the soonest first.

    ``tell`` tells those of a record, infinite ones too; ``come`` adds to a change what becomes of
    one when a moment has come, which cannot be refused.
    """

    def __init__(
        self,
        facts: Facts,
        cls: type[_T],
        tell: Callable[[_T], Collection[float]],
        come: Callable[[Change, Agent, _T, float], None],
    ) -> None:
        super().__init__(facts)
        self._cls = cls
        self._tell = tell
        self._come = come
        #: how much the wall clock is ahead of the other
        self._ahead = clock.ahead()
        #: with the records' indices, some of them out of date
        self._moments: list[tuple[float, ItemIndex]] = []
        self._crowded = 1024
        self._sooner = trio.Event()
        self._journal.subscribe(self)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, self._cls):
            self._expect(item)

    def counted(self, item: _T, moment: float, moment_up: float) -> float:
        """A moment of a record, as far as is known now; infinite for none.

        What was said as a duration is counted by the clock that nobody sets, in the boot in which
        it was said.
        """
        if moment_up and item.boot == boot_id():
            return moment_up
        return moment - self._ahead if moment else math.inf

    def deadline(self, item: _T) -> float:
        return self.counted(item, item.expires, item.expires_up)

    def _moments_of(self, item: _T) -> frozenset[float]:
        return frozenset(self._tell(item)) - {math.inf}

    def _expect(self, item: _T) -> None:
        """Its moments may be sooner than the others'."""
        for moment in self._moments_of(item):
            heapq.heappush(self._moments, (moment, item.index))
            if self._moments[0] == (moment, item.index):
                self._sooner.set()
        if len(self._moments) > self._crowded:
            self._count_anew()

    def _count_anew(self) -> None:
        """Most moments are of what is over, or the wall clock was set."""
        items = self._items.pending(self._cls)
        self._moments = sorted((m, item.index) for item in items for m in self._moments_of(item))
        self._crowded = max(1024, 2 * len(self._moments))

    async def run(self) -> None:
        """Has them come, those first that were due meanwhile."""
        self._count_anew()
        while True:
            self._sooner = trio.Event()
            ahead = clock.ahead()
            if abs(ahead - self._ahead) > clock.SET_SECONDS:
                self._ahead = ahead
                self._count_anew()
            while (moment := self._next()) is not None and moment[0] <= clock.up():
                heapq.heappop(self._moments)
                self._has_come(*moment)
                await trio.lowlevel.checkpoint()
            left = math.inf if moment is None else moment[0] - clock.up()
            longest = clock.LOOK_AGAIN if moment else math.inf
            with trio.move_on_after(min(max(left, 0.0), longest)):
                await self._sooner.wait()

    def _next(self) -> tuple[float, ItemIndex] | None:
        """The first moment of a record that it still has."""
        while self._moments:
            moment, index = self._moments[0]
            item = self._items.get(index)
            if isinstance(item, self._cls) and moment in self._moments_of(item):
                return moment, index
            heapq.heappop(self._moments)
        return None

    def _has_come(self, moment: float, index: ItemIndex) -> None:
        item = self._items.get(index)
        assert isinstance(item, self._cls)
        agent = self._registry.get(item.agent)
        if agent is None:
            return
        change = Change()
        try:
            self._come(change, agent, item, moment)
        except Exception:
            log.exception("%s: a bug in ctxfs", agent.name)
            return
        crashpoints.reach("wait.due")
        self._journal.note(change)
        crashpoints.reach("wait.fired")
