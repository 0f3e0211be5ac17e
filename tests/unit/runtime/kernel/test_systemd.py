"""What a service manager is told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernel.systemd import notify, notify_reloading, watchdog_seconds


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_assignments_come_in_one_datagram(manager: socket.socket) -> None:
    notify("READY=1", "STATUS=12 agents, 3 busy")
    assert manager.recv(1000) == b"READY=1\nSTATUS=12 agents, 3 busy"


def test_an_assignment_is_one_line(manager: socket.socket) -> None:
    notify("STATUS=3 agents; a mistake\nMAINPID=1")
    assert manager.recv(1000) == b"STATUS=3 agents; a mistake MAINPID=1"


def test_a_reload_has_its_time(manager: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    notify_reloading()
    first, second = manager.recv(1000).decode().split("\n")
    assert first == "RELOADING=1"
    name, _, moment = second.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(moment) <= time.monotonic_ns() // 1000


def test_a_manager_that_reads_nothing_holds_nobody_up(manager: socket.socket) -> None:
    for _ in range(3 * 512):  # more than any queue (net.unix.max_dgram_qlen) is long here
        begun = time.monotonic()
        notify("WATCHDOG=1")
        if time.monotonic() - begun > 0.4:
            return
    pytest.fail("the queue of the socket has no end")


def test_without_a_manager_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "x"}, None),
    ],
)
def test_the_watchdog_is_asked_for_by_the_environment(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert watchdog_seconds(environment) == seconds
