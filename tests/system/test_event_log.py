"""The events of all agents in one order: nothing missing, nothing twice, whatever dies."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.system.test_backup import ctx
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.histories import kept_histories, kept_logs, mistold
from tests.worlds.pages import mdoc_blocks

OWNERS = (1000, 1001)
#: which everybody can execute
PYTHON = "/usr/bin/python3"


def client(daemon: Daemon, *words: str) -> list[str]:
    return [PYTHON, str(daemon.root / "bin/ctx"), "--root", str(daemon.root), *words]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_of(config="grace: 200ms\n") as daemon:
        yield daemon


class Follower:
    """One ``ctx events -f`` from the beginning, over as many daemons as there are."""

    def __init__(self, daemon: Daemon, *words: str, user: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            client(daemon, "events", "-f", "--json", "--after", "0", *words),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            user=user, extra_groups=[], cwd="/",
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def has(self, number: int) -> bool:
        return bool(self.events) and self.events[-1]["seq"] >= number

    def end(self) -> str:
        """What it has said beside events."""
        self._process.kill()
        self._thread.join()
        with self._process, self._process.stderr as said:  # type: ignore[union-attr]
            return said.read()


@contextmanager
def following(daemon: Daemon, *words: str, user: int = 0) -> Iterator[Follower]:
    follower = Follower(daemon, *words, user=user)
    try:
        yield follower
    finally:
        follower.end()


def wait_readers(daemon: Daemon, count: int) -> None:
    """Returns when so many read the log."""
    metric = f"\nctxfs_event_readers {count}\n"
    wait_until(lambda: metric in daemon.path("metrics").read_text(), f"{count} follow")


class Load(threading.Thread):
    """Somebody who makes agents, writes to them and removes them, until it is over."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        super().__init__()
        self.ctxd = daemon
        self.number = number
        self.over = threading.Event()

    def run(self) -> None:
        for count in itertools.count():
            directory = self.ctxd.agent_dir(f"a{self.number}-{count}")
            acts: list[Callable[[], object]] = [
                directory.mkdir,
                partial(write, directory / "owner", str(OWNERS[self.number % 2])),
                *(partial(write, directory / "meta.json", f'{{"n":{n}}}')
                  for n in range(30 if count % 3 else 4)),
                partial(write, directory / "ctl", "stop"),
                *([directory.rmdir] if count % 2 else []),
            ]  # fmt: skip
            for act in acts:
                if self.over.is_set():
                    return
                with suppress(OSError):  # no daemon answers
                    act()


def logged(daemon: Daemon, owners: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """All events of the logs, in their order."""
    logs = kept_logs(daemon.state)
    lines = [line for owner in owners or logs for line in logs.get(owner, [])]
    return sorted(map(json.loads, lines), key=lambda event: event["seq"])


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_each_event_is_there_once_over_kills_under_load(daemon: Daemon, kills: int) -> None:
    with following(daemon) as of_all, following(daemon, user=OWNERS[0]) as of_one:
        wait_readers(daemon, 2)
        for number in range(kills):
            loads = [Load(daemon, 2 * number + each) for each in range(2)]
            for load in loads:
                load.start()
            before = len(logged(daemon))
            wait_until(lambda n=before: len(logged(daemon)) > n + 100, "much happens")  # type: ignore[misc]
            daemon.kill()
            for load in loads:
                load.over.set()
                load.join()
            daemon.start()
            assert not list(mistold(daemon.state, kept_histories(daemon.state)))
        last = logged(daemon)[-1]["seq"]
        wait_until(lambda: of_all.has(last), "the follower of all has the last event")
        mine = logged(daemon, OWNERS[:1])
        wait_until(lambda: of_one.has(mine[-1]["seq"]), "the other one, too")
        assert of_all.events == logged(daemon)
        assert of_one.events == mine
    text = daemon.path("events").read_text()
    assert text and logged(daemon)[-text.count("\n") :] == list(map(json.loads, text.splitlines()))


def test_whoever_is_killed_between_the_files_and_after_is_completed(daemon: Daemon) -> None:
    """A write(2) to a log that the machine did not get to, or half."""
    directory = daemon.make("x")
    for number in range(40):
        write(directory / "meta.json", f'{{"n":{number}}}')
    daemon.kill()
    log = daemon.state / "events/0/0"
    whole = log.read_bytes()
    for cut in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        log.write_bytes(whole[:cut])
        daemon.start()
        daemon.kill()
        now = log.read_bytes()
        assert now.startswith(whole), cut
        whole = now
    daemon.start()
    assert not list(mistold(daemon.state, kept_histories(daemon.state)))


def test_a_reader_sees_what_its_agents_did_and_a_removed_one_stays(daemon: Daemon) -> None:
    for number, owner in enumerate(OWNERS):
        directory = daemon.make(f"x{number}", owner=str(owner))
        write(directory / "ctl", "stop")
    daemon.agent_dir("x1").rmdir()

    def seen(*words: str, user: int = 0) -> list[tuple[str, str]]:
        done = subprocess.run(
            client(daemon, "events", "--json", *words), text=True, capture_output=True,
            check=True, timeout=TIMEOUT, user=user, extra_groups=[], cwd="/",
        )  # fmt: skip
        found = map(json.loads, done.stdout.splitlines())
        return [(event["agent"], event["type"]) for event in found]

    stop = "agent.stop"
    assert seen("--type", stop) == [("x0", stop), ("x1", stop)]
    assert seen("--type", stop, user=OWNERS[1]) == [("x1", stop)]
    assert seen("--after", "0", "--type", stop, "x1") == [("x1", stop)]
    assert seen("--after", str(2**62)) == []
    human = daemon.ctx("events", "--type", stop).stdout.splitlines()
    assert [" ".join(line.split()[1:4]) for line in human] == [
        f"{stop} owner={owner} agent=x{number}" for number, owner in enumerate(OWNERS)
    ]
    # an agent has its own session
    inside = daemon.finish("inside", "sh -c '$CTX_ROOT/bin/ctx events; echo; cat $CTX_ROOT/events; "
                           "echo $?; $CTX_ROOT/bin/ctx events --after 0; echo $?'")  # fmt: skip
    own, _, rest = read(inside, "out").partition("\n\n")
    assert own and all("agent=inside" in line for line in own.splitlines())
    assert rest.split() == ["1", "13"]


def test_what_a_follower_lost_is_said(tmp_path: Path) -> None:
    with daemon_of(config="events_max: 64K\n") as daemon:
        directory = daemon.make("x")
        while (daemon.state / "events/0/0").exists() or len(kept_logs(daemon.state)[0]) < 300:
            write(directory / "meta.json", "{}")
        done = daemon.ctx("events", "--after", "0", "--json")
        first = json.loads(done.stdout.splitlines()[0])["seq"]
        assert done.stderr.startswith("ctx: events before the number ")
        assert int(done.stderr.split()[5]) <= first
        assert sum(len(line) for line in kept_logs(daemon.state)[0]) <= 64 << 10


def test_a_follower_of_what_is_new_misses_nothing_of_the_next_daemon(daemon: Daemon) -> None:
    daemon.make("x")
    process = subprocess.Popen(
        client(daemon, "events", "-f", "--json", "--type", "agent.create"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None

    def named() -> str:
        assert process.stdout is not None
        name: str = json.loads(process.stdout.readline())["agent"]
        return name

    try:
        wait_readers(daemon, 1)
        for number, end in enumerate((daemon.kill, daemon.stop)):
            daemon.make(f"before-{number}")
            assert named() == f"before-{number}"
            end()
            daemon.start()
            daemon.make(f"after-{number}")
            assert named() == f"after-{number}"
    finally:
        process.kill()
    assert process.communicate()[1] == "ctx: ctxd has ended: waiting for the next one\n"


def test_the_file_is_polled(daemon: Daemon) -> None:
    directory = daemon.make("x")
    fd = os.open(daemon.path("events"), os.O_RDONLY)
    try:
        poller = select.poll()
        poller.register(fd, select.POLLPRI)
        for number in range(5):
            before = os.pread(fd, 1 << 20, 0)
            write(directory / "meta.json", f'{{"n":{number}}}')
            assert poller.poll(TIMEOUT * 1000)
            assert os.pread(fd, 1 << 20, 0).startswith(before)
    finally:
        os.close(fd)


def test_a_backup_ends_where_its_database_does_and_numbers_go_on(daemon: Daemon) -> None:
    def happen() -> None:
        for name in ("x", "y"):
            for number in range(20 if name == "x" else 2):
                write(daemon.agent_dir(name) / "meta.json", f'{{"n":{number}}}')

    for name in ("x", "y"):
        daemon.make(name)
    happen()
    load = Load(daemon, 1)
    load.start()
    backup = daemon.base / "backup.tar"
    done = ctx("backup", "--state", str(daemon.state), str(backup))
    load.over.set()
    load.join()
    assert done.returncode == 0, done.stderr
    happen()
    newest = logged(daemon)[-1]["seq"]
    daemon.stop()
    shutil.rmtree(daemon.state)
    assert ctx("restore", "--state", str(daemon.state), str(backup)).returncode == 0
    daemon.start()
    assert not list(mistold(daemon.state, kept_histories(daemon.state)))
    assert {event["agent"] for event in logged(daemon)} >= {"x", "y"}
    happen()
    assert not list(mistold(daemon.state, kept_histories(daemon.state)))
    # somebody who follows goes on, and sees what is new
    after = [event for event in logged(daemon) if event["seq"] > newest]
    assert sum(event["type"] == "agent.control" for event in after) == 22


def test_the_first_of_several_is_waited_for(daemon: Daemon) -> None:
    for name in ("x", "y"):
        wait_status(daemon.run(name, "sleep 1000"), "busy")
    process = subprocess.Popen(
        client(daemon, "wait", "--any", "--status", "paused,dead", "x", "y"),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    opened = Path(f"/proc/{process.pid}/fd")
    agents = str(daemon.path("agents"))

    def looks() -> bool:
        with suppress(FileNotFoundError):  # one that was closed meanwhile
            return agents in map(os.readlink, opened.iterdir())
        return False

    try:
        wait_until(looks, "it looks")
        daemon.kill()
        daemon.start()
        write(daemon.agent_dir("y") / "ctl", "pause")
        assert process.communicate(timeout=TIMEOUT)[0] == "y paused\n"
    finally:
        process.kill()
    assert process.returncode == 0
    write(daemon.agent_dir("x") / "ctl", "kill")
    wait_dead(daemon.agent_dir("x"))
    assert daemon.ctx("wait", "--any").stdout == "x dead\n"
    daemon.agent_dir("x").rmdir()
    done = daemon.ctx("wait", "--any", "-t", "50ms")
    assert (done.returncode, done.stdout) == (124, "")


@contextmanager
def receiver() -> Iterator[tuple[str, list[str]]]:
    """An address of apprise's for a server of this machine, and what it was sent."""
    got: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append(body["message"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"json://127.0.0.1:{server.server_port}/", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_notices_are_sent_as_the_manual_says(daemon: Daemon, tmp_path: Path) -> None:
    (script,) = [block for block in mdoc_blocks("ctx.1", "EXAMPLES") if "apprise" in block]
    assert len(script.strip().splitlines()) == 6
    with receiver() as (url, got):
        environment = {
            **os.environ, "HOME": str(tmp_path), "URL": url, "CTX_ROOT": str(daemon.root),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

        @contextmanager
        def notices() -> Iterator[None]:
            process = subprocess.Popen(
                ["sh", "-c", script], env=environment, start_new_session=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                yield
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        def followers() -> int:
            metrics, of = daemon.path("metrics").read_text().splitlines(), "ctxfs_event_readers "
            return int(next(line for line in metrics if line.startswith(of)).split()[1])

        with notices():
            wait_until(followers, "it follows")
            daemon.finish("one", "true")
            daemon.finish("two", "sh -c 'exit 3'")
            # apprise(1) is started for each, which takes seconds
            wait_until(lambda: len(got) == 2, "both are told", timeout=4 * TIMEOUT)
            told = [each["seq"] for each in logged(daemon) if each["type"] == "agent.stop"]
            wait_until(
                lambda: (tmp_path / ".ctx-told").read_text() == f"{told[-1]}\n", "it notes it"
            )
        daemon.finish("three", "true")
        with notices():
            wait_until(lambda: len(got) == 3, "what happened meanwhile is told")
    assert got == ["one: done, exit:0", "two: error, exit:3", "three: done, exit:0"]
