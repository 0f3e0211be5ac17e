"""Programs that draw on a terminal, in cells of every kind: as agents, and where agents are.

Each gets Ctrl-Z with no shell above it, is told of another size, typed at, left, found again in a
smaller window, and ended. `make test` has each program and each kind of cell; other pairs of them
are marked `long`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.system.test_at_terminals import BASH, client_of, programs
from tests.worlds.daemon import Daemon, daemon_of, read, wait_status, wait_until
from tests.worlds.distant import distant
from tests.worlds.ordinary import UID, OrdinaryDaemon, ordinary_daemon
from tests.worlds.screens import Terminal, terminal

CTX: Final = Path(sys.executable).with_name("ctx")
PORT: Final = 2222


@dataclass(frozen=True, slots=True)
class Program:
    """What somebody does with a program; what it shows then are patterns."""

    command: str
    #: once it is there
    shows: str
    #: what is typed at 90 columns and 20 lines, and what it shows after each
    types: tuple[tuple[tuple[str, ...], str], ...]
    #: in a window of 60 columns and 15 lines in which it is found again
    again: str
    #: to end it
    leaves: tuple[str, ...]


def says(size: str) -> tuple[tuple[str, ...], str]:
    """A shell is told to say when its terminal has a size."""
    loop = f'until [ "$(stty size)" = "{size}" ]; do :; done; echo $((40+2))'
    return (loop, "Enter"), "^42$"


UNTIL: Final = "import os; print(any(0 for _ in iter(os.get_terminal_size, (90, 20))), 40+2)"
PROGRAMS: Final = {
    "bash": Program(BASH, "bash-", (says("20 90"),), "^42$", ("exit", "Enter")),
    "vim": Program(
        "vim -u NONE /tmp/note", "^~",
        ((("ihello", "Escape"), "^hello\n(~ *\n){18}(?!~)"),),
        "^hello\n(~ *\n){13}(?!~)", (":q!", "Enter"),
    ),
    "less": Program(
        "less /etc/services", "^tcpmux", ((("G",), r"\A(.*\n){19}\(END\)"),),
        r"\A(.*\n){14}(:|\(END\))", ("q",),
    ),
    "top": Program("top", "load average", ((("V",), "`- (.*)top"),), "load average", ("q",)),
    "python": Program(
        "python3 -q", "^>>>",
        ((("C-c",), "^KeyboardInterrupt"),
         ((UNTIL, "Enter"), "^False 42$")),
        "^>>>", ("exit()", "Enter"),
    ),
    "tmux": Program("tmux -f /dev/null new sh", r"^\[0\]", (says("19 90"),),
                    r"\A(.*\n){14}\[0\]", ("exit", "Enter")),
    "ssh": Program("", "bash-", (says("20 90"),), "^42$", ("exit", "Enter")),
}  # fmt: skip
#: drops a key that is typed when a signal comes, such as that of another size
DROPS: Final = "less"
#: the status of an agent that only waits, by its mode
STATUS: Final = {"once": "busy", "turn": "idle", "resident": "ready"}
RUN: Final = "run --tty {} it --"
ENTER: Final = "enter it --"
Files = dict[str, str]
#: by kind of cell: the words before a program, and the agents that are there before, with files
CELLS: Final[dict[str, tuple[str, dict[str, Files]]]] = {
    "agent": (RUN, {}),
    "shared_agent": (RUN.format("--set iso=shared {}"), {}),
    "child_agent": (RUN.format("--parent boss {}"), {"boss": {}}),
    "agent_without_root": (RUN, {}),
    "once": (ENTER, {"it": {}}),
    "turn": (ENTER, {"it": {"mode": "turn"}}),
    "resident": (ENTER, {"it": {"mode": "resident"}}),
    "shared": (ENTER, {"it": {"iso": "shared"}}),
    "child": (ENTER, {"boss": {}, "it": {"parent": "agent:boss", "mode": "turn"}}),
    "child_without_root": (ENTER, {"boss": {}, "it": {"parent": "agent:boss"}}),
}
FEW: Final = {
    "agent": "ssh", "shared_agent": "top", "child_agent": "less", "agent_without_root": "python",
    "once": "bash", "shared": "vim", "child": "tmux",
}  # fmt: skip


@contextmanager
def shell_of(daemon: Daemon) -> Iterator[Terminal]:
    """A shell outside of all agents, of whom the daemon is."""
    shell = ["sh"]
    if isinstance(daemon, OrdinaryDaemon):
        own = f'chown {UID} "$(tty)"; exec "$@"'
        shell = ["sh", "-c", own, "sh", *daemon.run_as_user("sh")]
    with terminal(80, 24, {"CTX_ROOT": str(daemon.root), "PS1": "shell$ "}, shell) as at:
        yield at


def begin(daemon: Daemon, name: str, files: Files) -> None:
    """An agent in whose cell the program is to be, or its parent."""
    given = {file: text.format(name) for file, text in files.items()}
    status = STATUS[files.get("mode", "once")]
    wait_status(daemon.run(name, "sleep 1000", **given), status)


def sees(at: Terminal, pattern: str, *keys: str) -> None:
    """Waits for a pattern on the screen, and types keys until it is there."""

    def is_there(screen: str) -> bool:
        found = re.search(pattern, screen, re.M) is not None
        if keys and not found:
            at.type(*keys)
        return found

    at.wait(is_there, pattern)


@pytest.mark.parametrize(
    ("program", "cell"),
    [
        pytest.param(program, cell, marks=() if FEW.get(cell) == program else pytest.mark.long)
        for cell in CELLS
        for program in PROGRAMS
    ],
)
def test_a_program_is_as_if_typed_bare(program: str, cell: str) -> None:
    does, (words, agents) = PROGRAMS[program], CELLS[cell]
    command, config, more = does.command, "", ""
    given: Files = {}
    with ExitStack() as stack:
        if program == "ssh":
            far = stack.enter_context(distant())
            socket = stack.enter_context(far.listening())
            config = f"networks: {{far: {{socket: {socket}, port: {PORT}}}}}\n"
            command = shlex.join([*far.command("-tt", f"-p{PORT}"), BASH])
            policy, key = "allow {}_t network:far connect", far.directory
            given = {"policy": policy, "mount": f"{key} {key} ro"}
            if cell.startswith("shared"):  # ssh(1) runs for nobody whom the host does not know
                given |= {"uid": "2", "gid": "2"}
            sets = {name: text.format("it") for name, text in given.items() if name != "mount"}
            more = shlex.join([*(f"--set={name}={text}" for name, text in sets.items()),
                               "--mount", str(key)])
        elif shutil.which(command.split()[0]) is None:
            pytest.skip(f"needs {command.split()[0]}")
        made = ordinary_daemon if cell.endswith("without_root") else daemon_of
        daemon = stack.enter_context(made(config=config))
        at = stack.enter_context(shell_of(daemon))
        for name, files in agents.items():
            beginning = partial(begin, daemon, name, {**given, **files})
            daemon.do(beginning) if isinstance(daemon, OrdinaryDaemon) else beginning()
        before = at.tty(), at.state()
        at.run(f"clear; {CTX} {words.format(more)} {command}; echo ended: $?")
        sees(at, does.shows)
        if program not in (DROPS, "top"):  # which does not always go on, bare and continued, either
            at.type("C-z")
        at.resize(90, 20)
        for keys, answer in does.types:
            at.type(*keys)
            sees(at, answer, *(keys if program == DROPS else ()))
        at.type("C-]", "d")
        at.wait_for("which goes on; come back: ctx attach it")
        assert (at.tty(), at.state()) == before
        at.resize(60, 15)
        task = "/enter-1" if words == ENTER else ""
        at.run(f"clear; {CTX} attach it{task}; echo ended: $?")
        sees(at, does.again)
        at.type(*does.leaves)
        sees(at, "ended: 0", *(does.leaves if program == DROPS else ()))
        assert (at.tty(), at.state()) == before


def test_a_program_that_stops_goes_on(daemon: Daemon) -> None:
    """There is no shell above it that could say so."""
    with shell_of(daemon) as at:
        at.run(f"{CTX} run --tty it -- less /etc/services; echo ended: $?")
        sees(at, "^tcpmux")
        at.type("C-z")
        sees(at, r"\(END\)", "G")
        sees(at, "ended: 0", "q")


def looking(daemon: Daemon, name: str) -> int:
    """How many look at the terminal of an agent."""
    rows = map(json.loads, read(daemon.root, "agents").splitlines())
    return sum(row.get("viewers", 0) for row in rows if row["name"] == name)


def test_from_another_machine_by_ssh(daemon: Daemon) -> None:
    """A connection that is cut ends what was run by it, and nothing else."""
    with distant() as far, shell_of(daemon) as at:
        ctx = shlex.join([*far.here, "-tt", f"CTX_ROOT={daemon.root}", str(CTX)])
        before = at.tty(), at.state()
        wait_status(daemon.run("kept", BASH, tty="80x24"), "busy")
        at.run(f"clear; {ctx} attach kept; echo ended: $?")
        sees(at, "bash-")
        at.resize(90, 20)
        at.type(*says("20 90")[0])
        sees(at, says("20 90")[1])
        at.type("C-]", "d")
        at.wait_for("come back: ctx attach kept", "ended: 0")
        assert (at.tty(), at.state()) == before
        for name, command in (("kept", "attach kept"), ("gone", f"run --tty gone -- {BASH}")):
            at.run(f"clear; {ctx} {command}; echo ended: $?")
            wait_until(lambda of=name: looking(daemon, of) == 1, "it is looked at")  # type: ignore[misc]
            os.kill(client_of(at), signal.SIGKILL)
            at.wait_for("ended: 137")
            at.type("C-j", "stty sane", "C-j")  # which ssh could not do any more
            wait_until(lambda of=name: looking(daemon, of) == 0, "nobody looks")  # type: ignore[misc]
        # within which time: test_deaths_at_terminals.py
        wait_until(lambda: not programs(daemon, "gone"), "nothing is left of what it ran")
        wait_until(lambda: not daemon.agent_dir("gone").exists(), "it is removed")
        assert read(daemon.agent_dir("kept"), "status") == "busy\n"
