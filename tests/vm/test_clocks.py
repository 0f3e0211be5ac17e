"""The second boot: the wall clock is set, by hours and by days, and durations take as long as said.

Only a machine of its own can show this: a time namespace has no wall clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.texts.names import timestamp
from tests.systemd.service import SECONDS, Service
from tests.worlds.daemon import read, wait_dead, wait_status, wait_until, write

HOUR = 3600.0


def _set_by(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


@pytest.fixture(autouse=True)
def _clock() -> Iterator[None]:
    """It is right again afterwards."""
    ahead = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    yield
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_BOOTTIME) + ahead)


def _busy(agent: Path) -> Path:
    wait_status(agent, "busy", timeout=SECONDS)
    return agent


def _wait(agent: Path, name: str, on: str, deadline: str = "") -> Path:
    wait = agent / "waiting" / name
    wait.mkdir()
    if deadline:
        write(wait / "deadline", deadline)
    write(wait / "on", on)
    return wait


def _becomes(item: Path, status: str) -> None:
    wait_until(lambda: read(item, "status") == f"{status}\n", f"{item.name} is {status}", SECONDS)


def test_what_lasts_an_hour_does_so_whatever_the_clock_is_set_to(service: Service) -> None:
    once = _busy(service.run("once", "sleep 1000", limits="timeout=1h"))
    turn = service.run("turn", "sleep 1000", mode="turn", limits="timeout=1h")
    wait_status(turn, "idle", timeout=SECONDS)
    timer, trigger = _wait(turn, "timer", "timer 1h"), _wait(turn, "trigger", "trigger", "1h")
    moment = _wait(turn, "moment", f"timer {timestamp(time.time() + HOUR)}")
    write(turn / "inbox", "go on")
    _busy(turn)
    for by in (2 * HOUR, -24 * HOUR):
        _set_by(by)
        service.restart()
        for agent in (once, turn):
            assert read(agent, "status") == "busy\n", by
        for item in (timer, trigger):
            assert read(item, "status") == "armed\n", by
        # a time of day is one of the wall clock
        _becomes(moment, "fired")
        (wall,) = (line for line in read(once, "usage").splitlines() if "wall_msec" in line)
        assert 0 <= int(wall.partition("=")[2]) < 1000 * HOUR
    for agent in (once, turn):
        write(agent / "ctl", "stop")
        wait_dead(agent, SECONDS)
        events = (agent / "session" / "events.jsonl").read_text().splitlines()
        (end,) = (event for event in map(json.loads, events) if event["type"] == "run.end")
        assert 0 <= end["usage"]["wall_msec"] < 1000 * HOUR
        agent.rmdir()


def test_what_lasts_some_seconds_is_over_though_the_clock_is_set_back(service: Service) -> None:
    quiet = service.run("quiet", "cat", mode="turn")
    wait_status(quiet, "idle", timeout=SECONDS)
    again = service.run("again", "false", restart="always")
    wait_until(lambda: " in 2 s" in read(again, "log"), "it is to wait", SECONDS)
    short = service.run("short", "sleep 1000", limits="timeout=10s")
    timer, trigger = _wait(quiet, "timer", "timer 10s"), _wait(quiet, "trigger", "trigger", "10s")
    _set_by(-24 * HOUR)
    wait_dead(short, SECONDS)
    assert read(short, "reason") == "timeout\n"
    short.rmdir()
    _becomes(timer, "fired")
    _becomes(trigger, "expired")
    wait_until(lambda: " in 4 s" in read(again, "log"), "it was restarted", SECONDS)
    for agent in (quiet, again):
        write(agent / "ctl", "kill")
        wait_dead(agent, SECONDS)
        agent.rmdir()
