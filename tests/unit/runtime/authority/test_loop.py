"""What tasks of the event loop wait for, and what they do for each other."""

from __future__ import annotations

import trio
import trio.testing

from runtime.authority.loop import Holding


def test_all_who_come_are_held_up_until_it_lets_go() -> None:
    passed: list[str] = []

    async def main() -> None:
        holding = Holding()

        async def come(name: str) -> None:
            await holding.passed()
            passed.append(name)

        async with trio.open_nursery() as nursery:
            await holding.passed()  # it holds up nobody yet
            holding.hold()
            holding.hold()  # once is enough
            nursery.start_soon(come, "first")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(come, "second")
            await trio.testing.wait_all_tasks_blocked()
            assert holding.holds and passed == []
            holding.let_go()
            holding.let_go()
            assert not holding.holds

    trio.run(main)
    assert sorted(passed) == ["first", "second"]


def test_who_is_woken_looks_whether_it_holds_again() -> None:
    passed: list[str] = []

    async def main() -> None:
        holding = Holding()

        async def come() -> None:
            await holding.passed()
            passed.append("passed")

        async with trio.open_nursery() as nursery:
            holding.hold()
            nursery.start_soon(come)
            await trio.testing.wait_all_tasks_blocked()
            holding.let_go()
            holding.hold()
            await trio.testing.wait_all_tasks_blocked()
            assert passed == []
            holding.let_go()

    trio.run(main)
    assert passed == ["passed"]
