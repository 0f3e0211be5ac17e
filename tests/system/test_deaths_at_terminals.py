"""Whoever of a session at a terminal is killed, and a window that is closed: what is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from runtime.cell.record import RunRecord, read_record
from runtime.kernel.cgroups import Cgroup
from tests.system.test_windows import programs
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    alive,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.distant import distant
from tests.worlds.held import held
from tests.worlds.terminal import Terminal, terminal

#: what would otherwise be waited for is longer than any test waits
pytestmark = pytest.mark.settings(grace="10m")

SHELL = ("bash", "--norc", "--noprofile", "-i")
#: it ends by nothing but SIGKILL
STUBBORN = ("sh", "-c", 'trap "" TERM HUP INT; while :; do read -r x && eval "$x"; done')
#: cgroups that are there without agents
KEPT = {"user-0", "monitor", "daemon", "helper"}
#: seconds after which nothing of what was hung up runs
GONE = 1.0
#: and how much longer that may take than what ends at once, on a machine busy with other things
TIMES = 10.0


class Session:
    """A client at the terminal of a program: as ``run`` has it, ``enter``, or ``attach`` after
    Ctrl-] d."""

    def __init__(
        self, stack: ExitStack, daemon: Daemon, kind: str, *program: str,
        by: Sequence[str] = (),
    ) -> None:
        self.daemon, self.kind, self.name = daemon, kind, f"{kind}-{program[0]}"
        self._by = by
        self.directory = daemon.agent_dir(self.name)
        if kind == "enter":
            wait_status(daemon.run(self.name, "cat", mode="turn"), "idle")
            self.directory /= "task/enter-1"
            self.client = self._client(stack, "enter", self.name, "--", *program)
        else:
            self.client = self._client(stack, "run", "--tty", self.name, "--", *program)
        self.say("first")
        wait_status(self.directory, "running" if kind == "enter" else "busy")
        if kind == "attach":
            self.client.type("\x1dd")
            assert self.client.end() == 0
            self.client = self._client(stack, "attach", self.name)
            self.say("again")
        self.record = self._record()
        assert self.record.program and self.record.terminal, self.record

    def _client(self, stack: ExitStack, *words: str) -> Terminal:
        return stack.enter_context(terminal(self.daemon.root, *words, by=self._by))

    def say(self, word: str) -> None:
        """The program is heard."""
        self.client.type(f"echo $((1))-{word}\n")
        self.client.wait_for(f"1-{word}\r\n")

    def _record(self) -> RunRecord:
        whose = self.daemon.agent_dir(self.name)
        key = "task-enter-1" if self.kind == "enter" else read(whose, "run").strip()
        path = self.daemon.runtime / "record" / f"{read(whose, 'incarnation').strip()}-{key}"
        wait_until(lambda: read_record(path).program and read_record(path).terminal, "it began")
        return read_record(path)

    def kill(self, role: str) -> None:
        if role == "client":
            self.client.process.kill()
        else:
            os.kill(getattr(self.record, role), signal.SIGKILL)

    def close(self) -> None:
        """The window of what is run here, or whoever else is at its terminal."""
        if self.kind == "run" and not self._by:
            self.client.hang_up()
        else:
            self.kill("client")

    def runs(self) -> list[str]:
        """What there is of it in the machine: processes, its monitor, its terminal."""
        found = programs(self.daemon, self.name)
        if self.kind == "enter":
            found = [pid for pid in found if "/task/" in _cgroup_of(pid)]
        found += [pid for pid in [self.record.monitor] if alive(pid)]
        return [f"{pid} {_cgroup_of(pid)}" for pid in found]

    def is_over(self) -> None:
        """It is in no file or cgroup any more, if nobody wants to see it."""
        wait_until(lambda: not self.runs(), f"nothing of {self.name} runs: {self.runs()}")
        if self.kind == "attach":
            wait_dead(self.directory)
            self.directory.rmdir()
        wait_until(lambda: not self.directory.exists(), f"{self.name} is removed")


def _cgroup_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text().strip()
    return ""


def _masters(daemon: Daemon) -> list[str]:
    """Ptys of the machine that the daemon has, or anything below it."""
    found = []
    nodes = [daemon.own, *(Cgroup(path) for path, _, _ in os.walk(daemon.cgroup.path))]
    for pid in [pid for node in nodes for pid in node.processes()]:
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/fdinfo").iterdir():
                with suppress(OSError):
                    found += re.findall("tty-index:\t.*", each.read_text())
    return found


def _files(daemon: Daemon) -> set[str]:
    """What may be left of runs: in the runtime directory, and cgroups."""
    places = [daemon.runtime / name for name in ("record", "monitor")]
    found = {path.name for place in places for path in place.iterdir()}
    return found.union(*(below for _, below, _ in os.walk(daemon.cgroup.path)))


def check_nothing_left(daemon: Daemon, sessions: list[Session]) -> None:
    """Of all of them; the agents that were entered go on until now."""
    for each in sessions:
        each.is_over()
        if each.kind == "enter":
            assert read(daemon.agent_dir(each.name), "status") == "idle\n"
            write(daemon.agent_dir(each.name) / "ctl", "kill")
            wait_dead(daemon.agent_dir(each.name))
            daemon.agent_dir(each.name).rmdir()
    assert not _masters(daemon)
    wait_until(lambda: _files(daemon) <= KEPT, f"no file is left: {_files(daemon)}")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# processes of a session


@pytest.mark.parametrize(("role", "with_daemon"), [
    pytest.param("client", True, id="client-daemon", marks=pytest.mark.long),
    pytest.param("client", False, id="client-alone"),
    pytest.param("monitor", True, id="monitor-daemon"),
    pytest.param("monitor", False, id="monitor-alone"),
    pytest.param("keeper", True, id="keeper-daemon", marks=pytest.mark.long),
    pytest.param("keeper", False, id="keeper-alone"),
    pytest.param("program", True, id="program-daemon"),
    pytest.param("program", False, id="program-alone", marks=pytest.mark.long),
])
def test_a_death_of_a_process_of_a_session(
    daemon: Daemon, opened: ExitStack, role: str, with_daemon: bool
) -> None:
    """Whoever looks is told, what goes with its window is gone, and what was left goes on."""
    run, enter, kept = sessions = [
        Session(opened, daemon, kind, *SHELL) for kind in ("run", "enter", "attach")
    ]
    if not with_daemon:
        daemon.kill()
    for each in sessions:
        each.kill(role)
    ended = [run, enter] if role == "client" else sessions
    for each in ended:
        wait_until(lambda each=each: not each.runs(), f"{each.name} is gone")  # type: ignore[misc]
    if not with_daemon:
        daemon.start()
    statuses = [each.client.end() for each in sessions]
    if role == "client":
        assert statuses == [-signal.SIGKILL] * 3
        with terminal(daemon.root, "attach", kept.name) as client:
            client.type("echo $((1))-on; exit\n")
            client.wait_for("1-on\r\n")
            assert client.end() == 0
    else:
        wait_dead(kept.directory)
        end = {"monitor": ("interrupted", "runtime_lost"), "keeper": ("error", "signal:9"),
               "program": ("error", "signal:9")}[role]
        assert (read(kept.directory, "outcome"), read(kept.directory, "reason")) == (
            f"{end[0]}\n", f"{end[1]}\n")
    check_nothing_left(daemon, sessions)


def test_a_death_of_the_daemon_is_noticed_by_nobody(daemon: Daemon, opened: ExitStack) -> None:
    sessions = [Session(opened, daemon, kind, *SHELL) for kind in ("run", "enter", "attach")]
    daemon.kill()
    for each in sessions:
        each.say("meanwhile")
    daemon.start()
    for each in sessions:
        each.say("after")
        each.client.type("exit 5\n")
        assert each.client.end() == 5
    check_nothing_left(daemon, sessions)


# windows that are closed


@contextmanager
def works(daemon: Daemon) -> Iterator[None]:
    yield


@contextmanager
def is_killed(daemon: Daemon) -> Iterator[None]:
    daemon.kill()
    yield
    daemon.start()


@contextmanager
def is_stopped(daemon: Daemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    yield
    os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def hangs(daemon: Daemon) -> Iterator[None]:
    """Its loop waits for the lock of a directory that somebody holds."""
    with held(daemon.runtime / "root" / "wait"):
        maker = subprocess.Popen(["mkdir", daemon.agent_dir("made")])
        _wait_hangs(daemon)
        yield
    assert maker.wait(TIMEOUT) == 0
    daemon.agent_dir("made").rmdir()


def _wait_hangs(daemon: Daemon) -> None:
    stack = Path(f"/proc/{daemon.pid}/stack")
    wait_until(lambda: "filename_create" in stack.read_text(), "it makes a FIFO of an agent")


@pytest.mark.alone
@pytest.mark.parametrize("state", [
    works, hangs, *(pytest.param(each, marks=pytest.mark.long) for each in (is_killed, is_stopped))
])  # fmt: skip
def test_a_closed_window_leaves_nothing_within_a_second(
    daemon: Daemon, opened: ExitStack, state: Callable[[Daemon], AbstractContextManager[None]]
) -> None:
    """Whatever the daemon does, and the program; by a client that is killed, or one whose terminal
    is gone."""
    bound = _bound(daemon, opened)
    sessions = [
        Session(opened, daemon, kind, *program)
        for kind in ("run", "enter") for program in (SHELL, STUBBORN)
    ]  # fmt: skip
    with state(daemon):
        took = _seconds_until_gone(sessions)
    assert took < bound
    check_nothing_left(daemon, sessions)


@pytest.mark.alone
def test_a_connection_that_is_cut_leaves_nothing_within_a_second(
    daemon: Daemon, opened: ExitStack
) -> None:
    """To another machine, by ssh(1), which is killed."""
    bound = _bound(daemon, opened)
    session = Session(opened, daemon, "run", *SHELL, by=opened.enter_context(distant()).here)
    assert _seconds_until_gone([session]) < bound
    check_nothing_left(daemon, [session])


def _bound(daemon: Daemon, opened: ExitStack) -> float:
    """Seconds, by what the end of one takes now that was run here."""
    session = Session(opened, daemon, "run", *SHELL)
    bound = max(GONE, TIMES * _seconds_until_gone([session]))
    wait_until(lambda: not session.directory.exists(), "its name is free")
    return bound


def _seconds_until_gone(sessions: list[Session]) -> float:
    for each in sessions:
        each.close()
    closed = time.monotonic()
    for each in sessions:
        wait_until(lambda each=each: not each.runs(), f"{each.name} is gone")  # type: ignore[misc]
    took = time.monotonic() - closed
    assert not _masters(sessions[0].daemon)
    return took


def test_one_that_is_closed_while_its_agent_is_made_leaves_none(
    daemon: Daemon, opened: ExitStack
) -> None:
    """The client waits until there is something that goes with it."""
    with held(daemon.runtime / "root" / "wait"):
        words = ("run", "--tty", "early", "--", *SHELL)
        client = opened.enter_context(terminal(daemon.root, *words))
        _wait_hangs(daemon)
        client.hang_up()
    assert client.process.wait(TIMEOUT) == -signal.SIGHUP
    wait_until(lambda: not daemon.agent_dir("early").exists(), "it is removed")
    assert not programs(daemon, "early")
