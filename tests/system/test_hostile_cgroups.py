"""Agents that make cgroups as they can, hold the locks of them, or of their own memory: they end
as others do, and nobody waits for them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.system.hostile.compiling import compile_to
from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.held import held
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon
from tests.worlds.unfilled import unfilled_file
from tests.worlds.whose import ROOTLESS

REQUESTS = Path(__file__).parent / "requests"
#: seconds that a verb of an operator and a bystander's request may take, on a busy machine too
PATIENCE = 1.0
#: runs a script as root of a user namespace, at the root of its cgroups
AT_OWN = "unshare --user --map-root-user --mount --cgroup sh -c " \
         "'mount -t cgroup2 none /tmp && cd /tmp && {script}; echo up; exec sleep 1000'"
THREADED = AT_OWN.format(script="mkdir t && echo threaded > t/cgroup.type && cat t/cgroup.type")
WIDE = AT_OWN.format(script="n=0; while [ $n -lt 60000 ]; do mkdir $n || break; n=$((n+1)); done")
DEEP = AT_OWN.format(script=f"while mkdir {'d' * 250} && cd {'d' * 250}; do :; done")


@pytest.fixture
def owned() -> Iterator[OrdinaryDaemon]:
    """Agents have its uid, and so own their cgroups."""
    with ordinary_daemon(config="depth: 20\ngrace: 300ms\n") as daemon:
        yield daemon


def node(agent: Path) -> Cgroup:
    return Cgroup(Path(read(agent, "cgroup").strip()))


def start_task(agent: Path, name: str, command: str) -> Path:
    task = agent / "task" / name
    task.mkdir()
    write(task / "cmd", command)
    write(task / "ctl", "start")
    return task


class Bystander:
    """Asks for something again and again, and notes how long that took at most."""

    def __init__(self, daemon: Daemon, command: str) -> None:
        words = ["sh", "-c", f"while read x; do {{ {command}; }} > /dev/null; echo done; done"]
        if isinstance(daemon, OrdinaryDaemon):
            words = daemon.run_as_user(*words)
        self._asker = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.longest = 0.0
        self.asked = 0

    def _ask(self) -> None:
        assert self._asker.stdin is not None and self._asker.stdout is not None
        while not self._over.is_set():
            begun = time.monotonic()
            self._asker.stdin.write("\n")
            assert self._asker.stdout.readline() == "done\n"
            self.longest = max(self.longest, time.monotonic() - begun)
            self.asked += 1

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._asker.communicate()


@pytest.mark.alone
@pytest.mark.parametrize("script", [WIDE, pytest.param(DEEP, marks=pytest.mark.long)],
                         ids=["wide", "deep"])
def test_who_makes_all_cgroups_that_it_can_makes_a_dozen(
    owned: OrdinaryDaemon, script: str
) -> None:
    agent = owned.do(lambda: owned.run("maker", script))
    tasks = [owned.do(lambda n=n: start_task(agent, f"t{n}", script)) for n in range(4)]  # type: ignore[misc]
    wait_until(lambda: owned.do(lambda: read(agent, "out")).endswith("up\n"), "it has made them")
    for task in tasks:
        wait_until(lambda t=task: owned.do(lambda: read(t, "output")).endswith("up\n"), "and it")  # type: ignore[misc]
    top = owned.do(lambda: node(agent))
    made = (top.read("cgroup.stat") or "").split()
    assert int(made[made.index("nr_descendants") + 1]) <= 5 * 14 + 1
    with Bystander(owned, f"cat {owned.root}/status; mkdir {owned.root}/agent/by.d; "
                          f"rmdir {owned.root}/agent/by.d") as bystander:
        wait_until(lambda: bystander.asked > 2, "it works")

        def kill() -> float:
            begun = time.monotonic()
            subprocess.run(["sh", "-c", f"echo kill > {agent}/ctl"], check=True)
            wait_dead(agent)
            return time.monotonic() - begun

        assert owned.do(kill) < PATIENCE
        wait_until(lambda: not top.exists(), "its cgroups are removed")
    assert bystander.longest < PATIENCE


def test_a_threaded_cgroup_keeps_no_task_alive(owned: OrdinaryDaemon) -> None:
    def life() -> str:
        agent = owned.run("host", "sleep 1000")
        wait_status(agent, "busy")
        task = start_task(agent, "threads", THREADED)
        wait_until(lambda: read(task, "output").endswith("threaded\nup\n"), "it is there")
        write(task / "ctl", "stop")
        wait_dead(task)
        return read(task, "status") + read(agent, "status")

    assert owned.do(life) == "cancelled\nbusy\n"


@pytest.mark.parametrize("mode", ["once", "turn"])
def test_a_threaded_cgroup_keeps_no_run_alive(owned: OrdinaryDaemon, mode: str) -> None:
    def life() -> str:
        agent = owned.run("host", THREADED, mode=mode)
        if mode == "turn":
            write(agent / "inbox", "go")
        wait_until(lambda: read(agent, "out").endswith("threaded\nup\n"), "it is there")
        write(agent / "ctl", "abort")
        wait_status(agent, "paused")
        wait_until(lambda: not read(agent, "run"), "its run is over")
        write(agent / "ctl", "kill")
        wait_dead(agent)
        return read(agent, "outcome")

    assert owned.do(life) == "cancelled\n"


@pytest.mark.alone
def test_the_lock_of_an_agents_cgroup_is_nobody_elses(daemon: Daemon) -> None:
    """Somebody lists it into a page that is not there: the daemon takes no lock of it."""
    agent = daemon.run("host", "sleep 1000")
    wait_status(agent, "busy")
    task = start_task(agent, "held", "trap '' TERM; echo up; while :; do sleep 1; done")
    wait_until(lambda: read(task, "output") == "up\n", "it is there")
    leaf = node(agent).child("task", "held").own()
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(leaf.path))
        bystander = stack.enter_context(Bystander(daemon, f"cat {daemon.root}/status"))
        write(task / "ctl", "kill")
        wait_dead(task)
        again = daemon.run("other", "true", owner="4344", uid="4344", gid="4344", groups="")
        wait_dead(again)
        begun = time.monotonic()
        subprocess.run(["sh", "-c", f"echo kill > {agent}/ctl"], check=True)
        wait_dead(agent)
        assert time.monotonic() - begun < PATIENCE
        assert bystander.longest < PATIENCE
    wait_until(lambda: not leaf.exists(), "it is removed as soon as it can be")


@pytest.mark.needs_root("others are to try it")
def test_nobody_else_lists_where_the_daemon_makes_names(daemon: Daemon) -> None:
    """Who lists a directory can hold its lock: so could any user of the host."""
    agent = daemon.run("host", "sleep 1000")
    wait_status(agent, "busy")
    made = node(agent).child("run").path
    user = made.parents[1]
    for directory in (user.parent, user, made.parent, made):
        words = ["ls", str(directory)]
        done = subprocess.run(words, user=5151, group=5151, extra_groups=[], capture_output=True)
        assert b"Permission denied" in done.stderr, (directory, done)
    # what is in trees is their users', and the mount is no directory of the kernel's
    places = [str(daemon.runtime), str(daemon.runtime / "root")]
    which = ["-xdev", "-type", "d", "-perm", "/o+r",
             "!", "-path", "*/tree/*", "!", "-path", "*/root/ctx"]  # fmt: skip
    found = subprocess.run(["find", *places, *which], capture_output=True, text=True, check=True)
    assert not found.stdout


@pytest.mark.long
@pytest.mark.alone
def test_a_process_that_cannot_be_looked_into_holds_up_its_own_line_only(daemon: Daemon) -> None:
    """It waits for a page with the lock of its memory. Without root all are of one owner, for whom
    one program looks at processes: so nobody asks for those of others."""
    looked_at = ("status",) if ROOTLESS else ("usage", "processes")
    (daemon.base / "programs").mkdir()
    compile_to(daemon.base / "programs" / "tangled", REQUESTS / "tangled.c")
    other = daemon.run("other", "sleep 1000", owner="4344", uid="4344", gid="4344", groups="")
    wait_status(other, "busy")
    with unfilled_file() as file:
        mount = f"{daemon.base}/programs /programs ro\n{file} /page ro\n"
        agent = daemon.run(
            "tangler",
            "sh -c '/programs/tangled /page 0 & "
            "until test -e /programs/go; do sleep 0.1; done; echo looks; "
            "for n in 1 2 3 4 5 6 7 8; do "
            "while :; do cat $CTX_SELF/usage $CTX_SELF/processes; done > /dev/null & done; wait'",
            owner="4345", uid="4345", gid="4345", groups="", mount=mount,
        )  # fmt: skip
        wait_until(lambda: "tangled" in read(agent, "out"), "it is held")

        def seen() -> dict[str, object]:
            # of one owner, who asks while others do may be told to try again
            told = subprocess.run(["cat", agent / "processes"], capture_output=True).stdout
            return {line["name"]: line["memory"] for line in map(json.loads, told.splitlines())}

        wait_until(lambda: seen().get("tangled", 0) is None, "it is told without its memory")
        (daemon.base / "programs" / "go").touch()
        wait_until(lambda: "looks" in read(agent, "out"), "it looks at itself")
        words = " ".join(f"{other}/{name}" for name in looked_at)
        with Bystander(daemon, f"cat {words}") as bystander:
            wait_until(lambda: bystander.asked >= 5, "it has asked often enough")
        assert bystander.longest < PATIENCE
        write(agent / "ctl", "kill")
    # what waits for a page cannot be killed before
    wait_dead(agent)
