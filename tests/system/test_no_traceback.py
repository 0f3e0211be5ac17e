"""Whatever a user does, the client says a sentence, and never a traceback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from client.commands import GROUPS
from tests.unit.client.fakes import all_commands
from tests.worlds.daemon import TIMEOUT, Daemon, daemon_of, wait_status, wait_until
from tests.worlds.terminal import Terminal

#: what each command is given; those that wait or follow are stopped by Ctrl-C in one test
WORDS = {
    "ps": ["ps", "-a"],
    "tree": ["tree"],
    "status": ["status", "coder"],
    "new": ["new", "fresh"],
    "set": ["set", "coder", "model=x"],
    "get": ["get", "coder", "out"],
    "start": ["start", "coder"],
    "stop": ["stop", "nobody"],
    "kill": ["kill", "nobody"],
    "pause": ["pause", "nobody"],
    "resume": ["resume", "coder"],
    "abort": ["abort", "nobody"],
    "reset": ["reset", "coder"],
    "session": ["session", "coder", "other"],
    "wait": ["wait", "-t", "50ms", "coder"],
    "result": ["result", "coder"],
    "now": ["now", "coder"],
    "log": ["log", "coder"],
    "logs": ["logs", "coder", "clerk"],
    "attach": ["attach", "clerk"],
    "enter": ["enter", "coder"],  # refused: nobody is at a terminal
    "events": ["events", "coder"],
    "reports": ["reports"],
    "top": ["top"],
    "timeline": ["timeline", "coder"],
    "export": ["export", "coder"],
    "backup": ["backup", "--state", "/nowhere", "/nowhere/file"],
    "restore": ["restore", "--state", "/nowhere", "/nowhere/file"],
    "spawn": ["spawn", "--wait", "--rm", "quick", "--", "true"],
    "run": ["run", "quicker", "--message", "hi", "--", "cat"],
    "agents": ["agents"],
    "rm": ["rm", "nobody"],
    "send": ["send", "clerk", "hi"],
    "chat": ["chat", "clerk"],
    "queue": ["queue", "coder"],
    "bridge": ["bridge", "acp", "--", "true"],
    "acp": ["acp", "clerk"],
    "hook": ["hook", "claude"],
    "ask": ["ask", "Is this an agent?"],
    "asks": ["asks"],
    "answer": ["answer", "coder", "yes"],
    "why": ["why", "coder", "create", "agent:x"],
    "audit": ["audit"],
    "prune": ["prune", "--older", "30d"],
    "quota": ["quota"],
    "nodes list": ["nodes", "list"],
    "nodes check": ["nodes", "check", "nowhere"],
    "nodes forget": ["nodes", "forget", "nowhere"],
    "nodes add": ["nodes", "add", "n2", "-oProxyCommand=x"],
    "peer": ["peer"],
    "doctor": ["doctor"],
    "reexec": ["reexec", "now"],  # refused: test_reexec.py has daemons for it
    "help": ["help"],
    "task list": ["task", "list", "-a", "coder", "--all"],
    "task show": ["task", "show", "-a", "coder", "t"],
    "task start": ["task", "start", "-a", "coder", "--wait", "--", "true"],
    "task output": ["task", "output", "-a", "coder", "t"],
    "task input": ["task", "input", "-a", "coder", "t", "hi"],
    "task stop": ["task", "stop", "-a", "coder", "nothing"],
    "task kill": ["task", "kill", "-a", "coder", "nothing"],
    "task wait": ["task", "wait", "-a", "coder", "-t", "50ms", "t"],
    "task rm": ["task", "rm", "-a", "coder", "nothing"],
    "who": ["who", "fd63:7478:6673:0:0123:4567:89ab:cdef"],
    "work list": ["work", "list", "-a", "coder"],
    "work show": ["work", "show", "-a", "coder", "w"],
    "work new": ["work", "new", "-a", "coder", "try"],
    "work set": ["work", "set", "-a", "coder", "w", "plan.md=x"],
    "work focus": ["work", "focus", "-a", "coder", "w"],
    "work done": ["work", "done", "-a", "coder", "nothing"],
    "work cancel": ["work", "cancel", "-a", "coder", "nothing"],
    "waits list": ["waits", "list", "-a", "coder"],
    "waits show": ["waits", "show", "-a", "coder", "later"],
    "waits add": ["waits", "add", "-a", "coder", "soon", "timer", "1h"],
    "waits cancel": ["waits", "cancel", "-a", "coder", "nothing"],
    "tool list": ["tool", "list"],
    "tool show": ["tool", "show", "AgentGet"],
    "tool call": ["tool", "call", "AgentGet", '{"agent_id": "coder"}'],
    "mcp": ["mcp", "-a", "coder"],
    "ping": ["ping", "coder"],
    "__complete": ["__complete", "--", "get", ""],
}
#: commands that do not end by themselves
LASTING = (
    ["wait", "coder"], ["logs", "-f"], ["log", "-f", "coder"], ["events", "-f", "coder"],
    ["reports", "-f"], ["attach", "coder"], ["chat", "clerk"], ["send", "clerk", "slow"],
    ["task", "output", "-f", "-a", "coder", "t"], ["mcp", "-a", "coder"], ["acp", "clerk"],
    ["task", "wait", "-a", "coder", "t"],
)  # fmt: skip
#: commands of different kinds, which are in every run of the tests
SAMPLE = ("ps", "new", "log", "attach", "spawn", "send", "why", "help", "task start", "tool call")
SOME = pytest.mark.parametrize("names", [
    pytest.param(SAMPLE, id="some"), pytest.param(WORDS, id="all", marks=pytest.mark.long)
])
BYTES = os.fsdecode(b"not\xffutf8\x1b[31m")


def argv(daemon: Daemon, words: list[str]) -> list[str]:
    return [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), *words]


def environment(daemon: Daemon, **more: str) -> dict[str, str]:
    return {"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **more}


def scene(daemon: Daemon) -> None:
    """Agents that are at work, with something in every plane."""
    said = r"printf \"not\\377utf8\\033[31m\\n\"; echo on; sleep 1000"
    coder = daemon.run("coder", f"sh -c '{said}'")
    clerk = daemon.run("clerk", "sh -c 'read -r line; test \"$line\" != slow || sleep 1000'",
                       mode="turn")
    wait_status(coder, "busy")
    wait_status(clerk, "idle")
    for words in (
        ["work", "new", "-a", "coder", "w", "something"],
        ["waits", "add", "-a", "coder", "later", "timer", "1h"],
        ["task", "start", "-a", "coder", "--name", "t", "--", "sleep 1000"],
    ):
        assert daemon.ctx(*words).returncode == 0
    wait_until(lambda: (coder / "out").stat().st_size > 0, "it has said something")


@pytest.fixture(scope="module")
def alive() -> Iterator[Daemon]:
    """The commands change little, and what they change does not matter here."""
    with daemon_of() as daemon:
        scene(daemon)
        yield daemon


def said(daemon: Daemon, words: list[str], *, shell: str = "", **options: object) -> str:
    """What the client says on standard error and output, perhaps as part of a line of a shell."""
    line = argv(daemon, words)
    if shell:
        line = ["bash", "-c", shell.replace("CTX", shlex.join(line))]
    options = {"env": environment(daemon), "stdin": subprocess.DEVNULL, **options}
    done = subprocess.run(line, capture_output=True, timeout=TIMEOUT, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode >= 0, f"{words}: ended by a signal"
    text: bytes = done.stdout + done.stderr
    return text.decode(errors="replace")


def check(words: list[str], text: str) -> None:
    for sign in ("Traceback", "Exception ignored", "KeyboardInterrupt", "Fatal Python"):
        assert sign not in text, f"ctx {shlex.join(words)}:\n{text}"


def test_every_command_is_tried() -> None:
    assert {*WORDS} == {command.name for command in all_commands()} | {"__complete"}


SITUATIONS: dict[str, str] = {
    "nothing special": "CTX",
    "the reader is gone": "CTX | :",
    "no output": "CTX >&-",
    "no input": "CTX <&-",
    "nothing at all": "CTX <&- >&- 2>&-",
    "no complaints": "CTX 2>&-",
    "a full disk": "CTX > /dev/full",
    "a full disk for complaints": "CTX 2> /dev/full",
    "no locale": "LC_ALL=C CTX",
    "no environment": "env -i CTX_ROOT=$CTX_ROOT CTX",
}


@SOME
@pytest.mark.parametrize("situation", SITUATIONS)
def test_with_every_kind_of_input_and_output(
    alive: Daemon, situation: str, names: Iterable[str]
) -> None:
    for words in map(WORDS.__getitem__, names):
        check(words, said(alive, words, shell=SITUATIONS[situation]))


@pytest.mark.parametrize("place", ["the last", pytest.param("any", marks=pytest.mark.long)])
@pytest.mark.parametrize("words", [
    pytest.param(words, id=name, marks=[] if name in SAMPLE else pytest.mark.long)
    for name, words in WORDS.items()
])
def test_words_that_are_not_utf8(alive: Daemon, words: list[str], place: str) -> None:
    last = max(1, len(words) - 1)
    for number in range(1, len(words) + 1) if place == "any" else [last]:
        if words[:number][-1] not in GROUPS:
            changed = [*words[:number], BYTES, *words[number + 1 :]]
            check(changed, said(alive, changed))


@pytest.mark.parametrize(
    ("term", "size", "names"),
    [("dumb", (1, 1), SAMPLE), *(pytest.param(*each, WORDS, marks=pytest.mark.long)
                                 for each in (("dumb", (1, 1)), ("nonsense", (0, 0)),
                                              ("", (20, 5))))],
)
def test_terminals_of_all_sizes(
    alive: Daemon, term: str, size: tuple[int, int], names: Iterable[str]
) -> None:
    for words in map(WORDS.__getitem__, names):
        env = environment(alive, TERM=term, PAGER="cat", MANPAGER="cat")
        screen = Terminal(argv(alive, words), env, size)
        try:
            screen.end("\x04")
            check(words, screen.shown)
        finally:
            screen.close()


@SOME
def test_a_user_who_may_nothing(alive: Daemon, names: Iterable[str]) -> None:
    for words in map(WORDS.__getitem__, names):
        command = ["/usr/bin/python3", *argv(alive, words)[1:]]  # which everybody may execute
        done = subprocess.run(command, env=environment(alive), user=65534, group=65534,
                              extra_groups=[], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT, check=False)
        check(words, (done.stdout + done.stderr).decode(errors="replace"))


#: What begins as the client does, once Python itself has begun: before, Python tells of interrupts
#: as it likes, and nothing of ours is there to hinder it.
BEGUN = """
import os, _signal, sys
_signal.signal(_signal.SIGINT, _signal.SIG_DFL)
os.write(2, b"+")
del sys.argv[0]
exec(compile(open(sys.argv[0]).read(), "ctx", "exec"))
"""


def begun(command: list[str]) -> list[str]:
    """A command line of the client that says ``+`` when Python has begun."""
    return [*command[:2], "-c", BEGUN, *command[2:]]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=[] if name in SAMPLE else pytest.mark.long)
        for name, words in WORDS.items()
    ],
)
def test_an_interrupt_at_any_moment(alive: Daemon, words: list[str]) -> None:
    """The first one comes later each time, until the command ends before."""
    delay = 0.001
    ended = False
    while not ended and delay < 1:
        process = subprocess.Popen(
            begun(argv(alive, words)), env=environment(alive), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.read(1) == b"+"
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay)
            ended = True
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=TIMEOUT)[0].decode(errors="replace")
        check(words, text)
        delay *= 1.5


@pytest.mark.parametrize("words", LASTING, ids=" ".join)
def test_an_interrupt_of_what_lasts(alive: Daemon, words: list[str]) -> None:
    screen = Terminal(begun(argv(alive, words)), environment(alive, TERM="xterm"), (80, 24))
    try:
        screen.wait_for("+")
        wait_until(lambda: waits(screen.process.pid), "it waits for something")
        screen.end("\x03\x04")  # chat ends by Ctrl-D only
        check(words, screen.shown)
    finally:
        screen.close()


def waits(pid: int) -> bool:
    """Whether a process waits for a file, a socket, a terminal or a time."""
    what = Path(f"/proc/{pid}/wchan").read_text()
    return any(word in what for word in ("poll", "unix", "pipe", "wait_woken", "tty", "sleep"))


@SOME
def test_without_a_daemon(tmp_path: Path, names: Iterable[str]) -> None:
    """It was never there; it has died; it dies while commands work."""
    with daemon_of() as daemon:
        scene(daemon)
        client = daemon.base / "client"
        client.write_bytes((daemon.root / "bin" / "ctx").read_bytes())
        command = [sys.executable, "-IS", str(client)]
        first = begun(command)
        lasting = [
            (words, subprocess.Popen([*first, *words], env=environment(daemon),
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT))
            for words in LASTING
        ]
        for _, process in lasting:
            wait_until(partial(waits, process.pid), "it waits for something")
        daemon.kill()
        for words in map(WORDS.__getitem__, names):
            done = subprocess.run([*command, *words], env=environment(daemon), check=False,
                                  stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT)
            check(words, (done.stdout + done.stderr).decode(errors="replace"))
        daemon.start()
        for words, process in lasting:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            text = process.communicate(timeout=TIMEOUT)[0].decode(errors="replace")
            check(words, text)
        for words in map(WORDS.__getitem__, SAMPLE):
            env = environment(daemon, CTX_ROOT=str(tmp_path / "nowhere"))
            done = subprocess.run([*command, *words], env=env, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=TIMEOUT, check=False)
            check(words, (done.stdout + done.stderr).decode(errors="replace"))
