"""Completion in real shells, each skipped where it is not installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.worlds.daemon import TIMEOUT, Daemon, wait_until
from tests.worlds.terminal import Terminal

CONTRIB = Path(__file__).parents[2] / "contrib" / "completion"
#: what each shell executes first
BEGINS = {
    "bash": f"source {CONTRIB}/ctx.bash; bind 'set enable-bracketed-paste off'",
    "zsh": f"fpath=({CONTRIB} $fpath); autoload -U compinit; compinit -u -D; unsetopt beep",
}
COMMANDS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
#: the begin of a command line, and what it becomes
COMPLETED = {
    "ctx quo": "ctx quota ",
    "ctx task outp": "ctx task output ",
    "ctx get cod": "ctx get coder-1 ",
    "ctx get coder-1 handof": "ctx get coder-1 handoff.md ",
    "ctx get coder-1 session/conte": "ctx get coder-1 session/context/",
    "ctx task show -a coder-1 comp": "ctx task show -a coder-1 compile ",
    "ctx work show --agent=coder-1 par": "ctx work show --agent=coder-1 parser ",
    "ctx spawn new --set meta": "ctx spawn new --set meta.json=",
    "ctx spawn new --works": "ctx spawn new --workspace ",
    "ctx ps --color=nev": "ctx ps --color=never ",
    "ctx tool show WorkF": "ctx tool show WorkFocus ",
    "ctx tool WorkF": "ctx tool WorkFocus ",
    "ctx --root=ROOT result cod": "ctx --root=ROOT result coder-1 ",
    "ctx new x --parent cod": "ctx new x --parent coder-1 ",
    "ctx spawn new -- unsha": "ctx spawn new -- unshare ",
}


def environment(daemon: Daemon) -> dict[str, str]:
    programs = f"{daemon.root}/bin:/usr/bin:/bin"
    return {"CTX_ROOT": str(daemon.root), "HOME": str(daemon.base), "TERM": "dumb", "PS1": "> ",
            "PATH": programs, "LANG": "C.UTF-8"}  # fmt: skip


def need(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")


def scene(daemon: Daemon) -> None:
    """An agent with a task, a work item, and a file whose name a shell would obey."""
    agent = daemon.run("coder-1", "sh", ": > $CTX_SELF/artifact/'a;b'; exec sleep 1000")
    wait_until((agent / "artifact" / "a;b").exists, "it has made the file")
    (agent / "task" / "compile").mkdir()
    (agent / "work" / "parser").mkdir()


def complete(screen: Terminal, line: str, whole: str) -> None:
    """Type a line and a tab, wait for what they become, and clear the line."""
    begun = len(screen.shown)
    screen.type(f"{line}\t")
    screen.wait_for(whole, begun)
    screen.type("\x15")


@pytest.mark.parametrize("shell", COMMANDS)
def test_a_line_is_completed(daemon: Daemon, shell: str) -> None:
    need(shell)
    scene(daemon)
    screen = Terminal(COMMANDS[shell], environment(daemon), (200, 24))
    try:
        screen.type(f"{BEGINS[shell]}; echo re''ady\n")
        screen.wait_for("ready\r\n")
        for line, whole in COMPLETED.items():
            line, whole = (text.replace("ROOT", str(daemon.root)) for text in (line, whole))
            complete(screen, line, whole)
    finally:
        screen.close()


@pytest.mark.parametrize("shell", COMMANDS)
def test_names_of_files_are_quoted(daemon: Daemon, shell: str) -> None:
    """Agents make files where people work."""
    need(shell)
    place = daemon.base / "place"
    place.mkdir()
    (place / "one;it$(x)").touch()
    (place / "two;dir").mkdir()
    screen = Terminal(COMMANDS[shell], environment(daemon), (200, 24))
    try:
        screen.type(f"{BEGINS[shell]}; cd {place}; echo re''ady\n")
        screen.wait_for("ready\r\n")
        for line, whole in (
            ("ctx spawn new -- cat on", "cat one\\;it\\$\\(x\\) "),
            ("ctx spawn new --cwd tw", "--cwd two\\;dir/"),
        ):
            complete(screen, line, whole)
    finally:
        screen.close()


def test_fish_completes_a_line(daemon: Daemon) -> None:
    need("fish")
    scene(daemon)
    for line, whole in COMPLETED.items():
        line, whole = (text.replace("ROOT", str(daemon.root)) for text in (line, whole))
        script = f"source {CONTRIB}/ctx.fish; complete -C {shlex.quote(line)}"
        said = subprocess.run(
            ["fish", "-N", "-c", script], env=environment(daemon), text=True, timeout=TIMEOUT,
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        words = [row.partition("\t")[0] for row in said.splitlines()]
        assert whole.rstrip().rpartition(" ")[2] in words, line


def test_names_of_files_that_a_shell_would_obey_are_left_out(daemon: Daemon) -> None:
    scene(daemon)
    said = daemon.ctx("__complete", "--", "get", "coder-1", "artifact/").stdout
    assert said == ""


def test_nothing_is_said_where_nothing_can_be_completed(daemon: Daemon) -> None:
    for words in (["nonsense", ""], ["get", "nobody", ""], ["--root", "/nowhere", "get", ""]):
        done = daemon.ctx("__complete", "--", *words)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), words
