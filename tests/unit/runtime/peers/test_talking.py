"""A connection takes the loop in short steps, whatever comes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import trio

from runtime.authority.accounts import Payer
from runtime.authority.loop import Turns
from runtime.peers.peering import Event, Grown, Peering
from runtime.peers.talking import Talk


class Flood:
    """What came in one piece is very many frames."""

    lacks = 0
    at_once = 1

    def feed(self, data: bytes, now: float) -> Iterator[Event]:
        yield from (Grown("x", "out", number) for number in range(20 if data else 0))

    def outgoing(self, most: int) -> bytes:
        return b""


@pytest.mark.parametrize("owners", [1, 2])
def test_between_two_steps_of_an_owners_links_others_are_served(owners: int) -> None:
    order: list[str] = []

    async def hear(event: Event) -> None:
        order.append("frame")
        time.sleep(0.0015)  # longer than a step

    async def stand_by() -> None:
        while True:
            order.append("other")
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        turns = Turns()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand_by)
            async with trio.open_nursery() as links:
                for number in range(6):
                    turn = partial(turns.take, Payer(1000 + number % owners))
                    ours, theirs = os.pipe()
                    os.set_blocking(ours, False)
                    talk = Talk(cast(Peering, Flood()), ours, 60.0, turn)
                    links.start_soon(talk.run, hear, b"frames")
                    os.close(theirs)
            nursery.cancel_scope.cancel()

    trio.run(cast(Any, main))
    assert order.count("frame") == 6 * 20
    # the first step of each is before its turn; and the other's place in a pass is a random one
    passes = [part.count("frame ") for part in f"{' '.join(order)} ".split("other ")]
    assert sorted(passes)[-3] <= 2 * owners, passes
