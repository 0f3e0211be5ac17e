"""End an agent and everything it owns (ctxfs(5), When a parent ends)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.cell.execution import Execution, LiveCell, LiveCells
from runtime.errors import KernelError
from runtime.ids import AgentIndex
from runtime.kernel import cgroups, output
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.daemonlog import because_of
from runtime.kernel.inotify import Wakeup, Watcher
from runtime.records.change import Change
from runtime.records.items import Message
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent, Outcome
from runtime.texts.names import quote

log = logging.getLogger("ctxd.ending")

_REPEAT_SECONDS: Final = 0.5
#: SIGKILL is given this long before an agent is recorded as unkillable
_KILL_SECONDS: Final = 10.0
#: agents of a tree that are told to end in one step
_AT_ONCE: Final = 16
#: what is told to end, and does so at once, has ended after this time
_AT_ONCE_SECONDS: Final = 0.1
#: agents that are marked as ending in one step
_MARKED_AT_ONCE: Final = 64
_SETTLE_SECONDS: Final = 10.0
#: what waited for a program reports its end at once, if it is not frozen
_REPORT_SECONDS: Final = 1.0
#: what forks faster than so many looks at its processes meets ``cgroup.kill``
_LOOKS: Final = 6


class Ender:
    """Leads ends until the processes are gone; recording them is the recorder's."""

    def __init__(
        self,
        *,
        agents: Agents,
        hierarchy: Hierarchy,
        watcher: Watcher,
        live_cells: LiveCells,
        nursery: trio.Nursery,
    ) -> None:
        self._agents = agents
        self._hierarchy = hierarchy
        self._watcher = watcher
        self._live_cells = live_cells
        self._nursery = nursery
        #: of large trees that are being marked: set when all that lives in them is
        self._marking: dict[AgentIndex, trio.Event] = {}

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
        committed with it; not if the end has begun already.
        ``WrongStateError`` for a verb that does not fit.
        """
        if cue is Cue.ENDING and agent.status in (Status.STOPPING, Status.DEAD):
            return
        change = change or Change()
        by = self._agents.journal.actor
        self._mark(change, agent, cue, outcome, reason, by)
        for member in next(self._parts(self._unmarked(agent)), []):
            self._mark_owned(change, member, by)
        self._agents.journal.note(change)

    def _unmarked(self, top: Agent) -> list[Agent]:
        """What it owns and what has still to end, or be cancelled, with it; what lives, first."""
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

    # effects of moves

    def refuse(self, agent: Agent) -> None:
        """It waits for no next run any more."""
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None:
            live_cell.wake.notify()
            if not live_cell.settled:
                live_cell.wakeup.notify()

    def begin(self, agent: Agent) -> None:
        """An end that has just been marked."""
        crashpoints.reach("cancel.marked")
        self.lead(agent)

    def release(self, agent: Agent) -> None:
        """Nobody waits for it any more; of a temporary one only the parent's channel stays."""
        self._agents.wait_files.release(agent.wait_token)
        crashpoints.reach("finish.released")
        parent = self._agents.registry.parent_of(agent)
        if parent is not None and (above := self._live_cells.get(parent.index)) is not None:
            above.wakeup.notify()
        if agent.life == "temp":
            self._agents.removals.remove_temporary(agent)

    def lead(self, top: Agent) -> None:
        """Goes on with an end that is begun, down to the last process."""
        live_cell = self._live_cells.get(top.index)
        if live_cell is None:
            return
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
            if (live_cell := self._live_cells.get(member.index)) is not None:
                live_cell.wakeup.notify()  # what it had to wait for is cancelled

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
        members = [live_cell]
        for member in self._agents.registry.descendants(top):
            if (below := self._live_cells.get(member.index)) is not None:
                members.append(below)
        if all(_has_left(each) for each in members) and not live_cell.node.populated():
            for each in members:
                thaw(each.node)  # a later life may have the path of its cgroup
            return  # it ended by itself
        for each in members:
            for execution in each.entered():
                self._nursery.start_soon(self._tell_end, each, execution)
        signalled = all(execution.settled for each in members for execution in _all_of(each))
        held = contextlib.ExitStack()
        if signalled:
            _hold(members, held)
            self._signal(members[:_AT_ONCE])
        self._nursery.start_soon(self._terminate, top, members, signalled, held)

    @staticmethod
    def _signal(members: list[LiveCell]) -> None:
        """Step 4. A frozen process gets the signal when it is thawed.

        If the kernel refuses either, the end goes on: SIGKILL follows after the grace.
        """
        try:
            leaves = _signal_all(members)
        except OSError as error:
            log.error("%s: cannot signal it: %s", members[0].node.path, error.strerror)
            leaves = [leaf for each in members for leaf in each.leaves()]
        crashpoints.reach("cancel.signalled")
        for each in members:
            thaw(each.node)
        for leaf in leaves:
            thaw(leaf)
        crashpoints.reach("cancel.thawed")

    def kill(self, agent: Agent) -> None:
        """SIGKILL to the subtree of an ending agent, without the rest of its grace.

        ``KernelError`` if the kernel refuses it at once.
        """
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            return
        live_cell.given_up = True
        if live_cell.settled and not self._markings(agent):
            self._kill_now(agent, live_cell)
        else:
            self._nursery.start_soon(self._kill, agent, live_cell)

    def _markings(self, agent: Agent) -> list[trio.Event]:
        """The trees around an agent that are still being marked: an agent that is killed before it
        is marked would seem to have failed by itself."""
        trees = (agent, *self._agents.registry.ancestors(agent))
        return [self._marking[tree.index] for tree in trees if tree.index in self._marking]

    async def _kill(self, agent: Agent, live_cell: LiveCell) -> None:
        with guarded(agent):
            # A process that is just being started would escape the kill.
            with trio.move_on_after(_SETTLE_SECONDS):
                for marking in self._markings(agent):
                    await marking.wait()
                await live_cell.wait_settled(self._watcher)
            try:
                self._kill_now(agent, live_cell)
            except KernelError as error:
                why = because_of(agent.owner, agents=[agent.name])
                log.error("%s: %s", agent.name, error.sentence, extra=why)

    @staticmethod
    def _kill_now(agent: Agent, live_cell: LiveCell) -> None:
        if live_cell.over.is_set():
            return  # a later life may have the path of its cgroup by now
        try:
            live_cell.node.kill()
        except OSError as error:
            raise KernelError(f"cannot kill {quote(agent.name)} yet", error) from None
        crashpoints.reach("cancel.killed")

    async def _terminate(
        self, top: Agent, members: list[LiveCell], signalled: bool, held: contextlib.ExitStack
    ) -> None:
        with guarded(top), held:
            await self._end_processes(top, members, signalled, held)

    async def _end_processes(
        self, top: Agent, members: list[LiveCell], signalled: bool, held: contextlib.ExitStack
    ) -> None:
        """Steps 4 to 6: SIGTERM to all, one grace period, then ``cgroup.kill``."""
        node = members[0].node
        if not signalled:
            for each in members:
                thaw(each.node)  # a frozen start would never settle
            with trio.move_on_after(_SETTLE_SECONDS):
                for each in members:
                    for execution in _all_of(each):
                        await execution.wait_settled(self._watcher)
            _hold(members, held)
        await self._signal_rest(members[_AT_ONCE:] if signalled else members)
        over = trio.current_time() + self._agents.settings.grace(top)
        with trio.move_on_at(min(over, trio.current_time() + _AT_ONCE_SECONDS)):
            await self.wait_empty(node)
        held.close()
        with trio.move_on_at(over):
            await self._wait_released(members)
        if members[0].over.is_set():
            return  # a later life has the path of its cgroup now
        if node.populated():
            with contextlib.suppress(OSError):
                directory = self._agents.documents.directory(top) / "log"
                line = "the grace period is over: SIGKILL"
                output.append_line(directory, line, self._agents.settings.log_max(top))
            with trio.move_on_after(_KILL_SECONDS):
                await self._kill_all(node)
            for each in members:
                if each.node.populated() and not each.over.is_set():
                    each.unkillable = True
                    each.wakeup.notify()

    async def _kill_all(self, node: Cgroup) -> None:
        """SIGKILL until nothing is left: the kernel may refuse it for want of something."""
        while True:
            try:
                node.kill()
                break
            except OSError as error:
                log.error("%s: cannot kill it yet: %s", node.path, error.strerror)
                await trio.sleep(_REPEAT_SECONDS)
        crashpoints.reach("cancel.killed")
        await self.wait_empty(node)

    async def _signal_rest(self, members: list[LiveCell]) -> None:
        """Step 4 for many: others are served in between."""
        for begin in range(0, len(members), _AT_ONCE):
            # a later life may have the path of one that is over
            self._signal([m for m in members[begin : begin + _AT_ONCE] if not m.over.is_set()])
            await trio.lowlevel.checkpoint()

    async def _tell_end(self, live_cell: LiveCell, execution: Execution) -> None:
        """Nobody leads what entered a cell that ends; the agent waits for its last output."""
        await execution.launched.wait()
        await watch_monitor(self._hierarchy, execution)
        live_cell.wakeup.notify()

    async def _wait_released(self, members: list[LiveCell]) -> None:
        """Until the subtree is empty; held cells are signalled again and again, since an agent
        that signals its own PID 1 may hide the signal."""
        held = [each for each in members if each.record().held]
        while members[0].node.populated() and not members[0].over.is_set():
            with trio.move_on_after(_REPEAT_SECONDS if held else math.inf):
                await self.wait_empty(members[0].node)
            for each in reversed(held):
                each.release()

    def clear(self, ended: LiveCell) -> None:
        """Empties and removes the cgroup of a dead agent: a helper that looks at paths in its view,
        or runs git there, may have come late."""
        self._nursery.start_soon(self._clear, ended)

    async def _clear(self, ended: LiveCell) -> None:
        node = ended.node
        while not self._is_next(ended) and not node.remove():
            node.kill()
            with trio.move_on_after(_KILL_SECONDS) as scope:
                await self.wait_empty(node)
            if scope.cancelled_caught:
                log.warning("%s is not empty: %s", node.path, node.processes())

    def _is_next(self, ended: LiveCell) -> bool:
        """Whether another life has the same cgroup by now."""
        path = str(ended.node)
        return any(f is not ended and str(f.node) == path for f in self._live_cells.values())

    async def wait_empty(self, node: Cgroup) -> None:
        """Until no process is left in a cgroup, or it is gone."""
        wakeup = Wakeup()
        try:
            with self._watcher.watching(node.path / "cgroup.events", wakeup):
                while node.populated():
                    await wakeup.wait_changed()
        except FileNotFoundError:
            return


def _hold(members: Iterable[LiveCell], held: contextlib.ExitStack) -> None:
    """While a tree is told to end, and for a moment after, who leads an agent of it waits: to look
    at what has ended already, and to record it, would hold up the end of the others."""
    for each in members:
        each.wakeup.hold()
        held.callback(each.wakeup.let_go)


def _all_of(live_cell: LiveCell) -> list[Execution]:
    """A cell, and what has entered it or is about to."""
    return [live_cell, *live_cell.entered()]


def _has_left(live_cell: LiveCell) -> bool:
    """Whether nothing of it is on its way into its cgroup any more."""
    return live_cell.record().over and not any(live_cell.entered())


def _signal_all(members: Iterable[LiveCell]) -> list[Cgroup]:
    """SIGTERM to the programs of several agents, and to nothing that surrounds them; returns the
    cgroups that they are in."""
    found: list[Cgroup] = []
    for each in members:
        spared = set(each.spared())
        for execution in each.entered():
            spared |= execution.spared()
        left = each.node.below()
        for leaf in each.leaves():
            if left and signal_leaf(leaf, spared):
                found.append(leaf)
                left -= 1  # most agents have one: the others need not be looked for
        if each.record().held:
            each.release()
    return found


def signal_leaf(leaf: Cgroup, spared: set[int]) -> bool:
    """SIGTERM, and SIGCONT so that a stopped process sees it; False if there is no such leaf.

    Not to ``spared``, the cells' own PID 1 and the steps that led there: those end
    with their cell. A pid may be another process's by the time it is used; the
    process that a pidfd holds is the right one if its pid is still in
    the cgroup after it was opened. So each cgroup is looked at twice, and again
    while new processes turn up.
    """
    held: dict[int, int] = {}
    done = set(spared)
    try:
        with leaf.looking() as look:
            for _ in range(_LOOKS):
                if not _signal_some(look(), held, done):
                    break
    except FileNotFoundError:
        return False
    finally:
        for fd in held.values():
            os.close(fd)
    return True


async def terminate(execution: Execution, grace: float, impatient: trio.Event) -> None:
    """Ends what is left of one program, while its cell goes on: SIGTERM, after ``grace``
    seconds, or once ``impatient``, SIGKILL. Returns when it is gone, or cannot be killed."""
    if grace and not impatient.is_set():
        signal_leaf(execution.leaf, execution.spared())
        thaw(execution.leaf)
        with trio.move_on_after(grace) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, impatient, scope)
                await _wait_gone(execution)
                nursery.cancel_scope.cancel()
    with trio.move_on_after(_KILL_SECONDS):
        await _kill_rest(execution)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def watch_monitor(hierarchy: Hierarchy, execution: Execution) -> None:
    """Until the monitor of a program, whichever daemon started it, is gone."""
    monitor = execution.record().monitor
    with contextlib.suppress(OSError):
        if monitor:
            fd = os.pidfd_open(monitor)
            try:
                # a pid may have been given to another process since
                if hierarchy.holds_monitors(cgroups.path_of(monitor) or ""):
                    await trio.lowlevel.wait_readable(fd)
            finally:
                os.close(fd)
    if monitor:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(monitor, os.WNOHANG)  # ours to reap, unless adopted
    execution.monitor_gone = True
    execution.wakeup.notify()


def left_of(execution: Execution) -> list[int]:
    """Pids of a program and of what it left, but for what surrounds it."""
    spared = execution.spared()
    return [pid for pid in execution.leaf.processes() if pid not in spared]


async def _wait_gone(execution: Execution) -> None:
    while left := left_of(execution):
        await _wait_exit(left[0])


async def _wait_exit(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)


async def _kill_rest(execution: Execution) -> None:
    """SIGKILL to all processes but the spared ones, which may be PID 1 of a cell that goes on.

    What led a program that entered the cell is given time to say how that ended.
    """
    # frozen processes do not fork, so a few rounds find them all; without the freezer more do
    with contextlib.suppress(OSError):
        execution.leaf.freeze(True)
    try:
        while left := left_of(execution):
            for pid in left:
                with contextlib.suppress(OSError):
                    fd = os.pidfd_open(pid)
                    try:
                        if pid in execution.leaf.processes():
                            signal.pidfd_send_signal(fd, signal.SIGKILL)
                    finally:
                        os.close(fd)
            crashpoints.reach("abort.killed")
            for pid in left:
                await _wait_exit(pid)
    finally:
        thaw(execution.leaf)
    if isinstance(execution, LiveCell):
        return
    if not execution.leaf.is_held():
        with trio.move_on_after(_REPORT_SECONDS):
            for pid in execution.leaf.processes():
                await _wait_exit(pid)
    execution.leaf.kill()


def _signal_some(pids: Iterable[int], held: dict[int, int], done: set[int]) -> bool:
    """Signals the processes that were seen before and holds new ones; False if there are neither.

    A signalled process may have forked just before: its children are looked at again.
    """
    found = False
    for pid in pids:
        if pid in done:
            continue
        if pid in held:
            done.add(pid)
            found = True
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held[pid], number)
            continue
        with contextlib.suppress(OSError):
            held[pid] = os.pidfd_open(pid)
            found = True
    return found


def thaw(node: Cgroup) -> None:
    """Thaws processes that are ended anyway; SIGKILL reaches frozen ones too."""
    try:
        node.freeze(False)
    except OSError as error:
        log.error("%s: cannot thaw it: %s", node.path, error.strerror)


class guarded:
    """A bug in the care of one agent ends neither the daemon nor the care of others."""

    __slots__ = ("_agent", "_expected")

    def __init__(self, agent: Agent, *expected: type[Exception]) -> None:
        self._agent = agent
        self._expected = expected

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._expected):
            return False
        log.exception("%s: a bug in ctxfs", self._agent.name)
        return True
