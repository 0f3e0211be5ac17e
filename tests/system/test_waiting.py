"""wait, poll(2) and what a waiter costs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write


def _blocked(pid: int) -> bool:
    """Whether the process sleeps in the kernel's open(2) of a FIFO."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            return "wait_for_partner" in file.read()
    except FileNotFoundError:
        return False


def test_wait_blocks_until_the_end_and_returns_at_once_after(daemon: Daemon) -> None:
    agent = daemon.run("sleeper", "sleep 1000")
    with subprocess.Popen(["cat", str(agent / "wait")], stdout=subprocess.PIPE) as waiter:
        wait_until(lambda: _blocked(waiter.pid), "cat blocks in open")
        write(agent / "ctl", "kill")
        assert waiter.wait(30) == 0
    wait_dead(agent, timeout=5)
    assert (agent / "wait").read_bytes() == b""


def test_five_hundred_waiters_are_killable_and_nobody_notices_them(daemon: Daemon) -> None:
    agent = daemon.run("sleeper", "sleep 1000")
    waiters = [subprocess.Popen(["cat", str(agent / "wait")]) for _ in range(500)]
    for waiter in waiters:
        wait_until(lambda w=waiter: _blocked(w.pid), "cat blocks in open")  # type: ignore[misc]
    started = time.monotonic()
    for _ in range(100):
        assert read(agent, "status") == "busy\n"
    assert time.monotonic() - started < 10, "other callers are served"
    for waiter in waiters[:250]:
        waiter.send_signal(signal.SIGINT)
    for waiter in waiters[:250]:
        assert waiter.wait(30) == -signal.SIGINT
    write(agent / "ctl", "kill")
    for waiter in waiters[250:]:
        assert waiter.wait(30) == 0


def test_waiters_are_released_after_a_crash_of_the_daemon(daemon: Daemon) -> None:
    agent = daemon.run("brief", "sleep 1000")
    wait_status(agent, "busy")
    pid = int(read(agent, "pid"))
    living = daemon.run("other", "sleep 1000")
    waiters = [subprocess.Popen(["cat", str(d / "wait")]) for d in (agent, living)]
    for waiter in waiters:
        wait_until(lambda w=waiter: _blocked(w.pid), "cat blocks in open")  # type: ignore[misc]
    daemon.kill()
    assert [w.poll() for w in waiters] == [None, None], "the kernel blocks without the daemon"
    os.kill(pid, signal.SIGKILL)
    daemon.start()
    assert waiters[0].wait(30) == 0
    assert waiters[1].poll() is None
    write(living / "ctl", "kill")
    assert waiters[1].wait(30) == 0


def test_a_stranger_cannot_release_waiters(daemon: Daemon) -> None:
    agent = daemon.run("sleeper", "sleep 1000")
    fifo = os.readlink(agent / "wait")
    result = subprocess.run(
        ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "sh", "-c",
         f"echo > {fifo} || ls {os.path.dirname(fifo)}"],
        capture_output=True, text=True, check=False,
    )
    assert result.returncode != 0
    assert result.stderr.count("Permission denied") == 2
    write(agent / "ctl", "kill")
    wait_dead(agent)


def test_poll_tells_changes_of_status_once(daemon: Daemon) -> None:
    agent = daemon.make("watched", "sleep 1000")
    fd = os.open(agent / "status", os.O_RDONLY)
    poller = select.poll()
    poller.register(fd, select.POLLPRI | select.POLLERR)
    seen = [os.pread(fd, 100, 0)]
    assert poller.poll(0) == []
    write(agent / "ctl", "start")
    while seen[-1] != b"busy\n":
        assert poller.poll(30_000), "a change is told"
        seen.append(os.pread(fd, 100, 0))
    assert poller.poll(0) == [], "told once"
    write(agent / "ctl", "kill")
    while seen[-1] != b"dead\n":
        assert poller.poll(30_000)
        seen.append(os.pread(fd, 100, 0))
    os.close(fd)
    assert seen[0] == b"new\n"


def test_poll_tells_new_events(daemon: Daemon) -> None:
    agent = daemon.make("watched", "true")
    fd = os.open(agent / "session" / "events.jsonl", os.O_RDONLY)
    poller = select.poll()
    poller.register(fd, select.POLLPRI | select.POLLERR)
    text = os.pread(fd, 65536, 0)
    write(agent / "ctl", "start")
    while b"agent.stop" not in text:
        assert poller.poll(30_000)
        text = os.pread(fd, 65536, 0)
    assert text.count(b'"id":"e1"') == 1
    os.close(fd)


def test_an_idle_poller_costs_nothing(daemon: Daemon) -> None:
    agent = daemon.run("sleeper", "sleep 1000")
    wait_status(agent, "busy")
    fds = [os.open(agent / "status", os.O_RDONLY) for _ in range(100)]
    poller = select.poll()
    for fd in fds:
        os.pread(fd, 100, 0)
        poller.register(fd, select.POLLPRI)
    assert poller.poll(200) == []
    write(agent / "ctl", "kill")
    assert poller.poll(30_000)
    for fd in fds:
        os.close(fd)
    wait_dead(agent)
