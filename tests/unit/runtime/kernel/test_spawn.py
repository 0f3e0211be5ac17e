"""Who is served by the launcher when; what it starts is tried by the tests of a whole daemon."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from runtime.kernel.cgroups import Cgroup
from runtime.kernel.spawn import Process, Spawner
from tests.worlds.daemon import TIMEOUT

LEAF = Cgroup(Path("/cg/leaf"))


class Asked(Spawner):
    """A launcher that the test plays: it says what it is asked for, in which order."""

    def __init__(self) -> None:
        super().__init__(Path("/launcher"), LEAF)
        self.order: list[str] = []

    def _begin(self) -> None:
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def answer(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._theirs)
            data, fds, _, _ = socket.recv_fds(self._theirs, 1 << 16, 16)
            for fd in fds:
                socket.close(fd)
            self.order.append(data.rstrip(b"\0").rpartition(b"\0")[2].decode())
            await trio.testing.wait_all_tasks_blocked()
            self._theirs.send(b"1 0")

    def close(self) -> None:
        self._channel.close()
        self._theirs.close()


def test_owners_are_served_in_turn() -> None:
    """However many starts one of them has asked for before."""

    async def main() -> None:
        spawner = Asked()
        async with trio.open_nursery() as answering:
            answering.start_soon(spawner.answer)

            async def start(owner: int, word: str) -> None:
                await spawner.start(LEAF, [word], owner=owner)

            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(start, 1000, f"many{number}")
                await trio.testing.wait_all_tasks_blocked()
                for number in range(3):
                    nursery.start_soon(start, 1001, f"few{number}")
            answering.cancel_scope.cancel()
        spawner.close()
        assert len(spawner.order) == 103
        assert max(spawner.order.index(f"few{number}") for number in range(3)) <= 8
        assert not spawner._turns, "nothing is kept of who has waited"

    trio.run(main)


def test_an_end_is_waited_for_whatever_is_open() -> None:
    """select(2), for one, knows no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2048:
        pytest.skip(f"a process may have no more than {hard} descriptors here")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1024:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        ended = Process(os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {}))
        assert ended.wait_now(TIMEOUT) == 3
        waiting = Process(os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}))
        assert waiting.wait_now(0) is None
        waiting.kill()
        assert waiting.wait_now() == -9
