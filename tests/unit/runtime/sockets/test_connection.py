"""A connection that passes to the next daemon: every byte once, in order."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runtime.authority.loop import Turns
from runtime.kernel.handover import Descriptors, read_back, written
from runtime.sockets.connection import Asked, Connection, Server
from tests.worlds.records import ROOT, World, world_in


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(partial(test, **fixtures))

    return run


def connect(world: World, fd: int) -> Connection:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
    agents = world.agents
    who = agents.identity.payer(ROOT)
    return Connection(Server(), stream, ROOT, world.config, agents.accounts, Turns(), who)


class Pair:
    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: list[Connection] = []
        self.peer, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.peer.settimeout(10)
        self.connection = connect(world, own.detach())
        self.connection.admit()
        self.connections.append(self.connection)

    async def receive_all(self) -> list[str | None]:
        """The frames that are there."""
        found: list[str | None] = []

        async def receive() -> None:
            while True:
                found.append(await self.connection.receive())
                self.connection.at_hand = ""

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return found

    def succeed(self) -> tuple[Connection, bytearray, dict[str, Any]]:
        """As the daemon that is executed gets it; that before does nothing more."""
        saved = read_back(b"".join(written(self.connection.save(Descriptors()))))
        after = connect(self.world, os.dup(saved["fd"]))
        self.connections.append(after)
        after.restore(saved)
        return after, after.left_unsent, saved


@asynccontextmanager
async def pair_in(path: Path) -> AsyncIterator[Pair]:
    with world_in(path) as world:
        made = Pair(world)
        with made.peer:
            yield made
        for connection in made.connections:
            connection.stream.socket.close()


@pytest.mark.parametrize("cut", [0, 1, 10, 19, 20, 21, 30])
@in_trio
async def test_a_frame_is_received_wherever_it_is_cut(tmp_path: Path, cut: int) -> None:
    data = b'{"op":"ping","x":1}\n{"op":"wait"}\n'
    async with pair_in(tmp_path) as pair:
        pair.peer.sendall(data[:cut])
        got = await pair.receive_all()
        after, unsent, _ = pair.succeed()
        assert unsent == b""
        pair.peer.sendall(data[cut:])
        while len(got) < 2:
            got.append(await after.receive())
        assert got == [line.decode() for line in data.splitlines()]


@in_trio
async def test_a_line_that_was_not_looked_at_comes_first(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        pair.peer.sendall(b"one\ntwo\nthr")
        assert await pair.connection.receive() == "one"
        after, _, _ = pair.succeed()
        pair.peer.sendall(b"ee\n")
        assert [await after.receive() for _ in range(3)] == ["one", "two", "three"]


@in_trio
async def test_what_the_kernel_did_not_take_is_sent_once_and_in_order(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        frames = [{"n": number, "pad": "x" * 100_000} for number in range(8)]
        said = b"".join(json.dumps(frame, separators=(",", ":")).encode() + b"\n"
                        for frame in frames)
        async with trio.open_nursery() as nursery:
            for frame in frames:
                nursery.start_soon(pair.connection.send, frame)
                await trio.testing.wait_all_tasks_blocked()
            after, unsent, _ = pair.succeed()
            assert 0 < len(unsent) < len(said)
            nursery.cancel_scope.cancel()
        heard = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(after.send, unsent)
            while len(heard) < len(said):
                await trio.lowlevel.checkpoint()
                heard += await trio.to_thread.run_sync(pair.peer.recv, 1 << 16)
        assert sorted(heard.splitlines()) == sorted(said.splitlines())
        # the first was partly sent already
        assert heard.startswith(b'{"n":0,')


@in_trio
async def test_what_is_pending_passes_until_it_is_answered(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        pair.connection.pending = [
            Asked(fields={"op": "wait"}, progress={}),
            Asked(fields={"op": "resume"}, progress={"after": "e3"}),
            Asked(fields={"op": "tool"}, progress={"done": True}),
        ]
        _, _, saved = pair.succeed()
        assert saved["pending"] == [[{"op": "wait"}, {}], [{"op": "resume"}, {"after": "e3"}]]


@in_trio
async def test_the_same_is_charged(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as pair:
        pair.peer.sendall(b"x" * 10_000)
        await pair.receive_all()
        after, _, _ = pair.succeed()
        amounts = [charge.amount for charge in pair.connection._charges]
        assert [charge.amount for charge in after._charges] == amounts
        after.release()
        assert all(charge.amount == 0 for charge in after._charges)


@in_trio
async def test_a_line_is_charged_for_what_it_takes(tmp_path: Path) -> None:
    texts = ("x" * 100_000, "\U0001f600" + "x" * 100_000, "[" + "[]," * 30_000 + "[]]")
    async with pair_in(tmp_path) as pair:
        connection, charged = pair.connection, []
        for text in texts:
            pair.peer.sendall(text.encode() + b"\n")
            assert await connection.receive() == text
            charged.append(connection.answering)
            assert connection.take_line() == text
        assert charged[0] > 200_000 and charged[1] > 800_000 and charged[2] > 3_000_000
        pair.peer.sendall(b"short\n")
        assert await connection.receive() == "short"
        assert connection.answering == 6
