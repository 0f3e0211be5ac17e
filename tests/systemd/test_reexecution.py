"""The daemon executes itself again under systemd, while others read and send without pause."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.systemd.service import CHECKOUT, DAEMON, SECONDS, Service, systemctl
from tests.worlds.daemon import read, wait_dead, wait_status, wait_until, write
from tests.worlds.reexecution import (
    TURN,
    add_row_in_front,
    all_that_goes_on,
    break_syntax,
    clients_of,
    sleeper,
)


@contextmanager
def _program() -> Iterator[Path]:
    """The program of the service, which may be changed meanwhile."""
    before = CHECKOUT / "before"
    for package in ("ctxfs", "runtime"):
        shutil.copytree(CHECKOUT / package, before / package, symlinks=True)
    try:
        yield CHECKOUT
    finally:
        for package in ("ctxfs", "runtime"):
            shutil.copytree(before / package, CHECKOUT / package, dirs_exist_ok=True)
        shutil.rmtree(before)


def _executed_again(service: Service, version: str) -> None:
    pid, restarts = service.pid, service.show("NRestarts")
    told = service.ctx("reexec")
    assert told.returncode == 0, told
    assert told.stdout.startswith(f"ctxd {version}"), told
    assert (service.pid, service.show("NRestarts")) == (pid, restarts)


def test_nobody_meets_an_error_and_all_goes_on(service: Service, tmp_path: Path) -> None:
    busy, pid = sleeper(service, "executed-beside")
    turn = service.run("taking-turns", TURN, mode="turn")
    wait_status(turn, "idle")
    with (
        all_that_goes_on(service, tmp_path, times=5),
        clients_of(service, busy, "taking-turns") as clients,
        _program() as program,
    ):
        for _ in range(3):
            _executed_again(service, "0.2.0\n")
            clients.go_on(20)
        add_row_in_front(program)
        _executed_again(service, "9.0.2.0 (was 0.2.0)\n")
        assert os.listdir(busy)[0] == "first"
        clients.go_on(20)
        break_syntax(program)
        told = service.ctx("reexec")
        assert told.returncode == 1 and "SyntaxError" in told.stderr, told
        assert "version=9.0.2.0\n" in (service.root / "status").read_text()
        clients.go_on(20)
    assert read(busy, "pid") == pid
    _executed_again(service, "0.2.0 (was 9.0.2.0)\n")
    assert "first" not in os.listdir(busy)
    assert service.show("ActiveState") == "active"
    for agent in (busy, turn):
        write(agent / "ctl", "stop")
        wait_dead(agent)


def test_reloads_and_executions_at_once_are_all_done(service: Service) -> None:
    pid = service.pid
    for _ in range(5):
        reloading = subprocess.Popen(["systemctl", "reload", DAEMON])
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGHUP)
        told = service.ctx("reexec")
        assert told.returncode == 0, told
        assert reloading.wait(SECONDS) == 0
        wait_until(lambda: service.show("ActiveState") == "active", "it is ready", SECONDS)
    systemctl("reload", DAEMON)
    assert service.pid == pid
    assert "state=ready\n" in (service.root / "status").read_text()
