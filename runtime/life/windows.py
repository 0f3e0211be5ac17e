"""Clients that something ends with: by windows, and by the viewers of terminals (ctxfs-tools(5)).

The record of an agent or a task says so. Of a window, the daemon and the cell's monitor have the
same end, and each of them sees it hang up. A viewer is served by the monitor of the run alone,
which tells in the run's record who has come and gone. In both cases, if the daemon is not there, or
does not act, the monitor ends what was hung up (monitor.c), and the next daemon reads that in the
record. What nobody has the end of when a daemon begins was hung up before it was started, or after
it had ended; but of an agent at a node nobody has it here, so that its client may open another one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.agents import visits
from runtime.agents.tasks import STARTING as STARTING_TASK
from runtime.authority.accounts import Charge, Payer, Resource
from runtime.authority.guard import Act
from runtime.caller import Caller
from runtime.cell.port import Execution, Host, Part, guarded
from runtime.cell.record import RunRecord
from runtime.cell.viewers import VIEWERS_EVER, VIEWERS_MAX, Viewer
from runtime.cell.windows import FIRST, HANGUP, End, Key
from runtime.errors import AgainError, CtxError, NotRunningError, QuotaError, WrongStateError
from runtime.ids import AgentIndex
from runtime.kernel.handover import Descriptors
from runtime.life.beginning import STARTING
from runtime.life.ending import Ender
from runtime.records.change import RUNTIME, Change, Subscriber
from runtime.records.items import Item, Task, TaskCue, TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.visits import Visit
from runtime.texts.names import quote

#: the packet by which a viewer is told that its program never began
_FAILED: Final = "x failed "
#: for which a client of an earlier daemon is waited for
_RETURN_SECONDS: Final = 30.0
#: notices
_PAUSED: Final = "paused"
_RESUMED: Final = "resumed"
#: begins an agent whose terminal somebody looks at from then on
Begin = Callable[[Agent, Visit | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes of a viewer that comes. If it ``starts`` what it looks at, it is there before the
    program is; the others are as of a ``Visit``."""

    looks: bool = False
    starts: bool = False
    hangs_up: bool = False
    removes: bool = False
    screen: tuple[int, int] | None = None


class Windows(Part, Subscriber):
    """Opens windows and terminals, and ends what was hung up."""

    def __init__(self, host: Host, ender: Ender, begin: Begin) -> None:
        super().__init__(host)
        self._ender = ender
        self._begin = begin
        #: of the viewers in records
        self._charges: dict[Key, Charge] = {}
        #: the clients' ends that these have not been sent yet
        self._unsent: dict[Key, socket.socket] = {}
        self._ends.awaited |= {
            agent.index for agent in host.agents.registry if agent.window and agent.node
        }
        host.agents.journal.subscribe(self)

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._agents.registry.get(index)
        if agent is None:
            return
        if "viewers" in names:
            self._note(Key(index), agent.viewers)
        if "status" in names and agent.status is Status.DEAD:
            self._tell_over(Key(index), agent.reason)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if isinstance(item, Task) and "viewers" in names:
            key = Key(item.agent, item.name)
            self._note(key, item.viewers)
            if item.over:
                self._tell_over(key, item.reason)

    def agent_listed(self, agent: Agent) -> None:
        if self._agents.registry.get(agent.index) is not agent:
            self._ends.drop_all(agent.index)
            for key in [key for key in self._charges if key.agent == agent.index]:
                self._charges.pop(key).release()

    def _note(self, whose: Key, there: Iterable[Visit]) -> None:
        """The viewers of an agent's run, or of a task, are these."""
        numbers = {visit.number: visit.uid for visit in there}
        known = {key.viewer for key in self._charges if key[:2] == whose[:2]}
        for number in known - numbers.keys():
            self._charges.pop(whose._replace(viewer=number)).release()
        for number in numbers.keys() - known:
            payer, accounts = Payer(numbers[number]), self._agents.accounts
            charge = accounts.charged_anyway(payer, Resource.CONNECTIONS, 1)
            self._charges[whose._replace(viewer=number)] = charge

    def _tell_over(self, whose: Key, reason: str) -> None:
        """Tells whoever waits for a terminal that there will be none."""
        key = whose._replace(viewer=FIRST)
        if (end := self._ends.find(key)) is not None:
            _say_failed(end.socket, reason)
            self._ends.drop(key)

    # windows

    def make(self, agent: Agent, who: Payer, *, remove: bool) -> socket.socket:
        """The other end of a window for an agent that is ``new``, or whose window ``is_lost``. It
        ends, and is removed then if it is to be, when that is closed everywhere. ``QuotaError``,
        ``NoSpaceError``."""
        with self._pair(who) as (end, theirs):
            self._agents.journal.update(agent, window="remove" if remove else "end")
        self._ends.put(Key(agent.index), end)
        return theirs

    def is_lost(self, agent: Agent) -> bool:
        """Whether an earlier daemon took the window of an agent along, and nobody else has it."""
        return agent.index in self._ends.awaited

    async def _wait_for_clients(self) -> None:
        await trio.sleep(_RETURN_SECONDS)
        for agent in self._agents.registry:
            if self.is_lost(agent):
                self._ends.awaited.discard(agent.index)
                with guarded(agent):
                    self.hang_up(agent, None)

    @contextlib.contextmanager
    def _pair(
        self, who: Payer, screen: tuple[int, int] | None = None
    ) -> Iterator[tuple[End, socket.socket]]:
        """Both ends, of which the daemon's is charged; closed after an error."""
        with ExitStack() as stack:
            charge = self._agents.accounts.charged(who, Resource.DESCRIPTORS, 1)
            stack.callback(charge.release)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            yield End(ours, charge, screen), theirs
            stack.pop_all()

    # terminals

    @property
    def viewers(self) -> int:
        """How many look at terminals."""
        return len(self._charges)

    @property
    def terminals(self) -> int:
        """How many programs have one."""
        count = 0
        for live_cell in self._live_cells.values():
            agent = live_cell.agent
            count += bool(agent.tty and agent.run.pid)
            tasks = (self._agents.items.named(agent.index, Task, each) for each in live_cell.tasks)
            count += sum(bool(task and task.tty and task.pid) for task in tasks)
        return count

    async def view(
        self,
        caller: Caller,
        who: Payer,
        agent: Agent,
        task: Task | None,
        wanted: Wanted,
        progress: dict[str, Any],
    ) -> None:
        """A new viewer of what has a terminal; its number, for ``sending``, is in the progress as
        soon as it is there.

        ``UnsupportedError`` without a terminal, ``WrongStateError`` before it is started,
        ``NotRunningError`` once it has ended, ``QuotaError``; with a start also what that raises.
        """
        visits.check_terminal(agent, task)
        if wanted.starts:
            progress["viewer"] = self._start(caller, who, agent, task, wanted)
            return
        execution = self._running(agent, task)
        await execution.until(lambda: execution.launched or execution.over)
        if self._running(agent, task) is not execution or not execution.facts.exist():
            raise NotRunningError(f"{_name(agent, task)} has just ended")
        progress["viewer"] = self._join(caller, who, agent, task, wanted, execution)

    def _running(self, agent: Agent, task: Task | None) -> Execution:
        """The program, which runs or is just being started."""
        what, live_cell = _name(agent, task), self._live_cells.get(agent.index)
        status = agent.status.value if task is None else task.status.shown
        if agent.status is Status.DEAD or (task is not None and task.over):
            raise NotRunningError(f"{what} is {status}")
        if task is not None:
            self._agents.tasks.check_there(task)
            if task.status is TaskStatus.MADE:
                raise WrongStateError(f"{what} was not started: start it first")
        elif agent.status is Status.NEW:
            raise WrongStateError(f"{what} is {status}: start it first")
        elif not agent.run.id:
            raise WrongStateError(f"{what} is {status} and has no run now: try again when it has")
        if live_cell is None:
            raise NotRunningError(f"ctxd has not taken {quote(agent.name)} over yet: try again")
        return live_cell.command(task.name) if task is not None else live_cell.run_at_hand()

    def _start(
        self, caller: Caller, who: Payer, agent: Agent, task: Task | None, wanted: Wanted
    ) -> int:
        """In one step, so that nobody else starts it."""
        journal, tasks = self._agents.journal, self._agents.tasks
        if task is not None:
            tasks.check_command(STARTING_TASK, "start", caller, agent, task)
        else:
            STARTING.check(Act.SAY, "start", self._agents, caller, agent, agent)
        visit, key = _visit(FIRST, caller, wanted), _key(agent, task, FIRST)
        with self._charged(who, key), self._pair(who, wanted.screen) as (end, theirs):
            if task is not None:
                with journal.acting(caller):
                    tasks.start(caller, agent, task, visit)
            else:
                with journal.acting(caller, agent, verb="start"):
                    self._begin(agent, visit)
        self._ends.put(key, end)
        self._unsent[key] = theirs
        if task is None and not agent.window:
            self._ends.drop(Key(agent.index))  # in whose place the viewer is
        return key.viewer

    def _join(
        self,
        caller: Caller,
        who: Payer,
        agent: Agent,
        task: Task | None,
        wanted: Wanted,
        execution: Execution,
    ) -> int:
        there, record = (task or agent).viewers, execution.record()
        numbers = [record.next_viewer, *(visit.number + 1 for visit in there)]
        visit = _visit(max(numbers), caller, wanted)
        if len(there) >= VIEWERS_MAX:
            raise QuotaError(
                f"{len(there)} look at {_name(agent, task)}, the maximum: let one leave (Ctrl-] d)"
            )
        if visit.number > VIEWERS_EVER:
            raise QuotaError(
                f"{VIEWERS_EVER} have looked at this run of {_name(agent, task)}, the maximum"
            )
        key = _key(agent, task, visit.number)
        with self._charged(who, key), self._pair(who, wanted.screen) as (end, theirs):
            with self._agents.journal.acting(caller), self._agents.journal.changing() as change:
                visits.come(change, agent, task, visit)
            try:
                grace = self._agents.settings.grace(agent)
                viewer = Viewer(visit=visit, end=end.socket, screen=end.screen)
                self._port.view(execution, viewer, grace)
                crashpoints.reach("terminal.handed")
            except OSError as error:
                self._gone(agent, task, {visit.number: visits.CLOSED})
                if isinstance(error, BlockingIOError):
                    raise AgainError("too much waits for its monitor: try again") from None
                raise NotRunningError(f"{_name(agent, task)} has just ended") from None
        end.close()
        self._unsent[key] = theirs
        if any(each.frozen for each in (*self._agents.registry.ancestors(agent), agent)):
            self._port.tell_viewers(execution, _PAUSED)
        return key.viewer

    @contextlib.contextmanager
    def _charged(self, who: Payer, key: Key) -> Iterator[None]:
        """While a viewer comes: as a connection of who asks for it; ``QuotaError``."""
        self._charges[key] = self._agents.accounts.charged(who, Resource.CONNECTIONS, 1)
        try:
            yield
        except BaseException:
            if (charge := self._charges.pop(key, None)) is not None:
                charge.release()
            raise

    @contextlib.contextmanager
    def sending(self, agent: Agent, task: Task | None, number: int) -> Iterator[socket.socket]:
        """The client's end of a viewer, which is closed here then; ``NotRunningError``."""
        end = self._unsent.get(key := _key(agent, task, number))
        if end is None:
            raise NotRunningError(f"{_name(agent, task)} has just ended")
        try:
            with end:
                yield end
        finally:
            del self._unsent[key]

    @contextlib.contextmanager
    def launching(self, execution: Execution, agent: Agent, task: Task | None) -> Iterator[None]:
        """While something is launched: who waits for its terminal is at its monitor before the
        program runs, or is told why it cannot. That monitor alone hears it from now on."""
        end = self._ends.take(_key(agent, task, FIRST))
        if end is None:
            yield
            return
        for visit in (task or agent).viewers:
            if visit.number == FIRST:
                execution.first_viewer = Viewer(
                    visit=visit, end=end.socket, screen=end.screen
                )
        try:
            yield
        except (CtxError, OSError) as error:
            _say_failed(end.socket, str(error))
            raise
        finally:
            execution.first_viewer = None
            end.close()

    def tell_frozen(self, agent: Agent, frozen: bool) -> None:
        """Tells all who look at terminals of an agent, and of what it owns, that these are frozen,
        or no longer."""
        text = _PAUSED if frozen else _RESUMED
        family = {agent.index, *(each.index for each in self._agents.registry.descendants(agent))}
        for index, task in {key[:2] for key in self._charges if key.agent in family}:
            live_cell = self._live_cells.get(index)
            if live_cell is not None:
                execution = live_cell.tasks.get(task) if task else live_cell.run_at_hand()
                if execution is not None:
                    self._port.tell_viewers(execution, text)

    def look(self, agent: Agent, task: Task | None, record: RunRecord) -> None:
        """The record of a run, or of a task, may say that viewers have gone. Its end tells of
        those who stayed until then."""
        numbers = {visit.number for visit in (task or agent).viewers}
        gone = {n: why for n, why in record.left.items() if n in numbers and why != visits.ENDED}
        if gone:
            self._gone(agent, task, gone)

    def _gone(self, agent: Agent, task: Task | None, gone: Mapping[int, str]) -> None:
        change = Change(by=RUNTIME)
        visits.go(change, agent, task, gone)
        self._agents.journal.note(change)

    # hanging up

    async def run(self) -> None:
        while True:
            for key, left in await self._ends.hung_up():
                agent = self._agents.registry.get(key.agent)
                if agent is not None:
                    with guarded(agent):
                        self._closed(agent, key, left=left)

    def _closed(self, agent: Agent, key: Key, *, left: bool) -> None:
        """Somebody has closed what the daemon has the end of."""
        task = self._agents.items.named(agent.index, Task, key.task) if key.task else None
        if not key.viewer:
            self.hang_up(agent, None)
        elif task is not None or not key.task:
            self._lose(agent, task, {key.viewer: visits.DETACHED if left else visits.CLOSED})

    def _lose(self, agent: Agent, task: Task | None, gone: Mapping[int, str]) -> None:
        """Viewers have gone of whom no monitor tells."""
        there = [visit for visit in (task or agent).viewers if visit.number in gone]
        self._gone(agent, task, gone)
        if any(visit.hangs_up and gone[visit.number] == visits.CLOSED for visit in there):
            self.hang_up(agent, task)

    def hang_up(self, agent: Agent, task: Task | None) -> None:
        """Ends what somebody ended with, who is gone."""
        live_cell = self._live_cells.get(agent.index)
        if task is not None:
            if task.status not in (TaskStatus.QUEUED, TaskStatus.RUNNING):
                return
            change = Change(by=RUNTIME)
            change.step(task, TaskCue.STOP)
            change.put(task, by=RUNTIME, window=task.window or "end")
            self._agents.journal.note(change)
            execution = live_cell.tasks.get(task.name) if live_cell is not None else None
            ended = [execution] if execution is not None else []
        elif agent.status is Status.DEAD:
            self._ender.remove_unwanted(agent)
            return
        else:
            self._ender.end(agent, Outcome.CANCELLED, HANGUP)
            ended = [live_cell] if live_cell is not None else []
            if live_cell is not None and live_cell.run is not None:
                ended.append(live_cell.run)
        for execution in ended:
            execution.facts.leave_cell()  # its monitor need not tell the keeper
        crashpoints.reach("terminal.hungup")

    # what an earlier daemon left

    async def take_back(self) -> None:
        """Gets the windows of agents that live back from their monitors, knows viewers by their
        records, and ends what has neither any more."""
        self._nursery.start_soon(self._wait_for_clients)
        for agent in self._agents.registry:
            await self._take_back_window(agent)
            for task in (None, *self._agents.tasks.known(agent)):
                if (task or agent).viewers:
                    await self._take_back_viewers(agent, task)

    async def _take_back_window(self, agent: Agent) -> None:
        if not agent.window or Key(agent.index) in self._ends:
            return  # or it is awaited
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None and live_cell.facts.exist():
            end = await live_cell.facts.inlet.ask_window()
            if end is not None:
                self._keep(Key(agent.index), agent, end)
                return
            if not live_cell.record().hung_up:
                return  # its monitor was killed, which ends it, too
        with guarded(agent):
            self.hang_up(agent, None)

    async def _take_back_viewers(self, agent: Agent, task: Task | None) -> None:
        there = (task or agent).viewers
        self._note(_key(agent, task, 0), there)
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            return
        execution = live_cell.command(task.name) if task else live_cell.run_at_hand()
        if execution.facts.exist():
            # behind whoever an earlier daemon has sent there
            await execution.facts.inlet.ask_window()
        record = execution.record()
        lost = [
            visit.number
            for visit in there
            if visit.number not in record.viewers | record.left
            and _key(agent, task, visit.number) not in self._ends
        ]
        if lost:
            with guarded(agent):
                self._lose(agent, task, dict.fromkeys(lost, visits.CLOSED))

    def _keep(
        self, key: Key, agent: Agent, end: socket.socket, screen: tuple[int, int] | None = None
    ) -> None:
        payer = Payer(agent.owner, agent.name)
        charge = self._agents.accounts.charged_anyway(payer, Resource.DESCRIPTORS, 1)
        self._ends.put(key, End(end, charge, screen))

    # in the next daemon

    def save(self, descriptors: Descriptors) -> list[list[int]]:
        """Windows, as versions without terminals have them."""
        return [
            [key.agent, descriptors.keep(end.socket.fileno())]
            for key, end in self._ends.items()
            if not key.viewer
        ]

    def take_over(self, saved: list[list[Any]]) -> None:
        for index, fd in saved:
            self._take_over(Key(AgentIndex(index)), fd)

    def save_viewers(self, descriptors: Descriptors) -> dict[str, list[list[Any]]]:
        """Both ends of those that wait for a terminal, and of those that are being sent."""
        waiting = [
            [*key, descriptors.keep(end.socket.fileno()), end.screen]
            for key, end in self._ends.items()
            if key.viewer
        ]
        unsent = [[*key, descriptors.keep(end.fileno())] for key, end in self._unsent.items()]
        return {"waiting": waiting, "unsent": unsent}

    def take_over_viewers(self, saved: dict[str, list[list[Any]]]) -> None:
        for index, task, number, fd, screen in saved["waiting"]:
            self._take_over(Key(AgentIndex(index), task, number), fd, screen and tuple(screen))
        for index, task, number, fd in saved["unsent"]:
            self._unsent[Key(AgentIndex(index), task, number)] = socket.socket(fileno=fd)

    def _take_over(self, key: Key, fd: int, screen: tuple[int, int] | None = None) -> None:
        agent = self._agents.registry.get(key.agent)
        if agent is None:
            os.close(fd)
        else:
            self._keep(key, agent, socket.socket(fileno=fd), screen)


def _key(agent: Agent, task: Task | None, number: int) -> Key:
    return Key(agent.index, task.name if task is not None else "", number)


def _name(agent: Agent, task: Task | None) -> str:
    return quote(agent.name) if task is None else f"the task {quote(task.name)}"


def _visit(number: int, caller: Caller, wanted: Wanted) -> Visit:
    return Visit(
        number=number,
        uid=caller.uid,
        looks=wanted.looks,
        hangs_up=wanted.hangs_up,
        removes=wanted.removes,
    )


def _say_failed(end: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        end.send(f"{_FAILED}{why}".encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
