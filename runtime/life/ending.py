"""End an agent and everything it owns (ctxfs(5), When a parent ends).

A living daemon leads the end: SIGTERM to all in the cgroup, one grace period, ``cgroup.kill``. If
the daemon is gone (its end of a FIFO closes), the monitor tells the keeper to end the cell and all
nested cells.

A change is one step of the loop, so the marking of a large tree is split, live agents first, and
the processes are signalled when all of those are marked. An ended agent's messages, waits and
commands end in parts, and a removed agent's possessions are removed in parts. The first part marks
or removes the owner, and from then on its possessions can begin nothing: so each part leaves a
state from which the next daemon goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import trio

from runtime import crashpoints
from runtime.cell.port import Execution, Host, LiveCell, Part, Place, about, guarded
from runtime.cell.windows import HANG_UP_GRACE, HANGUP, Key
from runtime.errors import AgainError, CtxError, KernelError
from runtime.ids import AgentIndex
from runtime.records.change import RUNTIME, Change
from runtime.records.items import Message
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.texts.names import quote

log = logging.getLogger("ctxd.ending")

_REPEAT_SECONDS: Final = 0.5
#: a signal that a busy machine did not get to in time is sent again
_TRIES: Final = 3
#: SIGKILL is given this long before an agent is recorded as unkillable
_KILL_SECONDS: Final = 10.0
#: agents of a tree that are told to end in one step
_AT_ONCE: Final = 256
#: what is told to end, and does so at once, has ended after this time
_AT_ONCE_SECONDS: Final = 0.1
#: trees that are told to end while others are wait for those no longer than this
_TOGETHER_SECONDS: Final = 0.5
#: agents that are marked as ending in one step
_MARKED_AT_ONCE: Final = 64
_SETTLE_SECONDS: Final = 10.0
#: between two looks whether anything is left of a run whose cell goes on, from and to
_FIRST_LOOK: Final = 0.01
_LAST_LOOK: Final = 0.5


class Ender(Part):
    """Leads ends until the processes are gone; recording them is the recorder's."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        #: of large trees that are being marked: set when all that lives in them is
        self._marking: dict[AgentIndex, trio.Event] = {}
        #: by owner, the ends whose processes are being told to end
        self._together: dict[int, _Together] = {}

    def end(
        self,
        agent: Agent,
        outcome: Outcome,
        reason: str,
        *,
        cue: Cue = Cue.ENDING,
        change: Change | None = None,
    ) -> None:
        """Begins the end of an agent and of everything it owns, or cancels a new agent.

        The first cause of an end stays its cause. ``change`` is what came before it, and is
        committed with it; not if the end has begun already. It may say who wants that.
        ``WrongStateError`` for a verb that does not fit.
        """
        if cue is Cue.ENDING and agent.status in (Status.STOPPING, Status.DEAD):
            return
        change = change or Change()
        self.add(change, agent, outcome, reason, cue)
        self._agents.journal.note(change)

    def add(
        self, change: Change, agent: Agent, outcome: Outcome, reason: str, cue: Cue = Cue.ENDING
    ) -> None:
        """Adds that the end of an agent begins, and of what it owns as much as one step may."""
        by = change.by or self._agents.journal.actor
        self._mark(change, agent, cue, outcome, reason, by)
        for member in next(self._parts(self._unmarked(agent)), []):
            self._mark_owned(change, member, by)

    def _unmarked(self, top: Agent) -> list[Agent]:
        """The agents that it owns and that have still to end, or be cancelled, with it; the live
        ones first."""
        below = self._agents.registry.descendants(top)
        live = [m for m in below if m.accepts_children]
        return live + [m for m in below if m.status is Status.NEW]

    def _parts(self, members: list[Agent]) -> Iterator[list[Agent]]:
        """So many at a time as one step of the loop may take."""
        part: list[Agent] = []
        size = 0
        for member in members:
            queued = len(self._agents.items.of(member.index, Message))
            size += 1 + (queued // 4 if member.status is Status.NEW else 0)
            if part and size > _MARKED_AT_ONCE:
                yield part
                part, size = [], 1
            part.append(member)
        if part:
            yield part

    def _mark_owned(self, change: Change, member: Agent, by: str) -> None:
        """It ends with its owner."""
        self._mark(change, member, Cue.OWNER_ENDING, Outcome.CANCELLED, "parent_dead", by)

    def _mark(
        self, change: Change, agent: Agent, cue: Cue, outcome: Outcome, reason: str, by: str
    ) -> None:
        if agent.status is Status.NEW:
            self._agents.ends.record(change, agent, cue, Outcome.CANCELLED, reason)
            return
        change.move(agent, cue, reason=reason)
        if agent.cause is None:
            change.set(agent, cause=(outcome.value, reason), caused_by=by)
        elif cue is Cue.KILL and agent.caused_by == RUNTIME:
            change.set(agent, caused_by=by)  # who wants it dead does not want it started again

    # effects of moves

    def refuse(self, agent: Agent) -> None:
        """Wakes who leads an agent: it waits for no next run any more, or what its end had to
        wait for may be over."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None:
            live_cell.changed.notify()

    def begin(self, agent: Agent) -> None:
        """An end that has just been marked."""
        crashpoints.reach("cancel.marked")
        self.lead(agent)

    def release(self, agent: Agent) -> None:
        """Nobody waits for it any more; of a temporary one only the parent's channel stays."""
        self._agents.wait_files.release(agent.wait_token)
        crashpoints.reach("finish.released")
        parent = self._agents.registry.parent_of(agent)
        if parent is not None:
            self.refuse(parent)
        self.remove_unwanted(agent)

    def remove_unwanted(self, agent: Agent) -> None:
        """Removes what has ended and is not to stay: a ``temp`` agent, and one whose window was
        closed, or whose last viewer it was for."""
        closed = agent.window == "remove" and Key(agent.index) not in self._ends
        if closed or agent.life == "temp":
            self._agents.removals.remove_ended(agent)

    def lead(self, top: Agent) -> None:
        """Goes on with an end that is begun, down to the last process; the host of an agent that
        is away was told when it was marked."""
        live_cell = self._live_cells[top.index]
        below = self._unmarked(top)
        lives = any(member.live for member in below)
        if below:
            if lives:
                self._marking[top.index] = trio.Event()
            self._nursery.start_soon(self._mark_rest, top)
        if not lives:
            self._lead_marked(top, live_cell)

    async def _mark_rest(self, top: Agent) -> None:
        """A large tree, a little at a time; what lives ends as soon as all of that is marked."""
        with guarded(top):
            while below := self._unmarked(top):
                live = [member for member in below if member.live]
                if not live:
                    self._end_marking(top)
                for part in self._parts(live or below):
                    # it may have ended by itself, or be gone, by now
                    change = Change(by=top.caused_by)
                    for member in filter(self._is_unmarked, part):
                        self._mark_owned(change, member, top.caused_by)
                    self._agents.journal.note(change)
                    crashpoints.reach("cancel.more")
                    await trio.lowlevel.checkpoint()
        self._end_marking(top)
        for member in (top, *self._agents.registry.descendants(top)):
            self.refuse(member)

    def _is_unmarked(self, member: Agent) -> bool:
        there = self._agents.registry.get(member.index) is member
        return there and (member.status is Status.NEW or member.accepts_children)

    def _end_marking(self, top: Agent) -> None:
        """All that lives is marked: its end is led, if that was not begun already."""
        marking = self._marking.pop(top.index, None)
        if marking is None:
            return
        marking.set()
        if (live_cell := self._live_cells.get(top.index)) is not None:
            self._lead_marked(top, live_cell)

    def _lead_marked(self, top: Agent, live_cell: LiveCell) -> None:
        family = (top, *self._agents.registry.descendants(top))
        cells = (self._live_cells.get(each.index) for each in family if not each.away)
        members = [each for each in cells if each is not None]
        if top.away:
            live_cell.changed.notify()
            return
        if all(_has_left(each) for each in members) and not live_cell.node.populated():
            for each in members:
                self._port.thaw(each.node)  # a later life may have the path of its cgroup
            return  # it ended by itself
        for each in members:
            for execution in each.entered():
                self._nursery.start_soon(self._tell_end, each, execution)
        signalled = all(execution.settled for each in members for execution in each.programs())
        held = self._told_now(top.owner) if signalled else _Together()
        held.ends += 1
        if signalled:
            held.hold(members)
        self._nursery.start_soon(self._end_processes, top, members, signalled, held)

    def _told_now(self, owner: int) -> _Together:
        held = self._together.get(owner)
        if held is None or held.over.is_set():
            held = self._together[owner] = _Together()
            self._nursery.start_soon(self._let_go, owner, held)
        return held

    async def _let_go(self, owner: int, held: _Together) -> None:
        """Neither many ends, nor one that cannot be told, hold up the others for long."""
        with trio.move_on_after(_TOGETHER_SECONDS):
            await held.over.wait()
        held.let_go()
        if self._together.get(owner) is held:
            del self._together[owner]

    async def _signal(self, top: Agent, members: list[LiveCell]) -> None:
        """Step 4, to the programs of several agents and to nothing that surrounds them. A frozen
        process gets the signal when it is thawed.

        If that fails, the end goes on: SIGKILL follows after the grace.
        """
        # a later life may have the path of one that is over
        members = [each for each in members if not each.over]
        await self._tell(top, members)
        for each in members:
            if each.record().held:
                self._port.release(each)
        crashpoints.reach("cancel.signalled")
        for each in members:
            self._port.thaw(each.node)
        crashpoints.reach("cancel.thawed")

    async def _tell(self, top: Agent, members: list[LiveCell]) -> None:
        live_cell = self._live_cells.get(top.index)
        if live_cell is not None and live_cell.given_up:
            return  # it was sent SIGKILL
        for _ in range(_TRIES):
            try:
                if _is_hung_up(top):
                    await self._port.signal_cells(top.owner, signal.SIGHUP, members)
                await self._port.signal_cells(top.owner, signal.SIGTERM, members)
                return
            except (CtxError, OSError) as error:
                log.error("%s: cannot signal it: %s", top.name, error, extra=about(top))
                if not isinstance(error, AgainError):
                    return

    def kill(self, agent: Agent) -> None:
        """SIGKILL to the subtree of an ending agent, without the rest of its grace.

        ``KernelError`` if the kernel refuses it at once.
        """
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:  # nobody has taken it over yet
            if agent.cell.cgroup:
                self._kill_place(agent, self._port.place(agent.cell.cgroup))
            return
        if agent.away:  # what it gives back may be still to come
            live_cell.given_up = "ended" in agent.heard
            live_cell.changed.notify()
            return
        live_cell.given_up = True
        marked = not self._markings(agent)
        if not (live_cell.settled and marked):
            self._nursery.start_soon(self._kill, agent, live_cell)
        if marked:
            self._kill_now(agent, live_cell)

    def _markings(self, agent: Agent) -> list[trio.Event]:
        """The trees around an agent that are still being marked: an agent that is killed before it
        is marked would seem to have failed by itself."""
        trees = (agent, *self._agents.registry.ancestors(agent))
        return [self._marking[tree.index] for tree in trees if tree.index in self._marking]

    async def _kill(self, agent: Agent, live_cell: LiveCell) -> None:
        with guarded(agent):
            with trio.move_on_after(_SETTLE_SECONDS):
                for marking in self._markings(agent):
                    await marking.wait()
                self._try_to_kill(agent, live_cell)
                # a process that is just being started would escape the kill
                await self._port.wait_settled(live_cell)
            self._try_to_kill(agent, live_cell)

    def _try_to_kill(self, agent: Agent, live_cell: LiveCell) -> None:
        try:
            self._kill_now(agent, live_cell)
        except KernelError as error:
            why = about(agent)
            log.error("%s: %s", agent.name, error.sentence, extra=why)

    def _kill_now(self, agent: Agent, live_cell: LiveCell) -> None:
        if not live_cell.over:  # a later life may have the path of its cgroup by now
            self._kill_place(agent, live_cell.node)
            # once: a kill may be said again and again
            if not live_cell.hurried:
                live_cell.hurried = True
                self._nursery.start_soon(self._hurry, agent, live_cell.node)

    async def _hurry(self, agent: Agent, place: Place) -> None:
        """Helps what was killed to its end: it may wait for a processor behind all others, as each
        process may choose that for itself (sched(7))."""
        with guarded(agent):
            with trio.move_on_after(_AT_ONCE_SECONDS):
                await self._port.wait_empty(place)
                return
            try:
                await self._port.hurry(agent.owner, place)
            except (CtxError, OSError) as error:
                log.error("%s: cannot hurry it: %s", agent.name, error, extra=about(agent))

    @staticmethod
    def _kill_place(agent: Agent, place: Place) -> None:
        try:
            place.kill()
        except OSError as error:
            raise KernelError(f"cannot kill {quote(agent.name)} yet", error) from None
        crashpoints.reach("cancel.killed")

    async def _end_processes(
        self, top: Agent, members: list[LiveCell], signalled: bool, held: _Together
    ) -> None:
        """Steps 4 to 6: SIGTERM to all, one grace period, then ``cgroup.kill``."""
        node = members[0].node
        with guarded(top), contextlib.ExitStack() as waiting:
            waiting.callback(held.one_ended)
            if not signalled:
                for each in members:
                    self._port.thaw(each.node)  # a frozen start would never settle
                with trio.move_on_after(_SETTLE_SECONDS):
                    for each in members:
                        for execution in each.programs():
                            await self._port.wait_settled(execution)
                held.hold(members)
            grace = self._agents.settings.grace(top)
            if _is_hung_up(top):
                grace = min(grace, HANG_UP_GRACE)
            over = trio.current_time() + grace
            for begin in range(0, len(members), _AT_ONCE):
                await self._signal(top, members[begin : begin + _AT_ONCE])
            with trio.move_on_at(min(over, trio.current_time() + _AT_ONCE_SECONDS)):
                await self._port.wait_empty(node)
            waiting.close()
            with trio.move_on_at(over):
                await self._wait_released(top, members)
            if members[0].over or not node.populated():
                return  # a later life may have the path of its cgroup now
            self._tell_log(top, "the grace period is over: SIGKILL")
            with trio.move_on_after(_KILL_SECONDS):
                await self._kill_all(top, node)
            for each in members:
                if each.node.populated() and not each.over:
                    each.unkillable = True
                    each.changed.notify()

    async def _kill_all(self, agent: Agent, node: Place) -> None:
        """SIGKILL until nothing is left: the kernel may refuse it for want of something."""
        while True:
            try:
                node.kill()
                break
            except OSError as error:
                log.error("%s: cannot kill it yet: %s", node.path, error.strerror)
                await trio.sleep(_REPEAT_SECONDS)
        crashpoints.reach("cancel.killed")
        await self._hurry(agent, node)
        await self._port.wait_empty(node)

    async def _tell_end(self, live_cell: LiveCell, execution: Execution) -> None:
        """Nobody leads what entered a cell that ends; the agent waits for its last output."""
        await execution.until(lambda: execution.launched)
        await self._port.watch_monitor(execution)
        live_cell.changed.notify()

    async def _wait_released(self, top: Agent, members: list[LiveCell]) -> None:
        """Until the subtree is empty. Some are signalled again and again: held cells, since an
        agent that signals its own PID 1 may hide the signal; and programs with a terminal, since
        a shell forgets one that comes just before it reads (bash)."""
        held = [each for each in members if each.record().held]
        seen = [each for each in members if any(p.record().terminal for p in each.programs())]
        while members[0].node.populated() and not members[0].over:
            with trio.move_on_after(_REPEAT_SECONDS if held or seen else math.inf):
                await self._port.wait_empty(members[0].node)
                return
            for each in reversed(held):
                self._port.release(each)
            with contextlib.suppress(CtxError, OSError):
                await self._port.hang_up(top.owner, seen)

    async def terminate(
        self,
        live_cell: LiveCell,
        execution: Execution,
        grace: float,
        is_impatient: Callable[[], bool],
    ) -> None:
        """Ends what is left of one program, while its cell goes on: SIGTERM, after ``grace``
        seconds, or once somebody is impatient, SIGKILL. Returns when it is gone, or cannot be
        killed. ``execution.changed`` tells of impatience."""
        agent, is_first = live_cell.agent, execution is live_cell
        if grace and not is_impatient():
            with trio.move_on_after(grace):
                await self._look(agent, execution, signal.SIGTERM)
                if is_first:
                    await self._repeat(agent, execution, 0, is_impatient)
                else:
                    with self._port.watching_place(execution.leaf, execution.changed):
                        await execution.until(
                            lambda: is_impatient() or not execution.leaf.populated()
                        )
        with trio.move_on_after(_KILL_SECONDS):
            if is_first:
                await self._kill_around(agent, execution)
            else:
                await self._kill_all(agent, execution.leaf)
        if is_first and not execution.emptied:
            execution.leaf.kill()  # the cell with it: it is the agent's end

    async def _look(self, agent: Agent, execution: Execution, number: int) -> int | None:
        """Signals what is left of a program; how many processes that is, None if nobody knows."""
        try:
            return await self._port.signal(agent.owner, number, execution)
        except (CtxError, OSError) as error:
            why = about(agent)
            log.error("%s: cannot signal its program: %s", agent.name, error, extra=why)
            return None

    async def _kill_around(self, agent: Agent, execution: Execution) -> None:
        """SIGKILL to the processes of the first run, but not to PID 1 of its cell."""
        # frozen processes do not fork, so a few rounds find them all; without the freezer more do
        with contextlib.suppress(OSError):
            execution.leaf.freeze(True)
        try:
            await self._repeat(agent, execution, signal.SIGKILL, lambda: False)
        finally:
            self._port.thaw(execution.leaf)
        crashpoints.reach("abort.killed")

    async def _repeat(
        self, agent: Agent, execution: Execution, number: int, is_enough: Callable[[], bool]
    ) -> None:
        """Signals it until nothing is left: no event tells, for its cell's PID 1 is there, too."""
        pause = _FIRST_LOOK
        while await self._look(agent, execution, number) != 0:
            with trio.move_on_after(pause):
                await execution.until(is_enough)
                return
            pause = min(2 * pause, _LAST_LOOK)
        execution.emptied = True


class _Together:
    """While a tree is told to end, and others of its owner, and for a moment after, who leads an
    agent of them waits: to look at what has ended already, and to record it, would hold up the end
    of the others."""

    def __init__(self) -> None:
        #: how many trees have not ended, nor had that moment
        self.ends = 0
        #: all have, or there was no more time
        self.over = trio.Event()
        self._held: list[LiveCell] = []

    def hold(self, members: Iterable[LiveCell]) -> None:
        for each in members:
            each.changed.hold()
            self._held.append(each)

    def one_ended(self) -> None:
        self.ends -= 1
        if not self.ends:
            self.let_go()

    def let_go(self) -> None:
        self.over.set()
        held, self._held = self._held, []
        for each in held:
            each.changed.let_go()


def _is_hung_up(top: Agent) -> bool:
    return top.cause is not None and top.cause[1] == HANGUP


def _has_left(live_cell: LiveCell) -> bool:
    """Whether nothing of it is on its way into its cgroup any more."""
    return live_cell.record().over and not any(live_cell.entered())
