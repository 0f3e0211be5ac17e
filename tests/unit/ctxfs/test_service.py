"""What systemd hears of the daemon, also if it is busy with itself just then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from ctxfs.service import Service
from runtime.kernel import systemd
from runtime.runtime import Runtime
from tests.worlds.manager import fill, service_manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with service_manager(tmp_path, monkeypatch) as listening:
        yield listening


@pytest.fixture
def runtime() -> SimpleNamespace:
    """One without agents."""
    journal = SimpleNamespace(subscribe=lambda subscriber: None)
    return SimpleNamespace(state="ready", agents=SimpleNamespace(journal=journal, registry=[]))


def _told(manager: socket.socket) -> list[str]:
    return manager.recv(1000).decode().split("\n")


def _while_it_runs(service: Service, work: Any) -> None:
    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            await trio.to_thread.run_sync(work)
            nursery.cancel_scope.cancel()

    trio.run(both)


def test_the_end_of_a_reload_is_told_once_the_manager_takes_it(
    manager: socket.socket, runtime: SimpleNamespace
) -> None:
    service = Service(cast(Runtime, runtime))
    filled = fill(manager)
    service.reloading()
    service.reloaded()
    service.stopping()

    def read() -> None:
        for _ in range(filled):
            assert _told(manager) == ["STATUS=filled"]
        assert _told(manager)[0] == "RELOADING=1"
        assert [_told(manager) for _ in range(2)] == [["READY=1"], ["STOPPING=1"]]

    _while_it_runs(service, read)


def test_the_status_does_not_overtake_what_systemd_has_not_taken(
    manager: socket.socket, runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(cast(Runtime, runtime))
    answers, notify = iter([False, False]), systemd.notify
    # there is room as soon as the same was refused again
    monkeypatch.setattr(systemd, "notify", lambda *words: next(answers, True) and notify(*words))
    service.stopping()

    def read() -> None:
        assert [_told(manager) for _ in range(2)] == [["STOPPING=1"], ["STATUS=0 agents, 0 busy"]]

    _while_it_runs(service, read)


def test_the_status_is_told_once_the_manager_takes_it(
    manager: socket.socket, runtime: SimpleNamespace
) -> None:
    service = Service(cast(Runtime, runtime))
    filled = fill(manager)

    def read() -> None:
        for _ in range(filled):
            assert _told(manager) == ["STATUS=filled"]
        assert _told(manager) == ["STATUS=0 agents, 0 busy"]

    _while_it_runs(service, read)


def test_only_the_last_of_some_reloads_is_over(
    manager: socket.socket, runtime: SimpleNamespace
) -> None:
    service = Service(cast(Runtime, runtime))
    for _ in range(2):
        service.reloading()
    service.reloaded()
    service.reloaded()
    assert [_told(manager)[0] for _ in range(3)] == ["RELOADING=1", "RELOADING=1", "READY=1"]


def test_a_reload_before_it_is_ready_says_nothing_of_that(
    manager: socket.socket, runtime: SimpleNamespace
) -> None:
    runtime.state = "starting"
    service = Service(cast(Runtime, runtime))
    service.reloading()
    service.reloaded()
    assert _told(manager)[0] == "RELOADING=1"
    service.ready()
    assert _told(manager) == ["READY=1"]
