"""Viewers that take nothing, that come and go, and that type at what does not read: the others see
all, all is kept, and who works beside notices nothing."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from tests.system.hostile.guarded import Guard
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.terminal import terminal
from tests.worlds.viewers import Viewer
from tests.worlds.whose import OTHER

#: two megabytes, of which a viewer that takes nothing gets a quarter
NUMBERS = "".join(f"{number}\n" for number in range(1, 300_001))
FLOOD = "sh -c 'stty -onlcr -echo; echo ready; read x; seq 300000; read x; echo got $x'"
VIEWERS_MAX = 8
#: bytes of input that wait at the monitor
WAITING = 64 << 10
#: seconds in which a viewer that can be heard is, on a machine that does little else
HEARD = 0.5


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_viewers_that_are_stopped_and_others_that_come_and_go_hold_up_nobody(
    daemon: Daemon, guard: Guard, opened: ExitStack
) -> None:
    directory = daemon.run("flood", FLOOD, tty="80x24", owner=OTHER)
    wait_status(directory, "busy")
    reader = opened.enter_context(Viewer(daemon, "flood"))
    reader.wait_for("ready\n")
    stopped = opened.enter_context(terminal(daemon.root, "attach", "flood"))
    stopped.wait_for("ready")
    os.kill(stopped.process.pid, signal.SIGSTOP)

    def visit() -> None:
        with suppress(PermissionError), Viewer(daemon, "flood", look=True) as visitor:
            visitor.see()

    with ThreadPoolExecutor(10) as visitors:
        visits = [visitors.submit(visit) for _ in range(50)]
        reader.enter("\n")
        while len(reader.shown) < len(NUMBERS):
            assert reader.see()
    assert all(visited.result() is None for visited in visits)
    assert reader.shown.decode() == NUMBERS
    wait_until(lambda: _viewers(daemon) == 2, "the others have left")
    for _ in range(VIEWERS_MAX - 2):
        opened.enter_context(Viewer(daemon, "flood"))
    with pytest.raises(PermissionError, match="EDQUOT"):
        Viewer(daemon, "flood")
    os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.wait_for("bytes were not shown")
    reader.enter("end\n")
    stopped.wait_for("got end")
    assert stopped.end() == 0
    assert reader.wait_over() == "exit 0"
    wait_dead(directory)
    assert read(directory, "out") == f"ready\n{NUMBERS}got end\n"


def _viewers(daemon: Daemon) -> int:
    rows = json.loads(daemon.ctx("ps", "--json").stdout)
    [viewers] = [row["viewers"] for row in rows if row["name"] == "flood"]
    return int(viewers)


def test_what_is_typed_at_a_frozen_agent_waits(
    daemon: Daemon, guard: Guard, opened: ExitStack
) -> None:
    """Some of it at the monitor, and the rest with whoever types."""
    program = "sh -c 'stty raw -echo; echo ready; exec cat'"
    directory = daemon.run("frozen", program, tty="80x24", owner=OTHER)
    wait_status(directory, "busy")
    typist, other = (opened.enter_context(Viewer(daemon, "frozen")) for _ in range(2))
    typist.wait_for("ready\n")
    other.wait_for("ready\n")
    write(directory / "ctl", "pause")
    other.wait_notice("paused")
    typed = _type_until_it_waits(typist)
    assert len(typed) < 1 << 20
    with Viewer(daemon, "frozen") as third:
        third.wait_notice("paused")
    write(directory / "ctl", "resume")
    while len(other.shown) < len(typed):
        assert other.see()
    assert other.shown == typed


def _type_until_it_waits(viewer: Viewer) -> bytes:
    """Lines with numbers; returns what was taken: more than waits at the monitor, however late that
    hears of it."""
    taken, number = b"", 0
    poller = select.poll()
    poller.register(viewer.end, select.POLLOUT)
    while poller.poll(1000 * (HEARD if len(taken) > WAITING else TIMEOUT)):
        number += 1
        line = b"%d\n" % number
        viewer.end.send(b"i" + line)
        taken += line
    assert len(taken) > WAITING
    return taken
