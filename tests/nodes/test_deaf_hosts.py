"""A host that reads nothing, or gives nothing back, holds up no end at its lead."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from tests.worlds.daemon import read, wait_dead, wait_until, write
from tests.worlds.nodes import lead_of, node
from tests.worlds.strangers import false_host

pytestmark = pytest.mark.long

#: that whatever is at a node with a lease of 5 s may run on
_BOUND = (5 + 10 + 10) * 1.2


@pytest.mark.parametrize("parent", [False, True])
def test_a_stop_behind_all_that_is_not_heard(parent: bool) -> None:
    """Nothing more is read at the host, and as much waits for it as there may be."""
    with false_host() as far, lead_of({"n2": node(far.command)}) as lead:
        daemon = lead.daemon
        boss = daemon.run("boss", "sleep 1000")
        wait_until(lambda: read(boss, "status").strip() == "busy", "its parent runs")
        child = daemon.make("child", "true")
        write(child / "parent", "agent:boss\n") if parent else None
        write(child / "placement", "node=n2\n")
        write(child / "ctl", "start")
        wire = far.meet()
        agent = wire.op("put")["agent"]
        wire.op("start")
        wire.tell("state", agent, status="busy", run="r1")
        wait_until(lambda: read(child, "status").strip() == "busy", "it runs there")
        began = time.monotonic()
        with suppress(BlockingIOError):
            while time.monotonic() < began + 10:
                write(child / "ctl", "pause")
        with suppress(OSError):
            wire.tell("ended", agent, outcome="done", reason="exit:0", out=1 << 40,
                      files={"result.md": [5, 0]})  # fmt: skip
        began = time.monotonic()
        write((boss if parent else child) / "ctl", "stop")
        wait_dead(child, timeout=_BOUND + 20)
        wait_dead(boss, timeout=_BOUND + 20) if parent else None
        assert time.monotonic() - began < _BOUND + 5
        assert read(child, "reason").strip().endswith((",incomplete", ",unconfirmed"))
        wire.socket.close()
