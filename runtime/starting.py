"""Starting a run: from the agent's record to a monitor that is born."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from typing import Final

import trio

from runtime import cell, cgroups, crashpoints
from runtime.agents import Agents
from runtime.cell import Places
from runtime.cgroups import Hierarchy
from runtime.errors import UnsupportedError, WrongStateError
from runtime.following import Followed, Following
from runtime.inotify import Watcher
from runtime.lifecycle import Status
from runtime.limits import apply_limits
from runtime.model import Agent
from runtime.names import quote
from runtime.record import Record

log = logging.getLogger("ctxd.starting")

_SETTLE_SECONDS: Final = 10.0
_HELPER_SECONDS: Final = 10.0


class Starter:
    """Launches runs."""

    def __init__(
        self,
        *,
        agents: Agents,
        hierarchy: Hierarchy,
        watcher: Watcher,
        places: Places,
        followed: Followed,
    ) -> None:
        self._agents = agents
        self._hierarchy = hierarchy
        self._watcher = watcher
        self._places = places
        self._followed = followed

    async def launch(self, agent: Agent, following: Following) -> None:
        """Returns when the monitor is recorded; what becomes of the run is in its record.

        ``CtxError`` or ``OSError`` if it cannot be started.
        """
        places = self._places
        parent = self._agents.parent_of(agent)
        if parent is not None:
            above = self._followed.get(parent.index)
            if above is not None:  # itself just starting, perhaps
                with trio.move_on_after(_SETTLE_SECONDS):
                    await above.wait_settled(self._watcher)
        hidden = await self._inspect_hidden(agent, parent)
        plan = cell.plan(self._agents, agent, places, hidden=hidden)
        following.leaf.create(self._hierarchy.controllers)
        apply_limits(self._hierarchy, following.node, agent.limits)
        log.debug("%s %s: %s", agent.name, agent.run, plan.describe())
        crashpoints.reach("start.planned")
        with contextlib.ExitStack() as stack:
            keeper = None
            if parent is not None:
                keeper = self._open_keeper(parent)
                stack.callback(os.close, keeper)
            fds = stack.enter_context(cell.passed_files(plan, keeper))
            stdin = self._open_handoff(agent)
            stack.callback(os.close, stdin)
            # not a pipe: the monitor proper has it for a while, and nobody need wait for that
            complaint = os.memfd_create("complaint", os.MFD_CLOEXEC)
            stack.callback(os.close, complaint)
            if agent.status is not Status.STARTING:
                return  # stopped meanwhile: nothing may start any more
            directory = self._agents.directory(agent)
            # it exits as soon as the monitor proper is born and recorded
            await trio.to_thread.run_sync(
                lambda: subprocess.run(
                    [
                        str(places.program("monitor")),
                        str(following.record_path),
                        *(str(directory / "out"), str(directory / "log"), "-"),
                        str(self._agents.log_max(agent)),
                        str(places.lifeline),
                        str(self._hierarchy.monitors.path),
                        str(following.leaf.path),
                        *(str(agent.uid), "cell"),
                        ",".join(str(fd) for fd in fds),
                        "--",
                        *plan.steps,
                    ],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=complaint,
                    pass_fds=fds,
                    env={"LANG": "C.UTF-8"},
                    check=False,
                )
            )
            if not following.record_path.exists():
                said = os.pread(complaint, 1000, 0).decode(errors="replace").strip()
                raise UnsupportedError(f"its monitor could not be started: {said}")
            following.monitored = True
        crashpoints.reach("start.launched")

    def _open_keeper(self, parent: Agent) -> int:
        """A pidfd of the PID 1 of the parent's cell; ``WrongStateError`` if it is gone."""
        above = self._followed.get(parent.index)
        record = above.record() if above is not None else Record()
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
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if not self._agents.privilege.rootless:
            return opened
        # The file is the agent's own uid's, which could open it anew for writing.
        with open(opened, "rb") as file:
            return cell.sealed_file("handoff", file.read())

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
                    groups = self._agents.privilege.entering_groups(agent.groups)
                    step = [str(self._places.program("enter")), str(fds[0])]
                    step += [str(agent.uid), str(agent.gid), groups, "cell", "--"]
                else:
                    # what a mount line gives is reached as its creator reaches it
                    uid, gid = agent.uid, agent.gid
                    if given:
                        uid, gid = agent.creator_uid, agent.creator_gid
                    step = [*self._agents.privilege.take_ids(uid, gid)]
                found[target] = "none"
                for option, kind in (("-e", "file"), ("-d", "directory")):
                    if await _succeeds([*step, "test", option, path], fds):
                        found[target] = kind
        return found


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
