"""Which of the requests that were read from the kernel is served next.

The kernel has one queue of requests: a caller beside a hundred threads of another user
would wait for each of them. So all waiting requests are read first; then the owners are
served in turn, and the agents of each owner in turn.

What the kernel asks with a lock does not wait (``locks``): others wait for that lock, and the
kernel sends nothing for them yet. Of those at most one is read in a pass of the loop.

Reads have a line of their own for each agent: what a write waits for, such as the page that it is
written from, is never behind other writes. Requests that wait are on their owner's account of
memory. The kernel is told to send as many requests of readahead as it can, and they are served in
turn; by itself it sends a dozen at once for all owners.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Final

import pyfuse3
import trio

from ctxfs.handshake import Handshake
from runtime.authority.accounts import Payer, Reserve
from runtime.authority.loop import Holding, LoopMeter, OwnLoop

#: read at most in a row, and for so long before more is served
_READ_MAX: Final = 16
_READ_SECONDS: Final = 0.001
#: the reader serves by itself what has not to take its turn: others go on after so long
_READING_SECONDS: Final = 0.0005
#: served in one pass of the event loop: one, or as many as took no turn in the pass before,
#: and one more for so long as that took
_AT_MOST: Final = 4
_SERVICE_SECONDS: Final = 0.004
#: whose payer cannot be told
_UNKNOWN: Final = Payer(-1, "unknown callers")
_Owner = tuple[int, bool]


class _Waiting:
    """Those who wait, by owner and agent."""

    def __init__(self) -> None:
        # the first of each is the next one
        self._owners: dict[_Owner, dict[str, deque[trio.Event]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def add(self, who: Payer, event: trio.Event) -> None:
        owner = who.owner, who.reserve is not Reserve.NONE
        self._owners.setdefault(owner, {}).setdefault(who.name, deque()).append(event)

    def take(self) -> trio.Event:
        owner = next(iter(self._owners))
        agents = self._owners.pop(owner)
        name = next(iter(agents))
        events = agents.pop(name)
        event = events.popleft()
        if events:
            agents[name] = events
        if agents:
            self._owners[owner] = agents
        return event


class Scheduler:
    """Reads requests and lets them go on. Until ``run`` runs nobody waits."""

    def __init__(self, meter: LoopMeter, handshake: Handshake | None = None) -> None:
        self._meter = meter
        self._handshake = handshake
        #: who reads, while nothing is to be read
        self.reading = Holding()
        self._waiting = _Waiting()
        #: since the reader last let others go on: requests, and when that was
        self._read, self._passed = 0, 0.0
        #: since ``run`` last let others go on: requests that were answered as they were read
        self._turnless = 0
        #: what requests are read from, once it is known
        self._device: select.poll | None = None
        #: that, and what the loop waits for
        self._either = select.poll()
        self._wake = trio.Event()

    # reading

    def connect(self) -> None:
        """Makes pyfuse3 ask here when it may read, in the way of ``pyfuse3.asyncio``: by
        itself it reads one request in two passes of the event loop."""
        lowlevel = _Instead(trio.lowlevel, wait_readable=self._wait_readable)
        pyfuse3.trio = _Instead(  # type: ignore[attr-defined]
            trio, lowlevel=lowlevel, Lock=partial(_ReadLock, self._meter)
        )

    async def _wait_readable(self, fd: int) -> None:
        if self._device is None:
            self._device = select.poll()
            self._device.register(fd, select.POLLIN)
            self._either.register(fd, select.POLLIN)
        if self._handshake is not None and not self._handshake.done:
            await self._handshake.go_on(fd)
            if self._handshake is not None and not self._handshake.done:
                return
        self._read += 1
        self._turnless += 1
        if self._read >= _READ_MAX or time.monotonic() - self._passed > _READING_SECONDS:
            await trio.lowlevel.checkpoint()
            self._note_pass()
        # who asked may be killed meanwhile: then there is nothing to read any more, and
        # pyfuse3 would wait for the next request with the whole daemon
        while not self._is_more():
            if self.reading.holds:
                await self.reading.passed()
            elif self._meter.loop is None or not self._wait_here(self._meter.loop):
                await trio.lowlevel.wait_readable(fd)
            else:
                self._note_pass()
                return
            self._note_pass()

    def _wait_here(self, loop: OwnLoop) -> bool:
        """Waits for the next request as the loop would, if no other task can go on, and none is
        due: a pass of the loop takes as long as a small request. Whether only a request has
        come."""
        patience = loop.patience()
        if self._meter.runnable > 1 or not patience:
            return False
        self._either.register(loop.fd, select.POLLIN)
        self._meter.rest()
        ready = self._either.poll(math.ceil(patience * 1e3))
        self._meter.go_on()
        return bool(ready) and loop.fd not in dict(ready)

    def _note_pass(self) -> None:
        self._read, self._passed = 0, time.monotonic()

    def _is_more(self) -> bool:
        """Whether the kernel has more requests that may be read now."""
        if self._device is None or self.reading.holds:
            return False
        return bool(self._device.poll(0))

    # serving

    def is_asked(self) -> bool:
        """Whether there are other requests: those that wait, or that the kernel has."""
        return bool(self._waiting) or self._is_more()

    async def turn(self, who: Payer | None, *, reads: bool = False) -> None:
        """Until it is this request's turn; at once if nothing else was asked. Reads have a line
        beside the agent's other requests: these may wait for one, and for nothing else. Thousands
        of pages may be read ahead, for which nobody waits."""
        if not self.is_asked():
            return
        event = trio.Event()
        who = who or _UNKNOWN
        self._turnless -= 1
        self._waiting.add(replace(who, name=f"{who.name}/") if reads else who, event)
        self._wake.set()
        await event.wait()

    async def run(self) -> None:
        """Serves for ever those who wait."""
        served = time.monotonic()
        while True:
            if not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
                served = time.monotonic()
            until = time.monotonic() + _READ_SECONDS
            while self._is_more() and time.monotonic() < until:
                await trio.lowlevel.checkpoint()
            # Whoever asks meanwhile waits for those that are served in this pass. So it is one,
            # and more only where passes are long for what others do in them, or where many are
            # served without a turn, who would take all of the time.
            passed, served = time.monotonic() - served, time.monotonic()
            number = max(1, self._turnless) + int(passed / _SERVICE_SECONDS)
            self._turnless = 0
            for _ in range(min(number, _AT_MOST)):
                self._waiting.take().set()
                if not self._waiting:
                    break
            await trio.lowlevel.checkpoint()


class _ReadLock:
    """The turn to read the next request. A lock of trio would cost a pass of the loop for each:
    here who has served one reads the next at once, and another task only if that one waits.

    Whether it does is known once its step is over. Another task that was woken before would
    mostly find the lock taken again, and a step in vain costs as much as a small request.
    """

    def __init__(self, meter: LoopMeter) -> None:
        self._meter = meter
        self._taken = False
        self._lot = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._taken:
            await self._lot.park()
        self._taken = True

    async def __aexit__(self, *error: object) -> None:
        self._taken = False
        self._meter.afterwards = self._let_next

    def _let_next(self) -> None:
        if not self._taken:
            self._lot.unpark()


class _Instead:
    """A module, but for some of its names."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
