"""What callers may pile up in the daemon's memory."""

from __future__ import annotations

import pytest
import trio

from runtime.authority.identity import Caller
from runtime.budget import Budget
from runtime.config import Config
from runtime.errors import QuotaError, TooLongError
from runtime.sockets import Connection


def left(budget: Budget, key: str, limit: int) -> int:
    """How much more the caller may hold."""
    for size in range(limit, -1, -1):
        try:
            budget.charge(key, 0, size, limit)
        except QuotaError:
            continue
        budget.charge(key, size, 0, limit)
        return size
    return -1


def test_the_bound_is_over_all_that_one_caller_holds() -> None:
    budget = Budget()
    budget.charge("uid:1", 0, 6, 10)
    budget.charge("uid:1", 0, 4, 10)
    with pytest.raises(QuotaError):
        budget.charge("uid:1", 4, 5, 10)
    budget.charge("uid:2", 0, 10, 10)


def test_what_is_refused_is_not_charged() -> None:
    budget = Budget()
    budget.charge("uid:1", 0, 6, 10)
    with pytest.raises(QuotaError):
        budget.charge("uid:1", 0, 5, 10)
    assert left(budget, "uid:1", 10) == 4


def test_giving_back_always_succeeds() -> None:
    budget = Budget()
    budget.charge("uid:1", 0, 8, 10)
    budget.charge("uid:1", 8, 5, 2)
    budget.charge("uid:1", 5, 0, 2)
    assert left(budget, "uid:1", 10) == 10


def connection(budget: Budget, config: Config) -> tuple[Connection, trio.socket.SocketType]:
    ours, theirs = trio.socket.socketpair()
    caller = Caller(7, 7, 1)
    return Connection(trio.SocketStream(ours), caller, config, budget), theirs


def test_a_connection_is_charged_for_what_it_keeps() -> None:
    async def main() -> None:
        budget = Budget()
        held, peer = connection(budget, Config(staged_max=100))
        with peer:
            await peer.send(b"x" * 19 + b"\nabc\n" + b"y" * 6)
            assert await held.receive() == "x" * 19
            assert left(budget, "uid:7", 100) == 70, "a line is kept until it is answered"
            assert await held.receive() == "abc"
            assert left(budget, "uid:7", 100) == 90
            await peer.send(b"z" * 95)
            assert left(budget, "uid:7", 100) == 90
            with pytest.raises(QuotaError):
                await held.receive()
            held.release()
            assert left(budget, "uid:7", 100) == 100
            await held.stream.aclose()

    trio.run(main)


def test_an_overlong_frame_is_given_back_too() -> None:
    async def main() -> None:
        budget = Budget()
        held, peer = connection(budget, Config(staged_max=100, frame_max=10))
        with peer:
            await peer.send(b"x" * 50)
            with pytest.raises(TooLongError):
                await held.receive()
            held.release()
            assert left(budget, "uid:7", 100) == 100
            await held.stream.aclose()

    trio.run(main)
