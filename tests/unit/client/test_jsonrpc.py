"""Frames of JSON-RPC, and the loop that waits for several at once."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from client import jsonrpc, loop
from client.exits import Failure
from client.jsonrpc import Peer, Refused
from client.loop import Lines, Loop


class Pipes:
    """A peer, and the other side of it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.read_fd, self.to_peer = os.pipe()
        self.from_peer, self.write_fd = os.pipe()
        self.peer = Echo(self.loop, self.read_fd, self.write_fd)

    def send(self, data: bytes) -> list[dict[str, Any]]:
        """What it answers to this."""
        os.write(self.to_peer, data)
        while self.loop.readers and select_readable(self.read_fd):
            self.loop.step()
        self.loop.drain()
        found = b""
        while select_readable(self.from_peer):
            found += os.read(self.from_peer, 1 << 16)
        return [json.loads(line) for line in found.splitlines()]


def select_readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


class Echo(Peer):
    """Answers with what it was asked."""

    def serve(self, method: str, params: dict[str, Any], ident: object) -> None:
        if method == "refuse":
            raise Refused(-1, "no")
        if method == "lose":
            raise OSError(errno.ENOTCONN, "lost")
        if method == "fail":
            raise Failure("it failed")
        if ident is not None:
            self.answer(ident, {"method": method, **params})

@pytest.fixture
def pipes() -> Iterator[Pipes]:
    found = Pipes()
    yield found
    for fd in (found.read_fd, found.to_peer, found.from_peer, found.write_fd):
        os.close(fd)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('{"id":1,"method":"x","params":{"a":1}}', {"id": 1, "result": {"method": "x", "a": 1}}),
        ('{"id":"a","method":"x"}', {"id": "a", "result": {"method": "x"}}),
        ('{"id":1,"method":"x","params":null}', {"id": 1, "result": {"method": "x"}}),
        ('{"method":"x"}', None),
        ('{"method":"refuse"}', None),
        ('{"id":1,"method":"refuse"}', {"id": 1, "error": {"code": -1, "message": "no"}}),
        ('{"id":1,"method":"fail"}', {"id": 1, "error": {"code": -32603, "message": "it failed"}}),
        ('{"id":1,"method":"lose"}', {"id": 1, "error": {"code": -32603, "message": "lost"}}),
        ('{"method":"lose"}', None),
        ('{"id":7,"result":{}}', None),
        ('{"result":{}}', None),
        ("", None),
        (" ", None),
    ],
)
def test_what_is_answered(pipes: Pipes, line: str, answer: dict[str, Any] | None) -> None:
    expected = [] if answer is None else [{"jsonrpc": "2.0", **answer}]
    assert pipes.send(line.encode() + b"\n") == expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", -32700),
        (b"\xff", -32700),
        (b"[" * 100_000, -32700),
        (b"[]", -32600),
        (b"7", -32600),
        (b'{"id":1,"method":7}', -32600),
        (b'{"id":1,"method":"x","params":[]}', -32600),
        (b'{"id":[],"method":"x"}', -32600),
        (b'{"id":true,"method":"x"}', -32600),
        (b'{"id":null,"method":"x"}', -32600),
        (b'{"id":[],"method":7}', -32600),
        (b'{"id":1,"method":"x","params":{"a":NaN}}', -32700),
        (b'{"id":1,"method":"x","params":{"a":1e999}}', -32700),
    ],
)
def test_what_is_no_frame_is_an_error(pipes: Pipes, line: bytes, code: int) -> None:
    if len(line) > 1 << 16:
        line = line[: 1 << 15]
    (answer,) = pipes.send(line + b"\n")
    assert answer["error"]["code"] == code
    assert answer["id"] in (None, 1)


def test_what_is_read_can_be_said_again(pipes: Pipes) -> None:
    """Python's own limit on nesting leaves a few levels that cannot."""
    for depth in (*range(80, 120), *range(950, 1010)):
        nested = "[" * (depth - 2) + "7" + "]" * (depth - 2)
        line = f'{{"id":{depth},"method":"x","params":{{"a":{nested}}}}}\n'
        (answer,) = pipes.send(line.encode())
        deep = depth > jsonrpc.DEPTH_MAX
        assert answer["error"]["code"] == -32700 if deep else answer["id"] == depth
    wide = json.dumps({"id": 1, "method": "x", "params": {"a": [[[]]] * 1000}})
    assert pipes.send(wide.encode() + b"\n")[0]["result"]["a"] == [[[]]] * 1000


def test_answers_come_to_whoever_asked(pipes: Pipes) -> None:
    told: list[tuple[str, Any, Any]] = []
    for name in ("a", "b", "c"):
        pipes.peer.request(name, {}, lambda r, e, n=name: told.append((n, r, e)))  # type: ignore[misc]
    ids = {frame["method"]: frame["id"] for frame in pipes.send(b"\n")}
    assert len(set(ids.values())) == 3
    answers: tuple[dict[str, Any], ...] = (
        {"id": True, "result": {"x": 0}},
        {"id": ids["b"], "result": {"x": 1}},
        {"id": ids["a"], "error": {"code": 1, "message": "no"}},
        {"id": ids["b"], "result": {"x": 2}},
        {"id": ids["c"], "result": 7},
    )
    assert pipes.send(b"".join(json.dumps(each).encode() + b"\n" for each in answers)) == []
    assert told == [("b", {"x": 1}, None), ("a", {}, {"code": 1, "message": "no"}), ("c", {}, None)]


def test_lines_come_in_any_pieces(pipes: Pipes) -> None:
    lines, data = Lines(pipes.read_fd), b"one\n\ntwo three\nfour\n"
    for size in range(1, len(data) + 1):
        found: list[bytes] = []
        for start in range(0, len(data), size):
            os.write(pipes.to_peer, data[start : start + size])
            found += lines.read() or []
        assert found == data.split(b"\n")[:-1]


def test_a_line_that_is_too_long_is_refused(pipes: Pipes) -> None:
    """Also one that would be valid without its end."""
    pipes.peer.lines.most = 100
    for text in (json.dumps({"id": 1, "method": "x" * 200}), '{"id":1,"method":"x"}' + " " * 100):
        (answer, after) = pipes.send(text.encode() + b'\n{"id":2,"method":"y"}\n')
        assert answer["error"] == {"code": -32600, "message": "a line may have at most 100 bytes"}
        assert after["id"] == 2
    for _ in range(100):
        assert pipes.send(b"x" * 50) == []
    assert pipes.peer.lines.size == 101, "no more of it is kept"


def test_nothing_is_read_while_nobody_reads(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BACKLOG_MAX", 1000)
    os.write(pipes.to_peer, b'{"id":1,"method":"x"}\n')
    pipes.loop.write(pipes.write_fd, b"y" * (1 << 20))
    while select_writable(pipes.write_fd):
        pipes.loop.step()
    assert select_readable(pipes.read_fd), "it waits"
    while pipes.loop.unwritten:
        os.read(pipes.from_peer, 1 << 16)
        pipes.loop.step()
    pipes.loop.step()
    assert not select_readable(pipes.read_fd)


def select_writable(fd: int) -> bool:
    import select

    return bool(select.select([], [fd], [], 0)[1])


def test_what_nobody_will_read_is_dropped(pipes: Pipes) -> None:
    os.close(pipes.from_peer)
    pipes.peer.answer(1, {})
    pipes.loop.drain()
    assert not pipes.loop.unwritten
    pipes.from_peer = os.open("/dev/null", os.O_RDONLY)


def test_the_loop_keeps_times(pipes: Pipes) -> None:
    called: list[str] = []
    pipes.loop.later(0.3, lambda: called.append("second"))
    pipes.loop.later(0.01, lambda: called.append("first"))
    while len(called) < 2:
        pipes.loop.step()
    assert called == ["first", "second"]


@pytest.mark.parametrize(("took", "rest"), [(0.0, 0.5), (0.3, 3.0)])
def test_what_is_done_now_and_then_has_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, took: float, rest: float
) -> None:
    clock, calls, waiting = [100.0], [0], Loop()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def act() -> None:
        calls[0] += 1
        clock[0] += took

    waiting.every(0.5, act)
    for number in (1, 2, 3):
        assert calls == [number]
        clock[0] += rest - 0.01
        waiting.step(most=0)
        assert calls == [number], "it rests"
        clock[0] += 0.02
        waiting.step(most=0)


def test_no_frame_ends_the_conversation(pipes: Pipes) -> None:
    """Arbitrary frames are answered by errors, or not at all."""
    chance = random.Random(1)
    values: list[Any] = [None, True, 0, -1, 1e400, "", "x", "\ud800", [], {}, [{}], {"a": []}]
    for _ in range(2000):
        frame = {
            key: chance.choice(values)
            for key in ("id", "method", "params", "result", "error", "jsonrpc")
            if chance.random() < 0.7
        }
        line = json.dumps(frame).encode()
        if chance.random() < 0.2:
            line = line[: chance.randrange(len(line) + 1)]
        pipes.send(line + b"\n")
    assert pipes.send(b'{"id":"end","method":"x"}\n')[-1]["id"] == "end"
