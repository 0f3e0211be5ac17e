"""Pages of a status, which the kernel keeps: none is older than what was told."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ctxfs.caching import STEADY_SECONDS
from tests.worlds.daemon import TIMEOUT, Daemon, wait_status, wait_until

#: how often a status changes in a test
CHANGES = 400
SAID = {"pause": b"paused\n", "resume": b"idle\n"}


def wait_steady(agent: Path) -> None:
    def steady() -> bool:
        return time.time() - (agent / "status").stat().st_mtime > STEADY_SECONDS

    wait_until(steady, f"{agent} to keep its status")


@pytest.fixture
def agent(daemon: Daemon) -> Path:
    """One that is idle, and was for long enough."""
    made = daemon.run("coder", "true", mode="turn")
    wait_status(made, "idle")
    wait_steady(made)
    return made


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def requests(daemon: Daemon) -> int:
    lines = (daemon.root / "metrics").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("ctxfs_requests_total "))


def polled(fd: int, timeout: float = TIMEOUT) -> bool:
    """Whether it is told of a change."""
    poller = select.poll()
    poller.register(fd, select.POLLPRI)
    return bool(poller.poll(timeout * 1000))


def test_a_steady_status_is_read_without_the_daemon(daemon: Daemon, agent: Path) -> None:
    with opened(agent / "status") as fd:
        assert os.pread(fd, 64, 0) == b"idle\n"
        before = requests(daemon)
        for _ in range(CHANGES):
            assert os.pread(fd, 64, 0) == b"idle\n"
        assert requests(daemon) - before < CHANGES / 10


def test_a_verb_returns_when_no_page_is_left(agent: Path) -> None:
    """Whoever said it, and everybody else, reads what it has made."""
    with opened(agent / "status") as fd:
        for number in range(CHANGES):
            verb = ("pause", "resume")[number % 2]
            (agent / "ctl").write_text(f"{verb}\n")
            assert os.pread(fd, 64, 0) == SAID[verb], number
            assert (agent / "status").read_bytes() == SAID[verb], number


# Where readers are pre-empted between two steps of the kernel, see ctxfs/caching.py, one may be
# told and still read the old page: seen on a machine with several processes for each processor.
@pytest.mark.alone
def test_pollers_are_told_once_the_page_is_gone(agent: Path) -> None:
    """While others read without pause, and so fill pages at any moment."""
    over = threading.Event()

    def fill() -> None:
        with opened(agent / "status") as fd:
            while not over.is_set():
                os.pread(fd, 64, 0)

    fillers = [threading.Thread(target=fill) for _ in range(2)]
    with opened(agent / "status") as fd:
        assert os.pread(fd, 64, 0) == b"idle\n"
        assert not polled(fd, 0), "nothing changed since it was opened"
        for filler in fillers:
            filler.start()
        try:
            for number in range(CHANGES):
                verb = ("pause", "resume")[number % 2]
                (agent / "ctl").write_text(f"{verb}\n")
                assert polled(fd), number
                assert os.pread(fd, 64, 0) == SAID[verb], number
        finally:
            over.set()
            for filler in fillers:
                filler.join()

        def is_quiet() -> bool:
            if polled(fd, 0):
                # it read a page that another one had filled
                assert os.pread(fd, 64, 0) == b"idle\n"
                return False
            return True

        wait_until(is_quiet, "poll to report nothing more")
