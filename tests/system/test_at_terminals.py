"""Programs of agents at a person's terminal, which is tmux: run --tty, attach, enter, top."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    Daemon,
    alive,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.screens import Terminal, terminal
from tests.worlds.terminal import Terminal as BareTerminal
from tests.worlds.terminal import terminal as bare_terminal
from tests.worlds.viewers import Viewer
from tests.worlds.whose import OTHER

CTX = Path(sys.executable).with_name("ctx")
BASH = "bash --norc --noprofile"


@pytest.fixture
def at(daemon: Daemon) -> Iterator[Terminal]:
    """A shell at a terminal."""
    with terminal(80, 24, {"CTX_ROOT": str(daemon.root), "PS1": "shell$ "}) as opened:
        yield opened


def programs(daemon: Daemon, name: str) -> list[int]:
    """What runs of an agent, wherever it is in the cgroups."""
    found: list[int] = []
    for path, below, _ in os.walk(daemon.cgroup.path):
        below[:] = [each for each in below if each != "monitor"]
        if f"/agent-{name}/" in f"{path}/":
            with suppress(OSError):
                found += Cgroup(path).processes()
    return found


def client_of(at: Terminal) -> int:
    """The client that the shell runs."""
    shell = at.tmux("display-message", "-p", "#{pane_pid}").strip()
    children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return int(children[-1])


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


def test_a_shell_is_as_if_typed_bare(daemon: Daemon, at: Terminal) -> None:
    before = at.tty(), at.state()
    at.run(f"{CTX} run --tty sh -- {BASH}; echo ended: $?")
    at.wait_for("bash-")
    at.run("tty; stty size; echo $TERM $CTX_AGENT")
    at.wait_for("/dev/pts/0", "24 80", "screen-256color sh")
    at.resize(100, 30)
    at.run("stty size")
    at.wait_for("30 100")
    at.run("sleep 1000")
    wait_until(lambda: len(programs(daemon, "sh")) > 2, "it sleeps")
    at.type("C-c")
    at.wait_for("^C")
    at.run("echo status $?")
    at.wait_for("status 130")
    at.run("sleep 1001")
    at.wait_for("sleep 1001")
    at.type("C-z")
    at.wait_for("Stopped")
    at.run("kill -9 %1; wait %1; exec sh -c 'exit 7'")  # of a stopped job, it would not leave
    at.wait_for("ended: 7")
    assert (at.tty(), at.state()) == before
    assert not daemon.agent_dir("sh").exists()


def test_a_closed_window_leaves_nothing(daemon: Daemon, at: Terminal) -> None:
    for name, close in (("one", "kill-pane"), ("two", "")):
        at.tmux("new-window", f"env CTX_ROOT={daemon.root} {CTX} run --tty {name} -- {BASH}")
        at.wait_for("bash-")
        agent = daemon.agent_dir(name)
        wait_status(agent, "busy")
        pids = programs(daemon, name)
        assert pids
        if close:
            at.tmux("kill-pane")
        else:
            os.kill(int(at.tmux("display-message", "-p", "#{pane_pid}")), signal.SIGKILL)
        # within which time: test_deaths_at_terminals.py
        wait_until(lambda name=name: not programs(daemon, name), "nothing is left")  # type: ignore[misc]
        wait_until(lambda agent=agent: not agent.exists(), "the agent is removed")  # type: ignore[misc]


def test_who_leaves_comes_back_at_another_size(daemon: Daemon, at: Terminal) -> None:
    needs("vim")
    before = at.tty(), at.state()
    at.run(f"{CTX} run --tty ed -- vim -u NONE --cmd 'set ttymouse=sgr mouse=a' note")
    at.wait_for("~", "note")
    at.type("i")
    at.run("first line")
    at.wait_for("first line")
    assert at.state()[0] == "1"
    at.type("C-]", "d")
    at.wait_for("left ed, which goes on; come back: ctx attach ed", "shell$")
    assert (at.tty(), at.state()) == before
    wait_status(daemon.agent_dir("ed"), "busy")
    with terminal(60, 15, {"CTX_ROOT": str(daemon.root)}) as other:
        other.run(f"{CTX} attach ed; echo ended: $?")
        other.wait(
            lambda screen: (
                re.search(r"^first line\n", screen) and len(re.findall("^~", screen, re.M)) > 8
            ),
            "the text, and the rest of a smaller screen",
        )
        assert other.state()[0] == "1" and other.state()[4] == "1"
        other.type("-l", "second")
        other.wait_for("second")
        assert "tty:1" in daemon.ctx("ps").stdout
        assert "(tty:1)" in daemon.ctx("tree").stdout
        assert "Terminal: 80x24, 1 look at it" in daemon.ctx("status", "ed").stdout
        other.type("Escape")
        other.run(":q!")
        other.wait_for("ended: 0")
        assert other.state()[0] == "0" and other.state()[4] == "0"
    wait_dead(daemon.agent_dir("ed"))


#: draws the size of its terminal, anew whenever that changes
DRAWS = (
    "sh -c 'stty -echo; draw() { printf \"\\033[H\\033[J%s.\" \"$(stty size)\"; }; "
    "trap draw WINCH; draw; while :; do sleep 0.05; done'"
)


def test_two_windows_have_the_size_of_who_typed_or_resized_last(
    daemon: Daemon, at: Terminal
) -> None:
    wait_status(daemon.run("it", DRAWS, tty="80x24"), "busy")
    with terminal(60, 15, {"CTX_ROOT": str(daemon.root), "PS1": "other$ "}) as other:

        def both_have(size: str) -> None:
            for each in (at, other):
                each.wait(lambda screen: screen.strip() == f"{size}.", f"nothing but {size}")

        at.run(f"clear; {CTX} attach it")
        at.wait_for("24 80.")
        other.run(f"clear; {CTX} attach it")
        both_have("15 60")
        at.type("x")
        both_have("24 80")
        other.resize(50, 12)
        both_have("12 50")
        at.resize(90, 30)
        both_have("30 90")
        other.type("x")
        both_have("12 50")
        other.type("C-]", "d")
        other.wait_for("left it, which goes on")
        at.type("x")
        at.wait_for("30 90.")


#: Ctrl-], as terminals tell of it; and what cat -v shows of that
LEAVE = {"\x1d": "^]", "\x1b[93;5u\x1b[93;5:3u": "^[[93;5u", "\x1b[27;5;93~": "^[[27;5;93~"}


def test_the_key_that_leaves_is_found_however_a_terminal_tells_of_it(daemon: Daemon) -> None:
    agent = daemon.run("it", "sh -c 'stty raw -echo; echo ready; exec cat -v'", tty="80x24")
    wait_status(agent, "busy")
    for number, (key, shown) in enumerate(LEAVE.items()):
        with bare_terminal(daemon.root, "attach", "it") as person:
            person.wait_for("ready")
            person.type(f"{key}?")
            person.wait_for("Ctrl-] d leaves, Ctrl-] Ctrl-] types Ctrl-]")
            person.type(f"{number}a{key}{key}b")
            person.wait_for(f"{number}a{shown}b")
            person.type(f"c{key}d")
            assert person.end() == 0
    with bare_terminal(daemon.root, "attach", "--leave-key", "^A", "it") as person:
        person.type("\x1dd\x01\x01")
        person.wait_for("^]d^A")
        person.type("\x01d")
        assert person.end() == 0
    typed = "".join(f"{number}a{shown}bc" for number, shown in enumerate(LEAVE.values()))
    assert read(agent, "out").split() == ["ready", f"{typed}^]d^A"]
    assert read(agent, "status") == "busy\n"


def test_what_could_harm_a_terminal_is_shown_if_it_is_wished(daemon: Daemon) -> None:
    harm = r"\033]52;c;aGk=\007"
    program = f"sh -c 'stty -echo; while read -r x; do printf \"{harm}\"; echo got $x; done'"
    wait_status(daemon.run("it", program, tty="80x24"), "busy")
    for word, options in ("tame", ()), ("all", ("--raw",)):
        with bare_terminal(daemon.root, "attach", *options, "it") as person:
            person.type(f"{word}\r")
            person.wait_for(f"got {word}")
            person.type("\x1dd")
            assert person.end() == 0
            assert ("\x1b]52;c;aGk=\x07" in person.shown) == (word == "all")


def test_a_paste_is_one_piece_after_attaching(daemon: Daemon, at: Terminal) -> None:
    agent = daemon.run("sh", BASH, tty="80x24")
    wait_status(agent, "busy")
    at.run(f"{CTX} attach sh")
    at.wait_for("bash-")
    at.tmux("set-buffer", "echo one\necho two")
    at.tmux("paste-buffer", "-p")
    screen = at.wait_for("echo two")
    assert not re.search("^one", screen, re.M)
    at.type("Enter")
    at.wait(lambda screen: re.search("^one\ntwo", screen, re.M), "both commands were run")


def test_no_key_is_lost_when_a_window_is_resized(daemon: Daemon, at: Terminal) -> None:
    at.run(f"{CTX} run --tty it -- sh -c 'stty -echo; echo go; cat'; echo ended: $?")
    at.wait_for("\ngo")
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    for number, char in enumerate(text):
        at.type(char)
        at.resize(70 + number % 3, 24)
    at.type("Enter")
    at.wait_for(f"\n{text}\n")
    at.type("C-d")
    at.wait_for("ended: 0")


def test_a_program_asks(daemon: Daemon, at: Terminal) -> None:
    before = at.tty(), at.state()
    at.run(f"{CTX} run --tty it -- python3 -q -c 'print(input(\"na\" \"me? \"))'; echo ended: $?")
    at.wait_for("name?")
    at.run("x")
    at.wait_for("name? x\nx\n", "ended: 0")
    assert (at.tty(), at.state()) == before


def test_what_a_program_asks_is_not_typed_to_the_shell(daemon: Daemon, at: Terminal) -> None:
    asks = r"\033[6n\033[c\033[>c\033[>q\033]11;?\007\033[5n\033]52;c;aGk=\007\033[?1000h\033[5i"
    script = f'i=0; while [ $i -lt 30 ]; do printf "{asks}"; i=$((i+1)); done'
    agent = daemon.make("evil", f"sh -c {script!r}", tty="80x24")
    assert agent.exists()
    before = at.tty(), at.state()
    at.run(f"{CTX} run --tty bad -- sh -c '{script}'; echo ended: $?")
    at.wait_for("ended: 0")
    at.run("echo $((6*7))")
    screen = at.wait_for("42")
    assert "shell$ echo $((6*7))\n42" in screen, screen
    assert (at.tty(), at.state()) == before


def test_a_shell_where_an_agent_is(daemon: Daemon, at: Terminal) -> None:
    agent = daemon.run("coder", "sleep 1000")
    wait_status(agent, "busy")
    at.run(f"{CTX} enter coder -- {BASH}; echo ended: $?")
    at.wait_for("bash-")
    at.run("echo I am $CTX_AGENT at $(tty); ls /proc | grep -c '^[0-9]'")
    at.wait_for("I am coder at /dev/pts/")
    assert (agent / "task" / "enter-1").is_dir()
    at.run("exit 5")
    at.wait_for("ended: 5")
    assert not (agent / "task" / "enter-1").exists()
    at.run(f"{CTX} enter coder")
    wait_until(lambda: (agent / "task" / "enter-1").exists(), "the second one")
    wait_status(agent / "task" / "enter-1", "running")
    os.kill(client_of(at), signal.SIGKILL)
    wait_until(lambda: not (agent / "task" / "enter-1").exists(), "it went with its client")
    assert read(agent, "status") == "busy\n"
    # a client that is killed cannot restore the terminal
    at.tmux("send-keys", "-l", "\nstty sane; echo restored: $?\n")
    at.wait_for("restored: 0")
    at.run(f"{CTX} enter coder")
    wait_until(lambda: (agent / "task" / "enter-1").exists(), "the third one")
    wait_status(agent / "task" / "enter-1", "running")
    at.type("C-]", "d")
    at.wait_for("come back: ctx attach coder/enter-1")
    at.run(f"{CTX} attach coder/enter-1")
    at.wait_for("at the terminal of coder/enter-1; Ctrl-] d leaves it running")
    at.run("exit")
    wait_until(lambda: not (agent / "task" / "enter-1").exists(), "it has ended")


def test_the_key_of_top(daemon: Daemon, at: Terminal) -> None:
    agent = daemon.run("sh", f"{BASH}", tty="80x24")
    wait_status(agent, "busy")
    at.run(f"{CTX} top; echo ended: $?")
    at.wait_for("q quit", "sh")
    at.type("t")
    at.wait_for("bash-")
    at.run("echo $((40+2))")
    at.wait_for("42")
    at.type("C-]", "d")
    at.wait_for("q quit")
    at.type("q")
    at.wait_for("ended: 0")
    assert alive(int(read(agent, "pid")))


def test_bytes_go_both_ways_without_a_terminal(daemon: Daemon) -> None:
    agent = daemon.run("cat", "cat", tty="80x24")
    wait_status(agent, "busy")
    (agent.parent.parent / "error").read_text()
    done = daemon.ctx("attach", "cat", stdin=None, input="hello\n")
    assert done.returncode == 0
    wait_until(lambda: read(agent, "out").count("hello") == 2, "it was echoed, and written")
    wait_status(agent, "busy")


def test_who_may_not_is_told(daemon: Daemon, at: Terminal) -> None:
    plain = daemon.run("plain", "sleep 1000")
    busy = daemon.run("sh", BASH, tty="80x24")
    wait_status(plain, "busy")
    wait_status(busy, "busy")
    done = daemon.ctx("attach", "--look", "plain")
    assert done.returncode == 1 and "ctx enter" in done.stderr
    done = daemon.ctx("run", "--tty", "x", "--", "true")
    assert done.returncode == 2 and "ctx spawn --tty" in done.stderr
    assert daemon.ctx("attach", "nobody").returncode == 69
    assert daemon.ctx("enter", "nobody").returncode == 69
    assert daemon.ctx("pause", "plain").returncode == 0
    wait_status(plain, "paused")
    at.run(f"{CTX} enter plain; echo ended: $?")
    at.wait_for("plain is paused; continue it first: ctx resume plain", "ended: 69")
    at.run(f"{CTX} run --tty sh -- true; echo ended: $?")
    at.wait_for("be at its terminal with: ctx attach sh", "ended: 1")
    with ExitStack() as stack:
        for _ in range(8):
            stack.callback(Viewer(daemon, "sh", look=True).end.close)
        at.run(f"clear; {CTX} attach sh; echo ended: $?")
        at.wait_for("EDQUOT", "ended: 1")


#: which everybody can execute
PYTHON = "/usr/bin/python3"


@pytest.mark.needs_root("everything has the ids of agents")
def test_only_operators_attach(daemon: Daemon) -> None:
    """Neither another user, nor an agent, whoever's it is: each is told who may."""
    sh = daemon.run("sh", BASH, tty="80x24")
    plain = daemon.run("plain", "sleep 1000")
    task = daemon.run("host", "cat", mode="turn") / "task" / "shell"
    task.mkdir()
    for file, text in {"cmd": BASH, "tty": "80x24"}.items():
        write(task / file, text)
    wait_status(task.parents[1], "idle")
    write(task / "ctl", "start")
    wait_status(task, "running")
    for agent in (sh, plain):
        wait_status(agent, "busy")
    words = (
        ("attach", "sh"), ("attach", "--look", "sh"), ("attach", "plain"),
        ("attach", "--look", "plain"), ("attach", "host/shell"), ("enter", "plain"),
    )  # fmt: skip
    only = "only its operators may"
    env = {"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"]}
    for each in words:
        ids = ("setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups")
        stranger = BareTerminal([*ids, PYTHON, f"{daemon.root}/bin/ctx", *each], env)
        try:
            assert stranger.end() == 13, stranger.shown
        finally:
            stranger.close()
        assert only in stranger.shown
    script = "; ".join(f"ctx {shlex.join(each)} 2>&1; echo exit $?" for each in words)
    told = read(daemon.finish("inside", f"sh -c {shlex.quote(script)}"), "out").splitlines()
    assert told[1::2] == ["exit 13"] * len(words), told
    assert all(only in line or "only operators attach" in line for line in told[::2]), told


def test_spawned_with_a_terminal(daemon: Daemon) -> None:
    done = daemon.ctx("spawn", "--tty=100x30", "--wait", "--rm", "x", "--", "stty", "size")
    assert (done.returncode, done.stdout) == (0, "30 100\n"), done.stderr
    done = daemon.ctx("spawn", "--tty", "y", "--", "sleep", "1000")
    assert done.returncode == 0, done.stderr
    assert read(daemon.agent_dir("y"), "tty") == "80x24\n"
    done = daemon.ctx("spawn", "--tty=80", "z", "--", "true")
    assert done.returncode == 1 and "COLSxROWS" in done.stderr
