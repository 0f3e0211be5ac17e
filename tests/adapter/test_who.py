"""Whose an address is that a relay says first: of agents that are there, and of removed ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from runtime.caller import Caller
from runtime.errors import CtxError
from runtime.records.lifecycle import Status
from runtime.sockets.connection import Connection, Server
from runtime.sockets.operations import DAEMON_OPERATIONS
from runtime.sockets.request import Request
from tests.worlds.records import ROOT
from tests.worlds.tree import STRANGER, USER, Mounted, mounted_in, sockets_of


def ask(mounted: Mounted, caller: Caller, address: object) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    refused: list[CtxError] = []

    async def send(frame: dict[str, Any]) -> None:
        said.append(frame)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            connection = SimpleNamespace(send=send, server=Server(), caller=caller)
            services = sockets_of(mounted, nursery)._services
            fields = {"op": "who", "address": address}
            request = Request(fields=fields, services=services,
                              connection=cast(Connection, connection))  # fmt: skip
            try:
                await DAEMON_OPERATIONS["who"].handler(request)
            except CtxError as error:
                refused.append(error)
            nursery.cancel_scope.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "to_thread", SimpleNamespace(run_sync=here))
        trio.run(main)
    for error in refused:
        raise error
    return said[0]


async def here(function: Any, *words: Any, **_: Any) -> Any:
    return function(*words)


def address_of(incarnation: str) -> str:
    parts = (incarnation[at : at + 4] for at in range(0, 16, 4))
    return f"fd63:7478:6673:0:{':'.join(parts)}"


def test_it_tells_of_agents_and_of_removed_ones(tmp_path: Path) -> None:
    with mounted_in(tmp_path) as mounted:
        agent = mounted.make("x", USER)
        address = address_of(agent.incarnation)
        told = {"type": "who", "agent": "x", "owner": 1000, "incarnation": agent.incarnation}
        for caller in (USER, ROOT):
            assert ask(mounted, caller, address) == {**told, "status": "new"}
        with pytest.raises(CtxError, match="no agent of yours"):
            ask(mounted, STRANGER, address)
        mounted.agents.journal.update(agent, status=Status.DEAD)
        mounted.agents.removals.remove(agent)
        mounted.make("x", USER)
        for caller in (USER, ROOT):
            assert ask(mounted, caller, address.upper()) == {**told, "status": "removed"}
        with pytest.raises(CtxError, match="no agent of yours"):
            ask(mounted, STRANGER, address)


@pytest.mark.parametrize(("address", "why"), [
    ("fd63:7478:6673::1", "no agent of yours ever had 0000000000000001"),
    ("::1", "no agent's"), ("fd63:7478:6673:1::1", "no agent's"), ("127.0.0.1", "no IPv6 address"),
    ("x" * 100, "no IPv6 address"), (7, "write"),
])  # fmt: skip
def test_other_addresses_are_nobodys(tmp_path: Path, address: object, why: str) -> None:
    with mounted_in(tmp_path) as mounted, pytest.raises(CtxError, match=why):
        ask(mounted, ROOT, address)
