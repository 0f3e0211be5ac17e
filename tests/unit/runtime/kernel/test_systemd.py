"""What a service manager is told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernel.systemd import notify, reloading, watchdog_seconds
from tests.worlds.manager import fill, service_manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with service_manager(tmp_path, monkeypatch) as listening:
        yield listening


def test_assignments_come_in_one_datagram(manager: socket.socket) -> None:
    assert notify("READY=1", "STATUS=12 agents, 3 busy")
    assert manager.recv(1000) == b"READY=1\nSTATUS=12 agents, 3 busy"


def test_an_assignment_is_one_line(manager: socket.socket) -> None:
    notify("STATUS=3 agents; a mistake\nMAINPID=1")
    assert manager.recv(1000) == b"STATUS=3 agents; a mistake MAINPID=1"


def test_a_reload_has_its_time() -> None:
    before = time.monotonic_ns() // 1000
    first, second = reloading()
    assert first == "RELOADING=1"
    name, _, moment = second.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(moment) <= time.monotonic_ns() // 1000


def test_a_manager_that_reads_nothing_holds_nobody_up(manager: socket.socket) -> None:
    fill(manager)
    took = []
    for _ in range(3):  # others may take the processor for a moment
        begun = time.monotonic()
        assert not notify("WATCHDOG=1")
        took.append(time.monotonic() - begun)
    assert min(took) < 0.4
    manager.recv(1000)
    assert notify("WATCHDOG=1")


def test_a_manager_that_is_gone_is_not_told(manager: socket.socket) -> None:
    manager.close()
    assert not notify("READY=1")


def test_without_a_manager_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify("READY=1")


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
