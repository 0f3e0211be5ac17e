"""Agents whose lease is over are gone, whatever they do, and whatever became of the daemon."""

from __future__ import annotations

import os
import select
import shlex
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from runtime.kernel import clock
from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.leased import Lease, Leased, leased

GRACE: Final = 0.3
#: within which all is gone then, on a machine that does nothing else
LATE: Final = 0.5
HEEDS: Final = "trap 'exit 0' TERM; echo up; while :; do sleep 600 & wait; done"
STUBBORN: Final = "trap '' TERM HUP; echo up; while :; do sleep 600; done"
ORPHAN: Final = f"setsid sh -c {shlex.quote(STUBBORN)} & trap 'exit 0' TERM; wait"


def sh(script: str) -> str:
    return f"sh -c {shlex.quote(script)}"


def hang(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)


def live(daemon: Daemon) -> None:
    """And end them beside their monitors."""


class Village:
    """Agents of all kinds under one lease, and one without."""

    def __init__(self, daemon: Leased, lease: Lease) -> None:
        self.daemon = daemon
        self.lease = lease
        #: those that take the grace that they have, a short one
        self.stubborn: list[str] = []
        self.heedful: list[str] = []
        self._settle()

    def begin(self, name: str, script: str, *, leased: bool = True, **files: str) -> Path:
        if leased:
            self.daemon.give(name, self.lease.number)
        if "grace" in files.get("limits", ""):
            self.stubborn.append(name)
        elif leased:
            self.heedful.append(name)
        return self.daemon.run(name, sh(script), **files)

    def _settle(self) -> None:
        daemon, short = self.daemon, f"grace={int(GRACE * 1000)}ms"
        self.begin("bystander", HEEDS, leased=False)
        self.begin("once", HEEDS)
        self.begin("stubborn", STUBBORN, limits=short)
        self.begin("paused", STUBBORN, limits=short)
        self.begin("boss", ORPHAN, limits=short)
        wait_status(daemon.agent_dir("boss"), "busy")
        daemon.make("kid", sh(STUBBORN), parent="agent:boss")
        write(daemon.agent_dir("kid") / "ctl", "start")
        resident = self.begin("resident", "echo up; while read -r x; do :; done", mode="resident")
        idle = self.begin("idle", HEEDS, mode="turn")
        busy = self.begin("busy", STUBBORN, mode="turn", limits=short)
        aborted = self.begin("aborted", HEEDS, mode="turn")
        working = self.begin("working", HEEDS, mode="turn", limits=short)
        for agent in (idle, busy, aborted, working):
            wait_status(agent, "idle")
        wait_status(resident, "ready")
        for agent in (busy, aborted):
            write(agent / "inbox", "go")
        task = working / "task" / "t"
        task.mkdir()
        write(task / "cmd", STUBBORN)
        write(task / "ctl", "start")
        wait_until(lambda: read(task, "output") == "up\n", "the task is there")
        for name in ("bystander", "once", "stubborn", "paused", "boss", "kid", "busy", "aborted"):
            out = partial(read, daemon.agent_dir(name), "out")
            wait_until(lambda out=out: out() == "up\n", f"{name} is there")  # type: ignore[misc]
        write(aborted / "ctl", "abort")
        wait_until(lambda: not read(aborted, "run"), "the run has ended")
        write(daemon.agent_dir("paused") / "ctl", "pause")

    def nodes(self) -> dict[str, Cgroup]:
        names = [*self.stubborn, *self.heedful, "bystander"]
        paths = {name: read(self.daemon.agent_dir(name), "cgroup").strip() for name in names}
        return {name: Cgroup(Path(path)) for name, path in paths.items()}


@pytest.fixture
def daemon() -> Iterator[Leased]:
    with leased() as made:
        yield made


@pytest.fixture
def lease(daemon: Leased) -> Iterator[Lease]:
    with Lease(daemon) as made:
        yield made


def gone(nodes: dict[str, Cgroup]) -> dict[str, float]:
    """When they became empty."""
    found: dict[str, float] = {}
    limit = clock.up() + TIMEOUT
    while len(found) < len(nodes):
        empty = [name for name, each in nodes.items()
                 if name not in found and not each.populated()]
        found |= dict.fromkeys(empty, clock.up())
        assert clock.up() < limit, f"not gone: {nodes.keys() - found.keys()}"
        select.select([], [], [], 0.002)
    return found


@pytest.mark.alone
@pytest.mark.parametrize(
    "happens", [hang, *(pytest.param(each, marks=pytest.mark.long) for each in (live, Daemon.kill))]
)
def test_all_are_gone_when_their_lease_is_over(
    daemon: Leased, lease: Lease, happens: Callable[[Daemon], None]
) -> None:
    village = Village(daemon, lease)
    nodes = village.nodes()
    bystander = nodes.pop("bystander")
    daemon.restart()  # their monitors have all that they need
    happens(daemon)
    end = lease.let_go()
    late = {name: when - end for name, when in gone(nodes).items()}
    for name in village.heedful:
        assert 0 <= late[name] <= LATE, late
    for name in village.stubborn:
        # whose program heeds may be gone before
        assert 0 <= late[name] <= GRACE + LATE, late
    for name in ("stubborn", "paused", "busy"):
        assert late[name] >= GRACE or happens is live, late
    assert bystander.populated()
    if happens is not live:
        if happens is hang:
            daemon.kill()
        daemon.start()
    for _ in range(2):
        for name in nodes:
            agent = daemon.agent_dir(name)
            wait_dead(agent)
            assert (read(agent, "outcome"), read(agent, "reason")) == (
                "interrupted\n", "lease_over\n"), name  # fmt: skip
            stops = [each for each in daemon.events(name) if each["type"] == "agent.stop"]
            assert [each["reason"] for each in stops] == ["lease_over"], name
        assert read(daemon.agent_dir("kid"), "reason") == "parent_dead\n"
        daemon.restart()
    assert read(daemon.agent_dir("bystander"), "status") == "busy\n"


def test_nothing_begins_under_a_lease_that_is_over(daemon: Leased, lease: Lease) -> None:
    daemon.give("x", lease.number)
    agent = daemon.make("x", sh("echo never"))
    end = lease.let_go()
    wait_until(lambda: clock.up() > end, "it is over")
    write(agent / "ctl", "start")
    wait_dead(agent)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("interrupted\n", "lease_over\n")
    assert read(agent, "out") == ""
