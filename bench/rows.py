"""The rows: what is timed, and what it is compared with."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.measure import Side
from bench.minimal import FILES
from bench.setting import Setting
from runtime.config import FALLBACK_AGENT_ID, Config

#: agents in the row ``crowd``
CROWD: Final = 100
#: agents in the row ``list``; each has three names there
LISTED: Final = 1000

Sides = tuple[Side, list[Side]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. ``sides`` makes the subject and its references, and undoes them."""

    name: str
    doc: str
    sides: Callable[[Setting, ExitStack], Sides]
    #: part of the rounds that it gets, for rows whose single call is long
    share: float = 1.0


# plain file operations, with nothing but the system calls inside


def _read(path: str) -> Callable[[], object]:
    def call() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)

    return call


def _overwrite(path: str, values: Iterator[bytes]) -> Callable[[], object]:
    def call() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, next(values))
        os.close(fd)

    return call


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _values() -> Iterator[bytes]:
    """JSON objects of one length, no two after each other the same."""
    for number in itertools.cycle(range(10)):
        yield json.dumps({"number": number}).encode() + b"\n"


# agents

_numbers: Final = itertools.count(1)


def _fresh_name() -> str:
    """Used once: a name keeps its history, and the row would measure how that grows."""
    return f"b{next(_numbers)}"


def _directory(setting: Setting, name: str) -> str:
    return f"{setting.ctx}/agent/{name}.d"


def _make(setting: Setting, name: str, command: bytes) -> str:
    directory = _directory(setting, name)
    os.mkdir(directory)
    _write(f"{directory}/exec", command)
    return directory


def _start(directory: str) -> None:
    fd = os.open(f"{directory}/ctl", os.O_WRONLY)
    try:
        os.write(fd, b"start\n")
    finally:
        os.close(fd)


def _await(directory: str) -> None:
    fd = os.open(f"{directory}/wait", os.O_RDONLY)
    try:
        while os.read(fd, 4096):
            pass
    finally:
        os.close(fd)


def _check_done(directory: str) -> None:
    """A row about agents that end well must not time agents that fail."""
    reason = Path(directory, "reason").read_text()
    if reason != "exit:0\n":
        raise RuntimeError(f"an agent of the bench ended with {reason.strip() or 'nothing'}")


@contextmanager
def _agent(setting: Setting, name: str) -> Iterator[str]:
    directory = _make(setting, name, b"true\n")
    try:
        yield directory
    finally:
        os.rmdir(directory)


@contextmanager
def _running_agent(setting: Setting) -> Iterator[tuple[str, int]]:
    """(name, pid of its program) of an agent that runs until the row is over."""
    name = _fresh_name()
    directory = _make(setting, name, b"sleep infinity\n")
    try:
        _start(directory)
        while not (pid := Path(directory, "pid").read_text().strip()):
            if Path(directory, "status").read_text() == "dead\n":
                _check_done(directory)
        yield name, int(pid)
    finally:
        if Path(directory, "status").read_text() != "dead\n":
            Path(directory, "ctl").write_text("kill\n")
        _await(directory)
        os.rmdir(directory)


def _copies(setting: Setting, name: str, stack: ExitStack) -> list[tuple[str, str]]:
    """(filesystem, directory) of an agent's files on tmpfs and in the minimal filesystem."""
    copy = setting.tmpfs / "agent" / f"{name}.d"
    copy.mkdir(parents=True, exist_ok=True)
    for file, data in FILES.items():
        (copy / file).write_bytes(data)
    return [("tmpfs", str(copy)), ("minimal", f"{setting.minimal}/agent/bench.d")]


# bubblewrap alone


def _bubblewrap(*steps: str, view: Sequence[str]) -> Callable[[], int]:
    """Starts it and returns its pid."""
    command = [*steps, "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--new-session", *view, "true"]
    null = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]

    def spawn() -> int:
        return os.posix_spawnp(command[0], command, {"PATH": os.defpath}, file_actions=null)

    return spawn


def _finish(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"bubblewrap failed with wait status {status}")


def _bare(setting: Setting) -> Callable[[], int]:
    """The namespaces and the view of a root agent, without anything around them."""
    view = ["--unshare-net"]
    for entry in Config().base_view:
        if os.path.islink(entry):
            view += ["--symlink", os.readlink(entry), entry]
        else:
            view += ["--ro-bind-try", entry, entry]
    view += ["--dir", "/run", "--dir", "/var", "--symlink", "../run", "/var/run"]
    view += ["--tmpfs", "/var/tmp", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    view += ["--dir", "/home", "--perms", "0700", "--tmpfs", "/home/agent"]
    shared = f"{setting.base}/run/root"
    view += ["--bind", shared, shared]
    ids = str(FALLBACK_AGENT_ID)
    drop = ["setpriv", "--reuid", ids, "--regid", ids, "--clear-groups", "--no-new-privs"]
    drop += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    return _bubblewrap(*drop, view=view)


# the rows


def _stat_sides(setting: Setting, stack: ExitStack) -> Sides:
    directory = stack.enter_context(_agent(setting, "bench"))

    def side(name: str, where: str) -> Side:
        path = f"{where}/status"
        return Side(name=name, call=lambda: os.stat(path))

    references = [side(name, where) for name, where in _copies(setting, "bench", stack)]
    return side("ctxfs", directory), references


def _read_sides(file: str) -> Callable[[Setting, ExitStack], Sides]:
    def sides(setting: Setting, stack: ExitStack) -> Sides:
        directory = stack.enter_context(_agent(setting, "bench"))
        references = [
            Side(name=name, call=_read(f"{where}/{file}"))
            for name, where in _copies(setting, "bench", stack)
        ]
        return Side(name="ctxfs", call=_read(f"{directory}/{file}")), references

    return sides


def _commit_sides(setting: Setting, stack: ExitStack) -> Sides:
    directory = stack.enter_context(_agent(setting, "bench"))
    values = _values()
    places = _copies(setting, "bench", stack)
    references = [
        Side(name=name, call=_overwrite(f"{where}/meta.json", values)) for name, where in places
    ]
    write = _overwrite(f"{places[0][1]}/meta.json", values)
    database = sqlite3.connect(setting.state / "reference.db", isolation_level=None)
    stack.callback(database.close)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute("CREATE TABLE control (idx INTEGER PRIMARY KEY, data TEXT NOT NULL)")
    database.execute("INSERT INTO control VALUES (1, '')")

    def write_and_commit() -> None:
        write()
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE control SET data=? WHERE idx=1", (next(values).decode(),))
        database.execute("COMMIT")

    references.append(Side(name="tmpfs+sqlite", call=write_and_commit))
    return Side(name="ctxfs", call=_overwrite(f"{directory}/meta.json", values)), references


def _run_sides(setting: Setting, stack: ExitStack) -> Sides:
    def run() -> None:
        directory = _make(setting, _fresh_name(), b"true\n")
        _start(directory)
        _await(directory)
        _check_done(directory)
        os.rmdir(directory)

    spawn = _bare(setting)
    return Side(name="agent", call=run), [Side(name="bwrap", call=lambda: _finish(spawn()))]


def _child_sides(setting: Setting, stack: ExitStack) -> Sides:
    parent, pid = stack.enter_context(_running_agent(setting))

    def run() -> None:
        directory = _make(setting, _fresh_name(), b"true\n")
        _write(f"{directory}/parent", f"agent:{parent}\n".encode())
        _start(directory)
        _await(directory)
        _check_done(directory)
        os.rmdir(directory)

    ids = str(FALLBACK_AGENT_ID)
    enter = ["nsenter", "-t", str(pid), "-U", "-m", "-u", "-i", "-n", "-p", "-S", ids, "-G", ids]
    view = ["--bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    view += ["--perms", "0700", "--tmpfs", "/home/agent"]
    spawn = _bubblewrap(*enter, view=view)
    reference = Side(name="nsenter+bwrap", call=lambda: _finish(spawn()))
    return Side(name="child", call=run), [reference]


def _crowd_sides(setting: Setting, stack: ExitStack) -> Sides:
    def run() -> None:
        directories = [_make(setting, _fresh_name(), b"true\n") for _ in range(CROWD)]
        for directory in directories:
            _start(directory)
        for directory in directories:
            _await(directory)
        for directory in directories:
            _check_done(directory)
            os.rmdir(directory)

    spawn = _bare(setting)

    def run_bare() -> None:
        pids: list[int] = []
        try:
            for _ in range(CROWD):
                pids.append(spawn())
        finally:
            # after Ctrl-C too: none may outlive what it uses
            while pids:
                _finish(pids.pop())

    return Side(name="agents", call=run), [Side(name="bwraps", call=run_bare)]


def _list_sides(setting: Setting, stack: ExitStack) -> Sides:
    for _ in range(LISTED):
        stack.enter_context(_agent(setting, _fresh_name()))
    listed = f"{setting.ctx}/agent"
    copy = setting.tmpfs / "many"
    copy.mkdir()
    for name in os.listdir(listed):
        (copy / name).touch()

    def side(name: str, path: str) -> Side:
        return Side(name=name, call=lambda: os.listdir(path))

    references = [side("tmpfs", str(copy)), side("minimal", f"{setting.minimal}/many")]
    return side("ctxfs", listed), references


ROWS: Final = (
    Row(
        name="stat",
        doc="stat(2) of an agent's status, names and attributes cached, against the same path "
        "on tmpfs and in the minimal filesystem",
        sides=_stat_sides,
    ),
    Row(
        name="read-control",
        doc="open, read, close of exec, whose pages ctxfs lets the kernel keep and the minimal "
        "filesystem does not, against the same on tmpfs and there",
        sides=_read_sides("exec"),
    ),
    Row(
        name="read-status",
        doc="the same of status, which can be polled and is therefore rendered at every read",
        sides=_read_sides("status"),
    ),
    Row(
        name="commit",
        doc="open to replace, write, close of meta.json, which ctxfs commits durably, against a "
        "file on tmpfs, a file in the minimal filesystem's memory, and a file on tmpfs plus a "
        "commit to a SQLite database (WAL, synchronous=NORMAL) beside the daemon's",
        sides=_commit_sides,
    ),
    Row(
        name="run",
        doc="mkdir, exec=true, start, wait, rmdir of an agent, against bubblewrap with the same "
        "namespaces, view and ids run to its end",
        sides=_run_sides,
    ),
    Row(
        name="child",
        doc="the same of a child in its parent's cell, against nsenter and bubblewrap in there",
        sides=_child_sides,
    ),
    Row(
        name="crowd",
        doc=f"{CROWD} agents made, started, waited for and removed together, against as many "
        "bubblewraps started and waited for together",
        sides=_crowd_sides,
        share=0.2,
    ),
    Row(
        name="list",
        doc=f"listing agent/ with {LISTED} agents, three names each, against as many files in a "
        "directory on tmpfs and in the minimal filesystem",
        sides=_list_sides,
    ),
)
