"""How often a command that leads to a node is started, whatever ends it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runtime.kernel.daemonlog import Rates
from runtime.peers.lease import Grants
from runtime.peers.links import Link, Links
from runtime.peers.registrations import Registrations
from runtime.peers.streams import Stream

_HOUR = 3600.0
_MOST = 60


class _Cut(Links):
    """Whose connections are over as soon as they are made; 1,000 are needed."""

    def __init__(self, *, rootless: bool) -> None:
        config = SimpleNamespace(nodes={}, connections=_MOST)
        self._agents = cast(Any, SimpleNamespace(
            settings=SimpleNamespace(config=config), privilege=SimpleNamespace(rootless=rootless),
        ))  # fmt: skip
        self._leading = cast(Any, SimpleNamespace(closed=lambda *_: None))
        self.opened_at: list[float] = []

    def _is_needed(self, link: Link) -> bool:
        link.needed = trio.current_time() + _HOUR
        return len(self.opened_at) < 1000

    async def _open(self, link: Link, saved: dict[str, Any] | None) -> None:
        self.opened_at.append(trio.current_time())


@pytest.mark.parametrize("wanted", [False, True])
def test_a_user_opens_no_more_sessions_than_a_site_takes(wanted: bool) -> None:
    """However often it is cut, and whoever is impatient: so many in an hour, and one a minute."""

    async def main() -> list[float]:
        links, link = _Cut(rootless=True), Link("n2", 1000)

        async def want() -> None:
            while True:
                link.wanted.notify()
                await trio.sleep(20)

        async with trio.open_nursery() as nursery:
            if wanted:
                nursery.start_soon(want)
            await links._keep(link, None)
            nursery.cancel_scope.cancel()
        return links.opened_at

    opened = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(opened) == 1000
    for first in opened:
        assert len([each for each in opened if first <= each < first + _HOUR]) <= 2 * _MOST


def test_a_host_that_breaks_the_rules_is_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it says between, and however often it is connected."""
    clock = [0.0]
    link = Link("n2", 1000, refusals=Rates(lambda: clock[0], window=60.0))
    with caplog.at_level("INFO"):
        for second in range(0, 121, 5):
            clock[0] = float(second)
            link.become("up")
            link.become("refused", "no frame")
            link.become("refused", "no frame")
            assert (link.state, link.error) == ("refused", "no frame")
        link.become("up")
    said = [line.removeprefix("link of uid 1000 to n2: ") for line in caplog.messages]
    assert [each for each in said if each != "up"] == [
        "refused: no frame",
        "refused: no frame (23 more before)",
        "refused: no frame (23 more before)",
    ]
    assert said.count("up") == 4 and said[-1] == "up", "what is so at last is there"


class _Known(Links):
    """Knows its hosts; ``granted`` has those of whom leases are reckoned."""

    def __init__(self, state: Path) -> None:
        async def leave(*_: Any) -> None:
            pass

        config = SimpleNamespace(node_name="one", nodes={"n2": None})
        pays = SimpleNamespace(pay=lambda *_: None)
        self._agents = cast(Any, SimpleNamespace(
            settings=SimpleNamespace(config=config), accounts=SimpleNamespace(time=pays),
            nodes=SimpleNamespace(told=lambda: None),
        ))  # fmt: skip
        self.granted: list[str] = []
        files = SimpleNamespace(opened=lambda *_: None, closed=lambda *_: None)
        self._leading = cast(Any, SimpleNamespace(
            returns=files, opened=lambda *_: None, leave=leave, forget=lambda *_: set(),
            knows=lambda _: False, needs=lambda *_: True,
            grants=self._grant,
        ))  # fmt: skip
        self._registrations = Registrations(state)
        self._post = cast(Any, SimpleNamespace(stream=lambda _: Stream(), tell=lambda *_: None))
        self._turns = cast(Any, SimpleNamespace(take=trio.lowlevel.checkpoint))
        self._links = {}

    def _grant(self, key: str, *_: Any) -> Grants:
        self.granted.append(key)
        return Grants(30.0, 10.0, 0.0)


def test_who_is_forgotten_while_the_disk_is_waited_for_is_forgotten(tmp_path: Path) -> None:
    """What the host has said makes no registration any more."""
    held, writes = threading.Event(), threading.Event()

    def write(text: str) -> None:
        writes.set()
        held.wait(10)

    async def main() -> None:
        links = _Known(tmp_path)
        links._registrations._write = write  # type: ignore[method-assign]
        link = links._link("n2", 0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        node = cast(Any, SimpleNamespace(lease=30.0))
        hello = {"op": "hello", "version": 1, "as": "a" * 32, "alias": "one", "node": "two",
                 "boot": "b", "sent": 0, "got": 0, "seen": "", "lease_max": 3600,
                 "networks": [], "shared": [], "product": "0"}  # fmt: skip
        theirs.sendall(b"ctxfs-peer 1 1\n" + json.dumps(hello).encode() + b"\n")
        with ours, theirs:
            async with trio.open_nursery() as nursery:
                links._nursery = nursery
                nursery.start_soon(links._talk, link, node, ours.fileno(), None)
                await trio.to_thread.run_sync(writes.wait, 10)
                assert links._registrations.host("n2", 0) == "a" * 32
                nursery.start_soon(links.forget, "n2", 0)
                while links._registrations.host("n2", 0):
                    await trio.lowlevel.checkpoint()
                held.set()
                while link.talk is not None and not links.granted:
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        assert links.granted == [] and links._registrations.host("n2", 0) == ""

    trio.run(main)
