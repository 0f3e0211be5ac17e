"""Terminals of agents and tasks, on a real daemon, as a client without a screen has them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.test_windows import is_gone, programs, wait_gone
from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.emulator import HOSTILE, Emulator
from tests.worlds.reexecution import replaceable
from tests.worlds.terminal import Terminal
from tests.worlds.viewers import Typing, Viewer, echoing

#: what would otherwise be waited for is longer than any test waits
pytestmark = pytest.mark.settings(grace="10m")
#: shells ignore SIGTERM at a terminal
SHELL = "bash --norc --noprofile -i"
#: seconds after which somebody who types notices
LATE = 1.0


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(daemon: Daemon, name: str = "x", program: str = SHELL) -> Path:
    directory = daemon.make(name, program)
    write(directory / "tty", "80x24")
    return directory


def begin(daemon: Daemon, name: str = "x", **fields: bool) -> Viewer:
    """An agent with a shell, and who started it, as ``ctx run --tty``."""
    make(daemon, name)
    wanted = {"hangup": True, "remove": True, **fields}
    viewer = Viewer(daemon, name, start=True, size="100x30", **wanted)
    say(viewer, "first")
    wait_status(daemon.agent_dir(name), "busy")  # which it may be seen to be later
    return viewer


def say(viewer: Viewer, word: str) -> None:
    """The shell lives, and is heard."""
    viewer.enter(f"echo $((1))-{word}\n")
    viewer.wait_for(f"1-{word}\r\n")


def events(daemon: Daemon, name: str) -> list[tuple[str, ...]]:
    """Who came and went."""
    [path] = (daemon.root / "home").glob(f"*/agent/{name}/session/default/events.jsonl")
    told = map(json.loads, path.read_text().splitlines())
    return [
        (str(event["viewer"]), event.get("reason") or event["by"])
        for event in told
        if event["type"].startswith("terminal.")
    ]


ROOT = "operator uid:0"


def test_a_session_from_its_start_to_its_end(daemon: Daemon) -> None:
    with begin(daemon) as viewer:
        viewer.enter("tty; stty size; echo $TERM; cat ~/../../$CTX_SELF/handoff.md\n")
        for text in ("/dev/pts/0", "30 100", "xterm-256color"):
            viewer.wait_for(text)
        row = json.loads(daemon.ctx("ps", "--json").stdout)[0]
        assert (row["tty"], row["viewers"]) == ("80x24", 1)
        viewer.enter("exit 3\n")
        assert viewer.wait_over() == "exit 3"
    wait_until(lambda: is_gone(daemon.agent_dir("x")), "it is removed")
    assert events(daemon, "x") == [("1", ROOT), ("1", "ended")]


def test_whoever_leaves_finds_it_again_and_it_stays_when_it_is_over(daemon: Daemon) -> None:
    directory = daemon.agent_dir("x")
    with begin(daemon) as first, Viewer(daemon, "x", look=True) as second:
        second.wait_for("1-first")
        first.leave()
        wait_until(lambda: ("1", "detached") in events(daemon, "x"), "it is told")
        second.enter("exit\n")  # which it may not
        with Viewer(daemon, "x") as third:
            assert third.said["viewer"] == 3
            say(third, "again")
            third.enter("exit\n")
            assert [each.wait_over() for each in (second, third)] == ["exit 0"] * 2
    wait_dead(directory)
    assert (read(directory, "result.md"), read(directory, "log").count("\n")) == ("", 1)
    assert "1-again" in read(directory, "out")


def test_a_window_that_is_closed_hangs_up(daemon: Daemon) -> None:
    with begin(daemon):
        pass
    wait_gone(daemon, "x")
    assert events(daemon, "x") == [("1", ROOT), ("1", "closed")]


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGSTOP])
def test_it_does_so_without_a_daemon(daemon: Daemon, ended: signal.Signals) -> None:
    begun = 0.0
    with begin(daemon):
        if ended == signal.SIGKILL:
            daemon.kill()
        else:
            os.kill(daemon.pid, signal.SIGSTOP)
        begun = time.monotonic()
    try:
        wait_until(lambda: not programs(daemon, "x"), "its processes are gone")
        assert time.monotonic() - begun < TIMEOUT
    finally:
        if ended == signal.SIGKILL:
            daemon.start()
        else:
            os.kill(daemon.pid, signal.SIGCONT)
    wait_gone(daemon, "x")


def test_a_session_outlives_daemons_and_each_knows_what_was_wanted(
    daemon: Daemon, opened: ExitStack
) -> None:
    kept = opened.enter_context(begin(daemon, "kept", remove=False))
    gone = opened.enter_context(begin(daemon, "gone"))
    left = opened.enter_context(begin(daemon, "left"))
    daemon.kill()
    say(kept, "meanwhile")
    left.leave()
    daemon.start()
    for viewer in (kept, gone):
        say(viewer, "after")
    assert _used(daemon) == 2
    with Viewer(daemon, "kept") as another:
        assert another.said["viewer"] == 2
    gone.end.close()
    wait_gone(daemon, "gone")
    kept.end.close()
    wait_dead(daemon.agent_dir("kept"))
    assert read(daemon.agent_dir("kept"), "reason") == "hangup\n"
    with Viewer(daemon, "left") as viewer:
        viewer.enter("exit\n")
        viewer.wait_over()
    wait_dead(daemon.agent_dir("left"))


def _used(daemon: Daemon) -> int:
    """Connections of uid 0, but for that which asks."""
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    [use] = [row["use"] for row in rows if (row["owner"], row["account"]) == (0, "connections")]
    return int(use) - 1


@pytest.mark.alone
def test_ten_who_type_notice_nothing_of_a_daemon_that_is_executed_again(opened: ExitStack) -> None:
    """Not one byte is lost, told twice, or a second late; and each is known to the next daemon."""
    with replaceable(config="grace: 10m\n") as daemon:
        names = [f"x{number}" for number in range(10)]
        viewers = echoing(opened, daemon, *names)
        with Typing(viewers) as typing:
            typing.go_on(50)
            for _ in range(2):
                daemon.reexec()
                typing.go_on(50)
        assert typing.latest < LATE
        for viewer in viewers:
            viewer.end.close()
        for directory in map(daemon.agent_dir, names):
            wait_dead(directory)
            assert read(directory, "reason") == "hangup\n"
            assert (directory / "out").read_bytes().decode() == typing.echoed


def test_what_is_paused_says_so_and_an_abort_is_another_terminal(daemon: Daemon) -> None:
    directory = daemon.agent_dir("x")
    with begin(daemon) as viewer:
        write(directory / "ctl", "pause")
        viewer.wait_notice("paused")
        viewer.enter("echo $((2))-late\n")
        write(directory / "ctl", "resume")
        viewer.wait_for("2-late\r\n")
        write(directory / "ctl", "abort")
        assert viewer.wait_over() == "aborted"
    wait_status(directory, "paused")
    wait_until(lambda: not read(directory, "run"), "the run is over")
    with pytest.raises(PermissionError, match="EBUSY"):
        Viewer(daemon, "x")
    write(directory / "ctl", "resume")
    wait_status(directory, "busy")
    with Viewer(daemon, "x", hangup=True) as viewer:
        say(viewer, "again")
    wait_dead(directory)
    assert read(directory, "reason") == "hangup\n"


def test_a_stop_of_a_shell_does_not_take_its_grace(daemon: Daemon) -> None:
    directory = daemon.agent_dir("x")
    with begin(daemon, hangup=False, remove=False) as viewer:
        write(directory / "ctl", "stop")
        wait_dead(directory)
        assert viewer.wait_over().startswith("signal")
    assert read(directory, "reason") == "operator_stop\n"


def test_a_shell_in_an_agent_goes_with_its_window_or_at_its_end(daemon: Daemon) -> None:
    directory = daemon.run("x", "cat", mode="turn")
    wait_status(directory, "idle")
    for way in ("exit", "close", "kill ctxd"):
        task = directory / "task" / "enter-1"
        task.mkdir()
        write(task / "cmd", SHELL)
        write(task / "tty", "80x24")
        wanted = {"start": True, "hangup": True, "remove": True}
        with Viewer(daemon, "x", task="enter-1", **wanted) as viewer:
            assert viewer.said == {"type": "terminal", "agent": "x", "task": "enter-1", "viewer": 1}
            say(viewer, "inside")
            if way == "exit":
                viewer.enter("exit 4\n")
                assert viewer.wait_over() == "exit 4"
            elif way == "kill ctxd":
                daemon.kill()
        if way == "kill ctxd":
            daemon.start()
        wait_until(lambda at=task: not at.exists(), "it is removed")  # type: ignore[misc]
    assert (read(directory, "status"), read(directory, "queue")) == ("idle\n", "")


def test_what_has_no_terminal_says_what_opens_one(daemon: Daemon) -> None:
    directory = daemon.run("x", "sleep 1000")
    wait_status(directory, "busy")
    with pytest.raises(PermissionError, match=r"EOPNOTSUPP.*ctx enter x"):
        Viewer(daemon, "x")
    write(directory / "ctl", "kill")


def test_what_cannot_begin_says_why(daemon: Daemon) -> None:
    make(daemon, program="/none")
    with Viewer(daemon, "x", start=True, hangup=True) as viewer:
        assert viewer.wait_over().startswith("failed")
    wait_dead(daemon.agent_dir("x"))
    assert read(daemon.agent_dir("x"), "reason").startswith("start_failed")


#: reads what its shell would read, and says it; the mark is said in another way than it is typed
LEFT = """
import os, select, termios, tty
tty.setraw(0, termios.TCSANOW)
left = b""
while select.select([0], [], [], 0.3)[0]:
    left += os.read(0, 4096)
print("left:", left, end="." * 3)
"""
#: writes what is in a file once it is told to, byte by byte
WRITES = """
import os, sys, tty
tty.setraw(0)  # or what is typed would be in the midst of it
os.write(1, b"ready\\r\\n")
os.read(0, 4096)
for byte in open(sys.argv[1], "rb").read():
    os.write(1, bytes((byte,)))
os.write(1, b"\\nall\\r\\n" + 100 * b"\\x1b[6n\\x1b[c")
while sys.argv[2:] and os.read(0, 4096):
    pass
"""
PYTHON = f"{sys.executable} -IS"


@pytest.mark.parametrize("way", ["run", "attach", "enter"])
def test_a_hostile_program_reaches_nothing_but_the_screen(daemon: Daemon, way: str) -> None:
    """A person's terminal obeys and answers everything; some is split at each byte."""
    hostile = daemon.root.parent / "hostile"
    hostile.mkdir()
    (hostile / "writes").write_text(WRITES)
    (hostile / "bytes").write_bytes(b"".join(HOSTILE[::19]))
    program = f"python3 {hostile}/writes {hostile}/bytes{' stay' * (way == 'attach')}"
    ctx = f"{PYTHON} {daemon.root}/bin/ctx"
    command = {
        "run": f"{ctx} run --tty --mount {hostile} x -- {program}",
        "attach": f"{ctx} attach x",
        "enter": f"{ctx} enter x -- {program}",
    }[way]
    if way != "run":
        directory = make(daemon, program=program if way == "attach" else SHELL)
        write(directory / "mount", f"{hostile} {hostile} ro")
        write(directory / "ctl", "start")
        wait_status(directory, "busy")
    emulator = Emulator(_12=True, _1007=True)
    before = emulator.state()
    env = {"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"], "TERM": "xterm",
           "LANG": "C.UTF-8"}  # fmt: skip
    at = Terminal(["sh", "-c", f"{command}; {PYTHON} -c '{LEFT}'"], env, emulator=emulator)
    try:
        at.wait_for("ready\r\n")
        at.type("\r")
        at.wait_for("\nall\r\n")
        if way == "attach":  # else its end comes before the last answers
            at.type("\x1dd")
        at.wait_for("...")
        assert "left: b''..." in at.shown
        assert at.end() == 0
    finally:
        at.close()
    assert (emulator.beyond, emulator.state()) == ([], before)
    assert emulator.asked > 1
    assert emulator.titles and all(title.startswith("[x] ") for title in emulator.titles)
