"""Who goes on and who waits in lanes, and what is kept of those who are gone."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from runtime.kernel.lanes import Lanes


@pytest.mark.parametrize("at_once", [1, 3])
def test_of_a_key_so_many_go_on_in_their_order_and_another_is_not_held_up(at_once: int) -> None:
    lanes, seen, end = Lanes[str](at_once), list[str](), trio.Event()

    async def come(key: str, name: str) -> None:
        async with lanes.turn(key):
            seen.append(name)
            await end.wait()

    async def main() -> None:
        names = [f"{number}" for number in range(7)]
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(come, "a", name)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(come, "b", "other")
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [*names[:at_once], "other"]
            assert lanes.users("a") == len(names)
            assert lanes.is_full("a")
            assert lanes.is_full("b") is (at_once == 1)
            end.set()
        # those that go on at once are woken together, in any order
        assert sorted(seen[at_once + 1 :]) == names[at_once:]
        assert not lanes

    trio.run(main)


def test_who_is_cancelled_leaves_the_others_their_places() -> None:
    lanes, seen = Lanes[str](), list[str]()

    async def come(name: str, scope: trio.CancelScope) -> None:
        with scope:
            async with lanes.turn("a"):
                seen.append(name)

    async def main() -> None:
        scopes = {name: trio.CancelScope() for name in ("first", "second", "third")}
        async with trio.open_nursery() as nursery:
            await lanes.enter("a")
            for name, scope in scopes.items():
                nursery.start_soon(come, name, scope)
                await trio.testing.wait_all_tasks_blocked()
            scopes["second"].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert lanes.users("a") == 3
            lanes.leave("a")
        assert seen == ["first", "third"]
        with trio.move_on_after(0) as scope:
            await lanes.enter("a")
        assert scope.cancelled_caught
        assert not lanes

    trio.run(main)


def test_who_goes_on_anyway_counts_until_all_have_left() -> None:
    lanes, seen = Lanes[str](2), list[str]()

    async def come() -> None:
        async with lanes.turn("a"):
            seen.append("came")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                lanes.enter_anyway("a")
            nursery.start_soon(come)
            await trio.testing.wait_all_tasks_blocked()
            lanes.leave("a")
            await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            lanes.leave("a")
            await trio.testing.wait_all_tasks_blocked()
            assert seen == ["came"]
            lanes.leave("a")
        assert not lanes

    trio.run(main)
