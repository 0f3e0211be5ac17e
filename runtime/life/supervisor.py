"""The verbs, what moves of agents call for, and one task for each live agent.

The task leads its agent from the start to the recorded end. It learns
everything from what outlives the daemon, the monitor's record and the cgroup,
so that an agent adopted after a crash is led by the same code.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Final

import trio

from runtime import crashpoints
from runtime.cell import oldinputs
from runtime.cell.networks import metered
from runtime.cell.port import Host, LiveCell, Part, Place, about, guarded
from runtime.cell.spending import Spending
from runtime.cell.starting import Starter
from runtime.errors import (
    CtxError,
    KernelError,
    NoSpaceError,
    NotRunningError,
    StaleError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import AgentIndex, RunId
from runtime.kernel import clock
from runtime.kernel.processes import Census
from runtime.life.beginning import Beginner
from runtime.life.elsewhere import Elsewhere
from runtime.life.ending import Ender
from runtime.life.following import Follower, FollowingCell, FollowingTask, Inside
from runtime.life.metering import Meter
from runtime.life.recording import Recorder
from runtime.life.recovery import Recovery, record_lost, remove_strays
from runtime.life.room import Room
from runtime.life.runs import Runs
from runtime.life.streams import Streams
from runtime.life.turns import due, has_turn
from runtime.life.windows import Windows
from runtime.life.worktrees import Worktrees
from runtime.records.change import Change, Subscriber
from runtime.records.items import BY_ABORT, Item, Message, Task, TaskStatus
from runtime.records.lifecycle import Cue, Effect, Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import RunCue
from runtime.records.visits import Visit
from runtime.texts.limits import COST, TOKENS
from runtime.texts.names import escape, quote

log = logging.getLogger("ctxd.supervisor")

_SHUTDOWN_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 1.0
#: that a start waits for what was adopted
_SETTLE_SECONDS: Final = 10.0
#: that the last cgroups have to be removed
_DRAIN_SECONDS: Final = 5.0
_LED_TASKS: Final = frozenset({TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.CANCELLING})
#: fields that may make a next run due, or end the current one
_WAKING: Final = frozenset({"status", "run", "limits"})


class Supervisor(Part, Subscriber):
    """Starts, leads, ends and adopts agents."""

    def __init__(
        self,
        host: Host,
        starter: Starter,
        census: Census,
        streams: Streams,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        super().__init__(host)
        self._elsewhere = elsewhere or Elsewhere()
        self._host = host
        #: awaited for an agent before anything of it runs
        self._before: list[Callable[[Agent], Awaitable[None]]] = []
        self._ender = Ender(host)
        self._elsewhere.lead_by(self._ender)
        self.windows = Windows(host, self._ender, self.start)
        self._follower = follower = Follower(host, starter, self._ender, self.windows)
        self.streams = streams
        self._runs = Runs(host, follower, streams)
        #: every agent that lives has a live cell
        self._has_taken_over = False
        self._inside = Inside(host, follower)
        self._worktrees = Worktrees(host, self._inside.run, self._elsewhere)
        self.networks = follower.networks
        self._beginner = Beginner(
            host.agents, self._worktrees, host.port.boot, self._elsewhere
        )
        #: what agents use
        self.meter = Meter(host, census)
        self.meter.wanted = self._elsewhere.ask_usage
        #: what owners used of models
        self.spending = Spending(host.agents, host.places.networks)
        #: records ends, and counts them
        self.recorder = Recorder(host, self.meter, streams, self.networks, self.spending)
        room = Room(host.agents, self._worktrees.give_up)
        looking = (self.meter.run, self.windows.run, room.run)
        for run in (self.recorder.run, *looking):
            host.nursery.start_soon(run)
        host.nursery.start_soon(self.networks.run, self.spending)
        host.agents.journal.subscribe(self)

    def prepare_with(self, prepare: Callable[[Agent], Awaitable[None]]) -> None:
        """Awaits ``prepare`` for each agent, before its programs run or go on."""
        self._before.append(prepare)

    def launch_when(
        self, ready: Callable[[LiveCell], Awaitable[None]], lease_of: Callable[[Agent], int]
    ) -> None:
        """Awaits ``ready`` for each cell, before anything of it begins. It has to return as soon
        as the agent is not starting any more. ``lease_of`` says under which lease an agent of
        another machine may run now."""
        self._follower.ready = ready
        self._worktrees.lease_of = lease_of

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        registry = self._agents.registry
        if (changed := registry.get(index)) is not None:
            for waiting in due(registry, changed, set(names)):
                if (live_cell := self._live_cells.get(waiting.index)) is not None:
                    live_cell.changed.notify()
            if "limits" in names:
                self.networks.limits_changed(changed)
        live_cell = self._live_cells.get(index)
        if live_cell is None:
            return
        agent = live_cell.agent
        if "policy" in names:
            self.networks.policy_changed(agent)
        if not _WAKING.isdisjoint(names):
            live_cell.changed.notify()

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        live_cell = self._live_cells.get(item.agent)
        if not isinstance(item, Task) or live_cell is None:
            return
        if live_cell.launched:
            self._lead_task(live_cell, item)
        if item.name in live_cell.tasks:
            live_cell.tasks[item.name].changed.notify()

    def item_listed(self, item: Item) -> None:
        live_cell = self._live_cells.get(item.agent)
        if live_cell is not None and isinstance(item, Message):
            live_cell.changed.notify()

    def attempt(self, agent: Agent, effect: Effect) -> None:
        PERFORMED[effect](self, agent)

    def restore(self, agent: Agent) -> None:
        """Its cgroup is frozen, or not, as its record says."""
        try:
            self._place(agent).freeze(agent.frozen or agent.is_held)
        except OSError as error:
            word = "freeze" if agent.frozen or agent.is_held else "thaw"
            why = about(agent)
            log.error("%s: cannot %s it again: %s", agent.name, word, error.strerror, extra=why)

    def due(self, agent: Agent, effect: Effect) -> None:
        with guarded(agent, KernelError):
            PERFORMED[effect](self, agent)

    # verbs

    def fetch(self, task: Task) -> None:
        """``fetch`` said to a handle: ``CtxError`` if it cannot begin."""
        self._worktrees.fetch(task)

    def start(self, agent: Agent, visit: Visit | None = None) -> None:
        """Begins a start; what goes wrong later is in ``outcome`` and ``reason``. With a
        ``visit`` somebody looks at its terminal from the beginning on."""
        self._beginner.begin(agent, visit)

    def _launch(self, agent: Agent) -> None:
        crashpoints.reach("start.committed")
        self._begin_life(self._make_live_cell(agent))

    def _end(self, agent: Agent) -> None:
        if agent.index not in self._live_cells:
            if not self._has_taken_over:
                return  # who takes it over goes on with its end
            self._begin_life(self._make_live_cell(agent))
        self._ender.begin(agent)

    def stop(self, agent: Agent, *, kill: bool) -> None:
        """``stop`` and ``kill``: cancels the agent and all that it owns.

        ``KernelError`` if the kernel refused SIGKILL: the agent is stopping all the same, and
        SIGKILL is tried again after the grace.
        """
        reason = self._agents.journal.stop_reason(agent)
        # what stays to be spoken to ends well when it says so itself
        done = reason == "self_stop" and agent.how.holds_cell
        outcome = Outcome.DONE if done else Outcome.CANCELLED
        self._ender.end(agent, outcome, reason, cue=Cue.KILL if kill else Cue.STOP)

    def end(
        self, agent: Agent, outcome: Outcome, reason: str, cue: Cue, change: Change | None = None
    ) -> None:
        """``stop`` and the like, as somebody has decided it; after a ``change``."""
        self._ender.end(agent, outcome, reason, cue=cue, change=change)

    def pause(self, agent: Agent) -> None:
        """Freezes the subtree (cgroups(7)); agents below keep their status. ``KernelError``."""
        if agent.away:
            self._elsewhere.say(agent, "pause")
            return
        with self._agents.journal.changing() as change:
            change.move(agent, Cue.PAUSE)
        crashpoints.reach("pause.committed")

    def hold(self, agent: Agent, held: bool) -> None:
        """Freezes a guest, whose status stays, as what is above it at its lead is paused; or lets
        it go on. ``KernelError``."""
        change = Change()
        change.set(agent, guest={**agent.guest, "held": held})
        try:
            if agent.accepts_children:
                self._place(agent).freeze(held or agent.frozen)
        except FileNotFoundError:
            pass  # it waits until it is let go (``launch_when``)
        except OSError as error:
            raise KernelError(f"cannot freeze or thaw {quote(agent.name)}", error) from None
        self._agents.journal.note(change)
        if (live_cell := self._live_cells.get(agent.index)) is not None:
            live_cell.changed.notify()

    def _freeze(self, agent: Agent, frozen: bool = True) -> None:
        try:
            self._place(agent).freeze(frozen or agent.is_held)
        except OSError as error:
            word = "freeze" if frozen else "thaw"
            raise KernelError(f"cannot {word} {quote(agent.name)}", error) from None
        self.windows.tell_frozen(agent, frozen)
        crashpoints.reach("pause.frozen" if frozen else "resume.thawed")

    def resume(self, agent: Agent) -> None:
        """Thaws the subtree, except agents below that were paused by themselves; after an abort
        the next message, or the next run, follows. ``KernelError``."""
        if agent.away:
            self._elsewhere.say(agent, "resume")
            return
        with self._agents.journal.changing() as change:
            change.move(agent, Cue.RESUME)
        crashpoints.reach("resume.committed")

    def _follow(self, agent: Agent) -> None:
        live_cell = self._live_cells.get(agent.index)
        if live_cell is not None:
            self._serve(live_cell)

    def abort(self, agent: Agent, wanted: RunId | None) -> None:
        """Ends the current run and nothing else; the agent is paused when it has ended.

        A program that takes cancels is told to end its message, and goes on if it does; then the
        agent is paused at once. The guard was asked, and there is a run. ``StaleError`` if another
        one is ``wanted`` than the current. Said again, it ends what may go on, and skips the rest
        of the grace of what ends.
        """
        run = agent.run
        if wanted is not None and wanted != run.id:
            raise StaleError(f"{quote(wanted)} is not the current run; the current run is {run.id}")
        if agent.away:
            self._elsewhere.say(agent, "abort", run.id)
            return
        live_cell = self._live_cells.get(agent.index)
        if live_cell is None:
            raise NotRunningError(f"ctxd has not taken {quote(agent.name)} over yet: try again")
        if run.ending:
            live_cell.run_at_hand().impatient = True
            live_cell.changed.notify()
            return
        if agent.runs_first and not self._port.hold(live_cell):
            raise NotRunningError(f"the run {run.id} has just ended")
        change = Change()
        told = not run.aborting and self._agents.messages.takes_cancel(agent)
        cue, by = RunCue.CANCEL if told else RunCue.END, self._agents.journal.actor
        change.run(agent, cue, cause=BY_ABORT, caused_by=by)
        self._agents.asks.run_over(change, agent)
        change.set(agent, no_room="")
        if told and agent.status is not Status.PAUSED:
            change.move(agent, Cue.ABORT, reason=BY_ABORT)
            change.set(agent, paused_from=agent.how.between.value)
        self._agents.journal.commit(change)
        crashpoints.reach("abort.committed")

    def write_input(self, task: Task, data: bytes) -> int:
        """Bytes for a command's standard input; how many there was room for.

        ``WrongStateError`` if it does not run, or does not read.
        """
        live_cell = self._live_cells.get(task.agent)
        if live_cell is None:
            raise WrongStateError(f"the task {quote(task.name)} has just ended")
        if task.status is not TaskStatus.RUNNING:
            raise WrongStateError(f"the task {quote(task.name)} is {task.status.shown}")
        try:
            taken = live_cell.tasks[task.name].facts.inlet.put(data)
        except (LookupError, OSError):
            raise WrongStateError(
                f"the task {quote(task.name)} reads no more input: it has just ended, or has "
                "closed it"
            ) from None
        if data and not taken:
            raise WrongStateError(
                f"the task {quote(task.name)} does not read its input, and the pipe is "
                "full: write again when it has read"
            )
        return taken

    def switch(self, agent: Agent, name: str) -> None:
        """``session``: the guard was asked. ``DeniedError``, ``QuotaError``."""
        if agent.away:
            self._elsewhere.switch(agent, name)
        else:
            self._agents.births.switch_session(agent, name)

    def reset(self, agent: Agent) -> None:
        """A new incarnation in place of a dead one."""
        self._agents.births.renew(agent)

    def longest_end(self) -> float:
        """How long ``shut_down`` waits at most, in seconds: for the longest grace, and more."""
        live = (agent for agent in self._agents.registry if agent.live)
        return max(map(self._agents.settings.grace, live), default=0.0) + _SHUTDOWN_SECONDS

    async def shut_down(self) -> None:
        """Cancels every agent and returns when all are recorded.

        An agent that cannot be ended in order does not hold up the others: all processes that
        are left after the longest grace and some time are killed.
        """
        self.recorder.restarting = False
        patience = self.longest_end()
        for agent in self._agents.registry:
            with guarded(agent):
                if not (agent.owned and self._agents.registry.parent_of(agent)):
                    self._ender.end(agent, Outcome.CANCELLED, "shutdown")
        self._nursery.start_soon(self._elsewhere.give_up)
        with trio.move_on_after(patience) as bound:
            while self._live_cells:
                await next(iter(self._live_cells.values())).wait_over()
                await trio.lowlevel.checkpoint()
        with trio.move_on_after(_DRAIN_SECONDS):
            await self._port.removed()
        if bound.cancelled_caught:
            for place in self._port.all_places():
                place.kill()

    def check_limits(self, limits: dict[str, str]) -> None:
        """``UnsupportedError`` where the machine lacks a controller, or nothing counts tokens."""
        self._port.check_limits(limits)
        for key in (TOKENS, COST):
            if limits.get(key, "max") != "max" and not metered(self._agents):
                raise UnsupportedError(
                    f"{key}: nothing counts what is used of models: configure one of networks "
                    "with header: counters (ctxfs-meter(8))"
                )

    def apply_limits(self, agent: Agent, limits: dict[str, str]) -> None:
        """Writes the resource limits to the agent's cgroup, if there is one now."""
        self._port.apply_limits(self._place(agent), limits)

    async def recover(self, declared: Collection[str] = ()) -> None:
        """Takes over what an earlier daemon left: follows what lives, and goes on ending what was
        being ended. Returns when what has ended meanwhile is recorded, and what lives can be
        spoken to. ``declared`` names agents that are started with the machine."""
        recovery = Recovery(self._host, self._ender, self._beginner, self._make_live_cell)
        adopted = recovery.adopt(declared)
        self._has_taken_over = True
        ending = [each.agent for each in adopted if each.agent.status is Status.STOPPING]
        await self.windows.take_back()
        for live_cell in adopted:
            self._inside.end_left(live_cell)
        here = [each for each in adopted if not each.agent.away]
        await oldinputs.take_over(self._host, here)
        gone = []
        for live_cell in adopted:
            if live_cell.agent.away:
                self._begin_life(live_cell)
                continue
            if live_cell.agent.status is not Status.STOPPING:
                self.restore(live_cell.agent)
            # a daemon that died while it ended a program may have left that frozen
            for execution in live_cell.programs():
                self._port.thaw(execution.leaf)
            is_new = live_cell.agent.status is Status.STARTING and not live_cell.facts.exist()
            below = self._agents.registry.each_descendant(live_cell.agent)
            away = any(each.away and each.live for each in below)
            if not (is_new or away or live_cell.node.populated()):
                gone.append(live_cell)
            self._begin_life(live_cell)
        crashpoints.reach("adopt.led")
        for agent in ending:
            parent = self._agents.registry.parent_of(agent)
            if parent is None or parent.status is not Status.STOPPING or not agent.owned:
                self._ender.lead(agent)
        with trio.move_on_after(_SETTLE_SECONDS):
            for live_cell in gone:
                await live_cell.wait_over()
            for live_cell in adopted:
                await live_cell.wait_reachable()
        crashpoints.reach("adopt.ended")
        self._elsewhere.recovered()
        remove_strays(self._host)
        self._worktrees.resume()
        crashpoints.reach("adopt.cleaned")

    # following

    def _begin_life(self, live_cell: LiveCell) -> None:
        self._nursery.start_soon(self._live, live_cell)

    def _place(self, agent: Agent) -> Place:
        return self._port.place(agent.cell.cgroup or self._agents.registry.node_path(agent))

    def _make_live_cell(self, agent: Agent) -> LiveCell:
        live_cell = LiveCell(agent, self._place(agent), self._port.facts)
        if agent.run.id:
            live_cell.run_at_hand()
        for task in self._agents.tasks.known(agent):
            if self._is_led(task):
                # from the first moment on: an unknown record is removed
                live_cell.command(task.name)
        for execution in live_cell.entered():
            if execution.facts.exist():
                execution.note_launched()
        self._live_cells[agent.index] = live_cell
        return live_cell

    async def _live(self, live_cell: LiveCell) -> None:
        """Run after run, until the agent is dead."""
        agent = live_cell.agent
        try:
            while True:
                for prepare in self._before:
                    await prepare(agent)
                live_cell.reachable = True
                live_cell.changed.notify()
                if agent.waits_to_run:
                    live_cell = await self._until_due(live_cell)
                await self._until_over(live_cell)
                if not agent.live:
                    return
                live_cell = self._make_live_cell(agent)
        except Exception:
            log.exception("%s: a bug in ctxfs; its processes are killed", agent.name)
            with guarded(agent):
                live_cell.node.kill()
                if agent.live:
                    record_lost(self._agents, agent, Cue.LOST, "runtime_lost")
        finally:
            # Also when cancelled: tasks that wait for this agent must not wait forever.
            live_cell.reachable = live_cell.launched = True
            live_cell.note_over()
            if self._live_cells.get(agent.index) is live_cell:
                del self._live_cells[agent.index]

    async def _until_due(self, live_cell: LiveCell) -> LiveCell:
        """Until the next run is due, or it is the turn of the first one, and that is recorded, or
        the agent is ended instead."""
        agent, registry = live_cell.agent, self._agents.registry
        live_cell.launched = live_cell.monitor_gone = True
        # of an older daemon's record only the wall clock is known, which may have been set back
        left = -clock.since(agent.restart_at, agent.restart_up)
        moment = clock.up() + min(left, clock.LOOK_AGAIN)
        while agent.status is Status.STARTING:
            if not has_turn(registry, agent):
                await live_cell.until(
                    lambda: agent.status is not Status.STARTING or has_turn(registry, agent)
                )
            with trio.move_on_after(max(0.0, moment - clock.up())) as scope:
                await live_cell.until(lambda: agent.status is not Status.STARTING)
            if not scope.cancelled_caught or agent.status is not Status.STARTING:
                continue
            if agent.placement and not await self._reach(live_cell):
                continue
            if not has_turn(registry, agent):
                continue
            change = Change()
            try:
                self._beginner.add_start(change, agent)
                self._agents.journal.commit(change)
            except NoSpaceError as error:
                why = about(agent)
                log.error("%s: cannot start it yet: %s", agent.name, error, extra=why)
                moment = clock.up() + _RETRY_SECONDS
                continue
            except CtxError as error:
                self._ender.end(agent, Outcome.ERROR, f"start_failed: {escape(error.sentence)}")
                continue
            crashpoints.reach("restart.due")
            live_cell.note_over()
            return self._make_live_cell(agent)
        return live_cell

    async def _reach(self, live_cell: LiveCell) -> bool:
        """Until the node of an agent that is placed can be told of it; False if it ends."""
        agent = live_cell.agent
        try:
            if not agent.node:  # it waited for its turn
                change = Change()
                change.set(agent, node=self._elsewhere.choose(agent))
                self._agents.journal.note(change)
            await self._elsewhere.reach(live_cell)
            if agent.workspace == "worktree" and agent.status is Status.STARTING:
                await self._worktrees.make(agent)
                await self._elsewhere.reach(live_cell)
        except CtxError as error:
            self._ender.end(agent, Outcome.ERROR, f"start_failed: {escape(error.sentence)}")
        return agent.status is Status.STARTING

    async def _until_over(self, live_cell: LiveCell) -> None:
        agent = live_cell.agent
        if agent.away:
            await self._elsewhere.follow(live_cell)
        else:
            following = FollowingCell(
                self._follower, live_cell, worktrees=self._worktrees, serve=self._serve
            )
            await following.follow()
        if agent.status is Status.STOPPING:
            with guarded(agent):
                await self._worktrees.take_over(agent)
            with guarded(agent):
                await self.recorder.hear_rest(live_cell)
            with guarded(agent):
                await self.recorder.shed(live_cell)
            self.recorder.add(live_cell)
            await live_cell.wait_over()

    def _serve(self, live_cell: LiveCell) -> None:
        """Follows runs inside the cell, where there may be some, and tasks."""
        agent = live_cell.agent
        if not live_cell.goes_on:
            for execution in live_cell.entered():
                execution.note_launched()  # they are followed no more
            return
        inside = agent.how.holds_cell or not agent.runs_first or agent.run.ending
        if inside and not live_cell.served:
            live_cell.served = True
            self._nursery.start_soon(self._runs.serve, live_cell)
        for task in self._agents.tasks.known(agent):
            self._lead_task(live_cell, task)

    def _lead_task(self, live_cell: LiveCell, task: Task) -> None:
        # once its agent is ending, it ends with that, led by the task that leads the agent
        if self._is_led(task) and live_cell.goes_on:
            execution = live_cell.command(task.name)
            if not execution.served:
                execution.served = True
                self._nursery.start_soon(self._task_of, live_cell, task)

    @staticmethod
    def _is_led(task: Task) -> bool:
        return not task.child and task.status in _LED_TASKS

    async def _task_of(self, live_cell: LiveCell, task: Task) -> None:
        with guarded(live_cell.agent):
            await FollowingTask(self._follower, live_cell, task).run()


#: who does what a move calls for
PERFORMED: Final[dict[Effect, Callable[[Supervisor, Agent], None]]] = {
    Effect.LAUNCH: Supervisor._launch,
    Effect.REFUSE: lambda self, agent: self._ender.refuse(agent),
    Effect.END: Supervisor._end,
    Effect.KILL: lambda self, agent: self._ender.kill(agent),
    Effect.FREEZE: Supervisor._freeze,
    Effect.THAW: partial(Supervisor._freeze, frozen=False),
    Effect.CLEAR: lambda self, agent: self.recorder.clear(agent),
    Effect.RELEASE: lambda self, agent: self._ender.release(agent),
    Effect.FOLLOW: Supervisor._follow,
}
