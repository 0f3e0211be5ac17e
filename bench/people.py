"""What people feel: terminals, questions, and events."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from bench.agents import directory_of, fresh_name, make, running_agent, write
from bench.measure import Episode, Pair, Part, Ratio, Side, Sides, compare_episodes, undisturbed
from bench.reference.commands import at_terminal, finish, spawn
from bench.setting import MakeSides, Setting, another_daemon
from runtime.kernel import cgroups

#: what a viewer gets at once, and the bytes that are shown
_BULK: Final = 100_000_000
#: says each byte again, as it comes
_ECHO: Final = "stty raw -echo; echo ready; exec cat"
#: shows many bytes for each that it gets
_FLOOD: Final = (
    "stty raw -echo; echo ready; "
    f"while head -c 1 | grep -q .; do head -c {_BULK} /dev/zero; done"
)
_FOLLOWERS: Final = 100
#: agents in the larger daemon of the row ``inbox``, and in the smaller; lines that both show
_MANY: Final = 10_000
_FEW: Final = 10
_CHANGES: Final = 3000
#: a terminal that is asked whether it is well says so
_WELL: Final = (b"\x1b[5n", b"\x1b[0n")
_SECONDS: Final = 60.0


def _ask(setting: Setting, **fields: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SECONDS)
    connection.connect(str(setting.ctx / "ctxd.sock"))
    connection.send(json.dumps(fields).encode() + b"\n")
    return connection


# terminals


def _viewer(setting: Setting, stack: ExitStack, program: str) -> socket.socket:
    """Who looks at the terminal of an agent with this program for a shell."""
    name = fresh_name()
    directory = make(setting, name, f"sh -c '{program}'\n".encode())
    write(f"{directory}/tty", b"80x24\n")
    fields = {"op": "terminal", "agent": name, "start": True, "hangup": True, "remove": True}
    with _ask(setting, **fields) as connection:
        answer, fds, _, _ = socket.recv_fds(connection, 4096, 1)
    if not fds:
        raise RuntimeError(f"there is no viewer: {answer.decode()}")
    viewer = stack.enter_context(socket.socket(fileno=fds[0]))
    _take_until(lambda: viewer.recv(1 << 14), b"ready")
    return viewer


def _pair(stack: ExitStack, program: str) -> int:
    """The master of a pair of the kernel's with the same program at it."""
    pid, master = pty.fork()
    if not pid:
        os.execvp("sh", ["sh", "-c", program])
    stack.callback(os.waitpid, pid, 0)
    stack.callback(os.close, master)
    _take_until(lambda: os.read(master, 1 << 14), b"ready")
    return master


def _take_until(read: Callable[[], bytes], wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        data = read()
        if not data:
            raise RuntimeError(f"a terminal of the bench ended: {seen!r}")
        seen += data


def _take_bulk(read: Callable[[], bytes]) -> None:
    left = _BULK
    while left > 0:
        left -= len(read())


def _shown(viewer: socket.socket) -> bytes:
    """What one packet shows."""
    data = viewer.recv(1 << 14)
    if data[:1] == b"l":
        raise RuntimeError("the viewer was too slow, and was not shown everything")
    return data[1:] if data[:1] == b"o" else b""


def keystroke_sides(setting: Setting, stack: ExitStack) -> Sides:
    viewer, master = _viewer(setting, stack, _ECHO), _pair(stack, _ECHO)

    def type_to_agent() -> None:
        viewer.send(b"ix")
        _take_until(lambda: viewer.recv(1 << 14), b"x")

    def type_to_pair() -> None:
        os.write(master, b"x")
        _take_until(lambda: os.read(master, 1 << 14), b"x")

    return Side(name="viewer", call=type_to_agent), [Side(name="pty", call=type_to_pair)]


def flood_sides(setting: Setting, stack: ExitStack) -> Sides:
    viewer, master = _viewer(setting, stack, _FLOOD), _pair(stack, _FLOOD)

    def take_of_agent() -> None:
        viewer.send(b"ix")
        _take_bulk(lambda: _shown(viewer))

    def take_of_pair() -> None:
        os.write(master, b"x")
        _take_bulk(lambda: os.read(master, 1 << 14))

    return Side(name="viewer", call=take_of_agent), [Side(name="pty", call=take_of_pair)]


def _client(setting: Setting, *words: str) -> list[str]:
    return [str(setting.ctx / "bin" / "ctx"), "--root", str(setting.ctx), *words]


@contextmanager
def _window(command: list[str]) -> Iterator[tuple[int, int]]:
    """(pid, master) of a command in a window, which closes with the block."""
    pid, master = pty.fork()
    if not pid:
        os.execvpe(command[0], command, {"PATH": os.defpath, "TERM": "xterm"})
    try:
        yield pid, master
    finally:
        with suppress(OSError):
            os.close(master)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read_screen(master: int) -> bytes:
    """What a terminal takes; it answers as terminals do. Nothing once nobody is there."""
    try:
        data = os.read(master, 1 << 14)
    except OSError:
        return b""
    if _WELL[0] in data:
        os.write(master, _WELL[1])
    return data


def terminal_sides(setting: Setting, stack: ExitStack) -> Sides:
    def at_a_terminal() -> None:
        with _window(_client(setting, "run", "--tty", fresh_name(), "--", "true")) as (_, master):
            while _read_screen(master):
                pass

    def without() -> None:
        words = ["run", fresh_name(), "--message", "x", "--", "true"]
        finish(spawn(_client(setting, *words), quiet=True))

    return Side(name="run --tty", call=at_a_terminal), [Side(name="run", call=without)]


def _await(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} takes more than {_SECONDS:g} s")
        time.sleep(0.001)


def _with_word(word: str) -> Iterator[int]:
    """Processes that have this in their command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in file.read_bytes():
                yield int(file.parent.name)


def _is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2][1:2] not in b"ZX"
    return False


def _close(command: list[str], word: str, left: Callable[[], bool]) -> dict[str, float]:
    """Nanoseconds from the close of a window until no process is left of what ran there, and
    nothing else."""
    with _window(command) as (pid, master):
        _take_until(lambda: _read_screen(master), b"ready")
        there = set(_with_word(word)) - {pid}
        if not there:
            raise RuntimeError("nothing runs in a window")
        with undisturbed():
            begin = time.perf_counter_ns()
            os.kill(pid, signal.SIGKILL)
            os.close(master)
            _await(lambda: not any(map(_is_there, there)), "the end of a window")
            gone = time.perf_counter_ns()
            _await(lambda: not left(), "the removal of an agent")
            return {"gone": gone - begin, "removed": time.perf_counter_ns() - begin}


def measure_close(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    """A window that is closed: how long its processes, and its agent's directory, are left."""
    numbers = itertools.count(os.getpid() * 1000)

    def program() -> tuple[str, list[str]]:
        word = f"1000.{next(numbers)}"
        return word, ["sh", "-c", f"echo ready; sleep {word}"]

    def of_agent() -> dict[str, float]:
        word, command = program()
        name = fresh_name()
        directory = Path(directory_of(setting, name))
        words = ["run", "--tty", name, "--", *command]
        return _close(_client(setting, *words), word, directory.exists)

    def of_script() -> dict[str, float]:
        word, command = program()
        return _close(at_terminal(setting.base / "run" / "root", command), word, lambda: False)

    ours = Episode(name="run --tty", run=of_agent)
    theirs = Part(name="script, bwrap", episode=Episode(name="script", run=of_script), time="gone")
    return compare_episodes(
        [
            Pair(
                row=f"{row}-{time}",
                subject=Part(name=ours.name, episode=ours, time=time),
                reference=theirs,
            )
            for time in ("gone", "removed")
        ],
        rounds,
    )


# questions


class _Asker:
    """A process in an agent's cgroup: what it does, the agent does."""

    def __init__(self, agent: str, stack: ExitStack) -> None:
        group = cgroups.path_of(int(Path(agent, "pid").read_text()))
        procs = f"{cgroups.unified_mount()}{group}/cgroup.procs"
        self._ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            self._ours.close()
            write(procs, str(os.getpid()).encode())
            _obey(theirs)
        theirs.close()
        stack.callback(os.waitpid, pid, 0)
        stack.callback(self._ours.close)

    def make(self, directory: str, file: str, text: str) -> None:
        """Makes a directory, and writes a file there."""
        self._ours.send(json.dumps(["make", directory, file, text]).encode())
        self._heed()

    def remove(self, directory: str) -> None:
        self._ours.send(json.dumps(["remove", directory]).encode())
        self._heed()

    def _heed(self) -> None:
        if (said := self._ours.recv(4096)) != b"ok":
            raise RuntimeError(f"an agent of the bench may not do its part: {said.decode()}")


def _obey(orders: socket.socket) -> None:
    while data := orders.recv(4096):
        verb, directory, *file = json.loads(data)
        try:
            if verb == "remove":
                os.rmdir(directory)
            else:
                os.mkdir(directory)
                write(f"{directory}/{file[0]}", file[1].encode())
            orders.send(b"ok")
        except OSError as error:
            orders.send(str(error).encode())
    os._exit(0)


def ask_sides(setting: Setting, stack: ExitStack) -> Sides:
    """From mkdir to rmdir of a question that the operator answers, and of a wait that it fires."""
    name, _ = stack.enter_context(running_agent(setting))
    agent = directory_of(setting, name)
    asker = _Asker(agent, stack)

    def ask() -> None:
        directory = f"{agent}/ask/{fresh_name()}"
        asker.make(directory, "question", "May I?\n")
        write(f"{directory}/answer", b"yes\n")
        _expect(f"{directory}/status", "answered")
        asker.remove(directory)

    def wait() -> None:
        directory = f"{agent}/waiting/{fresh_name()}"
        asker.make(directory, "on", "trigger\n")
        token = Path(directory, "token").read_text().strip()
        write(f"{setting.ctx}/trigger/{token}", b"now\n")
        _expect(f"{directory}/status", "fired")
        asker.remove(directory)

    return Side(name="ask", call=ask), [Side(name="trigger", call=wait)]


def _expect(path: str, wanted: str) -> None:
    found = Path(path).read_text().strip()
    if found != wanted:
        raise RuntimeError(f"{path} is {found}, not {wanted}")


# events


def _followers(setting: Setting, stack: ExitStack, count: int) -> Callable[[], object]:
    """A change of an agent until so many were told."""
    name, _ = stack.enter_context(running_agent(setting))
    path = f"{directory_of(setting, name)}/meta.json"
    with _ask(setting, op="events") as asked:
        now = json.loads(asked.recv(1 << 14))["seq"]
    fields = {"op": "events", "follow": True, "after": now, "agents": [name]}
    streams = [stack.enter_context(_ask(setting, **fields)) for _ in range(count)]
    told = dict.fromkeys(streams, 0)
    numbers = itertools.count(1)

    def call() -> None:
        number = next(numbers)
        write(path, b'{"number": %d}\n' % number)
        for stream in streams:
            while told[stream] < number:
                told[stream] += stream.recv(1 << 14).count(b"\n")

    return call


def follow_sides(setting: Setting, stack: ExitStack) -> Sides:
    many, one = (_followers(setting, stack, count) for count in (_FOLLOWERS, 1))
    return Side(name=f"{_FOLLOWERS} follow", call=many), [Side(name="1 follows", call=one)]


@contextmanager
def _inbox(setting: Setting, count: int) -> Iterator[Setting]:
    """A daemon with so many agents, of which a few ask, and with as many events in any case."""
    with ExitStack() as stack:
        own = stack.enter_context(another_daemon(setting))
        asking = [stack.enter_context(running_agent(own))[0] for _ in range(_FEW)]
        for name in asking:
            agent = directory_of(own, name)
            asker = _Asker(agent, stack)
            asker.make(f"{agent}/ask/one", "question", "May I?\n")
        for _ in range(count - _FEW):
            os.mkdir(directory_of(own, fresh_name()))
        for number in range(_CHANGES):
            write(f"{directory_of(own, asking[0])}/meta.json", b'{"number": %d}\n' % number)
        yield own


def _reader(setting: Setting, name: str, lines: int) -> Callable[[], object]:
    path = setting.ctx / name

    def call() -> None:
        if path.read_bytes().count(b"\n") < lines:
            raise RuntimeError(f"{path} has less than {lines} lines")

    return call


def inbox_sides(file: str, lines: int) -> MakeSides:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        many, few = (stack.enter_context(_inbox(setting, count)) for count in (_MANY, _FEW))
        reference = Side(name=f"among {_FEW}", call=_reader(few, file, lines))
        return Side(name=f"among {_MANY}", call=_reader(many, file, lines)), [reference]

    return sides
