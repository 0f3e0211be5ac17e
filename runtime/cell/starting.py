"""Starting a run: from the agent's record to a monitor that is born.

A start is a chain, since each step needs what the one before it made::

    daemon -> launcher -> monitor -> [lend] -> [stage] | enter -> view -> keeper -> program

The launcher starts a process in its cgroup. The monitor keeps the output and writes the record: it
exists exclusively before anything runs, so that a run starts once. ``lend`` clones the mounts of
durable trees. ``stage`` opens mount sources for root agents and detached children, with the ids of
the user who may name them; for other children ``enter`` joins the namespaces of the parent's
keeper. ``view`` takes the agent's ids, drops every right and only then touches a path; it builds
the root, and becomes the keeper, PID 1 of the cell. The keeper filters system calls and starts the
program, which has descriptors 0 to 2 and the environment of ctxfs-programs(7), nothing else. The
head of each program says what it is told.

No step needs ``setpriv`` or ``bwrap``: tests/system/test_authority.py compares what is left of
rights with what setpriv(1) leaves. The programs are static programs of musl, since each start
executes three of them. Almost nothing in the chain sleeps, so only less work makes it faster
(bench/README.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from runtime import crashpoints
from runtime.cell import cell, networks
from runtime.cell.cell import Command, Places, Plan
from runtime.cell.port import Execution, Host, LiveCell, Part
from runtime.cell.sources import Looker
from runtime.cell.treework import Trees
from runtime.cell.windows import HANG_UP_GRACE
from runtime.errors import UnsupportedError, WrongStateError
from runtime.kernel import orders, unixsockets
from runtime.kernel.users import find_user
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.records.spaces import tree_of_home
from runtime.texts import mounts
from runtime.texts.names import quote

log = logging.getLogger("ctxd.starting")

_SETTLE_SECONDS: Final = 10.0
#: after standard input, output and error
_FIRST_PASSED: Final = 3
#: bytes that a monitor may say of why it cannot start
_COMPLAINT_MAX: Final = 1000


class Starter(Part):
    """Launches runs."""

    def __init__(self, host: Host, looker: Looker, trees: Trees) -> None:
        super().__init__(host)
        self._looker = looker
        self._trees = trees

    async def launch(self, live_cell: LiveCell, terminal: tuple[int, int] | None = None) -> None:
        """Starts an agent's cell, in mode ``once`` with its program, which may have a terminal.

        Returns when the monitor is recorded; what becomes of it is in its record.
        ``CtxError`` or ``OSError`` if it cannot be started.
        """
        places, agent = self._places, live_cell.agent
        parent = self._agents.registry.parent_of(agent)
        if parent is not None:
            above = self._live_cells.get(parent.index)
            if above is not None:  # itself just starting, perhaps
                with trio.move_on_after(_SETTLE_SECONDS):
                    await self._port.wait_settled(above)
        await self._looker.complete(agent)
        self._agents.authority.check_own_mounts(agent)
        await self._make_trees(agent)
        self._tell_lacking(agent)
        plan = cell.plan(self._agents, agent, places, terminal)
        await self._port.sweeper.removed(agent.owner, live_cell.node)
        live_cell.leaf.make_own(self._port.hierarchy.controllers)
        self._port.apply_limits(live_cell.node, agent.limits)
        log.debug("%s %s: %s", agent.name, agent.cell.id, plan.describe())
        if plan.lend:
            self._agents.disk.wake()
        networks.prepare(self._agents, agent, places.networks, plan.networks)
        proxies = networks.proxies(self._agents, plan.networks) if plan.networks else []
        if len(proxies) > 1:
            what = f"network:{proxies[0]} is its proxy, HTTPS_PROXY and HTTP_PROXY: the first of"
            self._tell_log(agent, f"{what} {', '.join(proxies)}, as configured")
        crashpoints.reach("start.planned")
        if agent.status is not Status.STARTING:
            return  # stopped meanwhile: nothing may start any more
        directory, holds_cell = self._agents.documents.directory(agent), agent.how.holds_cell
        command = Command(
            words=(),
            cwd="",
            run=agent.cell.id,
            # what is said on the way into a cell belongs into the log
            out=directory / ("log" if holds_cell else "out"),
            log=directory / "log",
            open_input=None if holds_cell or terminal else partial(self.open_handoff, agent),
            terminal=terminal,
            leads=not holds_cell,
        )
        hand = networks.hand_path(places.networks, agent)
        await self._monitor(agent, live_cell, plan, command, parent, hand)
        crashpoints.reach("start.launched")

    async def launch_apart(
        self, live_cell: LiveCell, execution: Execution, command: Command
    ) -> None:
        """Starts a program of the runtime's own in a cell that is like the one of an agent, which
        has none, or none any more; ``CtxError`` or ``OSError`` if it cannot be started."""
        agent = live_cell.agent
        await self._looker.complete(agent)
        await self._make_trees(agent)
        plan = cell.plan(self._agents, agent, self._places, command=command)
        await self._port.sweeper.removed(agent.owner, execution.leaf)
        execution.leaf.make_own(self._port.hierarchy.controllers)
        self._port.thaw(live_cell.node)
        self._port.apply_limits(live_cell.node, agent.limits)
        log.debug("%s %s: %s", agent.name, execution.facts.key, plan.describe())
        self._agents.disk.wake()
        await self._monitor(agent, execution, plan, command, None)

    async def _make_trees(self, agent: Agent) -> None:
        """The agent's own durable trees and those that it is to have are there."""
        lines = {mount.source for mount in mounts.parse(agent.mount) if mount.tree}
        for tree in {*agent.trees, *lines}:
            space = self._agents.spaces.named(mounts.space_of(tree))
            if space is not None:
                await self._trees.ready(space, _SETTLE_SECONDS)
        homes = []
        if agent.homedir == "durable":
            homes.append((self._agents.sessions.home(agent), agent.uid, agent.gid))
        if agent.is_guest and agent.workspace == "worktree":
            tree = self._agents.sessions.worktree(agent)
            homes += [(f"{tree}/{name}", agent.uid, agent.gid) for name in ("work", "git")]
        own = f"{mounts.HOME_TREE}{agent.owner}"
        if own in agent.trees or mounts.HOME_TREE in lines:
            user = find_user(agent.owner)
            gid = agent.owner if user is None else user.pw_gid
            homes.append((tree_of_home(agent.owner), agent.owner, gid))
        for tree, uid, gid in homes:
            await self._trees.have(agent.owner, tree, uid, gid, _SETTLE_SECONDS)

    def _tell_lacking(self, agent: Agent) -> None:
        """Its log says what its policy allows and it has not: more spaces than there is room for,
        and networks that are not configured."""
        _, left_out = self._agents.authority.trees(agent)
        if left_out:
            most = mounts.SPACES_MAX
            self._tell_log(agent, f"no room for more than {most} spaces: {' '.join(left_out)}")
        for name in networks.unknown(self._agents, agent):
            what = f"its policy allows network:{name}, but no such network is configured"
            self._tell_log(agent, f"{what}: add it to networks in the configuration of ctxd")

    async def enter(self, live_cell: LiveCell, execution: Execution, command: Command) -> None:
        """Starts a program inside an agent's cell, as ``launch`` does the cell.

        ``CtxError`` or ``OSError`` if it cannot be started.
        """
        agent = live_cell.agent
        with trio.move_on_after(_SETTLE_SECONDS):
            await self._port.wait_settled(live_cell)
        if not live_cell.goes_on:
            raise WrongStateError(f"{quote(agent.name)} is {agent.status}")
        plan = cell.plan_inside(self._agents, agent, self._places, command)
        # there may be the leaf of an earlier run; Linux 6.x kills what is born, by clone3(2)
        # from another cgroup, into one that was ever killed
        await self._port.sweeper.removed(agent.owner, execution.leaf)
        execution.leaf.make_own(self._port.hierarchy.controllers)
        log.debug("%s %s: %s", agent.name, execution.facts.key, plan.describe())
        await self._monitor(agent, execution, plan, command, agent)

    async def _monitor(
        self,
        agent: Agent,
        execution: Execution,
        plan: Plan,
        command: Command,
        inside: Agent | None,
        hand: Path | None = None,
    ) -> None:
        """Has a monitor (monitor.c) run a plan, which enters the cell of an agent, if any; it
        outlives the daemon. A new cell hands out at ``hand`` what it listens on."""
        places = self._places
        with ExitStack() as stack:

            def held(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            keeper = held(self._open_keeper(inside)) if inside is not None else None
            rootless = self._agents.privilege.rootless
            fds = stack.enter_context(
                passed_files(plan, places, keeper, rootless=rootless, hand=hand)
            )
            stdin = held(command.open_input() if command.open_input is not None else _null())
            window = self._ends.get(agent.index) if isinstance(execution, LiveCell) else None
            hangs = window is not None or command.terminal is not None
            inlet = [held(execution.facts.inlet.listen())] if command.fed or hangs else []
            grace = min(self._agents.settings.grace(agent), HANG_UP_GRACE)
            lease = self._lease(agent, execution)
            if window is not None:
                execution.facts.inlet.give(window, grace)
            if execution.first_viewer is not None:
                with execution.first_viewer.end:
                    self._port.view(execution, execution.first_viewer, grace)
                execution.first_viewer = None
            # what is killed if somebody hangs up, or the lease is over: a task alone, or the agent
            is_agent = command.leads or isinstance(execution, LiveCell)
            whole = self._port.place(agent.cell.cgroup) if is_agent else execution.leaf
            most = self._agents.settings.config.owner_monitors
            monitors = self._port.hierarchy.monitors(agent.owner, most)
            numbers = {fd: _FIRST_PASSED + i for i, fd in enumerate(fds)}
            led = "cell" if hand is not None or keeper is None else numbers[keeper]
            # the monitor closes it once it is recorded
            complaint, complaining = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            held(complaint)
            try:
                monitor = await self._port.spawner.start(
                    monitors,
                    orders.words(
                        places.program("monitor"),
                        execution.facts.path,
                        command.out,
                        command.log or "-",
                        command.reply or "-",
                        # it keeps two files, each of half
                        2 * command.most or self._agents.settings.log_max(agent),
                        self._agents.disk.output(agent.owner),
                        places.lifeline,
                        str(execution.leaf.own()),
                        agent.uid,
                        led if command.leads else "-",
                        _FIRST_PASSED + len(fds) if inlet else "-",
                        "fed" if command.fed else "-",
                        str(whole) if hangs or lease else "-",
                        *(lease or ("-", 0)),
                        list(numbers.values()),
                        plan.steps,
                    ),
                    owner=agent.owner,
                    fds=[stdin, None, complaining, *fds, *inlet],
                )
            finally:
                os.close(complaining)
            said = await _read_all(complaint)
            if not execution.facts.exist():
                await monitor.wait()
                raise UnsupportedError(f"cannot start its monitor: {said}")

    def _lease(self, agent: Agent, execution: Execution) -> tuple[Path, int] | None:
        """The file of the lease under which a program runs, and its grace in milliseconds."""
        if execution.lease is None:
            return None
        grace = self._agents.settings.grace(agent)
        return self._places.leases / str(execution.lease), int(grace * 1000)

    def _open_keeper(self, owner: Agent) -> int:
        """A pidfd of the PID 1 of a cell that something enters; ``WrongStateError``."""
        above = self._live_cells.get(owner.index)
        try:
            if above is None:
                raise ProcessLookupError
            return self._port.open_keeper(above)
        except OSError:
            raise WrongStateError(f"{quote(owner.name)} no longer has a cell") from None

    def open_handoff(self, agent: Agent) -> int:
        """The task of a ``once`` agent, after what it inherits, as standard input."""
        inherited = self._agents.documents.read(agent, "inherited.md")
        if inherited:
            handoff = self._agents.documents.read(agent, "handoff.md")
            return orders.sealed_file("handoff", inherited + b"\n" + handoff)
        path = self._agents.documents.path(agent, "handoff.md")
        try:
            os.chmod(path, 0o644)  # /dev/stdin opens it anew
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _null()
        if not self._agents.privilege.rootless:
            return opened
        # The file is the agent's own uid's, which could open it anew for writing.
        with open(opened, "rb") as file:
            return orders.sealed_file("handoff", file.read())


async def _read_all(pipe: int) -> str:
    """The text that is written to a pipe until nobody has it any more, or it is much."""
    said = b""
    while len(said) < _COMPLAINT_MAX:
        await trio.lowlevel.wait_readable(pipe)
        part = os.read(pipe, _COMPLAINT_MAX - len(said))
        if not part:
            break
        said += part
    return said.decode(errors="replace").strip()


def _null() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def open_program(places: Places, name: str, *, rootless: bool) -> int:
    """A descriptor to execute one of the programs by.

    Nobody who executes it can read it, so that no agent can trace what it becomes
    (PR_SET_DUMPABLE in prctl(2)). Without root the file is the agents' own uid's: it is a
    sealed copy then, which they cannot change even if they get at it.
    """
    path = places.program(name)
    if not rootless:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    fd = orders.sealed_file(name, path.read_bytes())
    try:
        os.fchmod(fd, 0o111)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def passed_files(
    prepared: Plan,
    places: Places,
    parent_cell: int | None,
    *,
    rootless: bool,
    hand: Path | None = None,
) -> Iterator[list[int]]:
    """The descriptors that the steps find from 4 on, in order.

    ``parent_cell`` is a pidfd of the parent's keeper, ``hand`` where the cell's own keeper hands
    out what it listens on.
    """

    def listen() -> int:
        assert hand is not None
        return unixsockets.listen(hand, unixsockets.PACKETS).detach()

    files: dict[str, Callable[[], int]] = {
        "spec": lambda: orders.memory_file("spec", prepared.spec),
        "networks": listen,
        "keeper": lambda: open_program(places, "keeper", rootless=rootless),
        "view": lambda: orders.memory_file("view", orders.message(prepared.view)),
        "builder": lambda: open_program(places, "view", rootless=rootless),
        "stage": lambda: orders.memory_file("stage", prepared.stage),
        "lend": lambda: orders.memory_file("lend", prepared.lend),
    }
    with ExitStack() as stack:
        opened: list[int] = []
        for name in prepared.passed:
            if name == "cell":
                assert parent_cell is not None
                opened.append(parent_cell)
            else:
                opened.append(files[name]())
                stack.callback(os.close, opened[-1])
        yield opened
