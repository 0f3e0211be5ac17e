"""Trees of plain files and FIFOs, and sockets, that look like a mounted ctxfs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from client.commands import SUBJECTS, commands_of
from client.declaring import Command
from client.root import Root
from tests.worlds.daemon import TIMEOUT

Run = Callable[..., tuple[int, str, str]]


FILES = (
    *("outcome", "reason", "pid", "run", "ctl", "exec", "env", "mount", "limits"),
    *("life", "cwd", "restart", "mode", "context", "workspace", "model", "placement"),
)


EMPTY = ("author", "out", "log", "result.md", "handoff.md", "inbox", "queue")


PARTS = {
    "task": "kind title cmd cwd env accepts_input status exit output preview input ctl work",
    "work": "objective plan.md acceptance.md status blocked_by parent created_at updated_at",
    "waiting": "on work deadline status payload token",
    "ask": "kind question detail options form default deadline to life answer status by asked_at "
    "ended_at",
}


class FakeRoot:
    """Directories that look like a mounted ctxfs, as far as plain files can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: the directories of agents, the oldest first
        self.made: list[Path] = []
        (path / "agent").mkdir(parents=True)
        (path / "status").write_text("version=1.2\nstate=ready\nmount=/ctx\ncontrollers=\n")

    def fill(self, directory: Path, **values: str) -> None:
        self.made.append(directory)
        for file in FILES:
            (directory / file).write_text(values.get(file, "") + "\n")
        for file in EMPTY:
            (directory / file).write_text(values.get(file.removesuffix(".md"), ""))
        (directory / "parent").write_text(values.get("parent", "operator uid:0") + "\n")
        (directory / "status").write_text(values.get("status", "new") + "\n")
        (directory / "incarnation").write_text("i1\n")
        for name in ("child", "session", *PARTS):
            (directory / name).mkdir()
        (directory / "work" / "current").write_text("")
        (directory / "session" / "events.jsonl").write_text(values.get("events", ""))
        if values.get("status") == "dead":
            (directory / "wait").write_text("")
        else:
            os.mkfifo(directory / "wait")

    def agent(self, name: str, **values: str) -> Path:
        directory = self.path / "agent" / f"{name}.d"
        directory.mkdir()
        self.fill(directory, **values)
        parent = values.get("parent", "").partition(" ")[0].removeprefix("agent:")
        if parent:
            link = self.path / "agent" / f"{parent}.d" / "child" / name
            link.symlink_to(f"../../{name}.d")
        return directory

    def list_agents(self) -> None:
        """Write `agents`, as the agents are now, in the order in which they were made."""
        lines = []
        for directory in self.made:
            if not directory.exists():
                continue

            def value(file: str, directory: Path = directory) -> str:
                return (directory / file).read_text().removesuffix("\n")

            owned = value("life") != "detached" and value("parent").startswith("agent:")
            names = ("status", "outcome", "reason", "parent", "run")
            made = datetime.fromtimestamp((directory / "incarnation").stat().st_mtime, UTC)
            lines.append({
                "name": directory.name.removesuffix(".d"),
                **{file: value(file) for file in names},
                "profile": "private_child" if owned else "public_named",
                "pid": int(value("pid")) if value("pid") else None,
                "created_at": made.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            })  # fmt: skip
        (self.path / "agents").write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        )

    def fill_part(self, directory: Path, **values: str) -> None:
        """Fill the directory of a task, a work item or a wait."""
        for file in PARTS[directory.parent.name].split():
            value = values.get(file.removesuffix(".md"), "")
            (directory / file).write_text(value + "\n" * bool(value))
        if directory.parent.name == "task":
            os.mkfifo(directory / "wait")

    def part(self, plane: str, name: str, of: str = "x", **values: str) -> Path:
        directory = self.path / "agent" / f"{of}.d" / plane / name
        directory.mkdir()
        self.fill_part(directory, **values)
        return directory

    def end(self, name: str, outcome: str, reason: str) -> None:
        """End an agent as the daemon does."""
        directory = self.path / "agent" / f"{name}.d"
        self.record_end(directory, outcome=outcome, reason=reason, status="dead")

    def record_end(self, directory: Path, **values: str) -> None:
        """Record the end of an agent or a task, replace the FIFO, release its readers."""
        for file, value in values.items():
            (directory / file).write_text(value + "\n")
        fifo = os.open(directory / "wait", os.O_RDWR | os.O_NONBLOCK)
        (directory / "wait.new").write_text("")
        (directory / "wait.new").rename(directory / "wait")
        os.close(fifo)

    def reject(self, code: str, path: str, sentence: str, ago: float = -60) -> None:
        """Have a reason in `error`, by default of a time after the request that will fail."""
        when = datetime.fromtimestamp(time.time() - ago, UTC)
        stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        (self.path / "error").write_text(f"{stamp} {code} {path}: {sentence}\n")


def refuse(monkeypatch: pytest.MonkeyPatch, file: str, number: int, at_close: bool = False) -> None:
    """Make writing to files of that name fail like a control file, at `write` or at `close`."""
    real_open, real_write, real_close = os.open, os.write, os.close
    refused: set[int] = set()

    def fake_open(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if str(path).endswith("/" + file) and flags & os.O_WRONLY:
            refused.add(fd)
        return fd

    def fake_write(fd: int, data: bytes) -> int:
        if fd in refused and not at_close:
            raise OSError(number, os.strerror(number))
        return real_write(fd, data)

    def fake_close(fd: int) -> None:
        real_close(fd)
        if fd in refused:
            refused.discard(fd)
            if at_close:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "write", fake_write)
    monkeypatch.setattr(os, "close", fake_close)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def has_open(process: subprocess.Popen[bytes], path: Path) -> bool:
    """Return whether a process has opened a file, which here means that it waits for it."""
    try:
        descriptors = Path(f"/proc/{process.pid}/fd").iterdir()
        return any(os.readlink(descriptor) == str(path) for descriptor in descriptors)
    except OSError:  # one was closed meanwhile
        return False


def is_asleep(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process waits: Python looks at signals later if they come just before."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("S")


LIFE = "agent/x.d/life"


EVENT = {"id": "e1", "ts": "2026-11-21T21:50:00.123Z", "type": "run.end", "run": "r1", "n": 3}


ASKED: dict[str, Any] = {"type": "the next request is awaited"}


class FakeAgent:
    """A socket that answers each connection with prepared frames."""

    def __init__(
        self, root: FakeRoot, *frames: dict[str, Any], path: str = "agent/x.sock", times: int = 1
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.frames = frames
        self.times = times
        self.socket = socket.socket(socket.AF_UNIX)
        directory = os.open((root.path / path).parent, os.O_PATH)
        self.socket.bind(f"/proc/self/fd/{directory}/{Path(path).name}")  # addresses are short
        os.close(directory)
        self.socket.listen()
        self.thread = threading.Thread(target=self.answer, daemon=True)
        self.thread.start()

    def answer(self) -> None:
        for _ in range(self.times):
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as lines:
                self.answer_one(connection, lines)
        self.socket.close()

    def answer_one(self, connection: socket.socket, lines: Any) -> None:
        for frame in self.frames:
            if frame is ASKED or frame.get("type") in ("start", "resumed"):
                line = lines.readline()
                if not line:
                    return  # only whether there is an answer was of interest
                self.requests.append(json.loads(line))
            if frame is not ASKED:
                ident = self.requests[-1].get("id") if self.requests else None
                connection.sendall(json.dumps({"id": ident, **frame}).encode() + b"\n")


START, DONE = {"type": "start"}, {"type": "done"}


def delta(text: str) -> dict[str, Any]:
    return {"type": "delta", "text": text}


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "text": text}


class Obeying:
    """What the daemon does about verbs, done as they are written."""

    def __init__(
        self, root: FakeRoot, monkeypatch: pytest.MonkeyPatch, **verbs: Callable[[], object]
    ) -> None:
        self.written: list[str] = []
        write = Root.write

        def obey(root: Any, relative: str, data: bytes) -> None:
            write(root, relative, data)
            if relative.endswith("/ctl"):
                self.written.append(data.decode().strip())
                verbs[self.written[-1]]()

        monkeypatch.setattr(Root, "write", obey)


def set_status(root: FakeRoot, status: str, name: str = "x") -> None:
    (root.path / "agent" / f"{name}.d" / "status").write_text(status + "\n")


def all_commands() -> Iterator[Command]:
    """Every command that people use, in the order of help."""
    for word in SUBJECTS:
        if not word.startswith("_"):
            yield from commands_of(word).values()
