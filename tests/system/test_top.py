"""``ctx top`` in a terminal, with a real daemon."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.screens import Terminal, lines_with, terminal

CTX = Path(sys.executable).with_name("ctx")
FOOTER = "q quit"
#: an agent that would change the title, the colours and the place of the cursor
EVIL = r"printf '\''\033]0;evil\007\033[31m\033[2Jred\r\n'\''"


@contextmanager
def top(daemon: Daemon, **environment: str) -> Iterator[Terminal]:
    """A terminal in which the shell has run ``ctx top``."""
    with terminal(80, 24, {"CTX_ROOT": str(daemon.root), **environment}) as opened:
        opened.run(f"{CTX} top; echo ended: $?")
        opened.wait_for(FOOTER)
        yield opened


def line_of(screen: str, name: str) -> str:
    lines = [line for line in screen.splitlines() if re.search(rf"[^\w ] {name}\b", line)]
    return lines[0] if lines else ""


def test_a_family_is_shown_and_controlled(daemon: Daemon) -> None:
    boss = daemon.run("boss", f"sh -c '{EVIL}; echo fine > $CTX_SELF/result.md; exec sleep 1000'")
    wait_status(boss, "busy")
    kid = daemon.run("kid", "sleep 1000", parent="agent:boss")
    wait_status(kid, "busy")
    with top(daemon) as at:
        screen = at.wait_for("kid", "2 busy")
        assert screen.index("boss") < screen.index("└─● kid")
        at.wait(lambda now: re.search(r"boss +busy +[0-9.]+ +[0-9.]+[KM]", now), "what boss uses")
        at.wait(lambda now: "agent.status busy" in line_of(now, "kid"), "the last event of kid")
        at.type("Space")
        at.wait_for("boss [+1]")
        at.wait(lambda now: line_of(now, "kid") == "", "no line of kid")
        at.type("Space")
        at.wait_for("└─● kid")
        at.type("p")
        at.wait(lambda now: "paused" in line_of(now, "boss"), "a paused boss")
        assert read(boss, "status") == "paused\n"
        at.type("c")
        at.wait(lambda now: "busy" in line_of(now, "boss"), "a busy boss")
        at.type("c")
        at.wait_for("cannot resume: the agent is busy")
        at.type("r")
        assert "fine" in at.wait_for("result.md of boss", "fine")
        at.type("Escape")
        at.wait_for(FOOTER)
        at.type("l")
        at.wait_for(r"\x1b]0;evil\x07\x1b[31m\x1b[2Jred")
        at.type("Escape")
        at.wait_for(FOOTER)
        at.type("x")
        at.wait_for("Stop boss and the 1 agent below it?")
        at.type("n")
        at.wait_gone("Stop boss")
        assert read(boss, "status") == "busy\n"
        at.type("x")
        at.wait_for("Stop boss")
        at.type("y")
        at.wait_for("operator_stop", "parent_dead", "2 dead")
        assert read(boss, "reason") == "operator_stop\n"
        at.type("x")
        at.wait_for("boss is dead")
        at.type("?")
        at.wait_for("stop it, or kill it")
        at.type("q")
        at.wait_for(FOOTER)
        at.type("d")
        at.wait_for("dead ones hidden")
        at.wait_gone("parent_dead")
        at.type("q")
        at.wait_for("ended: 0")


def test_a_kill_takes_no_grace(daemon: Daemon) -> None:
    loop = "sh -c 'trap true TERM; while :; do sleep 1; done'"
    deaf = daemon.run("deaf", loop, limits="grace=1h")
    wait_status(deaf, "busy")
    with top(daemon) as at:
        at.wait_for("deaf")
        at.type("x")
        at.wait_for("Stop deaf?")
        at.type("K")
        wait_dead(deaf)
        at.wait_for("1 dead")


@pytest.mark.long
def test_a_text_of_very_many_lines_is_shown_at_once(daemon: Daemon) -> None:
    said = "head -c 65000 /dev/zero | tr '\\''\\0'\\'' '\\''\\n'\\''; echo last"
    coder = daemon.run("coder", f"sh -c '{said}; exec sleep 1000'")
    wait_until(lambda: (coder / "out").stat().st_size > 65000, "it has said all of it")
    with top(daemon) as at:
        at.wait_for("coder")
        at.type("l")
        at.wait_for("log and out of coder", "last")
        at.type("Home")
        at.wait_for("(63002 bytes before this are left out)")
        at.type("q")
        at.wait_for(FOOTER)


@pytest.mark.long
def test_it_leaves_the_terminal_as_it_was(daemon: Daemon) -> None:
    daemon.make("coder")
    with terminal(80, 24, {"CTX_ROOT": str(daemon.root)}) as at:
        at.run("echo before")
        at.wait_for("before")
        was = at.state(), at.tty()
        for end in ("q", "C-c", "TERM", "HUP"):
            at.run(f"clear; echo before; {CTX} top; echo ended: $?")
            at.wait_for("coder", FOOTER)
            assert at.state() != was[0]
            if end.isupper() and end.isalpha():
                shell = int(at.tmux("display-message", "-p", "#{pane_pid}"))
                tops = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
                os.kill(int(tops[0]), getattr(signal, f"SIG{end}"))
            else:
                at.type(end)
            screen = at.wait_for("before", "ended: ")
            assert "coder" not in screen, end
            assert (at.state(), at.tty()) == was, end
            status = {"TERM": 128 + signal.SIGTERM, "HUP": 128 + signal.SIGHUP}.get(end, 0)
            assert f"ended: {status}\n" in screen, end


def test_it_is_drawn_whole_when_it_goes_on(daemon: Daemon) -> None:
    daemon.make("coder")
    with top(daemon) as at:
        at.wait_for("coder")
        at.type("C-z")
        at.wait(lambda now: "Stopped" in now and FOOTER not in now, "the shell")
        at.run("fg")
        at.wait_for("NAME", "coder", FOOTER)
        at.type("q")
        at.wait_gone(FOOTER)


@pytest.mark.long
def test_three_hundred_agents_in_a_small_and_in_a_large_terminal(daemon: Daemon) -> None:
    for number in range(1, 301):
        daemon.make(f"a{number}")
    with top(daemon) as at:
        screen = at.wait_for("300 agents: 300 new", "a19")
        assert len(lines_with(screen, ["· a"])) == 21
        assert all(len(line) <= 80 for line in screen.splitlines())
        at.type("End")
        at.wait_for("a300")
        at.resize(200, 50)
        screen = at.wait_for("PROCS", "a300", FOOTER)
        assert "PROCS" not in line_of(screen, "a300")
        at.wait(lambda now: len(lines_with(now, ["· a"])) == 47, "47 agents")
        at.wait(lambda now: "agent.create" in line_of(now, "a300"), "the last event of a300")
        at.resize(80, 24)
        at.wait(lambda now: "PROCS" not in now and "a300" in now, "80 columns")
        at.type("Home")
        at.wait_for("a1 ")
        at.type("/", "2", "9", "9")
        screen = at.wait(lambda now: len(lines_with(now, ["· a"])) == 1, "what was found")
        assert "· a299" in screen
        at.resize(len(str(daemon.root)) + 30, 24)
        at.wait_for("(found: 299)")
        at.type("Escape")
        at.wait_for("· a298", "· a299")


def test_it_goes_on_when_the_daemon_is_back(daemon: Daemon) -> None:
    first = daemon.run("first", "sleep 1000")
    wait_status(first, "busy")
    with top(daemon) as at:
        at.wait(lambda now: "agent.status busy" in line_of(now, "first"), "the last event")
        daemon.kill()
        screen = at.wait_for("no ctxd since", "waiting for it: the ctxd of /tmp/")
        assert "first" in screen, "what was known stays"
        at.type("p")
        at.wait(lambda now: len(lines_with(now, ["no ctxd", "died"])) == 2, "why it is not paused")
        daemon.start()
        daemon.make("second")
        screen = at.wait_for("first", "second", "2 agents")
        at.wait_gone("no ctxd since")
        at.wait(lambda now: "agent.create" in line_of(now, "second"), "the event of second")
        write(first / "ctl", "pause")
        at.wait(lambda now: "agent.status pau" in line_of(now, "first"), "the event of first")
        at.type("q")
        at.wait_for("ended: 0")


@pytest.mark.long
def test_a_daemon_that_hangs_is_told_of(daemon: Daemon) -> None:
    kid = daemon.run("kid", "sleep 1000")
    wait_status(kid, "busy")
    with top(daemon) as at:
        at.wait_for("kid")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            at.wait_for("does not answer")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        at.wait_gone("does not answer")


@pytest.mark.long
def test_colours_are_left_out_if_they_are_not_wanted(daemon: Daemon) -> None:
    daemon.make("first")  # the line of the cursor has no colours
    wait_status(daemon.run("kid", "sleep 1000"), "busy")
    coloured = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])[;m]")
    cases: tuple[tuple[dict[str, str], bool], ...] = (
        ({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)
    )  # fmt: skip
    for environment, wanted in cases:
        with top(daemon, **environment) as at:
            at.wait_for("● kid")
            assert bool(coloured.search(at.screen("-e"))) is wanted


def test_agents_come_and_go(daemon: Daemon) -> None:
    daemon.make("stays")
    with top(daemon) as at:
        at.wait_for("1 agent: 1 new")
        comes = daemon.make("comes")
        at.wait_for("comes", "2 agents")
        comes.rmdir()
        at.wait_gone("comes")
        at.wait_for("1 agent: 1 new", "stays")


def test_the_client_of_sandboxes_says_what_it_lacks(daemon: Daemon) -> None:
    with terminal(120, 24, {"CTX_ROOT": str(daemon.root)}) as at:
        at.run(f"{sys.executable} -IS {daemon.root}/bin/ctx top; echo ended: $?")
        screen = at.wait_for("ended: 1")
        assert "top needs the installed client, and this is the one of sandboxes" in screen
        at.run(f"clear; TERM=dumb {CTX} top; echo ended: $?")
        at.wait_for("ended: 2", "TERM says that it has none")
    result = daemon.ctx("top")
    assert (result.returncode, result.stderr[:26]) == (2, "ctx: top needs a terminal;")


@pytest.mark.long
def test_its_waiting_costs_nothing(daemon: Daemon) -> None:
    """The list is read anew when it changes, and not before."""
    for number in range(100):
        daemon.make(f"a{number}")
    with top(daemon) as at:
        at.wait_for("100 agents", "agent.create")
        shell = int(at.tmux("display-message", "-p", "#{pane_pid}"))
        pid = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0]

        def read_bytes() -> int:
            text = Path(f"/proc/{pid}/io").read_text()
            return int(text.split("rchar: ")[1].split()[0])

        wait_until(lambda: "agent.create" in line_of(at.screen(), "a20"), "the events are read")
        size = len((daemon.root / "agents").read_bytes())
        before = read_bytes()
        for _ in range(3):  # the clock on the screen goes on
            at.wait_gone(at.screen().splitlines()[0].split()[-1])
        assert read_bytes() - before < size, "the list was read without a change"
        write(daemon.agent_dir("a0") / "meta.json", "{}")
        daemon.make("new")
        at.wait_for("101 agents")
        assert read_bytes() - before >= size


def test_a_question_is_answered(daemon: Daemon) -> None:
    program = "sh -c 'ctx ask -o yes -o no \"May I push?\"; ctx ask \"How\\x1b?\"'"
    asker = daemon.run("asker", program)
    with top(daemon) as at:
        at.wait_for("(1 question: a)")
        at.type("a")
        at.wait_for("asker/ask-1 asks", "May I push?", "question 1 of 1")
        at.type("maybe")
        at.wait(lambda screen: re.search("^maybe", screen, re.M), "what is typed")
        at.type("Enter")
        at.wait_for('"maybe" is no option; use yes, no')
        for _ in "maybe":
            at.type("BSpace")
        # it deletes in a later step than it inserts
        at.wait(lambda screen: not re.search("^m", screen, re.M), "nothing that is typed")
        at.type("yes")
        at.type("Enter")
        at.wait_for("answered asker/ask-1: yes")
        at.wait_for("asker/ask-2 asks")
        at.type("so")
        at.type("Enter")
        at.wait_for("(nothing is asked)")
        at.type("Escape")
        at.wait_for(FOOTER)
        at.type("q")
        at.wait_for("ended: 0")
    wait_dead(asker)
    assert read(asker, "out") == "yes\nso\n"
