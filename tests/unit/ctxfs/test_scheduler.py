"""Which of many requests is served next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from ctxfs.scheduler import Scheduler, _ReadLock
from runtime.authority.accounts import Payer, Reserve
from runtime.authority.loop import LoopMeter

ROOT = Payer(0, reserve=Reserve.MASTER)


class Line:
    """Requests that all wait because the kernel has one more."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LoopMeter())
        self.served: list[str] = []
        self._read, self._write = os.pipe()
        os.write(self._write, b".")

    async def ask(self, name: str, who: Payer | None, operation: str) -> None:
        await self.scheduler.turn(who, reads=operation == "read")
        self.served.append(name)

    async def run(self, asked: list[tuple[str, Payer | None, str]]) -> list[str]:
        """What is served, in this order, once all of these were asked."""
        async with trio.open_nursery() as nursery:
            await self.scheduler._wait_readable(self._read)
            for name, who, operation in asked:
                nursery.start_soon(self.ask, name, who, operation)
                await trio.testing.wait_all_tasks_blocked()
            assert self.served == []
            os.read(self._read, 1)
            nursery.start_soon(self.scheduler.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return self.served

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def line() -> Iterator[Line]:
    made = Line()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    # those that are served together go on in any order
    monkeypatch.setattr("ctxfs.scheduler._SERVICE_SECONDS", 1000)
    with line() as made:
        yield made


def test_owners_are_served_in_turn_and_their_agents_too(served: Line) -> None:
    asked: list[tuple[str, Payer | None, str]] = [
        (f"flood {n}", Payer(1000, "flood"), "read") for n in range(4)
    ]
    asked += [("sibling", Payer(1000, "sibling"), "read"), ("other", Payer(2000, "a"), "read"),
              ("root", ROOT, "read"), ("nobody", None, "read")]
    assert trio.run(served.run, asked) == [
        "flood 0", "other", "root", "nobody", "sibling", "flood 1", "flood 2", "flood 3"
    ]


def test_what_is_read_and_the_rest_of_an_agents_requests_do_not_delay_each_other(
    served: Line,
) -> None:
    asked: list[tuple[str, Payer | None, str]] = [
        (f"page {n}", Payer(1000, "a"), "read") for n in range(3)
    ]
    asked += [(f"write {n}", Payer(1000, "a"), "write") for n in range(3)]
    assert trio.run(served.run, asked) == [
        "page 0", "write 0", "page 1", "write 1", "page 2", "write 2"
    ]


def test_operators_of_an_owner_do_not_wait_for_its_agents(served: Line) -> None:
    asked: list[tuple[str, Payer | None, str]] = [
        (f"flood {n}", Payer(1000, "flood"), "read") for n in range(3)
    ]
    asked.append(("operator", Payer(1000, reserve=Reserve.OWNER), "read"))
    assert trio.run(served.run, asked)[1] == "operator"


@pytest.mark.parametrize(("turnless", "passes"), [(0, 12), (2, 6), (100, 3)])
def test_those_who_take_turns_keep_up_with_those_who_take_none(
    served: Line, turnless: int, passes: int
) -> None:
    async def run() -> None:
        await served.scheduler._wait_readable(served._read)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(served.ask, str(number), ROOT, "write")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(served.scheduler.run)
            os.read(served._read, 1)
            taken = 0
            while len(served.served) < 12:
                served.scheduler._turnless += turnless
                await trio.lowlevel.checkpoint()
                taken += 1
            nursery.cancel_scope.cancel()
        assert passes <= taken <= passes + 4

    trio.run(run)


def test_who_asks_alone_does_not_wait() -> None:
    async def run() -> None:
        with trio.testing.assert_no_checkpoints():
            await Scheduler(LoopMeter()).turn(ROOT, reads=True)

    trio.run(run)


def test_what_is_there_is_read_at_once_but_not_without_end() -> None:
    with line() as made:
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                passes += 1
                await trio.lowlevel.checkpoint()

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(count)
                for _ in range(160):
                    await made.scheduler._wait_readable(made._read)
                nursery.cancel_scope.cancel()

        trio.run(run)
        assert 5 <= passes <= 40


def lock_of_this_loop() -> _ReadLock:
    meter = LoopMeter()
    trio.lowlevel.add_instrument(meter)
    return _ReadLock(meter)


def test_who_serves_at_once_reads_on_and_another_reads_while_one_waits() -> None:
    order: list[str] = []

    async def reader(lock: _ReadLock, name: str, waits: trio.Event | None) -> None:
        for number in range(2):
            async with lock:
                order.append(f"{name}{number}")
            if waits is not None:
                await waits.wait()

    async def main() -> None:
        lock, answered = lock_of_this_loop(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader, lock, "a", answered)
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["a0"]
            nursery.start_soon(reader, lock, "b", None)
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["a0", "b0", "b1"], "whether the first is answered or not"
            answered.set()

    trio.run(main)
    assert order == ["a0", "b0", "b1", "a1"]


def test_one_who_waits_for_the_lock_gets_it() -> None:
    order: list[str] = []

    async def main() -> None:
        lock = lock_of_this_loop()

        async def wait() -> None:
            async with lock:
                order.append("second")

        async with trio.open_nursery() as nursery, lock:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            order.append("first")
        assert order == ["first", "second", "second"]

    trio.run(main)


@contextmanager
def device() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


class Passes(trio.abc.Instrument):
    """How often the loop waits for events."""

    number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


def test_who_is_alone_waits_in_its_step_for_what_is_asked_next() -> None:
    meter, passes = LoopMeter(), Passes()

    async def main() -> None:
        scheduler = Scheduler(meter)
        await trio.lowlevel.checkpoint()  # from here on, tasks are counted
        with device() as (read, write):
            before = passes.number + 1  # which the first to read takes
            asking = threading.Timer(0.1, os.write, (write, b"."))
            asking.start()
            await scheduler._wait_readable(read)
            assert (passes.number, os.read(read, 1)) == (before, b".")
            asking.join()

    trio.run(main, instruments=[meter, passes])


def test_who_is_due_goes_on_before_what_is_asked_next() -> None:
    meter = LoopMeter()

    async def main() -> None:
        scheduler = Scheduler(meter)
        with device() as (read, write):
            os.write(write, b".")
            await scheduler._wait_readable(read)
            assert meter.loop is not None and scheduler._wait_here(meter.loop)
            with trio.move_on_after(0.001):
                time.sleep(0.002)
                assert not scheduler._wait_here(meter.loop)

    trio.run(main, instruments=[meter])


@pytest.mark.parametrize("event", ["a deadline", "a thread", "another task"])
def test_others_go_on_while_nothing_is_asked(event: str) -> None:
    meter = LoopMeter()

    async def main() -> None:
        scheduler, went_on = Scheduler(meter), trio.Event()

        async def other(token: trio.lowlevel.TrioToken) -> None:
            if event == "a deadline":
                await trio.sleep(0.1)
                went_on.set()
            elif event == "a thread":
                await trio.to_thread.run_sync(lambda: token.run_sync_soon(went_on.set))
            else:
                for _ in range(10):
                    await trio.lowlevel.checkpoint()
                went_on.set()

        with device() as (read, write):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other, trio.lowlevel.current_trio_token())
                nursery.start_soon(scheduler._wait_readable, read)
                with trio.fail_after(10):
                    await went_on.wait()
                os.write(write, b".")

    trio.run(main, instruments=[meter])
