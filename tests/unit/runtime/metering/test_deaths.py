"""The meter is killed at each step of a request: what is counted then, and after that."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.unit.runtime.metering.test_passing import GREETING, Counters
from tests.worlds.daemon import wait_until
from tests.worlds.dying_meter import DyingMeters
from tests.worlds.models import Metered

GIVEN, MADE = 10, 5
#: what a whole answer ends with
_ENDS: Final = (b'"output_tokens": 5}}', b'"type": "message_stop"}\n\n')


class Seen(NamedTuple):
    """What a payer has used so far."""

    tokens: tuple[int, int]
    requests: int
    refused: int


class Scene:
    """A child and who pays for it, behind a meter that may die."""

    def __init__(self, directory: Path) -> None:
        self.models = Metered(directory, drain="20ms")
        self.meters = DyingMeters(self.models.config)
        self.payers = [Counters(directory / name, name) for name in ("kid", "boss")]

    def seen(self) -> list[Seen]:
        return [Seen(each.tokens, each["requests"], each["refused"]) for each in self.payers]

    def connect(self, *, stream: bool = False) -> socket.socket:
        """A connection with a request."""
        body = b'{"model":"m-10-5","max_tokens":9,"stream":%s}' % (b"true" if stream else b"false")
        length = b"Connection: close\r\nContent-Length: %d" % len(body)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(30)
        made.connect(str(self.models.socket))
        files = [each.path.open("r+b") for each in self.payers]
        try:
            socket.send_fds(made, [GREETING], [file.fileno() for file in files])
            made.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n%s" % (length, body))
        except OSError:
            pass  # it is dead
        finally:
            for file in files:
                file.close()
        return made

    def ask(self, *, stream: bool = False) -> bytes:
        """What came, until the end."""
        with self.connect(stream=stream) as made:
            came = b""
            try:
                while data := made.recv(65536):
                    came += data
            except ConnectionResetError:
                pass
            return came

    def go(self) -> bytes:
        """A client that goes once the upstream is asked; nothing is answered."""
        upstream = self.models.upstream
        before = len(upstream.asked)
        upstream.may_answer.clear()
        with self.connect():
            wait_until(lambda: len(upstream.asked) > before or self.meters.is_dead(), "it asks",
                       interval=0.001)
        return b""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.models.upstream.may_answer.set()
        made.meters.close()
        made.models.close()


def _whole(scene: Scene) -> bytes:
    return scene.ask()


def _stream(scene: Scene) -> bytes:
    return scene.ask(stream=True)


def _refused(scene: Scene) -> bytes:
    boss = scene.payers[1]
    boss.set("tokens_max", sum(boss.tokens))
    return scene.ask()


#: what is done; tokens that are counted at the most, in and out, beside what the server said
WAYS: Final[list[tuple[Callable[[Scene], bytes], tuple[int, int]]]] = [
    (_whole, (GIVEN, MADE)), (_stream, (GIVEN, MADE)), (_refused, (0, 0)),
    (Scene.go, (50 // 3, 9)),
]  # fmt: skip


@pytest.mark.parametrize("every", [67, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("way", "most"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_killed_at_each_step_it_counts_what_was_said_and_no_more(
    scene: Scene, way: Callable[[Scene], bytes], most: tuple[int, int], every: int
) -> None:
    upstream = scene.models.upstream
    for lines in itertools.count(1, every):
        before = scene.seen()
        scene.meters.start(lines)
        came = way(scene)
        lived = scene.meters.end()
        upstream.may_answer.set()
        for old, new in zip(before, scene.seen(), strict=True):
            more = [now - was for was, now in zip(old.tokens, new.tokens, strict=True)]
            asked = new.requests - old.requests
            # it may be told only later of a request whose meter has died
            assert new.requests >= len(upstream.asked), (lines, "none passes uncounted")
            assert asked in (0, 1) and all(
                0 <= each <= asked * bound for each, bound in zip(more, most, strict=True)
            ), lines
            if came.endswith(_ENDS):
                assert more == [GIVEN, MADE], (lines, "who has all of an answer has paid")
            if lived or b"429" in came[:20]:
                assert new.refused - old.refused == (way is _refused), lines
        if lived:
            break
    assert lines > 3 * every
    if way is not _refused:
        assert all(each["output"] for each in scene.payers)
    _goes_on(scene)


def _goes_on(scene: Scene) -> None:
    """The next meter counts beside what was counted, and limits hold."""
    boss = scene.payers[1]
    boss.set("tokens_max", sum(boss.tokens) + 1)
    before = [each.tokens for each in scene.payers]
    scene.meters.start()
    assert scene.ask().endswith(_ENDS)
    assert [each.tokens for each in scene.payers] == [
        (given + GIVEN, made + MADE) for given, made in before
    ]
    assert scene.ask().startswith(b"HTTP/1.1 429 ")
    assert scene.meters.end()
