"""The only place that starts and ends processes.

One task follows each live agent, from its start to its recorded end. It
learns everything from what outlives the daemon, the monitor's record and the
cgroup, so that an agent adopted after a crash is followed by the same code.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import trio

from runtime import cell, cgroups, linux, output
from runtime.agents import Agents, Change, replace_file
from runtime.cell import Places
from runtime.cgroups import Cgroup, Hierarchy
from runtime.errors import CtxError, UnsupportedError, WrongStateError
from runtime.inotify import Changes, Watcher
from runtime.lifecycle import Effect, Event, Status, move
from runtime.model import Agent, Outcome
from runtime.names import quote, timestamp
from runtime.record import Record, judge, read_record
from runtime.sockets import Sockets

log = logging.getLogger("ctxd.supervisor")

#: SIGKILL is given this long before an agent is recorded as unkillable
_KILL_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 10.0
_HELPER_SECONDS: Final = 10.0
_SHUTDOWN_SECONDS: Final = 30.0
_RESULT_TAIL: Final = 64 << 10
_MESSAGE_MAX: Final = 1 << 20
_CPU_PERIOD: Final = 100_000


class Following:
    """What the daemon knows in memory of one live agent's run."""

    def __init__(self, node: Cgroup, record_path: Path) -> None:
        self.node = node
        self.record_path = record_path
        self.changes = Changes()
        self.skip_grace = trio.Event()
        #: set when the monitor runs, or it is certain that none will
        self.launched = trio.Event()
        self.monitored = False
        self.monitor_gone = False
        self.unkillable = False
        self.dead = trio.Event()


class Supervisor:
    """Starts, follows, ends and adopts agents."""

    def __init__(
        self,
        *,
        agents: Agents,
        hierarchy: Hierarchy,
        watcher: Watcher,
        sockets: Sockets,
        places: Places,
        nursery: trio.Nursery,
    ) -> None:
        self._agents = agents
        self._hierarchy = hierarchy
        self._watcher = watcher
        self._sockets = sockets
        self._places = places
        self._nursery = nursery
        self._following: dict[int, Following] = {}
        agents.watching.append(self)
        self._boot = linux.boot_id()

    # Watching

    def agent_changed(self, index: int, names: Iterable[str]) -> None:
        following = self._following.get(index)
        if following is not None and "limits" in names:
            following.changes.notify()  # the timeout may be another

    def session_changed(self, index: int, names: Iterable[str]) -> None:
        pass

    def agent_listed(self, agent: Agent) -> None:
        pass

    # verbs

    def start(self, agent: Agent) -> None:
        """Begins a start; what goes wrong later is in ``outcome`` and ``reason``."""
        to = move(agent.status, Event.START)
        parent = self._agents.parent_of(agent)
        if parent is not None and (not parent.live or parent.status is Status.STOPPING):
            raise WrongStateError(
                f"the parent {quote(parent.name)} is {parent.status}: nothing starts below it"
            )
        cell.program(agent)
        if agent.workspace == "worktree":
            raise UnsupportedError("workspace=worktree is not supported by this version")
        assert to.status is not None
        run = self._agents.next_run(agent)
        change = Change()
        change.set(
            agent,
            status=to.status,
            run=run,
            started=time.time(),
            boot=self._boot,
            cgroup=self._agents.node_path(agent),
        )
        change.event(agent.session, "agent.start", agent.name, run=run)
        change.event(agent.session, "agent.status", agent.name, status=to.status)
        self._agents.commit(change)
        self._follow(agent, launch=True)

    def stop(self, agent: Agent, reason: str, *, kill: bool) -> None:
        """``stop`` and ``kill``: cancels the agent and all that it owns."""
        to = move(agent.status, Event.KILL if kill else Event.STOP)
        if Effect.CANCEL_NEW in to.effects:
            self._agents.cancel_new(agent, reason)
            return
        if Effect.END in to.effects:
            self.end(agent, Outcome.CANCELLED, reason)
        if Effect.SKIP_GRACE in to.effects:
            self._following[agent.index].skip_grace.set()

    def end(self, agent: Agent, outcome: Outcome, reason: str) -> None:
        """Begins the end of an agent and of everything it owns (ABI section 13).

        The cause of one that is ending already stays what it was.
        """
        if agent.status in (Status.STOPPING, Status.DEAD):
            return
        move(agent.status, Event.ENDING)
        change = Change()
        self._mark(change, agent, (outcome.value, reason))
        cancelled = []
        members = self._agents.descendants(agent)
        for member in members:
            if member.status is Status.NEW:
                self._agents.record_end(change, member, Outcome.CANCELLED, "parent_dead")
                cancelled.append(member)
            elif member.status is not Status.STOPPING and member.live:
                self._mark(change, member, (Outcome.CANCELLED.value, "parent_dead"))
        self._agents.note(change)
        for member in cancelled:
            self._agents.waits.release(member.wait_token)
        for member in (agent, *members):
            self._sockets.refuse(member)
            following = self._following.get(member.index)
            if following is not None:
                following.changes.notify()
        self._nursery.start_soon(self._terminate, agent)

    @staticmethod
    def _mark(change: Change, agent: Agent, cause: tuple[str, str]) -> None:
        change.set(agent, status=Status.STOPPING, cause=cause)
        change.event(agent.session, "agent.status", agent.name, status="stopping", reason=cause[1])

    async def shut_down(self) -> None:
        """Cancels every agent and returns when all are recorded.

        One that cannot be ended in order does not keep the others: what is left
        after the longest grace and some time is killed.
        """
        longest = max((self._agents.grace(a) for a in self._agents if a.live), default=0.0)
        for agent in self._agents:
            with self._guarded(agent):
                if agent.status is Status.NEW:
                    self._agents.cancel_new(agent, "shutdown")
                elif agent.live and not (agent.owned and self._agents.parent_of(agent)):
                    self.end(agent, Outcome.CANCELLED, "shutdown")
        with trio.move_on_after(longest + _SHUTDOWN_SECONDS) as patience:
            for following in list(self._following.values()):
                await following.dead.wait()
        if patience.cancelled_caught:
            for user in self._hierarchy.root.path.glob("user-*"):
                Cgroup(user).kill()

    @contextlib.contextmanager
    def _guarded(self, agent: Agent) -> Iterator[None]:
        """A bug in the care of one agent ends neither the daemon nor the care of others."""
        try:
            yield
        except Exception:
            log.exception("%s: a bug in ctxfs", agent.name)

    def usage(self, agent: Agent) -> dict[str, int]:
        """cpu_usec, memory_current, memory_peak, processes, wall_msec; bytes and counts."""
        if not agent.cgroup:
            return agent.usage
        node = self._node(agent)
        usage = {}
        if (cpu := node.keys("cpu.stat").get("usage_usec")) is not None:
            usage["cpu_usec"] = cpu
        processes = node.processes()
        for key in ("memory.current", "memory.peak"):
            text = node.read(key)
            if text is not None and text.strip().isdigit():
                usage[key.replace(".", "_")] = int(text)
        if "memory_current" not in usage:
            usage["memory_current"] = sum(_resident(pid) for pid in processes)
        usage["processes"] = len(processes)
        usage["wall_msec"] = int((time.time() - agent.started) * 1000)
        return usage

    def apply_limits(self, agent: Agent, limits: dict[str, str]) -> None:
        """Writes the resource limits to the agent's cgroup node.

        ``UnsupportedError`` where the machine lacks the controller.
        """
        for key, value in limits.items():
            controller, _, rest = key.partition(".")
            if not rest:
                continue
            if controller not in self._hierarchy.controllers:
                raise UnsupportedError(
                    f"{key}: the {controller} controller is not available in cgroup v2 here; "
                    "boot with systemd.unified_cgroup_hierarchy=1 (see ctx doctor)"
                )
            node = self._node(agent)
            if node.exists():
                node.write(key, _cpu_max(value) if key == "cpu.max" else value)

    # recovery

    async def recover(self) -> None:
        """Takes over what an earlier daemon left: adopts, records, goes on ending.

        Returns when what has ended meanwhile is recorded.
        """
        for agent in self._agents:
            self._agents.waits.create(agent.wait_token)
            if agent.status is Status.DEAD:
                self._agents.waits.release(agent.wait_token)
        for agent in self._agents:
            if agent.live and agent.boot == self._boot:
                self._follow(agent, launch=False)
            elif agent.live:
                self._record_lost(agent, "reboot")
        for agent in self._agents:
            if agent.status is Status.STOPPING:
                parent = self._agents.parent_of(agent)
                if parent is None or parent.status is not Status.STOPPING or not agent.owned:
                    self._nursery.start_soon(self._terminate, agent)
        gone = [
            following
            for index, following in self._following.items()
            if (found := self._agents.get(index)) and not self._node(found).populated()
        ]
        with trio.move_on_after(_SETTLE_SECONDS):
            for following in gone:
                await following.dead.wait()
        self._remove_strays()

    def _record_lost(self, agent: Agent, reason: str) -> None:
        change = Change()
        self._agents.record_end(change, agent, Outcome.INTERRUPTED, reason)
        for member in self._agents.descendants(agent):
            if member.status is Status.NEW:
                self._agents.record_end(change, member, Outcome.CANCELLED, "parent_dead")
        self._agents.note(change)
        for member in (agent, *self._agents.descendants(agent)):
            if member.status is Status.DEAD:
                self._agents.waits.release(member.wait_token)

    def _remove_strays(self) -> None:
        """Cgroups and directories of no agent: left by a crash between two steps."""
        known = {agent.incarnation for agent in self._agents}
        base = self._places.state / "agent"
        for directory in base.iterdir() if base.is_dir() else ():
            if directory.name not in known and not (directory / "doc").is_dir():
                self._agents.trash.discard(directory)
        living = {agent.cgroup for agent in self._agents if agent.cgroup}
        for user in self._hierarchy.root.path.glob("user-*"):
            for node in user.glob("agent-*"):
                if f"{user.name}/{node.name}" not in living:
                    Cgroup(node).kill()
                    Cgroup(node).remove()

    # following

    def _node(self, agent: Agent) -> Cgroup:
        return self._hierarchy.root.child(agent.cgroup or self._agents.node_path(agent))

    def _record(self, agent: Agent) -> Record:
        following = self._following.get(agent.index)
        return read_record(following.record_path) if following is not None else Record()

    def _log(self, agent: Agent, text: str) -> None:
        with contextlib.suppress(OSError):
            output.append_line(self._agents.directory(agent) / "log", text)

    def _follow(self, agent: Agent, *, launch: bool) -> None:
        record_path = self._agents.directory(agent) / f"record-{agent.run}"
        following = self._following[agent.index] = Following(self._node(agent), record_path)
        self._nursery.start_soon(self._live, agent, following, launch)

    async def _live(self, agent: Agent, following: Following, launch: bool) -> None:
        failure = ""
        try:
            await self._sockets.open(agent)
            if launch:
                try:
                    await self._launch(agent, following)
                except (CtxError, OSError) as error:
                    failure = str(error)
            following.launched.set()
            await self._until_ended(agent, following, failure)
        except Exception:
            log.exception("%s: a bug in ctxfs; its processes are killed", agent.name)
            with self._guarded(agent):
                following.node.kill()
                if agent.live:
                    self._record_lost(agent, "runtime_lost")
        finally:
            # Also when cancelled: whoever waits for this agent must not wait forever.
            following.launched.set()
            following.dead.set()
            if self._following.get(agent.index) is following:
                del self._following[agent.index]

    async def _until_ended(self, agent: Agent, following: Following, failure: str) -> None:
        node, path = following.node, following.record_path
        with contextlib.ExitStack() as watches:
            for watched in (path, node.path / "cgroup.events"):
                with contextlib.suppress(OSError):
                    watches.enter_context(self._watcher.watching(watched, following.changes))
            self._nursery.start_soon(self._watch_monitor, read_record(path), following)
            while agent.status is not Status.DEAD:
                record = read_record(path)
                deadline = math.inf
                self._note_progress(agent, record, following, failure)
                if agent.status is Status.STOPPING and self._is_empty(agent, following, record):
                    self._finish(agent, following, record)
                    return
                timeout = self._agents.timeout(agent)
                if timeout is not None and agent.status is not Status.STOPPING:
                    deadline = trio.current_time() + agent.started + timeout - time.time()
                with trio.move_on_at(deadline) as scope:
                    await following.changes.wait_changed()
                if scope.cancelled_caught:
                    self.end(agent, Outcome.CANCELLED, "timeout")

    def _note_progress(
        self, agent: Agent, record: Record, following: Following, failure: str
    ) -> None:
        if agent.status is Status.STARTING and record.started:
            to = move(agent.status, Event.RUNNING)
            change = Change()
            change.set(agent, status=to.status, pid=record.program)
            change.event(agent.session, "run.start", agent.name, run=agent.run, pid=record.program)
            change.event(agent.session, "agent.status", agent.name, status=to.status)
            self._agents.note(change)
        if agent.status is Status.STOPPING:
            return
        if failure:
            self.end(agent, Outcome.ERROR, f"start_failed: {failure}")
        elif record.over:
            # A parent that ended before this agent is the cause, however late we look.
            for ancestor in self._ancestors(agent):
                above = self._record(ancestor)
                if above.ended and (not record.ended or above.ended <= record.ended):
                    self.end(ancestor, *self._judge(ancestor, above))
            self.end(agent, *self._judge(agent, record))
        elif following.monitor_gone:
            self.end(agent, Outcome.INTERRUPTED, "runtime_lost")

    def _ancestors(self, agent: Agent) -> list[Agent]:
        """Owners, the oldest first."""
        found: list[Agent] = []
        parent = self._agents.parent_of(agent) if agent.owned else None
        while parent is not None:
            found.insert(0, parent)
            parent = self._agents.parent_of(parent) if parent.owned else None
        return found

    def _judge(self, agent: Agent, record: Record) -> tuple[Outcome, str]:
        leaf = self._node(agent).child("run")
        killed_for_memory = leaf.keys("memory.events").get("oom_kill", 0) > 0
        text = output.Output(self._agents.directory(agent) / "log").tail(4096)
        lines = text.decode(errors="replace").strip().splitlines()
        return judge(record, oom=killed_for_memory, complaint=lines[-1] if lines else "")

    def _is_empty(self, agent: Agent, following: Following, record: Record) -> bool:
        if following.unkillable:
            return True
        if following.node.populated():
            return False
        if any(child.live for child in self._agents.descendants(agent)):
            return False
        return record.finished or following.monitor_gone

    async def _watch_monitor(self, record: Record, following: Following) -> None:
        """Until the monitor, whichever daemon started it, is gone."""
        with contextlib.suppress(OSError):
            if record.monitor:
                fd = os.pidfd_open(record.monitor)
                try:
                    # a pid may have been given to another process since
                    if cgroups.path_of(record.monitor) == f"{self._hierarchy.prefix}/monitor":
                        await trio.lowlevel.wait_readable(fd)
                finally:
                    os.close(fd)
        if record.monitor:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record.monitor, os.WNOHANG)  # ours to reap, unless adopted
        following.monitor_gone = True
        following.changes.notify()

    # starting

    async def _launch(self, agent: Agent, following: Following) -> None:
        places = self._places
        parent = self._agents.parent_of(agent)
        if parent is not None:
            above = self._following.get(parent.index)
            if above is not None:  # itself just starting, perhaps
                with trio.move_on_after(_SETTLE_SECONDS):
                    await self._wait_settled(above)
        hidden = await self._inspect_hidden(agent, parent)
        plan = cell.plan(self._agents, agent, places, hidden=hidden)
        leaf = following.node.child("run")
        leaf.create(self._hierarchy.controllers)
        self.apply_limits(agent, {k: v for k, v in agent.limits.items() if "." in k})
        following.record_path.touch(mode=0o600)
        log.debug("%s %s: %s", agent.name, agent.run, plan.describe())
        with contextlib.ExitStack() as stack:
            keeper = None
            if parent is not None:
                keeper = self._open_keeper(parent)
                stack.callback(os.close, keeper)
            fds = stack.enter_context(cell.passed_files(plan, keeper))
            stdin = self._open_handoff(agent)
            stack.callback(os.close, stdin)
            if agent.status is not Status.STARTING:
                return  # stopped meanwhile: nothing may start any more
            # it exits as soon as the monitor proper is born and recorded
            await trio.to_thread.run_sync(
                lambda: subprocess.run(
                    [
                        str(places.program("monitor")),
                        str(self._agents.directory(agent)),
                        agent.run,
                        str(self._agents.log_max(agent)),
                        str(places.lifeline),
                        str(self._hierarchy.monitors.path),
                        str(leaf.path),
                        str(agent.uid),
                        ",".join(str(fd) for fd in fds),
                        "--",
                        *plan.steps,
                    ],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=fds,
                    env={"LANG": "C.UTF-8"},
                    check=False,
                )
            )
            following.monitored = True

    def _open_keeper(self, parent: Agent) -> int:
        """A pidfd of the PID 1 of the parent's cell; ``WrongStateError`` if it is gone."""
        record = self._record(parent)
        try:
            fd = os.pidfd_open(record.keeper)
        except (OSError, ValueError):
            raise WrongStateError(f"the parent {quote(parent.name)} has no cell any more") from None
        path = cgroups.path_of(record.keeper) or ""
        if self._hierarchy.agent_path(path) != f"{parent.cgroup}/run":
            os.close(fd)
            raise WrongStateError(f"the parent {quote(parent.name)} has no cell any more")
        return fd

    def _open_handoff(self, agent: Agent) -> int:
        path = self._agents.document(agent, "handoff.md")
        try:
            os.chmod(path, 0o644)  # /dev/stdin opens it anew
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    async def _inspect_hidden(self, agent: Agent, parent: Agent | None) -> dict[str, str]:
        """What is at the targets of the agent's ``hide`` lines: directory, file or none.

        Asked by a process with the agent's rights, in the view that its own is
        made from; it may hang there (a dead network filesystem), and is left behind then.
        """
        found: dict[str, str] = {}
        hidden = cell.hidden_paths(self._agents, agent)
        if not hidden:
            return found
        with contextlib.ExitStack() as stack:
            fds = []
            if parent is not None:
                fds.append(self._open_keeper(parent))
                stack.callback(os.close, fds[0])
            for target, path, given in hidden:
                if parent is not None:
                    groups = ",".join(map(str, agent.groups)) or "-"
                    step = [str(self._places.program("enter")), str(fds[0])]
                    step += [str(agent.uid), str(agent.gid), groups, "--"]
                else:
                    # what a mount line gives is reached as its creator reaches it
                    uid, gid = agent.uid, agent.gid
                    if given:
                        uid, gid = agent.creator_uid, agent.creator_gid
                    step = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
                found[target] = "none"
                for option, kind in (("-e", "file"), ("-d", "directory")):
                    if await _succeeds([*step, "test", option, path], fds):
                        found[target] = kind
        return found

    # ending

    async def _terminate(self, top: Agent) -> None:
        """Steps 4 to 6: SIGTERM to all, one grace period, then ``cgroup.kill``."""
        following = self._following.get(top.index)
        if following is not None:
            with self._guarded(top):
                await self._end_processes(top, following)

    async def _end_processes(self, top: Agent, following: Following) -> None:
        node = following.node
        followed = [following]
        for member in self._agents.descendants(top):
            if (below := self._following.get(member.index)) is not None:
                followed.append(below)
        with trio.move_on_after(_SETTLE_SECONDS):
            for each in followed:
                await self._wait_settled(each)
        for directory, _, _ in os.walk(node.path):
            Cgroup(Path(directory)).freeze(False)
        self._signal_all(node, followed)
        with trio.move_on_after(self._agents.grace(top)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_skipped, following, nursery.cancel_scope)
                await self._wait_empty(node)
                nursery.cancel_scope.cancel()
        if node.populated():
            self._log(top, "the grace period is over: SIGKILL")
            node.kill()
            with trio.move_on_after(_KILL_SECONDS):
                await self._wait_empty(node)
        for each in followed:
            each.unkillable = each.node.populated()
            each.changes.notify()

    @staticmethod
    async def _wait_skipped(following: Following, scope: trio.CancelScope) -> None:
        await following.skip_grace.wait()
        scope.cancel()

    async def _wait_settled(self, following: Following) -> None:
        """Until it is known whether the program began: only then can SIGTERM reach it."""
        await following.launched.wait()
        if not following.monitored or following.dead.is_set():
            return
        changes = Changes()
        with (
            contextlib.suppress(FileNotFoundError),
            self._watcher.watching(following.record_path, changes),
        ):
            while not read_record(following.record_path).settled:
                if following.monitor_gone or following.dead.is_set():
                    return
                await changes.wait_changed()

    async def _wait_empty(self, node: Cgroup) -> None:
        changes = Changes()
        try:
            with self._watcher.watching(node.path / "cgroup.events", changes):
                while node.populated():
                    await changes.wait_changed()
        except FileNotFoundError:
            return

    def _signal_all(self, node: Cgroup, followed: list[Following]) -> None:
        """SIGTERM, and SIGCONT so that a stopped process sees it.

        Not to the cells' own PID 1 and the steps that led there: those end with
        their cell. Repeated while new processes turn up, a few times: what forks
        faster than that meets ``cgroup.kill``.
        """
        spared: set[int] = set()
        for each in followed:
            record = read_record(each.record_path)
            spared |= {record.chain, record.keeper, _parent_pid(record.keeper)}
        signalled: set[int] = set()
        prefix = f"/{node.path.relative_to(self._hierarchy.mount)}"
        for _ in range(5):
            found = set(node.processes()) - spared - signalled
            if not found:
                return
            for pid in found:
                _signal(pid, prefix)
            signalled |= found

    def _finish(self, agent: Agent, following: Following, record: Record) -> None:
        """Steps 7 and 8: what became of it is recorded, then everybody is told."""
        assert agent.cause is not None
        outcome, reason = Outcome(agent.cause[0]), agent.cause[1]
        if following.unkillable:
            reason += ",unkillable"
        usage = self.usage(agent)
        usage["processes"] = 0
        if record.started and record.ended:
            usage["wall_msec"] = (record.ended - record.started) // 1_000_000
        move(agent.status, Event.ENDED)
        change = Change()
        if record.started:
            try:
                self._add_conversation(change, agent, outcome)
            except OSError as error:  # a full disk, say: the end is recorded all the same
                log.error("%s: the result could not be kept: %s", agent.name, error.strerror)
            ended = record.ended or time.time_ns()
            change.event(
                agent.session,
                "run.end",
                agent.name,
                run=agent.run,
                outcome=outcome,
                reason=reason,
                started=timestamp(record.started / 1e9),
                ended=timestamp(ended / 1e9),
                usage=usage,
            )
        self._agents.record_end(change, agent, outcome, reason)
        change.set(agent, usage=usage)
        node = self._node(agent)
        with contextlib.suppress(OSError):
            self._log(agent, f"{agent.run} ended: {outcome} {reason}")
        self._agents.note(change)
        if not following.unkillable and not node.remove():
            log.warning("%s: the cgroup %s could not be removed", agent.name, node.path)
        self._agents.waits.release(agent.wait_token)
        self._sockets.close(agent)
        parent = self._agents.parent_of(agent)
        if parent is not None and parent.index in self._following:
            self._following[parent.index].changes.notify()
        log.info("%s: %s (%s)", agent.name, outcome, reason)

    def _add_conversation(self, change: Change, agent: Agent, outcome: Outcome) -> None:
        """The result (by default the end of stdout) and what the session shows of the run."""
        agents = self._agents
        if outcome is Outcome.DONE and not agents.document_size(agent, "result.md"):
            tail = output.Output(agents.directory(agent) / "out").tail(_RESULT_TAIL)
            if tail:
                agents.write_document(agent, "result.md", tail)
        session = agents.session(agent.session)
        handoff = _text(agents.read_document(agent, "handoff.md"))
        result = _text(agents.read_document(agent, "result.md"))
        if handoff:
            change.message(
                agent.session,
                role="user",
                **{"from": agent.lineage.split(" ")[0]},
                run=agent.run,
                content=handoff,
            )
        if outcome is Outcome.DONE and result and session is not None:
            replace_file(agents.session_directory(session) / "latest.md", result.encode())
            change.set_session(agent.session, state="done")
            change.message(
                agent.session,
                role="assistant",
                **{"from": f"agent:{agent.name}"},
                run=agent.run,
                content=result,
            )


async def _succeeds(command: list[str], fds: list[int]) -> bool:
    """Whether a command exits 0 in time. One that hangs is not waited for."""
    process = await trio.lowlevel.open_process(
        command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with trio.move_on_after(_HELPER_SECONDS):
        return await process.wait() == 0
    process.kill()
    raise UnsupportedError(f"{command[-1]}: whatever is there did not answer in time")


def _text(data: bytes) -> str:
    """A document as a message's content, cut to what a message may hold."""
    text = data.decode(errors="replace")
    if len(data) > _MESSAGE_MAX // 2:
        cut = len(data) - _MESSAGE_MAX // 2
        text = data[: _MESSAGE_MAX // 2].decode(errors="ignore") + f"\n[{cut} bytes more]"
    return text


def _cpu_max(value: str) -> str:
    """``cpu.max`` as cgroups take it: a quota and a period in microseconds."""
    return value if " " in value else f"{value} {_CPU_PERIOD}"


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _parent_pid(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _signal(pid: int, cgroup: str) -> None:
    """SIGTERM to a process that is still in this cgroup; its pid may be another's by now."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        path = cgroups.path_of(pid) or ""
        if path == cgroup or path.startswith(cgroup + "/"):
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)
