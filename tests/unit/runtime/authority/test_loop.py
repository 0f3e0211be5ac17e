"""What tasks of the event loop wait for, and what they do for each other."""

from __future__ import annotations

import threading

import trio
import trio.testing

from runtime.authority.loop import Holding, Threads


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


def test_threads_work_one_after_the_other_if_there_are_no_more() -> None:
    go, order, loop = threading.Semaphore(0), list[str](), threading.get_ident()
    begun, most = [], 2

    def work(number: int) -> None:
        begun.append(number)
        go.acquire()
        order.append(f"work {number}")

    async def main() -> None:
        done = trio.Event()

        def then(number: int) -> None:
            assert threading.get_ident() == loop
            order.append(f"then {number}")
            if number == 4:
                done.set()

        async with trio.open_nursery() as nursery:
            threads = Threads(most, nursery)
            for number in range(5):
                threads.do(lambda number=number: work(number), lambda number=number: then(number))  # type: ignore[misc]
            for number in range(5):
                while len(begun) < min(5, number + most):
                    await trio.sleep(0.001)
                assert len(begun) - number <= most
                go.release()
                await trio.testing.wait_all_tasks_blocked()
            await done.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert sorted(order) == sorted(f"{what} {n}" for n in range(5) for what in ("work", "then"))


def test_what_a_thread_is_doing_at_the_end_is_waited_for() -> None:
    begun, go, done = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        go.wait()
        done.append("work")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            Threads(1, nursery).do(work, lambda: done.append("then"))
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
            trio.lowlevel.current_trio_token().run_sync_soon(go.set)
        assert done == ["work", "then"]

    trio.run(main)
