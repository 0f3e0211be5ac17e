"""The daemon executes another version of itself: nobody meets an error, and all goes on."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from runtime.kernel.cgroups import Cgroup
from runtime.kernel.handover import FORMAT
from tests.worlds.daemon import (
    Daemon,
    alive,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.ordinary import ordinary_daemon
from tests.worlds.reexecution import (
    TURN,
    Clients,
    Peer,
    Replaceable,
    add_row_in_front,
    break_syntax,
    change,
    clients_of,
    half_asked,
    half_written,
    kept_paths,
    polled,
    replaceable,
    reply_in_pieces,
    sleeper,
)


@pytest.fixture
def daemon() -> Iterator[Replaceable]:
    with replaceable() as each:
        yield each


def test_clients_without_pause_see_no_error_and_agents_live_on(daemon: Replaceable) -> None:
    first, pid = sleeper(daemon, "first")
    turn = daemon.run("turn", TURN, mode="turn")
    wait_status(turn, "idle")
    with clients_of(daemon, first, "turn") as clients:
        for _ in range(2):
            daemon.reexec()
            clients.go_on(40)
    assert read(first, "pid") == pid and alive(int(pid))
    waits = re.findall(r"callers have waited ([0-9.]+) s", daemon.log.read_text())
    assert len(waits) == 2
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
        for _ in range(2):
            daemon.reexec()
            clients.go_on(5)


@pytest.mark.long
def test_half_written_controls_go_on(daemon: Replaceable) -> None:
    with half_written(daemon, "half"):
        for _ in range(2):
            daemon.reexec()


def test_open_files_go_on(daemon: Replaceable) -> None:
    new = daemon.make("new")
    busy, _ = sleeper(daemon, "busy")
    daemon.path("shared", "space").mkdir()
    shared = daemon.path("shared", "space", "data")
    (shared / "file").write_bytes(b"x" * 8192)
    for number in range(3000):
        (shared / f"n{number}").touch()

    document = os.open(new / "handoff.md", os.O_RDWR)
    os.write(document, b"begin ")
    inputs = os.open(new / "input.jsonl", os.O_WRONLY)
    os.write(inputs, b'{"path": "/one"}\n{"path": ')
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
    os.write(document, b"end")
    os.write(inputs, b'"/two"}\n')
    for fd in (document, inputs):
        os.close(fd)
    assert read(new, "handoff.md") == "begin end"
    assert read(new, "input.jsonl") == '{"path": "/one"}\n{"path": "/two"}\n'
    rest = begun + os.read(agents, 1 << 20)
    assert [json.loads(line)["name"] for line in rest.splitlines()] == ["new", "busy"]
    assert os.pread(history, 1 << 20, 0)[: len(head)] == head
    for fd in (agents, history, real, appended, gone):
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


@pytest.mark.long
def test_pollers_are_woken_once_and_go_on(daemon: Replaceable) -> None:
    with polled(daemon, "x", times=2):
        for _ in range(2):
            daemon.reexec()


def test_connections_go_on(daemon: Replaceable) -> None:
    with half_asked(daemon, "x"), Peer(daemon.path("ctxd.sock")) as own:
        own.socket.sendall(b'{"op":"ping"}\n{"op":"status"}\n')
        assert own.next() == {"type": "pong"} and own.next()["type"] == "status"
        daemon.reexec()
        own.ask(op="ping")
        assert own.next() == {"type": "pong"}


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
        command = {"agent_id": "host", "task_id": "c", "cmd": "exec sleep 1000", "yield": 50}
        peer.ask(op="tool", name="ExecCommand", id="command", input=command)
        wait_until((host / "task" / "c").exists, "the command is made")
        wait_status(host / "task" / "c", "running")
        daemon.reexec()
        cut_short = peer.next()
        assert (cut_short["id"], cut_short["output"]["task_handle"]["task_id"]) == ("command", "c")
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


@pytest.mark.long
def test_a_reply_goes_on_where_it_was(daemon: Replaceable) -> None:
    with reply_in_pieces(daemon, "slow", daemon.base / "gate"):
        daemon.reexec()


@pytest.mark.long
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
    with kept_paths(directory):
        add_row_in_front(daemon.program)
        told = daemon.ctx("reexec")
        assert told.stdout.startswith("ctxd 9.") and "(was " in told.stdout, told
    assert read(directory, "first") == "I am new\n"
    assert os.listdir(directory)[0] == "first"
    assert "version=9." in daemon.path("status").read_text()
    assert read(directory, "pid") == pid


def _break_syntax(daemon: Replaceable) -> str:
    break_syntax(daemon.program)
    return "SyntaxError"


def _break_client(daemon: Replaceable) -> str:
    (daemon.program / "client" / "ps.py").write_text("def broken(:\n")
    return "SyntaxError"


def _break_settings(daemon: Replaceable) -> str:
    (daemon.base / "config.yaml").write_text("grace: [\n")
    return "config.yaml"


def _take_other_handovers(daemon: Replaceable) -> str:
    own = f"FORMAT: Final = {FORMAT}"
    change(daemon.program, "runtime/kernel/handover.py", own, "FORMAT: Final = 99")
    return f"takes another handover (handover 99; this ctxd gives handover {FORMAT})"


def _write_newer_state(daemon: Replaceable) -> str:
    with closing(sqlite3.connect(daemon.state / "ctxfs.db")) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version={version + 1}")
    return "written by a newer ctxd"


def _read_only_older(daemon: Replaceable) -> str:
    last = "SCHEMA: Final = len(STEPS)\n"
    change(daemon.program, "runtime/records/schema.py", last, f"STEPS = STEPS[:-1]\n{last}")
    return "written by a newer ctxd"


@pytest.mark.parametrize("spoil", [
    _break_syntax, _write_newer_state,
    *(pytest.param(each, marks=pytest.mark.long)
      for each in (_break_client, _break_settings, _read_only_older, _take_other_handovers)),
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


@pytest.mark.long
def test_who_asks_is_told_what_is_wrong_beside_the_settings() -> None:
    with replaceable(config="depth: 8\n") as daemon:
        directory, pid = sleeper(daemon, "x")
        (daemon.base / "agents.d").mkdir(mode=0o755, exist_ok=True)
        bad = daemon.base / "agents.d" / "bad.yaml"
        bad.write_text("limts: {}\n")
        bad.chmod(0o644)
        misnamed = daemon.base / "ctxfs.yaml"
        misnamed.write_text("grace: 1s\n")
        told = daemon.ctx("reexec")
        assert told.returncode == 0 and told.stdout.startswith("ctxd "), told
        first, second = told.stderr.splitlines()
        assert first.startswith(f"ctx: {misnamed}: this file is not read: settings are in ")
        assert second == f"ctx: {bad}:1: limts: unknown key; did you mean limits?"
        assert read(directory, "pid") == pid
        bad.unlink()
        misnamed.unlink()
        assert daemon.ctx("reexec").stderr == ""


def test_a_program_that_would_lack_descriptors_is_not_executed(daemon: Replaceable) -> None:
    directory, pid = sleeper(daemon, "x")
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    most = len(daemon.descriptors()) + 40
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (most, before[1]))
    told = daemon.ctx("reexec")
    assert told.returncode == 1, told
    assert re.search(f"holds [0-9]+ of {most} descriptors.*EAGAIN", told.stderr), told
    assert daemon.times_ready() == 1
    # a thread writes the log
    wait_until(lambda: "rejected: uid:0: EAGAIN" in daemon.log.read_text(), "the log says so")
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
    daemon.reexec()
    assert read(directory, "status") == "busy\n" and read(directory, "pid") == pid


@pytest.mark.parametrize("point", [
    "reexec.executed",
    *(pytest.param(point, marks=pytest.mark.long)
      for point in ("reexec.held", "reexec.saved", "reexec.restored")),
])
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


@pytest.mark.long
def test_two_at_once_are_both_answered(daemon: Replaceable) -> None:
    with Peer(daemon.path("ctxd.sock")) as one, Peer(daemon.path("ctxd.sock")) as other:
        one.ask(op="reexec")
        other.ask(op="reexec")
        os.kill(daemon.pid, signal.SIGUSR1)
        assert one.next()["type"] == other.next()["type"] == "reexec"
    assert "state=ready" in daemon.path("status").read_text()


@pytest.mark.long
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


@contextmanager
def _being_checked() -> Iterator[tuple[Replaceable, int]]:
    """A daemon that checks its program, which takes long, and the process that it has check it."""
    with replaceable() as daemon:
        check = "    check_state(state"
        change(daemon.program, "ctxfs/daemon.py", check, "    time.sleep(1000)\n" + check)
        before = set(Cgroup(daemon.cgroup.path / "helper").processes())
        os.kill(daemon.pid, signal.SIGUSR1)
        helpers = Cgroup(daemon.cgroup.path / "helper")
        wait_until(lambda: set(helpers.processes()) > before, "it runs")
        (pid,) = set(helpers.processes()) - before
        yield daemon, pid


@pytest.mark.long
def test_to_stop_while_the_program_is_checked_leaves_nothing() -> None:
    with _being_checked() as (daemon, _):
        assert daemon.stop() == 0
        assert not daemon.cgroup.path.exists()
        daemon.start()


def test_the_program_is_checked_with_the_precedence_of_the_daemon() -> None:
    """However many processes agents have, an upgrade does not wait for them."""
    with _being_checked() as (daemon, pid):
        own = os.getpriority(os.PRIO_PROCESS, daemon.pid)
        assert own < os.getpriority(os.PRIO_PROCESS, 0)
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == own, "it has precedence")
        assert daemon.stop() == 0
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


@pytest.mark.long
def test_nothing_is_left_by_many(daemon: Replaceable) -> None:
    directory, pid = sleeper(daemon, "x")
    daemon.reexec()
    with _descriptors_of(daemon):
        for _ in range(3):
            daemon.reexec()
    processes = Path("/proc").glob("[0-9]*/stat")
    assert [each for each in processes if _is_zombie_of(each, daemon.pid)] == []
    # what is just started has the name of who started it
    wait_until(lambda: len(daemon.guards()) == 1 and daemon.strangers() == [], "it has one guard")
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert not alive(int(pid))


def _is_zombie_of(stat: Path, parent: int) -> bool:
    try:
        state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(ppid) == parent


@pytest.mark.long
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
