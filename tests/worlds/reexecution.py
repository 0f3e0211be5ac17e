"""A daemon that executes itself again: what is changed in its program, who works meanwhile, and
what was begun before and has to go on.

Each thing that goes on is a context: what it yields to happens between its begin and its end.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import TIMEOUT, Daemon, read, running, wait_status, wait_until, write

HOUSE: Final = Path(__file__).resolve().parents[2]
#: the program may take 60 s to be checked, and the daemon 25 s to become quiet
REEXEC_SECONDS: Final = 60 + 25 + TIMEOUT

# programs


def change(program: Path, file: str, old: str, new: str) -> None:
    """Replaces a text of a file of a program."""
    path = program / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def break_syntax(program: Path) -> None:
    (program / "ctxfs" / "files" / "root.py").write_text("def broken(:\n")


def add_row_in_front(program: Path) -> None:
    """A version of which each agent has a file ``first``, before all others."""
    change(
        program,
        "ctxfs/files/agent.py",
        "ROWS: Final[tuple[Row[Agent], ...]] = (\n",
        'ROWS: Final[tuple[Row[Agent], ...]] = (\n    Shown(name="first", public=True, '
        'render=lambda base, agent, caller: "I am new\\n", doc="x"),\n',
    )
    last = '"waiting", "session",'
    change(program, "ctxfs/tree/numbers.py", last, f'{last} "first",')
    change(program, "runtime/runtime.py", 'VERSION = "', 'VERSION = "9.')


class Replaceable(Daemon):
    """A daemon whose program is a copy that the test may change."""

    executed = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.program = self.base / "program"
        for package in ("ctxfs", "runtime", "client"):
            # what is compiled comes along, but for what another process writes at this moment
            shutil.copytree(HOUSE / package, self.program / package,
                            ignore=shutil.ignore_patterns("*.pyc.*"))

    def command(self, *more: str) -> list[str]:
        # python -m looks into the working directory first
        return ["env", "-C", str(self.program), *super().command(*more)]

    def times_ready(self) -> int:
        return self.log.read_text().splitlines().count("ready")

    def reexec(self) -> None:
        """Returns when the next one is ready, or this one dead."""
        before, pid = self.times_ready(), self.pid
        os.kill(pid, signal.SIGUSR1)
        said = len(self.log.read_text())

        def is_over() -> bool:
            refused = "is not executed again" in self.log.read_text()[said:]
            return refused or self.times_ready() > before or self.has_ended()

        wait_until(is_over, "it is ready again", REEXEC_SECONDS)
        assert self.times_ready() > before, self.log.read_text()[said:]
        assert self.pid == pid


@contextmanager
def replaceable(**options: Any) -> Iterator[Replaceable]:
    daemon = Replaceable(**options)
    with running(daemon):
        yield daemon


# who works meanwhile


class Peer:
    """One connection that speaks JSON lines."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("rb")

    def ask(self, **fields: Any) -> None:
        self.socket.sendall(json.dumps(fields).encode() + b"\n")

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.lines.readline())
        return found

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.socket.close()


class Clients:
    """Threads that do something without pause; every error counts, and the longest wait."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self.errors: list[BaseException] = []
        self.done = 0
        self.longest = 0.0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]

    def _run(self, work: Callable[[], object]) -> None:
        try:
            while not self._over.is_set():
                begun = time.monotonic()
                work()
                self.longest = max(self.longest, time.monotonic() - begun)
                self.done += 1
        except BaseException as error:
            self.errors.append(error)

    def go_on(self, works: int) -> None:
        """Returns when they have done so much more."""
        enough = self.done + works
        wait_until(lambda: self.done >= enough or self.errors, "clients go on", REEXEC_SECONDS)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
        assert not self.errors, self.errors


TURN: Final = "cat"
#: of sessions of messages
_numbers = itertools.count()


def sleeper(daemon: Daemon, name: str, **files: str) -> tuple[Path, str]:
    """A busy agent, and its pid."""
    directory = daemon.run(name, "sleep 1000", **files)
    wait_status(directory, "busy")
    return directory, read(directory, "pid")


def clients_of(daemon: Daemon, busy: Path, turn: str) -> Clients:
    """Those who read files of an agent that is busy, send messages to one that takes turns, and
    make and remove agents."""

    def send() -> None:
        with Peer(daemon.path("agent", f"{turn}.sock")) as peer:
            name = f"m{next(_numbers)}"
            peer.ask(op="send", id=name, input="hello")
            while (frame := peer.next())["type"] != "done":
                assert frame["type"] in ("start", "delta", "message"), frame
            assert frame["status"] == "processed", frame

    def look() -> None:
        assert "state=ready" in daemon.path("status").read_text()
        assert read(busy, "status") == "busy\n"
        assert "status" in os.listdir(busy)

    def make() -> None:
        directory = daemon.make(f"n{next(_numbers)}", label="word")
        assert read(directory, "label") == "word\n"
        directory.rmdir()

    return Clients(look, look, send, send, make)


# what goes on


@contextmanager
def kept_paths(directory: Path) -> Iterator[None]:
    """Paths of an agent that the kernel knows lead to the same inodes, with the same texts."""
    kept = [directory / name for name in ("status", "pid", "label", "exec", "ctl")]
    with ExitStack() as stack:
        fds = []
        for path in kept:
            fds.append(os.open(path, os.O_PATH))
            stack.callback(os.close, fds[-1])
        before = [os.fstat(fd).st_ino for fd in fds]
        texts = [path.read_text() for path in kept]
        status = os.open(directory / "status", os.O_RDONLY)
        stack.callback(os.close, status)
        yield
        assert [os.fstat(fd).st_ino for fd in fds] == before
        assert [path.stat().st_ino for path in kept] == before
        assert [path.read_text() for path in kept] == texts
        assert os.pread(status, 100, 0).decode() == texts[0]


#: writes halves of controls, and the others once it is told to. A process of its own: who starts
#: another one closes its files there, which commits them
_WRITER: Final = """
import os, sys
os.chdir(sys.argv[1])
label = os.open("label", os.O_WRONLY | os.O_TRUNC)
os.write(label, b"half-")
env = os.open("env", os.O_WRONLY | os.O_APPEND)
os.write(env, b"A=1\\n")
verbs = os.open("ctl", os.O_WRONLY)
os.write(verbs, b"sta")
print("half", flush=True)
sys.stdin.readline()
os.write(label, b"whole\\n")
os.close(label)
os.write(env, b"B=2\\n")
os.close(env)
print("whole", flush=True)
sys.stdin.readline()
os.write(verbs, b"rt\\n")
"""


@contextmanager
def half_written(daemon: Daemon, name: str) -> Iterator[None]:
    """Controls of a new agent, of which each has the first half of what it gets."""
    directory = daemon.make(name)
    unchanged = read(directory, "label")
    writer = subprocess.Popen(
        [sys.executable, "-ISc", _WRITER, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdin is not None and writer.stdout is not None
    with writer, writer.stdin as tell, writer.stdout as told:
        assert told.readline() == "half\n"
        yield
        assert (read(directory, "label"), read(directory, "env")) == (unchanged, "")
        print(file=tell, flush=True)
        assert told.readline() == "whole\n"
        assert read(directory, "label") == "half-whole\n"
        assert read(directory, "env") == "A=1\nB=2\n"
        write(directory / "exec", "sleep 1000")
        print(file=tell, flush=True)
    assert writer.returncode == 0
    wait_status(directory, "busy")


@contextmanager
def polled(daemon: Daemon, name: str, times: int) -> Iterator[None]:
    """A busy agent that is paused in the end: who polls its status is woken at most so many times
    before, and who reads ``wait`` never."""
    directory, _ = sleeper(daemon, name)
    fd = os.open(directory / "status", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == b"busy\n"
    poller = select.poll()
    poller.register(fd, select.POLLPRI | select.POLLERR)
    found: list[bytes] = []

    def wait() -> None:
        while poller.poll(4 * TIMEOUT * 1000):
            found.append(os.pread(fd, 100, 0))
            if found[-1] == b"paused\n":
                return

    waiting = threading.Thread(target=wait)
    waiting.start()
    fifo = subprocess.Popen(["cat", str(directory / "wait")])
    yield
    assert fifo.poll() is None
    write(directory / "ctl", "pause")
    waiting.join(TIMEOUT)
    assert found and found[-1] == b"paused\n"
    assert set(found[:-1]) <= {b"busy\n", b"paused\n"} and len(found) <= times + 1
    os.close(fd)
    write(directory / "ctl", "kill")
    assert fifo.wait(TIMEOUT) == 0


#: a resident program that replies in two pieces, the second when there is a file
SLOW = """
while read -r line; do
    printf '{"id":"m","type":"delta","text":"one "}\\n'
    until test -e /gate/open; do sleep 0.02; done
    printf '{"id":"m","type":"delta","text":"two"}\\n{"id":"m","type":"message"}\\n'
done
"""


@contextmanager
def reply_in_pieces(daemon: Daemon, name: str, gate: Path) -> Iterator[None]:
    """A message of which half is answered. ``gate`` is a new directory."""
    gate.mkdir()
    (gate / "program").write_text(SLOW)
    slow = daemon.run(name, "sh /gate/program", mode="resident", mount=f"{gate} /gate ro")
    wait_status(slow, "ready")
    with Peer(daemon.path("agent", f"{name}.sock")) as peer:
        peer.ask(op="send", id="m", input="x")
        assert peer.next()["type"] == "start"
        assert peer.next()["text"] == "one "
        yield
        (gate / "open").touch()
        assert peer.next() == {"type": "delta", "id": "m", "text": "two"}
        assert peer.next() == {"type": "message", "id": "m", "text": "one two"}
        assert peer.next()["status"] == "processed"


@contextmanager
def half_asked(daemon: Daemon, name: str) -> Iterator[None]:
    """Connections to a busy agent: one that waits for its end, one that follows its events, and
    half a question."""
    waited, _ = sleeper(daemon, name)
    socket_path = daemon.path("agent", f"{name}.sock")
    with Peer(socket_path) as waiting, Peer(socket_path) as following, Peer(socket_path) as half:
        waiting.ask(op="wait")
        following.ask(op="resume")
        seen = [following.next()["id"] for _ in range(2)]
        half.socket.sendall(b'{"op":"pi')
        yield
        half.socket.sendall(b'ng"}\n')
        assert half.next() == {"type": "pong"}
        write(waited / "ctl", "stop")
        assert waiting.next()["outcome"] == "cancelled"
        while line := following.lines.readline():
            seen.append(json.loads(line)["id"])
    assert seen == [event["id"] for event in daemon.events(name)]


@contextmanager
def all_that_goes_on(daemon: Daemon, work: Path, times: int) -> Iterator[None]:
    """Of each of these one, for so many executions. ``work`` is a directory that agents can be
    shown."""
    known, pid = sleeper(daemon, "known")
    going: list[AbstractContextManager[None]] = [
        kept_paths(known),
        half_written(daemon, "halfwritten"),
        polled(daemon, "polled", times),
        reply_in_pieces(daemon, "slow", work / "gate"),
        half_asked(daemon, "asked"),
    ]
    with ExitStack() as stack:
        for each in going:
            stack.enter_context(each)
        yield
    assert read(known, "pid") == pid
