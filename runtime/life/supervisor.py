"""The only place that starts and ends processes.

One task follows each live agent, from its start to its recorded end. It
learns everything from what outlives the daemon, the monitor's record and the
cgroup, so that an agent adopted after a crash is followed by the same code.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from runtime import crashpoints
from runtime.agents.forking import inherit
from runtime.agents.parts import Agents
from runtime.authority.limits import apply_limits, check_limits, in_use
from runtime.cell import cell
from runtime.cell.cell import Places
from runtime.cell.following import Execution, Followed, Following
from runtime.cell.record import Record
from runtime.cell.sources import Looker
from runtime.cell.starting import Starter
from runtime.errors import (
    CtxError,
    KernelError,
    NoSpaceError,
    NotRunningError,
    StaleError,
    WrongStateError,
)
from runtime.kernel import linux, output
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.kernel.inotify import Watcher
from runtime.kernel.spawn import Spawner
from runtime.life.conclusions import add_run_start, end_message, judge_agent
from runtime.life.ending import Ender, guarded, thaw, watch_monitor
from runtime.life.inside import Inside
from runtime.life.leading import Leader, watching
from runtime.life.recording import Recorder
from runtime.life.runs import Runs
from runtime.life.streams import Streams
from runtime.life.taskruns import TaskRuns, execution_of
from runtime.life.worktrees import Worktrees
from runtime.records.change import Change, Watching
from runtime.records.items import Item, Message, MessageStatus, Task, TaskStatus
from runtime.records.lifecycle import AGENT_MOVES, Effect, Event, Status
from runtime.records.model import Agent, Outcome
from runtime.texts import mounts, policy
from runtime.texts.names import escape, quote

log = logging.getLogger("ctxd.supervisor")

_SETTLE_SECONDS: Final = 10.0
_SHUTDOWN_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 1.0
#: what a first message is made of
_FIRST_DOCUMENTS: Final = ("inherited", "handoff")
_FOLLOWED_TASKS: Final = frozenset(
    {TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.CANCELLING}
)
#: fields that may make a next run due, or end the current one
_WAKING: Final = frozenset({"status", "run", "run_cause", "limits"})


class Supervisor(Watching):
    """Starts, follows, ends and adopts agents."""

    def __init__(
        self,
        *,
        agents: Agents,
        hierarchy: Hierarchy,
        watcher: Watcher,
        streams: Streams,
        places: Places,
        spawner: Spawner,
        nursery: trio.Nursery,
    ) -> None:
        self._agents = agents
        self._hierarchy = hierarchy
        self._watcher = watcher
        #: awaited for an agent before anything of it runs
        self._before: list[Callable[[Agent], Awaitable[None]]] = []
        self._places = places
        self._nursery = nursery
        self._followed = followed = Followed()
        self._looker = Looker(
            agents=agents,
            hierarchy=hierarchy,
            places=places,
            followed=followed,
            spawner=spawner,
            nursery=nursery,
        )
        self._starter = Starter(
            agents=agents,
            hierarchy=hierarchy,
            watcher=watcher,
            places=places,
            spawner=spawner,
            followed=followed,
            looker=self._looker,
        )
        self._ender = Ender(
            agents=agents,
            hierarchy=hierarchy,
            watcher=watcher,
            followed=followed,
            nursery=nursery,
        )
        leader = Leader(
            hierarchy=hierarchy, watcher=watcher, places=places, starter=self._starter
        )
        self._runs = Runs(
            agents=agents,
            watcher=watcher,
            places=places,
            starter=self._starter,
            ender=self._ender,
            leader=leader,
            streams=streams,
        )
        self._task_runs = TaskRuns(agents=agents, places=places, leader=leader)
        self._led_tasks: set[int] = set()
        self._inside = Inside(
            agents=agents,
            places=places,
            ender=self._ender,
            leader=leader,
            followed=followed,
        )
        self._worktrees = Worktrees(
            agents=agents,
            run=self._inside.run,
            gather=str(places.program("gather")),
            nursery=nursery,
        )
        self._recorder = Recorder(
            agents=agents,
            hierarchy=hierarchy,
            streams=streams,
            places=places,
            followed=followed,
            ender=self._ender,
        )
        nursery.start_soon(self._recorder.run)
        agents.journal.watch(self)
        self._boot = linux.boot_id()

    def prepare_with(self, prepare: Callable[[Agent], Awaitable[None]]) -> None:
        """It is awaited for each agent, before anything of it runs or goes on."""
        self._before.append(prepare)

    # Watching

    def agent_changed(self, index: int, names: Iterable[str]) -> None:
        following = self._followed.get(index)
        if following is None:
            return
        if "limits" in names:
            following.changes.notify()  # the timeout may be another
        if not _WAKING.isdisjoint(names):
            following.rouse()
        agent = self._agents.registry.get(index)
        if "run_cause" in names and agent is not None and agent.run_cause is not None:
            # that of an earlier run; a change that waited for room on the disk is told twice
            if following.impatient.is_set():
                following.impatient = trio.Event()
            self._serve(agent, following)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        following = self._followed.get(item.agent)
        agent = self._agents.registry.get(item.agent)
        if not isinstance(item, Task) or following is None or agent is None:
            return
        if following.launched.is_set():
            self._follow_task(agent, following, item)
        if "status" in names and item.name in following.tasks:
            following.tasks[item.name].changes.notify()

    def item_listed(self, item: Item) -> None:
        following = self._followed.get(item.agent)
        if following is not None and isinstance(item, Message):
            following.rouse()

    def attempt(self, agent: Agent, effect: Effect) -> None:
        PERFORMED[effect](self, agent)

    def restore(self, agent: Agent) -> None:
        """Its cgroup is frozen, or not, as its record says."""
        try:
            self._node(agent).freeze(agent.frozen)
        except OSError as error:
            word = "freeze" if agent.frozen else "thaw"
            log.error("%s: cannot %s it again: %s", agent.name, word, error.strerror)

    def due(self, agent: Agent, effect: Effect) -> None:
        with guarded(agent, KernelError):
            PERFORMED[effect](self, agent)

    # verbs

    async def look(self, agent: Agent, paths: Iterable[str]) -> dict[str, mounts.Source]:
        """What is at paths that the creator of an agent wrote (``Looker.look``)."""
        return await self._looker.look(agent, paths)

    def fetch(self, task: Task) -> None:
        """``fetch`` said to a handle: ``CtxError`` if it cannot begin."""
        self._worktrees.fetch(task)

    def start(self, agent: Agent) -> None:
        """Begins a start; what goes wrong later is in ``outcome`` and ``reason``."""
        AGENT_MOVES.check(agent.status, Event.START)
        parent = self._agents.registry.live_parent(agent)
        if agent.owned and parent is not None:
            if parent.waits_to_restart:
                raise WrongStateError(
                    f"the parent {quote(parent.name)} waits for its next run: try again later"
                )
            for owner in (*self._agents.registry.ancestors(parent), parent):
                if owner.status is Status.PAUSED:
                    raise WrongStateError(
                        f"{quote(owner.name)}, which it would run in, is paused: resume it first"
                    )
        self._agents.living.check_agent(agent)
        self._agents.authority.check_start(agent)
        cell.program(agent)
        self._worktrees.check_start(agent)
        change = Change()
        if parent is not None and not agent.owned:
            # from here on it has what its parent has now, whatever becomes of that
            bound = self._agents.authority.effective_policy(parent)
            table = self._agents.authority.effective_mounts(parent)
            change.set(
                agent,
                bound_policy=policy.render(policy.as_bound(bound), agent.label),
                bound_mount=mounts.render(table),
                bound_root=cell.has_own_root(self._agents, parent),
            )
        if agent.context == "fork" and parent is not None:
            inherited = inherit(self._agents, parent, agent)
            self._agents.documents.write(agent, "inherited.md", inherited.markdown.encode())
            self._agents.documents.write(agent, "inherited.json", inherited.json.encode())
        self._add_start(change, agent)
        self._add_handoff(change, agent)
        change.move(agent, Event.START)
        self._agents.journal.commit(change)

    def _launch(self, agent: Agent) -> None:
        crashpoints.reach("start.committed")
        self._nursery.start_soon(self._live, agent, self._follow(agent), True)

    def _add_start(self, change: Change, agent: Agent) -> None:
        """A cell is to be made; in mode ``once`` it is that of the run."""
        run = self._agents.registry.next_run(agent) if not agent.how.holds_cell else ""
        if agent.result_from_output:  # of the run before
            self._agents.documents.write(agent, "result.md", b"")
        output_start = output.Output(self._agents.documents.directory(agent) / "out").end
        now = time.time()
        change.set(
            agent,
            run=run,
            cell=run or f"cell-{secrets.token_hex(4)}",
            run_cause=None,
            run_started=now,
            started=now,
            boot=self._boot,
            cgroup=self._agents.registry.node_path(agent),
            output_start=output_start,
            result_from_output=False,
        )
        change.event(
            agent.session, "agent.start", agent.name, **({"run": run} if run else {})
        )

    def _add_handoff(self, change: Change, agent: Agent) -> None:
        """The delegated task is the first message of an agent that takes messages."""
        if not agent.how.holds_cell:
            return
        parts = [self._agents.documents.read(agent, f"{name}.md") for name in _FIRST_DOCUMENTS]
        text = b"\n".join(part for part in parts if part).decode(errors="replace")
        if not text.strip():
            return
        provenance = "operator" if agent.parent is None else "delegation"
        if agent.parent is not None and not agent.owned:
            provenance = "bootstrap"
        self._agents.messages.queue_first(
            change,
            agent,
            text=text,
            sender=agent.lineage.split(" ")[0],
            provenance=provenance,
        )

    def stop(self, agent: Agent, reason: str, *, kill: bool) -> None:
        """``stop`` and ``kill``: cancels the agent and all that it owns.

        ``KernelError`` if SIGKILL was refused at once: the agent is stopping, and what is left
        after its grace is killed again.
        """
        # what stays to be spoken to ends well when it says so itself
        done = reason == "self_stop" and agent.how.holds_cell
        outcome = Outcome.DONE if done else Outcome.CANCELLED
        self._ender.end(agent, outcome, reason, event=Event.KILL if kill else Event.STOP)

    def pause(self, agent: Agent) -> None:
        """Freezes the subtree (cgroups(7)); what is below keeps its status. ``KernelError``."""
        with self._agents.journal.changing() as change:
            change.move(agent, Event.PAUSE)
        crashpoints.reach("pause.committed")

    def _freeze(self, agent: Agent) -> None:
        try:
            self._node(agent).freeze(True)
        except OSError as error:
            raise KernelError(f"cannot freeze {quote(agent.name)}", error) from None
        crashpoints.reach("pause.frozen")

    def resume(self, agent: Agent) -> None:
        """Thaws the subtree, but for what below was paused by itself; after an abort the
        next message, or a next run, follows. ``KernelError``."""
        with self._agents.journal.changing() as change:
            change.move(agent, Event.RESUME)
            if agent.run_cause is not None:
                raise WrongStateError(f"the run {agent.run} is still ending: try again later")
        crashpoints.reach("resume.committed")

    def _thaw(self, agent: Agent) -> None:
        try:
            self._node(agent).freeze(False)
        except OSError as error:
            raise KernelError(f"cannot thaw {quote(agent.name)}", error) from None
        crashpoints.reach("resume.thawed")

    def abort(self, agent: Agent, run: str | None) -> None:
        """Ends the current run and nothing else; the agent is paused then.

        ``StaleError`` if ``run`` is given and another one is current; said again while
        the run is ending, it skips the rest of the grace.
        """
        AGENT_MOVES.check(agent.status, Event.ABORT)
        if not agent.run:
            raise NotRunningError(f"no run to abort: {quote(agent.name)} is between two runs")
        if run is not None and run != agent.run:
            raise StaleError(f"{quote(run)} is not the current run; the current run is {agent.run}")
        if agent.run_cause is not None:
            self._followed[agent.index].impatient.set()
            return
        following = self._followed.get(agent.index)
        if following is None:
            raise NotRunningError(f"{quote(agent.name)} has not been taken over yet: try again")
        if agent.run == agent.cell and not following.hold():
            raise NotRunningError(f"the run {agent.run} has just ended")
        change = Change()
        cause, by = (Outcome.CANCELLED.value, "operator_aborted"), self._agents.journal.actor
        change.set(agent, run_cause=cause, run_caused_by=by)
        if agent.status is not Status.PAUSED:
            change.move(agent, Event.ABORT, reason="operator_aborted")
            change.set(agent, paused_from=agent.how.between.value)
        self._agents.journal.commit(change)
        crashpoints.reach("abort.committed")

    def write_input(self, task: Task, data: bytes) -> int:
        """Bytes for a command's standard input; how many it has room for."""
        agent = self._agents.registry.get(task.agent)
        if agent is None:
            raise WrongStateError("the agent of this task is gone")
        return self._task_runs.write_input(agent, task, data)

    def reset(self, agent: Agent) -> None:
        """A new incarnation in place of a dead one."""
        self._agents.births.renew(agent)

    async def shut_down(self) -> None:
        """Cancels every agent and returns when all are recorded.

        One that cannot be ended in order does not keep the others: what is left
        after the longest grace and some time is killed.
        """
        self._recorder.restarting = False
        live = [agent for agent in self._agents.registry if agent.live]
        longest = max(map(self._agents.settings.grace, live), default=0.0)
        for agent in self._agents.registry:
            with guarded(agent):
                if not (agent.owned and self._agents.registry.parent_of(agent)):
                    self._ender.end(agent, Outcome.CANCELLED, "shutdown")
        with trio.move_on_after(longest + _SHUTDOWN_SECONDS) as patience:
            while self._followed:
                await next(iter(self._followed.values())).over.wait()
                await trio.lowlevel.checkpoint()
        if patience.cancelled_caught:
            for node in self._hierarchy.root.path.glob("user-*/agent-*"):
                Cgroup(node).kill()

    def usage(self, agent: Agent) -> dict[str, int]:
        """cpu_usec, memory_current, memory_peak, processes, wall_msec; bytes and counts."""
        if not agent.cgroup:
            return agent.usage
        usage = in_use(self._node(agent))
        usage["wall_msec"] = int((time.time() - agent.started) * 1000)
        return usage

    def check_limits(self, limits: dict[str, str]) -> None:
        """``UnsupportedError`` where the machine lacks a controller."""
        check_limits(self._hierarchy, limits)

    def apply_limits(self, agent: Agent, limits: dict[str, str]) -> None:
        """Writes the resource limits to the agent's cgroup, if there is one now."""
        apply_limits(self._hierarchy, self._node(agent), limits)

    # recovery

    async def recover(self) -> None:
        """Takes over what an earlier daemon left: adopts, records, goes on ending.

        Returns when what has ended meanwhile is recorded, and what lives can be spoken to.
        """
        for agent in self._agents.registry:
            self._agents.waits.create(agent.wait_token)
            if agent.status is Status.DEAD:
                self._ender.release(agent)
        for task in self._agents.items.all(Task):
            if not task.child:
                self._agents.waits.create(task.wait_token)
                if task.over:
                    self._agents.waits.release(task.wait_token)
        adopted: list[tuple[Agent, Following]] = []
        lost = []
        for agent in self._agents.registry:
            if agent.live and agent.boot == self._boot:
                adopted.append((agent, self._follow(agent)))
            elif agent.live:
                lost.append(agent)
        for agent in sorted(lost, key=self._agents.registry.depth, reverse=True):
            self._record_lost(agent, Event.REBOOTED, "reboot")
            crashpoints.reach("adopt.lost")
        for _, following in adopted:
            await self._inside.end_left(following)
        gone = []
        for agent, following in adopted:
            if agent.status is not Status.STOPPING:
                self.restore(agent)
            # a daemon that died while it ended a program may have left that frozen
            for execution in (following, *following.entered()):
                thaw(execution.leaf)
            # Nothing was launched if no monitor has begun a record: it is done now.
            launch = agent.status is Status.STARTING and not following.record_path.exists()
            if not launch and not following.node.populated():
                gone.append(following)
            self._nursery.start_soon(self._live, agent, following, launch)
        crashpoints.reach("adopt.followed")
        for agent, _ in adopted:
            if agent.status is Status.STOPPING:
                parent = self._agents.registry.parent_of(agent)
                if parent is None or parent.status is not Status.STOPPING or not agent.owned:
                    self._ender.lead(agent)
        with trio.move_on_after(_SETTLE_SECONDS):
            for following in gone:
                await following.over.wait()
            for _, following in adopted:
                await following.reachable.wait()
        crashpoints.reach("adopt.ended")
        self._remove_strays()
        self._worktrees.resume()
        crashpoints.reach("adopt.cleaned")

    def _record_lost(self, agent: Agent, event: Event, reason: str) -> None:
        change = Change()
        for member in reversed(self._agents.registry.descendants(agent)):
            if member.status is Status.NEW:
                self._agents.ends.record(
                    change, member, Event.OWNER_ENDING, Outcome.CANCELLED, "parent_dead"
                )
        if agent.pid:
            change.event(
                agent.session,
                "run.end",
                agent.name,
                run=agent.run,
                outcome=Outcome.INTERRUPTED,
                reason=reason,
            )
        message = self._agents.messages.current(agent)
        if message is not None:
            failed = MessageStatus.FAILED
            end_message(change, self._agents, agent, message, failed, reason=reason)
        self._agents.ends.record(change, agent, event, Outcome.INTERRUPTED, reason)
        self._agents.journal.note(change)

    def _remove_strays(self) -> None:
        """Cgroups and files of no agent: left by a crash between two steps."""
        self._agents.removals.remove_strays()
        living = {agent.cgroup for agent in self._agents.registry if agent.cgroup}
        records = {each.record_path for each in self._followed.values()}
        for following in self._followed.values():
            records |= {each.record_path for each in following.entered()}
        for user in self._hierarchy.root.path.glob("user-*"):
            self._remove_stray_nodes(Cgroup(user), user.name, living)
        for path in self._places.records.iterdir():
            if path not in records:
                path.unlink(missing_ok=True)
        names = {path.name for path in records}
        for path in self._places.inputs.iterdir():
            if path.name.removesuffix("~") not in names:
                path.unlink(missing_ok=True)

    def _remove_stray_nodes(self, base: Cgroup, path: str, living: set[str]) -> None:
        for node in base.children():
            if node.path.name == "monitor":
                continue
            below = f"{path}/{node.path.name}"
            if below in living:
                self._remove_stray_nodes(node.child("child"), f"{below}/child", living)
            else:
                node.kill()
                node.remove()

    # following

    def _node(self, agent: Agent) -> Cgroup:
        return self._hierarchy.root.child(agent.cgroup or self._agents.registry.node_path(agent))

    def _follow(self, agent: Agent) -> Following:
        record_path = self._places.records / f"{agent.incarnation}-{agent.cell}"
        following = Following(self._node(agent), record_path, holds_cell=agent.how.holds_cell)
        if agent.run and agent.run != agent.cell:
            path = self._places.records / f"{agent.incarnation}-{agent.run}"
            following.run = Execution(following.run_leaf, path)
            following.run.changes = following.wake
        for task in self._agents.tasks.known(agent):
            if self._is_followed(task):
                # from the first moment on: a record that nobody knows of is removed
                execution_of(self._places, agent, following, task)
        for execution in following.entered():
            execution.monitored = execution.record_path.exists()
            if execution.monitored:
                execution.launched.set()
        self._followed[agent.index] = following
        return following

    async def _live(self, agent: Agent, following: Following, launch: bool) -> None:
        """Run after run, until the agent is dead."""
        try:
            while True:
                for prepare in self._before:
                    await prepare(agent)
                following.reachable.set()
                if agent.waits_to_restart:
                    following = await self._back_off(agent, following)
                    launch = bool(agent.cell)
                await self._until_over(agent, following, launch)
                if not agent.live:
                    return
                following = self._follow(agent)
        except Exception:
            log.exception("%s: a bug in ctxfs; its processes are killed", agent.name)
            with guarded(agent):
                following.node.kill()
                if agent.live:
                    self._record_lost(agent, Event.LOST, "runtime_lost")
        finally:
            # Also when cancelled: tasks that wait for this agent must not wait forever.
            following.reachable.set()
            following.launched.set()
            following.over.set()
            if self._followed.get(agent.index) is following:
                del self._followed[agent.index]

    async def _back_off(self, agent: Agent, following: Following) -> Following:
        """Until the next run is due, and recorded, or the agent is ended instead."""
        following.launched.set()
        following.monitor_gone = True
        due = agent.restart_at
        while agent.status is Status.STARTING:
            # a clock that was set back must not make it longer
            left = max(0.0, min(due - time.time(), 60.0))
            with trio.move_on_after(left) as scope:
                await following.changes.wait_changed()
            if not scope.cancelled_caught or agent.status is not Status.STARTING:
                continue
            change = Change()
            try:
                self._add_start(change, agent)
                self._agents.journal.commit(change)
            except NoSpaceError as error:
                log.error("%s: cannot restart it yet: %s", agent.name, error)
                due = time.time() + _RETRY_SECONDS
                continue
            crashpoints.reach("restart.due")
            following.over.set()
            return self._follow(agent)
        return following

    async def _until_over(self, agent: Agent, following: Following, launch: bool) -> None:
        failure = ""
        if launch:
            try:
                await self._worktrees.make(agent)
                await self._starter.launch(agent, following)
            except (CtxError, OSError) as error:
                failure = escape(str(error))
        elif following.record_path.exists():
            following.monitored = True
        following.launched.set()
        self._serve(agent, following)
        path = following.record_path
        with watching(
            self._watcher, following.changes, path, following.node.path / "cgroup.events"
        ):
            self._nursery.start_soon(watch_monitor, self._hierarchy, following)
            while not self._is_over(agent, following):
                self._note_progress(agent, following, failure)
                if self._is_over(agent, following):
                    break
                timeout = self._agents.settings.timeout(agent)
                deadline = math.inf
                # in mode turn it is one of each run
                counts = not agent.how.run_per_message and agent.status is not Status.STOPPING
                if timeout is not None and counts:
                    deadline = trio.current_time() + agent.started + timeout - time.time()
                with trio.move_on_at(deadline) as scope:
                    await following.changes.wait_changed()
                if scope.cancelled_caught:
                    self._ender.end(agent, Outcome.CANCELLED, "timeout")
        if agent.status is Status.STOPPING:
            with guarded(agent):
                await self._worktrees.take_over(agent)
            with guarded(agent):
                await self._recorder.hear_rest(agent, following)
            with guarded(agent):
                await self._recorder.shed(agent, following)
            self._recorder.add(agent, following)
            await following.over.wait()

    def _serve(self, agent: Agent, following: Following) -> None:
        """Leads runs inside the cell, where there may be some, and tasks."""
        if not following.goes_on(agent):
            for execution in following.entered():
                execution.launched.set()  # or nobody will
            return
        inside = agent.how.holds_cell or agent.run != agent.cell or agent.run_cause is not None
        if inside and not following.served:
            following.served = True
            self._nursery.start_soon(self._runs_of, agent, following)
        for task in self._agents.tasks.known(agent):
            self._follow_task(agent, following, task)

    async def _runs_of(self, agent: Agent, following: Following) -> None:
        try:
            await self._runs.serve(agent, following)
        except Exception:
            log.exception("%s: a bug in ctxfs; its processes are killed", agent.name)
            following.node.kill()

    def _follow_task(self, agent: Agent, following: Following, task: Task) -> None:
        if not self._is_followed(task) or task.index in self._led_tasks:
            return
        if not following.goes_on(agent):
            return  # it ends with its agent, led by the task that leads the agent
        self._led_tasks.add(task.index)
        execution_of(self._places, agent, following, task)
        self._nursery.start_soon(self._task_of, agent, following, task)

    @staticmethod
    def _is_followed(task: Task) -> bool:
        return not task.child and task.status in _FOLLOWED_TASKS

    async def _task_of(self, agent: Agent, following: Following, task: Task) -> None:
        try:
            await self._task_runs.follow(agent, following, task)
        finally:
            self._led_tasks.discard(task.index)

    def _note_progress(self, agent: Agent, following: Following, failure: str) -> None:
        if agent.status is Status.STOPPING:
            return
        record = following.record()
        if record.started and not following.settled:
            following.note_settled()
        if record.held and not following.settled:
            following.note_settled()
            following.rouse()
        own = agent.run == agent.cell
        if own and agent.status is Status.STARTING and record.started:
            change = Change()
            add_run_start(change, agent, record)
            change.move(agent, Event.RUNNING)
            self._agents.journal.note(change)
            crashpoints.reach("start.running")
        if failure:
            self._ender.end(agent, Outcome.ERROR, f"start_failed: {failure}")
        elif record.over and (record.finished or (own and agent.run_cause is None)):
            # A parent that ended before this agent is the cause, however late we look.
            for ancestor in self._agents.registry.ancestors(agent):
                above = self._followed.get(ancestor.index)
                if above is not None and _ended_before(above, record):
                    self._ender.end(ancestor, *judge_agent(self._agents, ancestor, above))
            self._ender.end(agent, *judge_agent(self._agents, agent, following))
        elif following.monitor_gone:
            self._ender.end(agent, Outcome.INTERRUPTED, "runtime_lost")

    def _is_over(self, agent: Agent, following: Following) -> bool:
        """Whether the end that was begun is complete, down to the last descendant."""
        if agent.status is not Status.STOPPING:
            return agent.status is Status.DEAD
        if following.unkillable:
            return True
        if following.node.populated():
            return False
        # one that is new is still to be cancelled
        if any(c.live or c.status is Status.NEW for c in self._agents.registry.descendants(agent)):
            return False
        return all(
            each.monitor_gone or each.record().finished
            for each in (following, *following.entered())
        )


#: who does what a move calls for
PERFORMED: Final[dict[Effect, Callable[[Supervisor, Agent], None]]] = {
    Effect.LAUNCH: Supervisor._launch,
    Effect.REFUSE: lambda self, agent: self._ender.refuse(agent),
    Effect.END: lambda self, agent: self._ender.begin(agent),
    Effect.KILL: lambda self, agent: self._ender.kill(agent),
    Effect.FREEZE: Supervisor._freeze,
    Effect.THAW: Supervisor._thaw,
    Effect.CLEAR: lambda self, agent: self._recorder.clear(agent),
    Effect.RELEASE: lambda self, agent: self._ender.release(agent),
}


def _ended_before(above: Following, record: Record) -> bool:
    """Whether an owner's run ended no later than one below it."""
    owner = above.record()
    if owner.ended:
        return not record.ended or owner.ended <= record.ended
    # Nothing tells when: its PID 1 or its monitor was killed, and what was below
    # died of that, unless it exited by itself.
    gone = not linux.is_alive(owner.keeper) or not linux.is_alive(owner.monitor)
    return record.exit_code is None and bool(owner.keeper) and gone
