"""Agents that end with the client that made them: windows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.reexecution import replaceable

#: what would otherwise be waited for is longer than any test waits
pytestmark = pytest.mark.settings(grace="10m")

#: it ends by nothing but SIGKILL
STUBBORN = 'sh -c \'trap "" TERM HUP; while :; do sleep 1000; done\''


def programs(daemon: Daemon, name: str) -> list[int]:
    """What runs of an agent, wherever it is in the cgroups."""
    found: list[int] = []
    for path, below, _ in os.walk(daemon.cgroup.path):
        inside = f"/agent-{name}/" in f"{path}/"
        below[:] = [each for each in below if each != "monitor"]
        if inside:
            with suppress(OSError):
                found += Cgroup(path).processes()
    return found


def is_gone(directory: Path) -> bool:
    return not directory.exists()


def wait_gone(daemon: Daemon, name: str) -> None:
    wait_until(lambda: not programs(daemon, name), "its processes are gone")
    wait_until(lambda: not daemon.agent_dir(name).exists(), "its record is gone")
    home = daemon.root / "home"
    [events] = home.glob(f"*/agent/{name}/session/default/events.jsonl")
    last = json.loads(events.read_text().splitlines()[-1])
    assert (last["type"], last["status"]) == ("agent.stop", "cancelled")


def frame(daemon: Daemon, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(daemon.runtime / "ctxd.sock"))
        connection.sendall(json.dumps(fields).encode() + b"\n")
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    return json.loads(data), fds


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_window(daemon: Daemon, name: str, *, remove: bool = True) -> socket.socket:
    """An agent that is new, and its window."""
    daemon.make(name, STUBBORN)
    said, [window] = frame(daemon, op="window", agent=name, remove=remove)
    assert said == {"type": "window", "agent": name}
    return socket.socket(fileno=window)


def start(daemon: Daemon, name: str) -> None:
    write(daemon.agent_dir(name) / "ctl", "start")
    wait_status(daemon.agent_dir(name), "busy")


# clients


class Client:
    """A client with an agent of its own that runs."""

    def __init__(self, daemon: Daemon, name: str, *words: str, said: str = "") -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), *words],
            env={"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"]},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(said)
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    close = kill


def spawning(daemon: Daemon) -> Client:
    made = Client(daemon, "s", "spawn", "s", "--wait", "--rm", "--", *_words())
    wait_until(daemon.agent_dir("s").exists, "it is there")
    wait_status(daemon.agent_dir("s"), "busy")
    return made


def running(daemon: Daemon) -> Client:
    made = Client(daemon, "r", "run", "r", "--message", "go", "--", *_words())
    wait_until(daemon.agent_dir("r").exists, "it is there")
    wait_status(daemon.agent_dir("r"), "busy")
    return made


def editing(daemon: Daemon) -> Client:
    recipe = daemon.base / "recipe"
    recipe.mkdir()
    (recipe / "exec").write_text(STUBBORN + "\n")
    (recipe / "README.md").write_text("# stubborn\n\nEnds by nothing but SIGKILL.\n")
    work = daemon.base / "work"
    work.mkdir()
    asked = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": 1}},
        {"id": 2, "method": "session/new", "params": {"cwd": str(work), "mcpServers": []}},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in asked)
    made = Client(daemon, "", "acp", "--agent", str(recipe), said=lines)
    assert made.process.stdout is not None
    made.process.stdout.readline()
    made.name = json.loads(made.process.stdout.readline())["result"]["sessionId"]
    wait_status(daemon.agent_dir(made.name), "idle")
    return made


def _words() -> list[str]:
    return ["sh", "-c", 'trap "" TERM HUP; while :; do sleep 1000; done']


CLIENTS = (spawning, running, editing)


@pytest.mark.parametrize("begin", CLIENTS)
def test_an_agent_ends_with_the_client_that_is_killed(
    daemon: Daemon, begin: Callable[[Daemon], Client]
) -> None:
    client = begin(daemon)
    client.kill()
    wait_gone(daemon, client.name)


@pytest.mark.parametrize("begin", CLIENTS)
def test_it_ends_while_there_is_no_daemon(
    daemon: Daemon, begin: Callable[[Daemon], Client]
) -> None:
    client = begin(daemon)
    daemon.kill()
    client.kill()
    wait_until(lambda: not programs(daemon, client.name), "its processes are gone")
    daemon.start()
    wait_gone(daemon, client.name)


def test_it_ends_while_the_daemon_hangs(daemon: Daemon) -> None:
    # of a client with files of /ctx the kernel would wait for the daemon to know of their end
    window = open_window(daemon, "one")
    start(daemon, "one")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        window.close()
        wait_until(lambda: not programs(daemon, "one"), "its processes are gone")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_gone(daemon, "one")


def test_what_ends_by_itself_or_by_ctrl_c_is_told_as_before(daemon: Daemon) -> None:
    result = daemon.ctx("spawn", "x", "--wait", "--rm", "--", "sh", "-c", "echo here; exit 3")
    assert (result.returncode, result.stdout) == (3, "here\n")
    assert not daemon.agent_dir("x").exists()
    client = Client(daemon, "y", "spawn", "y", "--wait", "--rm", "--", "sleep", "1000")
    wait_until(daemon.agent_dir("y").exists, "it is there")
    wait_status(daemon.agent_dir("y"), "busy")
    client.process.send_signal(signal.SIGINT)
    assert client.process.wait(TIMEOUT) == 130
    client.close()
    assert not daemon.agent_dir("y").exists()
    kept = daemon.ctx("run", "z", "--keep", "--message", "a", "--", "cat")
    assert (kept.returncode, kept.stdout) == (0, "a\n")
    assert read(daemon.agent_dir("z"), "status") == "idle\n"


def test_a_child_ends_with_the_client_in_its_parents_cell(daemon: Daemon) -> None:
    command = f"ctx run child --message go -- sh -c '{_words()[2]}'"
    parent = daemon.run("parent", f"sh -c {json.dumps(command + ' & sleep 1000')}",
                        policy="allow parent_t agent:* create")
    wait_until(daemon.agent_dir("child").exists, "the child is there")
    wait_status(daemon.agent_dir("child"), "busy")
    for pid in programs(daemon, "parent"):
        with suppress(FileNotFoundError):
            if b"\0run\0child\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not daemon.agent_dir("child").exists(), "the child is gone")
    assert read(parent, "status") == "busy\n"
    write(parent / "ctl", "kill")


# windows


@pytest.mark.parametrize("remove", [True, False])
def test_what_was_never_started_goes(daemon: Daemon, remove: bool, opened: ExitStack) -> None:
    with open_window(daemon, "one", remove=remove):
        window = opened.enter_context(open_window(daemon, "other", remove=remove))
        daemon.restart()
        wait_until(lambda: window.recv(1) == b"", "the daemon has let go of it")
    for name in ("one", "other"):
        directory = daemon.agent_dir(name)
        if remove:
            wait_until(partial(is_gone, directory), "it is gone")
        else:
            wait_dead(directory)
            assert read(directory, "reason") == "hangup\n"
    with open_window(daemon, "third", remove=remove):
        pass
    if remove:
        wait_gone(daemon, "third")
    else:
        wait_dead(daemon.agent_dir("third"))
        assert read(daemon.agent_dir("third"), "outcome") == "cancelled\n"


def test_a_window_that_is_open_is_known_to_each_daemon(daemon: Daemon, opened: ExitStack) -> None:
    for name in ("one", "two", "three"):
        opened.enter_context(closing(window := open_window(daemon, name)))
        start(daemon, name)
        if name == "one":
            first = window
        elif name == "two":
            second = window
    daemon.restart()
    daemon.restart()
    for name in ("one", "two", "three"):
        assert read(daemon.agent_dir(name), "status") == "busy\n"
    first.close()
    wait_gone(daemon, "one")
    daemon.kill()
    second.close()
    daemon.start()
    wait_gone(daemon, "two")
    assert read(daemon.agent_dir("three"), "status") == "busy\n"


@pytest.mark.long
def test_windows_pass_to_a_daemon_that_is_executed_again() -> None:
    names = ("new", "busy", "gone")
    with replaceable(config="grace: 10m\n") as daemon, ExitStack() as opened:
        new, busy, gone = (opened.enter_context(open_window(daemon, name)) for name in names)
        start(daemon, "busy")
        start(daemon, "gone")
        os.kill(daemon.pid, signal.SIGSTOP)  # closed at that moment
        gone.close()
        os.kill(daemon.pid, signal.SIGUSR1)
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.reexec()
        start(daemon, "new")
        new.close()
        busy.close()
        for name in names:
            wait_gone(daemon, name)


def test_what_has_ended_stays_until_its_window_is_closed(daemon: Daemon) -> None:
    directory = daemon.agent_dir("one")
    with open_window(daemon, "one"):
        write(directory / "exec", "sh -c 'exit 3'")
        write(directory / "ctl", "start")
        wait_dead(directory)
        assert read(directory, "reason") == "exit:3\n"
    wait_until(lambda: not directory.exists(), "it is gone")


def test_its_end_without_a_daemon_is_told_while_its_window_is_open(daemon: Daemon) -> None:
    directory, shared = daemon.agent_dir("one"), daemon.base / "shared"
    shared.mkdir()
    os.mkfifo(shared / "go")
    (shared / "go").chmod(0o666)
    with open_window(daemon, "one"):
        write(directory / "mount", f"{shared} /shared rw")
        write(directory / "exec", "sh -c 'read -r x < /shared/go; echo $x; exit 3'")
        start(daemon, "one")
        daemon.kill()
        (shared / "go").write_text("done\n")
        wait_until(lambda: not programs(daemon, "one"), "its processes are gone")
        daemon.start()
        wait_dead(directory)
        assert [read(directory, file) for file in ("out", "reason")] == ["done\n", "exit:3\n"]
    wait_until(lambda: not directory.exists(), "it is gone")


# refusals


def test_a_window_is_for_what_is_new(daemon: Daemon) -> None:
    directory = daemon.make("running", STUBBORN)
    start(daemon, "running")
    said, fds = frame(daemon, op="window", agent="running", remove=True)
    assert (said["type"], said["code"], fds) == ("error", "EBUSY", [])
    assert read(directory, "status") == "busy\n", "it goes on"
    write(directory / "ctl", "kill")


_MANY = """
import array, json, os, socket, sys
root, runtime = sys.argv[1:]
windows = []
while True:
    name = f"n{len(windows)}"
    os.mkdir(f"{root}/agent/{name}.d")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(f"{runtime}/ctxd.sock")
        peer.sendall(json.dumps({"op": "window", "agent": name, "remove": True}).encode() + b"\\n")
        data, fds, _, _ = socket.recv_fds(peer, 1 << 16, 4)
    if not fds:
        break
    windows += fds
print(json.dumps([len(windows), json.loads(data)["code"]]), flush=True)
"""


def test_windows_are_on_their_owners_account() -> None:
    with daemon_of(config="owner_descriptors: 40\n") as small:
        done = subprocess.run(
            ["/usr/bin/python3", "-c", _MANY, str(small.root), str(small.runtime)],
            user=4343, group=4343, extra_groups=[], stdout=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        count, code = json.loads(done.stdout)
        assert code == "EDQUOT" and count > 0
        # asked by root: all that the account has may still be in use
        assert read(small.agent_dir(f"n{count}"), "status") == "new\n", "and nothing is lost"
        wait_until(partial(is_gone, small.agent_dir("n0")), "the process has ended")
        assert not is_gone(small.agent_dir(f"n{count}")), "which has no window"
