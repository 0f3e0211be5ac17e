"""A daemon may be executed again between any two steps of its loop: in none of them are bytes, or a
connection, with a task alone."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio
import trio.testing

from runtime.kernel.handover import Descriptors
from tests.unit.runtime.sockets.test_connection import in_trio, pair_in
from tests.worlds.readiness import readable
from tests.worlds.tree import mounted_in, sockets_of

_FRAME: bytes = json.dumps({"op": "ping", "pad": "x" * 3000}).encode()


class _EachStep(trio.abc.Instrument):
    def __init__(self, check: Callable[[], str]) -> None:
        self._check = check
        self.wrong: list[str] = []
        self.steps = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if complaint := self._check():
            self.wrong.append(complaint)


@contextmanager
def checking(check: Callable[[], str]) -> Iterator[None]:
    """``check`` complains after no step."""
    each = _EachStep(check)
    trio.lowlevel.add_instrument(each)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(each)
    assert each.steps > 3 and each.wrong == [], each.wrong[:3]


def _waiting_in(peer: socket.socket) -> int:
    """Bytes that the kernel has for it."""
    size = array.array("i", [0])
    fcntl.ioctl(peer, termios.FIONREAD, size)
    return size[0]


@in_trio
async def test_bytes_are_with_the_kernel_or_pass_to_the_next_daemon(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        said, looked_at = (_FRAME + b"\n") * 20, 0
        connection = pair.connection
        own = socket.socket(fileno=os.dup(connection.stream.socket.fileno()))

        def complaint() -> str:
            saved = connection.save(Descriptors())
            total = looked_at + len(saved["received"]) + _waiting_in(own)
            return "" if total in (0, len(said)) else f"{len(said) - total} bytes are lost"

        with own, checking(complaint):
            pair.peer.sendall(said)
            while looked_at < len(said):
                line = await connection.receive()
                assert line is not None
                await trio.lowlevel.checkpoint()
                looked_at, connection.at_hand = looked_at + len(line) + 1, ""


@in_trio
async def test_bytes_are_sent_or_pass_to_the_next_daemon(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        frame = {"pad": "x" * 1_000_000}
        whole, heard, begun = len(json.dumps(frame, separators=(",", ":"))) + 1, 0, False

        def complaint() -> str:
            nonlocal begun
            unsent = len(pair.connection.save(Descriptors())["unsent"])
            begun = begun or unsent > 0
            more = heard + _waiting_in(pair.peer) + unsent - whole
            return f"{more} bytes would come twice" if begun and more else ""

        with checking(complaint):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.connection.send, frame)
                while heard < whole:
                    await trio.lowlevel.checkpoint()
                    if _waiting_in(pair.peer):
                        heard += len(pair.peer.recv(1 << 16))


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        yield listener


@in_trio
async def test_connections_are_with_the_kernel_or_pass_to_the_next_daemon(tmp_path: Path) -> None:
    with mounted_in(tmp_path) as mounted, _listening(tmp_path / "socket") as listener:
        clients: list[socket.socket] = []
        taken = 0
        async with trio.open_nursery() as nursery:
            sockets = sockets_of(mounted, nursery)
            sockets._listen(sockets._daemons, listener)

            def complaint() -> str:
                nonlocal taken
                saved, _ = sockets.save(Descriptors())
                taken = len(saved["arriving"]) + len(saved["connections"])
                waits = bool(readable([listener.fileno()], 0))
                return "" if taken == len(clients) or waits else "a connection is lost"

            with checking(complaint):
                for number in range(10):
                    client = socket.socket(socket.AF_UNIX)
                    client.connect(str(tmp_path / "socket"))
                    clients.append(client)
                    while number % 2 and taken < len(clients):
                        await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        for client in clients:
            client.close()


@in_trio
async def test_no_connection_passes_that_is_closed(tmp_path: Path) -> None:
    with mounted_in(tmp_path) as mounted, _listening(tmp_path / "socket") as listener:
        async with trio.open_nursery() as nursery:
            sockets = sockets_of(mounted, nursery)
            sockets._listen(sockets._daemons, listener)
            clients = [socket.socket(socket.AF_UNIX) for _ in range(10)]
            for client in clients:
                client.connect(str(tmp_path / "socket"))
            await trio.testing.wait_all_tasks_blocked()
            assert len(sockets._daemons.connections) == len(clients)

            def complaint() -> str:
                descriptors = Descriptors()
                sockets.save(descriptors)
                return "one is closed" if -1 in descriptors.kept else ""

            with checking(complaint):
                for client in clients:
                    client.close()
                while sockets._daemons.connections:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


@in_trio
async def test_a_line_waits_in_the_connection_while_none_is_begun(tmp_path: Path) -> None:
    with mounted_in(tmp_path) as mounted:
        async with trio.open_nursery() as nursery:
            sockets = sockets_of(mounted, nursery)
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
            await sockets._admit(sockets._daemons, stream)
            await trio.testing.wait_all_tasks_blocked()
            sockets.beginning.hold()
            said = b'{"op":"ping"}\n' * 3

            def complaint() -> str:
                (saved,) = sockets.save(Descriptors())[0]["connections"]
                kept = len(saved["received"]) + _waiting_in(theirs)
                return "" if kept in (0, len(said)) else f"{len(said) - kept} bytes are lost"

            with checking(complaint):
                ours.sendall(said)
                while _waiting_in(theirs):
                    await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        ours.close()
