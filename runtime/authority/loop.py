"""The cost of the event loop: how long its steps are, and how late others are for them.

One loop serves everybody, so no call may take more than 50 ms of it; a test tries each row, tool
and operation with the largest contents that there may be (tests/adapter/test_cost.py). What is
longer by its nature is done in pieces (``Gentle``): all agents of an owner together get a fifth of
the loop for it. The disk is waited for outside of the loop.

Each step of a handler charges its processor time to its caller's owner. The requests of an owner
over its account are late (``Late``) or refused, as ``ctxfs.locks`` says of each. Only so
many requests of an owner sleep. Those beyond take turns: the loop serves one for each owner in a
pass, so that others are answered between any two. Operators are always served.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, TypeVar

import trio

from runtime.authority.accounts import Payer, Reserve, TimeAccounts
from runtime.kernel.inotify import Wakeup
from runtime.kernel.lanes import Lanes

_R = TypeVar("_R")
_T = TypeVar("_T")

#: more tasks than there can be
_UNKNOWN: Final = 1 << 40
#: the last minute, in parts that are forgotten one by one
_PART_SECONDS: Final = 10.0
_PARTS: Final = 6
#: of what a piece of work took
_PAUSE: Final = 4
#: of one owner that sleep; more only take turns
_LATE_MAX: Final = 256
#: seconds of one wait for events
_LONGEST: Final = 86_400.0


class OwnLoop:
    """The events and deadlines for which the loop of trio waits between two passes. Its names are
    trio's own: a test knows if they go."""

    def __init__(self) -> None:
        self._runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        #: becomes readable by events
        self.fd: int = self._runner.io_manager._epoll.fileno()

    def queued(self) -> int:
        """How many tasks are to go on in the next pass."""
        return len(self._runner.runq)

    def patience(self) -> float:
        """The seconds until the next deadline."""
        deadline = self._runner.deadlines.next_deadline()
        return min(_LONGEST, max(0.0, self._runner.clock.deadline_to_sleep_time(deadline)))


class LoopMeter(trio.abc.Instrument):
    """Measures every step of every task of one loop.

    A step runs without a pause. Its time is processor time, so that a busy machine makes no
    step longer. A pass is all that the loop does before it looks for new events: the longest
    pass, in real time, bounds how late anybody is answered.

    Reading the processor time costs as much as a short step. So it is read once in a pass, before
    the loop looks for events, which therefore counts with the pass that follows; and again for a
    step that seems to be the longest: such a step cannot have used more than the pass so far.

    It also counts the tasks that can go on, and calls whoever waits for the end of a step.
    """

    #: known from the first pass on
    loop: OwnLoop | None = None
    #: tasks that can go on: the one whose step this is, and those whose step is to come
    runnable = _UNKNOWN
    #: called once, after the step in which it is set
    afterwards: Callable[[], object] | None = None

    def __init__(self) -> None:
        #: since the daemon is ready: the longest step, the time of all, and their number
        self.longest = 0.0
        self.total = 0.0
        self.steps = 0
        self._begun = self._awake = time.monotonic()
        self._used = time.thread_time()
        self._step = self._pass = 0.0
        self._part_ends = self._awake + _PART_SECONDS
        #: longest step and pass of each part before this one
        self._parts: deque[tuple[float, float]] = deque(maxlen=_PARTS - 1)

    def reset(self) -> None:
        """Forgets what was measured: how it was started is nobody's request."""
        self.__init__()  # type: ignore[misc]

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.runnable += 1

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.runnable -= 1
        if self.afterwards is not None:
            then, self.afterwards = self.afterwards, None
            then()
        # the next step begins at once, or in the next pass
        now = time.monotonic()
        took, self._begun = now - self._begun, now
        self.steps += 1
        if took > self._step:
            took = min(took, time.thread_time() - self._used)
            self._step = max(took, self._step)
            self.longest = max(took, self.longest)

    def before_io_wait(self, timeout: float) -> None:
        if self.loop is None:
            self.loop = OwnLoop()
        self.runnable = self.loop.queued()  # between two passes all are there
        self.rest()

    def after_io_wait(self, timeout: float) -> None:
        self.go_on()

    def rest(self) -> None:
        """The loop waits for events from now on, or a task does in its place."""
        used = time.thread_time()
        self.total += used - self._used
        self._used = used
        took = time.monotonic() - self._awake
        if took > self._pass:
            self._pass = took

    def go_on(self) -> None:
        """It does not wait any more."""
        self._begun = self._awake = time.monotonic()
        if self._awake > self._part_ends:
            self._turn()

    def _turn(self) -> None:
        passed = int((self._awake - self._part_ends) // _PART_SECONDS) + 1
        self._parts.append((self._step, self._pass))
        self._parts.extend([(0.0, 0.0)] * min(passed - 1, _PARTS))
        self._step = self._pass = 0.0
        self._part_ends += passed * _PART_SECONDS

    @property
    def recent(self) -> tuple[float, float]:
        """(longest step, longest pass) of about the last minute, in seconds."""
        parts = [*self._parts, (self._step, self._pass)]
        return max(step for step, _ in parts), max(whole for _, whole in parts)


class Turns:
    """Lets agents of one owner go on one after the other: in one pass of the loop one of each.

    So however many of its tasks have something to do, others are served between any two.
    Operators need none.
    """

    def __init__(self) -> None:
        self._turns = Lanes[int]()

    async def take(self, who: Payer) -> None:
        await self.rest(who, 0.0)

    async def rest(self, who: Payer, seconds: float) -> None:
        """Takes a turn and keeps it for so many seconds: the next in turn waits that long."""
        if who.reserve is not Reserve.NONE:
            return
        # who gets it goes on in the next pass, and who comes after in the one after that
        async with self._turns.turn(who.owner):
            if seconds:
                await trio.sleep(seconds)


class Gentle:
    """Does a long work of an owner's agents piece by piece, at most a part of the time.

    After each piece it pauses, so that all such works of one owner together take no more
    than a fifth of the loop, however much there is to do.
    """

    def __init__(self, time: TimeAccounts) -> None:
        self._time = time
        self._turns = Lanes[int]()

    async def do(self, who: Payer, piece: Callable[[], _R]) -> _R:
        """One piece, in its turn; its result after the pause. Raises what it raises."""
        async with self._turns.turn(who.owner):
            begun = time.thread_time()
            result = piece()
            took = time.thread_time() - begun
            self._time.pay(who, took)
            await trio.sleep(_PAUSE * took)
            return result


class Late:
    """Delays callers of an owner that has used too much of the loop's time.

    It sleeps, half a second at most, and then takes its turn.
    """

    def __init__(self, time: TimeAccounts, turns: Turns) -> None:
        self._time = time
        self._turns = turns
        self._sleeping = Lanes[int](_LATE_MAX)

    async def wait(self, who: Payer) -> None:
        owner = who.owner
        if self._time.makes_wait(who) and not self._sleeping.is_full(owner):
            async with self._sleeping.turn(owner):
                await trio.sleep(self._time.delay(owner))
        await self._turns.take(who)


class Timed(Generic[_R]):
    """Awaits a coroutine and tells how long each of its steps took of the processor."""

    def __init__(self, coroutine: Coroutine[Any, Any, _R], charge: Callable[[float], None]) -> None:
        self._coroutine = coroutine
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, _R]:
        step = partial(self._coroutine.send, None)
        while True:
            begun = time.thread_time()
            try:
                trap = step()
            except StopIteration as stop:
                result: _R = stop.value
                return result
            finally:
                self._charge(time.thread_time() - begun)
            try:
                answer = yield trap
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, answer)


class Holding:
    """Holds up who comes, from ``hold`` until ``let_go``."""

    def __init__(self) -> None:
        #: set when it lets go; None while it holds up nobody
        self._held: trio.Event | None = None

    @property
    def holds(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        if self._held is None:
            self._held = trio.Event()

    def let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.set()

    async def passed(self) -> None:
        """Returns when it holds up nobody."""
        while self._held is not None:
            await self._held.wait()


class AtHand:
    """How much of something is being done, for who waits until it is done."""

    def __init__(self) -> None:
        self._count = 0
        self._none = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._count)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                none, self._none = self._none, trio.Event()
                none.set()

    async def none(self) -> None:
        """Returns when nothing is."""
        while self._count:
            await self._none.wait()


class Threads:
    """Work for so many threads at most, which call the loop when they have done it.

    That costs a part of what a task does that waits for a thread. What is being done when the
    nursery ends is waited for.
    """

    def __init__(self, most: int, nursery: trio.Nursery) -> None:
        self._most = most
        self._nursery = nursery
        self._waiting: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
        self._busy = 0
        self._ended: Wakeup | None = None

    def do(self, work: Callable[[], object], then: Callable[[], object]) -> None:
        """``then`` is called on the loop. Neither may raise anything."""
        if self._ended is None:
            self._ended = Wakeup()
            self._nursery.start_soon(self._finish, self._ended)
        self._waiting.append((work, then))
        self._start()

    def _start(self) -> None:
        token = trio.lowlevel.current_trio_token()
        while self._waiting and self._busy < self._most:
            work, then = self._waiting.popleft()
            self._busy += 1
            tell = partial(token.run_sync_soon, self._done, then)
            trio.lowlevel.start_thread_soon(work, lambda result, tell=tell: tell())  # type: ignore[misc]

    def _done(self, then: Callable[[], object]) -> None:
        self._busy -= 1
        then()
        self._start()
        assert self._ended
        self._ended.notify()

    async def _finish(self, ended: Wakeup) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await ended.until(lambda: not self._busy)


class Batches(Generic[_T]):
    """Work of a thread for the event loop: whatever came together while it was at work.

    ``done`` is called with each batch that is done, on the loop.
    """

    def __init__(
        self, work: Callable[[set[_T]], None], done: Callable[[set[_T]], None] = lambda batch: None
    ) -> None:
        self._work = work
        self._tell = done
        self._waiting: set[_T] = set()
        #: how many were ever added
        self.added = 0
        #: set when the batch that is being collected is done
        self._done = trio.Event()
        #: the same of the batch at work
        self._working: trio.Event | None = None
        self._wake = Wakeup()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[_T]:
        """The work that no thread has begun."""
        return list(self._waiting)

    async def idle(self) -> None:
        """Returns when no thread is at work."""
        while self._working is not None:
            await self._working.wait()

    @property
    def is_idle(self) -> bool:
        return self._working is None

    def add(self, item: _T) -> None:
        self.added += 1
        self._waiting.add(item)
        self._wake.notify()

    async def wait(self, since: int) -> None:
        """Returns when everything is done that was added after so many."""
        done = self._done if self._waiting else self._working
        if self.added != since and done is not None:
            await done.wait()

    async def run(self) -> None:
        while True:
            await self._wake.wait_changed()
            batch, self._waiting = self._waiting, set()
            self._working, self._done = self._done, trio.Event()
            # It may hang on a directory when the filesystem goes: then it is left behind.
            await trio.to_thread.run_sync(self._work, batch, abandon_on_cancel=True)
            self._working.set()
            self._working = None
            self._tell(batch)
