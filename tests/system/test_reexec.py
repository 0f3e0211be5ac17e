"""The daemon executes another version of itself: nobody meets an error, and all goes on."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    alive,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import ordinary_daemon

HOUSE = Path(__file__).resolve().parents[2]


class Replaceable(Daemon):
    """A daemon whose program is a copy that the test may change."""

    executed = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.program = self.base / "program"
        for package in ("ctxfs", "runtime", "client"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HOUSE / package, self.program / package, ignore=ignored)

    def command(self, *more: str) -> list[str]:
        # python -m looks into the working directory first
        return ["env", "-C", str(self.program), *super().command(*more)]

    def change(self, file: str, old: str, new: str) -> None:
        path = self.program / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

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

        wait_until(is_over, "it is ready again")
        assert self.times_ready() > before, self.log.read_text()[said:]
        assert self.pid == pid


@contextmanager
def replaceable(**options: Any) -> Iterator[Replaceable]:
    daemon = Replaceable(**options)
    with running(daemon):
        yield daemon


@pytest.fixture
def daemon() -> Iterator[Replaceable]:
    with replaceable() as each:
        yield each


def sleeper(daemon: Daemon, name: str, **files: str) -> tuple[Path, str]:
    directory = daemon.run(name, "sleep 1000", **files)
    wait_status(directory, "busy")
    return directory, read(directory, "pid")


TURN = "cat"
#: a resident program that replies in two pieces, the second when there is a file
SLOW = """
while read -r line; do
    printf '{"id":"m","type":"delta","text":"one "}\\n'
    until test -e /gate/open; do sleep 0.02; done
    printf '{"id":"m","type":"delta","text":"two"}\\n{"id":"m","type":"message"}\\n'
done
"""


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

    def have_done(self, enough: int) -> bool:
        return self.done > enough or bool(self.errors)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
        assert not self.errors, self.errors


def test_clients_without_pause_see_no_error_and_agents_live_on(daemon: Replaceable) -> None:
    first, pid = sleeper(daemon, "first")
    turn = daemon.run("turn", TURN, mode="turn")
    wait_status(turn, "idle")
    numbers = iter(range(10**9))

    def send() -> None:
        with Peer(daemon.path("agent", "turn.sock")) as peer:
            name = f"m{next(numbers)}"
            peer.ask(op="send", id=name, input="hello")
            while (frame := peer.next())["type"] != "done":
                assert frame["type"] in ("start", "delta", "message"), frame
            assert frame["status"] == "processed", frame

    def look() -> None:
        assert "state=ready" in daemon.path("status").read_text()
        assert read(first, "status") == "busy\n"
        assert "status" in os.listdir(first)

    def make() -> None:
        directory = daemon.make(f"n{next(numbers)}", label="word")
        assert read(directory, "label") == "word\n"
        directory.rmdir()

    with Clients(look, look, send, send, make) as clients:
        for _ in range(4):
            enough = clients.done + 100
            daemon.reexec()
            wait_until(partial(clients.have_done, enough), "clients go on")
    assert read(first, "pid") == pid and alive(int(pid))
    assert clients.done > 400
    waits = re.findall(r"callers have waited ([0-9.]+) s", daemon.log.read_text())
    assert len(waits) == 4
    events = [event["id"] for event in daemon.events("turn")]
    assert events == [f"e{n}" for n in range(1, len(events) + 1)]
    write(first / "ctl", "stop")
    wait_dead(first)
    assert read(first, "reason") == "operator_stop\n"


def test_lives_go_on_from_their_start_to_their_end(daemon: Replaceable) -> None:
    """Agents and commands that begin and end meanwhile do so once, and as they would."""
    host = daemon.run("host", TURN, mode="turn")
    wait_status(host, "idle")
    numbers = itertools.count()

    def life() -> None:
        agent = daemon.run(name := f"a{next(numbers)}", "echo hi")
        wait_dead(agent)
        end = tuple(read(agent, file) for file in ("outcome", "reason", "out"))
        assert end == ("done\n", "exit:0\n", "hi\n"), read(agent, "log")
        kinds = [event["type"] for event in daemon.events(name)]
        assert kinds.count("run.start") == kinds.count("run.end") == 1, kinds
        agent.rmdir()

    def command() -> None:
        task = host / "task" / f"t{next(numbers)}"
        task.mkdir()
        write(task / "cmd", "echo out; exit 3")
        write(task / "ctl", "start")
        wait_dead(task)
        end = tuple(read(task, file) for file in ("status", "exit", "output"))
        assert end == ("failed\n", "exit:3\n", "out\n"), read(task, "reason")
        task.rmdir()

    def pause() -> None:
        agent = daemon.run(f"p{next(numbers)}", "sleep 1000")
        wait_status(agent, "busy")
        for verb, status in (("pause", "paused"), ("resume", "busy"), ("pause", "paused")):
            write(agent / "ctl", verb)
            wait_status(agent, status)
        write(agent / "ctl", "stop")
        wait_dead(agent)
        assert read(agent, "reason") == "operator_stop\n"
        agent.rmdir()

    with Clients(life, life, command, pause) as clients:
        for _ in range(5):
            enough = clients.done + 5
            daemon.reexec()
            wait_until(partial(clients.have_done, enough), "lives go on")


def test_open_files_go_on(daemon: Replaceable) -> None:
    new = daemon.make("new")
    busy, _ = sleeper(daemon, "busy")
    shared = daemon.path("shared", "space")
    shared.mkdir()
    (shared / "file").write_bytes(b"x" * 8192)
    for number in range(3000):
        (shared / f"n{number}").touch()

    unchanged = read(new, "label")
    label = os.open(new / "label", os.O_WRONLY | os.O_TRUNC)
    os.write(label, b"half-")
    added = os.open(new / "env", os.O_WRONLY | os.O_APPEND)
    os.write(added, b"A=1\n")
    document = os.open(new / "handoff.md", os.O_RDWR)
    os.write(document, b"begin ")
    inputs = os.open(new / "input.jsonl", os.O_WRONLY)
    os.write(inputs, b'{"path": "/one"}\n{"path": ')
    verbs = os.open(new / "ctl", os.O_WRONLY)
    os.write(verbs, b"sta")
    agents = os.open(daemon.path("agents"), os.O_RDONLY)
    begun = os.read(agents, 10)
    history = os.open(busy / "session" / "events.jsonl", os.O_RDONLY)
    head = os.pread(history, 1 << 20, 0)
    real = os.open(shared / "file", os.O_RDWR)
    appended = os.open(shared / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(appended, b"1\n")
    gone = os.open(shared / "gone", os.O_RDWR | os.O_CREAT)
    os.write(gone, b"kept")
    (shared / "gone").unlink()
    with mmap.mmap(real, 8192) as shown, os.scandir(shared) as entries:
        shown[0:3] = b"map"
        names = [next(entries).name for _ in range(10)]
        for _ in range(2):
            daemon.reexec()
        names += [entry.name for entry in entries]
        shown[4096:4100] = b"page"
        shown.flush()
        assert shown[0:3] == b"map"
    assert sorted(names) == sorted(os.listdir(shared)) and len(set(names)) == len(names)
    data = (shared / "file").read_bytes()
    assert data[:3] == b"map" and data[4096:4100] == b"page"
    assert os.pread(gone, 10, 0) == b"kept" and os.fstat(gone).st_nlink == 0
    os.write(appended, b"2\n")
    assert (shared / "log").read_bytes() == b"1\n2\n"
    assert read(new, "label") == unchanged
    os.write(label, b"whole\n")
    os.write(added, b"B=2\n")
    os.write(document, b"end")
    os.write(inputs, b'"/two"}\n')
    for fd in (label, added, document, inputs):
        os.close(fd)
    assert read(new, "label") == "half-whole\n"
    assert read(new, "env") == "A=1\nB=2\n"
    assert read(new, "handoff.md") == "begin end"
    assert read(new, "input.jsonl") == '{"path": "/one"}\n{"path": "/two"}\n'
    rest = begun + os.read(agents, 1 << 20)
    assert [json.loads(line)["name"] for line in rest.splitlines()] == ["new", "busy"]
    assert os.pread(history, 1 << 20, 0)[: len(head)] == head
    write(new / "exec", "sleep 1000")
    os.write(verbs, b"rt\n")
    wait_status(new, "busy")
    for fd in (verbs, agents, history, real, appended, gone):
        os.close(fd)


def test_what_was_refused_before_is_refused_the_same(daemon: Replaceable) -> None:
    """Rights of an open file are those of who opened it, and of then."""
    directory = daemon.make("x")
    label = os.open(directory / "label", os.O_WRONLY | os.O_TRUNC)
    os.write(label, b"staged\n")
    ended = os.open(daemon.path("agent", "x.d", "status"), os.O_RDONLY)
    assert os.pread(ended, 10, 0) == b"new\n"
    directory.rmdir()
    last = os.pread(ended, 10, 0)
    daemon.reexec()
    with pytest.raises(FileNotFoundError):
        os.close(label)
    assert os.pread(ended, 10, 0) == last
    os.close(ended)
    assert not directory.exists()


def test_pollers_are_woken_once_and_go_on(daemon: Replaceable) -> None:
    directory, _ = sleeper(daemon, "x")
    fd = os.open(directory / "status", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == b"busy\n"
    poller = select.poll()
    poller.register(fd, select.POLLPRI | select.POLLERR)
    found: list[bytes] = []

    def wait() -> None:
        while poller.poll(TIMEOUT * 1000):
            found.append(os.pread(fd, 100, 0))
            if found[-1] == b"paused\n":
                return

    waiting = threading.Thread(target=wait)
    waiting.start()
    fifo = subprocess.Popen(["cat", str(directory / "wait")])
    for _ in range(2):
        daemon.reexec()
    assert fifo.poll() is None
    write(directory / "ctl", "pause")
    waiting.join(TIMEOUT)
    assert found and found[-1] == b"paused\n"
    assert set(found[:-1]) <= {b"busy\n", b"paused\n"} and len(found) <= 3
    os.close(fd)
    write(directory / "ctl", "kill")
    assert fifo.wait(TIMEOUT) == 0


def test_connections_go_on(daemon: Replaceable) -> None:
    waited, _ = sleeper(daemon, "waited")
    with (
        Peer(daemon.path("agent", "waited.sock")) as waiting,
        Peer(daemon.path("agent", "waited.sock")) as following,
        Peer(daemon.path("agent", "waited.sock")) as half,
        Peer(daemon.path("ctxd.sock")) as own,
    ):
        waiting.ask(op="wait")
        following.ask(op="resume")
        seen = [following.next()["id"] for _ in range(2)]
        half.socket.sendall(b'{"op":"pi')
        own.socket.sendall(b'{"op":"ping"}\n{"op":"status"}\n')
        assert own.next() == {"type": "pong"} and own.next()["type"] == "status"
        for _ in range(2):
            daemon.reexec()
        half.socket.sendall(b'ng"}\n')
        assert half.next() == {"type": "pong"}
        own.ask(op="ping")
        assert own.next() == {"type": "pong"}
        write(waited / "ctl", "stop")
        assert waiting.next()["outcome"] == "cancelled"
        while (line := following.lines.readline()):
            seen.append(json.loads(line)["id"])
    assert seen == [event["id"] for event in daemon.events("waited")]


def test_a_call_that_waits_is_answered_once(daemon: Replaceable) -> None:
    host = daemon.run("host", TURN, mode="turn")
    wait_status(host, "idle")
    task = host / "task" / "t"
    task.mkdir()
    write(task / "cmd", "echo said; exec sleep 1000")
    write(task / "ctl", "start")
    wait_status(task, "running")
    given = {"agent_id": "host", "task_id": "t", "block": True}
    with Peer(daemon.path("ctxd.sock")) as peer, Peer(daemon.path("ctxd.sock")) as gone:
        peer.ask(op="tool", name="TaskOutput", input=given)
        peer.ask(op="tool", name="TaskOutput", id="again", input=given)
        gone.ask(op="tool", name="TaskOutput", id="cancelled", input=given)
        for _ in range(2):
            daemon.reexec()
        gone.ask(op="cancel", id="cancelled")
        gone.ask(op="ping")
        assert gone.next() == {"type": "pong"}
        write(task / "ctl", "stop")
        found = [peer.next(), peer.next()]
        assert {frame.get("id") for frame in found} == {None, "again"}
        assert {frame["output"]["status"] for frame in found} == {"cancelled"}
        peer.ask(op="ping")
        assert peer.next() == {"type": "pong"}


def test_a_reply_goes_on_where_it_was(daemon: Replaceable) -> None:
    gate = daemon.base / "gate"
    gate.mkdir()
    (gate / "program").write_text(SLOW)
    slow = daemon.run("slow", "sh /gate/program", mode="resident", mount=f"{gate} /gate ro")
    wait_status(slow, "ready")
    with Peer(daemon.path("agent", "slow.sock")) as peer:
        peer.ask(op="send", id="m", input="x")
        assert peer.next()["type"] == "start"
        assert peer.next()["text"] == "one "
        daemon.reexec()
        (gate / "open").touch()
        assert peer.next() == {"type": "delta", "id": "m", "text": "two"}
        assert peer.next() == {"type": "message", "id": "m", "text": "one two"}
        assert peer.next()["status"] == "processed"


def test_what_a_slow_reader_has_not_read_comes_whole_and_once(daemon: Replaceable) -> None:
    directory, _ = sleeper(daemon, "x")
    history = directory / "session" / "events.jsonl"
    for number in range(300):
        write(directory / "meta.json", json.dumps({"n": number, "pad": "x" * 50}))
    with Peer(daemon.path("agent", "x.sock")) as peer:
        for _ in range(16):  # more than the kernel takes for it
            peer.ask(op="resume")
        daemon.reexec()
        daemon.reexec()
        peer.ask(op="ping")
        counts: dict[str, int] = {}
        last = json.loads(history.read_text().splitlines()[-1])["id"]
        while counts.get(last, 0) < 16:
            frame = peer.next()
            if "id" in frame:
                counts[frame["id"]] = counts.get(frame["id"], 0) + 1
    assert set(counts.values()) == {16}


def test_a_row_in_front_of_all_others_changes_nothing_for_a_cached_path(
    daemon: Replaceable,
) -> None:
    directory, pid = sleeper(daemon, "x")
    kept = [directory / name for name in ("status", "pid", "label", "exec", "ctl")]
    fds = [os.open(path, os.O_PATH) for path in kept]
    before = [os.fstat(fd).st_ino for fd in fds]
    texts = [path.read_text() for path in kept]
    status = os.open(directory / "status", os.O_RDONLY)
    daemon.change(
        "ctxfs/files/agent.py",
        "ROWS: Final[tuple[Row[Agent], ...]] = (\n",
        'ROWS: Final[tuple[Row[Agent], ...]] = (\n    Shown(name="first", public=True, '
        'render=lambda base, agent, caller: "I am new\\n", doc="x"),\n',
    )
    last = '"waiting", "session",'
    daemon.change("ctxfs/tree/numbers.py", last, f'{last} "first",')
    daemon.change("runtime/runtime.py", 'VERSION = "', 'VERSION = "9.')
    told = daemon.ctx("reexec")
    assert told.stdout.startswith("ctxd 9.") and "(was " in told.stdout, told
    assert [os.fstat(fd).st_ino for fd in fds] == before
    assert [path.stat().st_ino for path in kept] == before
    assert [path.read_text() for path in kept] == texts
    assert os.pread(status, 100, 0) == b"busy\n"
    assert read(directory, "first") == "I am new\n"
    assert os.listdir(directory)[0] == "first"
    assert "version=9." in daemon.path("status").read_text()
    assert read(directory, "pid") == pid
    for fd in (*fds, status):
        os.close(fd)


def _break_syntax(daemon: Replaceable) -> str:
    (daemon.program / "ctxfs" / "files" / "root.py").write_text("def broken(:\n")
    return "SyntaxError"


def _break_client(daemon: Replaceable) -> str:
    (daemon.program / "client" / "ps.py").write_text("def broken(:\n")
    return "SyntaxError"


def _break_settings(daemon: Replaceable) -> str:
    (daemon.base / "config.yaml").write_text("grace: [\n")
    return "config.yaml"


def _take_other_handovers(daemon: Replaceable) -> str:
    daemon.change("runtime/kernel/handover.py", "FORMAT: Final = 1", "FORMAT: Final = 2")
    return "takes another handover (handover 2; this ctxd gives handover 1)"


def _write_newer_state(daemon: Replaceable) -> str:
    with closing(sqlite3.connect(daemon.state / "ctxfs.db")) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version={version + 1}")
    return "written by a newer ctxd"


def _read_only_older(daemon: Replaceable) -> str:
    daemon.change("runtime/records/store.py", "    Store._add_answers,\n", "")
    return "written by a newer ctxd"


@pytest.mark.parametrize("spoil", [
    _break_syntax, _break_client, _break_settings, _take_other_handovers, _write_newer_state,
    _read_only_older,
])  # fmt: skip
def test_a_program_that_does_not_do_leaves_the_old_one_serving(
    spoil: Callable[[Replaceable], str],
) -> None:
    with replaceable(config="grace: 1s\n") as daemon:
        directory, pid = sleeper(daemon, "x")
        backup = daemon.base / "backup"
        shutil.copytree(daemon.program, backup)
        why = spoil(daemon)
        for _ in range(2):
            told = daemon.ctx("reexec")
            assert told.returncode == 1 and why in told.stderr, told

        def says(times: int) -> bool:
            return daemon.log.read_text().count("is not executed again: ") == times

        wait_until(lambda: says(2), "the log says it each time")
        os.kill(daemon.pid, signal.SIGUSR1)
        wait_until(lambda: says(3), "it says why")
        assert why in daemon.log.read_text().splitlines()[-1]
        assert daemon.times_ready() == 1
        assert read(directory, "status") == "busy\n" and read(directory, "pid") == pid
        # what was spoilt is made good
        shutil.rmtree(daemon.program)
        backup.rename(daemon.program)
        (daemon.base / "config.yaml").write_text("grace: 1s\n")
        with closing(sqlite3.connect(daemon.state / "ctxfs.db")) as db:
            if spoil is _write_newer_state:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                db.execute(f"PRAGMA user_version={version - 1}")


@pytest.mark.parametrize(
    "point", ["reexec.held", "reexec.saved", "reexec.executed", "reexec.restored"]
)
def test_to_die_meanwhile_is_a_crash_like_any_other(point: str) -> None:
    with replaceable(env={"CTXD_CRASH_AT": point}) as daemon:
        directory, pid = sleeper(daemon, "x")
        write(directory / "ctl", "pause")
        fd = os.open(directory / "status", os.O_RDONLY)
        os.kill(daemon.pid, signal.SIGUSR1)
        daemon.wait_killed()
        with pytest.raises(OSError):
            os.pread(fd, 100, 0)
        with suppress(OSError):  # of the flush
            os.close(fd)
        daemon.env.clear()
        daemon.start()
        assert read(directory, "status") == "paused\n" and read(directory, "pid") == pid
        write(directory / "ctl", "resume")
        write(directory / "ctl", "stop")
        wait_dead(directory)


def test_two_at_once_are_both_answered(daemon: Replaceable) -> None:
    with Peer(daemon.path("ctxd.sock")) as one, Peer(daemon.path("ctxd.sock")) as other:
        one.ask(op="reexec")
        other.ask(op="reexec")
        os.kill(daemon.pid, signal.SIGUSR1)
        assert one.next()["type"] == other.next()["type"] == "reexec"
    assert "state=ready" in daemon.path("status").read_text()


def test_a_signal_that_comes_meanwhile_is_obeyed_afterwards(daemon: Replaceable) -> None:
    os.kill(daemon.pid, signal.SIGUSR1)
    wait_until(lambda: "executing" in daemon.log.read_text(), "it begins")
    # the program may have been changed since it was checked
    os.kill(daemon.pid, signal.SIGUSR1)
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: daemon.times_ready() == 3, "it is executed once more")
    wait_until(lambda: "settings were read again" in daemon.log.read_text(), "it has read them")
    assert "refused" not in daemon.log.read_text()


def test_sigterm_meanwhile_ends_it_in_order() -> None:
    daemon = Replaceable()
    daemon.start()
    _, pid = sleeper(daemon, "x")
    before = len(re.findall("executing", daemon.log.read_text()))
    os.kill(daemon.pid, signal.SIGUSR1)
    wait_until(lambda: len(re.findall("executing", daemon.log.read_text())) > before, "it begins")
    assert daemon.process is not None
    assert daemon.stop() == 0
    assert not alive(int(pid))
    assert not daemon.cgroup.path.exists()
    daemon.close()


def test_to_stop_while_the_program_is_checked_leaves_nothing() -> None:
    daemon = Replaceable()
    with running(daemon):
        check = "    check_state(state"
        daemon.change("ctxfs/daemon.py", check, "    time.sleep(1000)\n" + check)
        helpers = daemon.cgroup.path / "helper"
        before = len((helpers / "cgroup.procs").read_text().split())
        os.kill(daemon.pid, signal.SIGUSR1)
        wait_until(lambda: len((helpers / "cgroup.procs").read_text().split()) > before, "it runs")
        assert daemon.stop() == 0
        assert not daemon.cgroup.path.exists()
        daemon.start()


def test_only_its_operator_may_have_it_executed(daemon: Replaceable) -> None:
    def ask_as(uid: int) -> dict[str, Any]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(uid)
                os.setuid(uid)
                with Peer(daemon.path("ctxd.sock")) as peer:
                    peer.ask(op="reexec")
                    os.write(writing, json.dumps(peer.next()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as told:
            found: dict[str, Any] = json.loads(told.read())
            return found

    refused = ask_as(61000)
    assert (refused["type"], refused["code"]) == ("error", "EACCES"), refused
    assert daemon.times_ready() == 1


@contextmanager
def _descriptors_of(daemon: Daemon) -> Iterator[None]:
    before = sorted(daemon.descriptors())
    yield
    # a socket's name has its inode number
    def kinds(found: list[str]) -> list[str]:
        return sorted(re.sub(r"\d+", "", path) for path in found)

    wait_until(lambda: kinds(daemon.descriptors()) == kinds(before),
               f"it has the same descriptors: {before}")


def test_nothing_is_left_by_many(daemon: Replaceable) -> None:
    directory, pid = sleeper(daemon, "x")
    daemon.reexec()
    with _descriptors_of(daemon):
        for _ in range(5):
            daemon.reexec()
    processes = Path("/proc").glob("[0-9]*/stat")
    assert [each for each in processes if _is_zombie_of(each, daemon.pid)] == []
    assert len(daemon.guards()) == 1 and daemon.strangers() == []
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert not alive(int(pid))


def _is_zombie_of(stat: Path, parent: int) -> bool:
    try:
        state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(ppid) == parent


def test_without_root() -> None:
    with ordinary_daemon() as daemon:
        def life() -> None:
            directory = daemon.run("x", "sleep 1000")
            wait_status(directory, "busy")
            pid = read(directory, "pid")
            fd = os.open(directory / "status", os.O_RDONLY)
            for _ in range(2):
                told = daemon.ctx("reexec")
                assert told.returncode == 0, told
                assert read(directory, "pid") == pid and os.pread(fd, 100, 0) == b"busy\n"
            os.close(fd)

        daemon.do(life)
        assert daemon.stop() == 0
        assert not daemon.is_mounted() and not daemon.root.is_symlink()
        daemon.start()
