"""Files of placed agents come whole, whatever happens on the way, and nothing else does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing

from runtime.errors import QuotaError
from runtime.kernel.output import Segments
from runtime.peers.parcels import _Asked, _Way
from runtime.peers.peering import CREDIT_MAX, GREETING, Bytes, Grown, Host, Lead, Want
from runtime.records.model import Agent
from runtime.texts.names import dump_json
from tests.worlds.parcels import Two, in_two, tree


def shown(two: Two, name: str, file: str) -> bytes:
    segments = Segments(two.lead.directory(name) / file)
    return segments.read(0, segments.size)


def has(two: Two, name: str, out: bytes) -> bool:
    return shown(two, name, "out") == out


def test_what_an_agent_prints_comes_while_it_runs(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")

    async def act(two: Two) -> None:
        two.supplies.watch(two.host.agent("x"))
        said = b""
        for number in range(20):
            piece = b"%d\n" % number * 5000
            two.say("x", "out", piece)
            said += piece
            await two.run(partial(has, two, "x", said))
        two.say("x", "log", b"oh\n")
        await two.run(lambda: shown(two, "x", "log") == b"oh\n")

    in_two(two, act)


def test_what_it_gives_back_comes_at_its_end(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    two.write("x", "result.md", b"done\n")
    two.write("x", "refs.jsonl", b'{"path":"artifact/a"}\n')
    two.write("x", "artifact/a", b"")
    two.write("x", "artifact/b/c/\xc3\xa4 %41\n".encode().decode(), b"y" * 200_000)
    two.say("x", "out", b"z" * 1_000_000)

    async def act(two: Two) -> None:
        await two.end("x")
        await two.run(lambda: two.lead.done == ["x"])
        assert two.is_complete("x") and not two.returns.error(two.lead.agent("x"))
        assert two.returns.left(two.lead.agent("x")) == 0
        assert tree(two.lead.directory("x") / "doc") == tree(two.host.directory("x") / "doc")
        assert shown(two, "x", "out") == b"z" * 1_000_000

    in_two(two, act)


def is_past(two: Two, went: int) -> bool:
    return bool(two.lead.done) or two.went > went


def give(two: Two, name: str) -> None:
    """What an agent gives back: something of each kind."""
    two.write(name, "result.md", b"done\n" * 50)
    two.write(name, "refs.jsonl", b'{"path":"artifact/a"}\n')
    for number in range(12):
        two.write(name, f"artifact/{number % 3}/{number}", bytes([number]) * (number * 3000))
    two.say(name, "out", bytes(range(256)) * 500)
    two.say(name, "log", b"oh\n" * 300)
    two.write_session(name, "latest.md", b"Hello!")
    two.write_session(name, "messages.jsonl", b"".join(map(line, range(300))))


def line(number: int) -> bytes:
    said = {"id": f"m{number}", "ts": "then", "role": "assistant", "provenance": "self",
            "run": "r7", "from": "agent:x@one", "content": f"{number} " + "word " * 20}  # fmt: skip
    return dump_json(said).encode() + b"\n"


def check(two: Two, name: str) -> None:
    """All of it is here, once."""
    agent = two.lead.agent(name)
    assert two.returns.is_complete(agent) and two.returns.error(agent) == ""
    assert tree(two.lead.directory(name) / "doc") == tree(two.host.directory(name) / "doc")
    assert shown(two, name, "out") == bytes(range(256)) * 500
    assert shown(two, name, "log") == b"oh\n" * 300
    said = [json.loads(text) for text in two.lead.world.lines(agent, "messages.jsonl")]
    assert [each["content"].split()[0] for each in said] == [str(n) for n in range(300)]
    assert {(each["from"], each["node"]) for each in said} == {(f"agent:{name}", "n2")}
    session = two.lead.world.agents.sessions.load(agent.session)
    assert (two.lead.world.agents.sessions.directory(session) / "latest.md").read_text() == "Hello!"


@pytest.mark.parametrize("seed", range(4))
def test_a_connection_may_end_at_any_byte(tmp_path: Path, seed: int) -> None:
    two, chance = Two(tmp_path), random.Random(seed)
    two.add("x")
    give(two, "x")
    two.step = chance.choice((1 << 16, 1000, 77))

    async def act(two: Two) -> None:
        await two.end("x")
        while not two.lead.done:
            two.most = two.went + int(chance.paretovariate(0.5) * 500)
            two.connect()
            await two.run(lambda: bool(two.lead.done) or two.ends is None)
        check(two, "x")

    in_two(two, act)


@pytest.mark.parametrize("seed", range(3))
def test_either_daemon_may_begin_again(tmp_path: Path, seed: int) -> None:
    two, chance = Two(tmp_path), random.Random(seed)
    two.add("x")
    give(two, "x")

    async def act(two: Two) -> None:
        await two.end("x")
        for _ in range(12):
            until = two.went + chance.randrange(40_000)
            await two.run(partial(is_past, two, until))
            match chance.randrange(3):
                case 0:
                    await two.restart(two.lead)
                    await two.end("x")
                case 1:
                    await two.restart(two.host)
                case 2 if two.ends and two.ends[0].is_open and two.ends[1].is_open:
                    await two.hand_over()
                    await two.end("x")
        await two.run(lambda: bool(two.lead.done))
        check(two, "x")

    in_two(two, act)


def pieces(two: Two, size: int) -> list[int]:
    """What is asked for at once when so much comes."""
    two.add("x")
    two.say("x", "out", bytes(size))
    real, found = Lead.want, list[int]()

    def want(self: Lead, agent: str, file: str, offset: int, credit: int) -> None:
        found.append(credit)
        real(self, agent, file, offset, credit)

    async def act(two: Two) -> None:
        await two.end("x")
        await two.run(lambda: bool(two.lead.done))
        assert shown(two, "x", "out") == bytes(size)

    with mock.patch.object(Lead, "want", want):
        in_two(two, act)
    return found


def test_more_is_asked_for_where_it_comes_at_once(tmp_path: Path) -> None:
    found = pieces(Two(tmp_path), 8 << 20)
    assert found[0] == 128 << 10 and max(found) == CREDIT_MAX // 2


@pytest.mark.parametrize("side", ["lead", "host"])
def test_an_earlier_version_is_asked_for_as_much_as_it_gives(tmp_path: Path, side: str) -> None:
    greeting, known = (b"1 2", (1, 3)) if side == "host" else (b"1 3", (1, 2))
    real = Host.__init__

    def begin(self: Host) -> None:
        real(self)
        self._control[:] = [GREETING + greeting + b"\n"]

    with (
        mock.patch("runtime.peers.peering.VERSIONS", known),
        mock.patch.object(Host, "__init__", begin),
    ):
        assert {*pieces(Two(tmp_path), 2 << 20)} == {128 << 10}


def test_less_is_asked_for_where_it_takes_long() -> None:
    peering: Any = SimpleNamespace(credit_max=CREDIT_MAX)
    way, name = _Way("n1", peering), ("x", "out")

    async def came(seconds: float) -> int:
        size = way.window // 2
        way.coming[name] = deque([_Asked(size, size, trio.current_time())])
        await trio.sleep(seconds)
        way.take(peering, name, size)
        assert not way.coming
        return way.window

    async def main() -> None:
        assert [(await came(0.01)) >> 10 for _ in range(5)] == [512, 1024, 2048, 2048, 2048]
        assert await came(0.15) == CREDIT_MAX
        # nothing of what it waits for is to be larger than what may be asked for
        way.credit = CREDIT_MAX // 2
        assert [(await came(1.0)) >> 10 for _ in range(6)] == [1024, 512, 256, 128, 64, 64]
        assert way.credit == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_hundred_agents_have_their_turns(tmp_path: Path) -> None:
    two = Two(tmp_path)
    names = [f"x{number}" for number in range(100)]
    for name in names:
        two.add(name)
        two.say(name, "out", name.encode() * 50)
        two.write(name, "result.md", name.encode())
    two.say("x0", "out", b"0" * 3_000_000)

    async def act(two: Two) -> None:
        await two.end(*names)
        await two.run(lambda: len(two.lead.done) == 99)
        assert "x0" not in two.lead.done
        await two.run(lambda: len(two.lead.done) == 100)
        for name in names[1:]:
            assert shown(two, name, "out") == name.encode() * 50

    in_two(two, act)


def test_output_that_was_dropped_leaves_a_gap_that_says_its_length(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")

    async def act(two: Two) -> None:
        two.supplies.watch(two.host.agent("x"))
        two.say("x", "out", b"first\n")
        await two.run(partial(has, two, "x", b"first\n"))
        two.cut()
        two.say("x", "out", b"lost\n" * 1000)
        start = two.drop("x", "out")
        two.say("x", "out", b"last\n")
        two.connect()
        gap = f"ctxfs: {start - 6} bytes of output dropped (log_max)\n…".encode()
        await two.run(partial(has, two, "x", b"first\n" + gap + b"last\n"))
        segments = Segments(two.lead.directory("x") / "out")
        assert segments.end == start + 5
        assert segments.since(6, 100) == (gap + b"last\n", start + 5)
        assert segments.since(2, 4) == (b"rst\n", 6)
        assert segments.since(start + 1, 100) == (b"ast\n", start + 5)

    in_two(two, act)


def test_the_lead_keeps_what_its_own_log_max_lets_it(tmp_path: Path) -> None:
    two = Two(tmp_path, log_max=20_000)
    two.add("x")
    two.say("x", "out", b"abcdefgh" * 10_000)

    async def act(two: Two) -> None:
        await two.end("x")
        await two.run(lambda: bool(two.lead.done))
        segments = Segments(two.lead.directory("x") / "out")
        assert segments.end == 80_000
        kept = sum(each.size for each in segments.segments)
        assert 10_000 <= kept <= 20_000
        header = f"ctxfs: {80_000 - kept} bytes of older output dropped (log_max)\n…".encode()
        assert segments.header == header

    in_two(two, act)


ALLOWED = ("doc/artifact/", "doc/result.md", "parcel/")
#: what a hostile host says of files
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"artifact/../x": [1, 0]}, "the name of no file"),
    ({"artifact/a/./x": [1, 0]}, "the name of no file"),
    ({"artifact//x": [1, 0]}, "too long a name, or empty"),
    ({"artifact/": [1, 0]}, "too long a name, or empty"),
    ({"artifact/%2e%2e/x": [1, 0]}, "the name of no file"),
    ({"artifact/a%00b": [1, 0]}, "the name of no file"),
    ({"artifact/a%2f..%2fb": [1, 0]}, "the name of no file"),
    ({"artifact/" + "x" * 256: [1, 0]}, "too long a name"),
    ({"artifact/" + "x/" * 600: [1, 0]}, "too long a name"),
    ({"/etc/passwd": [1, 0]}, "nothing that an agent gives back"),
    ({"handoff.md": [1, 0]}, "nothing that an agent gives back"),
    ({"out": [1, 0]}, "nothing that an agent gives back"),
    ({"result.md": [-1, 0]}, "no right size"),
    ({"result.md": ["1", 0]}, "no right size"),
    ({"result.md": [None, 0]}, "no right size"),
    ({"result.md": 5}, "no right size"),
    ({"result.md": [(1 << 20) + 1, 0]}, "longer than document_max"),
    ({f"artifact/{n}": [0, 0] for n in range(30)}, "are too many"),
    ({f"artifact/{n}": [1 << 20, 0] for n in range(5)}, "are too many"),
    ({f"artifact/{n}/{'d/' * 9}x": [0, 0] for n in range(12)}, "bytes are too many"),
    ({"artifact/a": [1, 0], "artifact/a/b": [1, 0]}, "Not a directory"),
    ({"refs.jsonl": [1, 0]}, "is not a JSON object"),
    ({"messages.jsonl": [None, 0]}, "is not a JSON object"),
    ({"files": [1, 1]}, "a line that is none"),
    ({"result.md": [9, 0]}, "shorter than was said"),
]


@pytest.mark.parametrize(("said", "why"), HOSTILE, ids=[why for _, why in HOSTILE])
def test_what_cannot_be_ends_one_parcel(
    tmp_path: Path, said: dict[str, Any], why: str
) -> None:
    limits = {"document_max": 1 << 20, "artifact_max": 4 << 20, "files": 20}
    two = Two(tmp_path, **limits)
    two.add("x")
    two.add("y")
    two.write("y", "result.md", b"good")

    async def act(two: Two) -> None:
        real = two.supplies._read

        def read(agent: Agent, name: str, offset: int, size: int) -> tuple[int, bytes]:
            if agent.name != "x":
                return real(agent, name, offset, size)
            return offset, b"5"[offset:]

        with mock.patch.object(two.supplies, "_read", read):
            two.returns.ended(two.lead.agent("x"), {"files": said, "out": 0, "log": 0})
            await two.end("y")
            await two.run(lambda: {*two.lead.done} == {"x", "y"})
        assert why in two.returns.error(two.lead.agent("x"))
        assert not two.returns.error(two.lead.agent("y"))
        assert two.returns.left(two.lead.agent("x")) == 0
        for path in tree(two.lead.directory("x").parent):
            assert path.split("/", 1)[1].startswith(ALLOWED), path

    in_two(two, act)


def test_a_line_of_the_list_is_no_longer_than_a_name(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    said = dump_json(["artifact/" + "x" * 100_000, 1, 0]).encode() + b"\n"

    async def act(two: Two) -> None:
        with mock.patch.object(two.supplies, "_read", lambda _, __, at, n: (at, said[at : at + n])):
            two.returns.ended(two.lead.agent("x"), {"files": {"files": [len(said), 1]}})
            await two.run(lambda: bool(two.lead.done))
        assert "a line that is none" in two.returns.error(two.lead.agent("x"))

    in_two(two, act)


def test_a_line_of_a_conversation_may_have_any_field(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    said = {**json.loads(line(1)), "session": 5, "self": 1, "fields": [], "type": "run.end"}
    two.write_session("x", "messages.jsonl", dump_json(said).encode() + b"\n" + line(2))

    async def act(two: Two) -> None:
        await two.end("x")
        await two.run(lambda: bool(two.lead.done))
        lines = two.lead.world.lines(two.lead.agent("x"), "messages.jsonl")
        assert [json.loads(text).get("session") for text in lines] == [5, None]

    in_two(two, act)


def test_very_many_artifacts_are_looked_at_in_steps(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    for number in range(50):
        two.write("x", f"artifact/{number}", b"1")
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await trio.lowlevel.checkpoint()

    async def act(two: Two) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            found = await two.supplies.files_of(two.host.agent("x"))
            nursery.cancel_scope.cancel()
        assert len(found) == 50 and passes >= 49  # who is first in a tick is chance

    with mock.patch("runtime.peers.supplies.SLICE", -1.0):
        in_two(two, act)


def test_bytes_that_nobody_asked_for_are_nothing(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")

    async def act(two: Two) -> None:
        await two.run(lambda: two.ends is not None and two.ends[0].is_open)
        inc = two.lead.agent("x").incarnation
        for event in (
            Grown(inc, "result.md", 5), Grown("0" * 16, "out", 5), Bytes(inc, "out", 0, b"x"),
            Bytes("0" * 16, "out", 0, b""), Bytes(inc, "../x", 7, b"x"), Want(inc, "../x", 0, 5),
        ):  # fmt: skip
            if isinstance(event, Want):
                assert two.ends
                two.ends[0]._owed[f"{inc}\n../x"] = 5
            two.lead.hear(event)
        assert not (two.lead.directory("x") / "out").exists()

    in_two(two, act)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    give(two, "x")
    write, full = os.write, [False]

    def limited(fd: int, data: Any) -> int:
        if full[0] and os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full[0] |= len(data) > 20_000
        return write(fd, data[: len(data) // 2] if full[0] else data)

    async def act(two: Two) -> None:
        await two.end("x")
        with mock.patch("os.write", limited):
            await two.run(lambda: full[0])
            until = trio.current_time() + 5
            await two.run(lambda: trio.current_time() > until)
            left = two.returns.left(two.lead.agent("x"))
            assert left > 0 and not two.lead.done, two.returns.error(two.lead.agent("x"))
        await two.run(lambda: bool(two.lead.done))
        check(two, "x")

    in_two(two, act)


def test_a_full_account_asks_for_nothing(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    give(two, "x")

    async def act(two: Two) -> None:
        def no_room(owner: int, size: int, **_: Any) -> None:
            raise QuotaError("full")

        with mock.patch.object(two.lead.world.agents.disk, "check", no_room):
            await two.end("x")
            await two.run(lambda: two.ends is not None and two.ends[0].is_open)
            for _ in range(20):
                await trio.sleep(0.5)
                assert two.ends and two.ends[0].credit == CREDIT_MAX
            assert two.returns.left(two.lead.agent("x")) > 100_000
        await two.run(lambda: bool(two.lead.done))
        check(two, "x")

    in_two(two, act)


def test_artifacts_that_are_too_many_for_a_message_are_listed(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    for number in range(900):
        two.write("x", f"artifact/{number % 30}/{number:060}", b"%d" % number)
    (two.host.directory("x") / "doc/artifact/empty/er").mkdir(parents=True)
    (two.host.directory("x") / "doc/artifact/run").write_text("#!/bin/sh\n")
    (two.host.directory("x") / "doc/artifact/run").chmod(0o755)
    write, threads = Path.write_bytes, []

    def noted(path: Path, data: bytes) -> int:
        threads.append(threading.current_thread())
        return write(path, data)

    async def act(two: Two) -> None:
        with mock.patch.object(Path, "write_bytes", noted):
            await two.end("x")
        assert threads and threading.main_thread() not in threads, "others do not wait for it"
        await two.run(lambda: bool(two.lead.done))
        assert not two.returns.error(two.lead.agent("x"))
        lead, host = (side.directory("x") / "doc" for side in (two.lead, two.host))
        assert tree(lead) == tree(host)
        assert (lead / "artifact/empty/er").is_dir()
        assert (lead / "artifact/run").stat().st_mode & 0o777 == 0o755
        two.returns.forget(two.lead.agent("x"))
        assert not (two.lead.directory("x") / "parcel").exists()
        assert tree(lead) == tree(host)

    in_two(two, act)


# to the host


def handed(two: Two, **documents: bytes) -> dict[str, list[Any]]:
    """The documents of an agent at its lead, as ``put`` has them."""
    agent, found = two.lead.agent("x"), {}
    for name, data in documents.items():
        name = name.replace("_", ".")
        two.lead.world.agents.documents.write(agent, name, data)
        found[name] = [len(data), hashlib.sha256(data).hexdigest()]
    return found


def test_a_guest_gets_what_it_is_given(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.add("x")
    given = {"handoff_md": b"Do it.\n" * 40_000, "input_jsonl": b'{"path":"/a"}\n'}

    async def act(two: Two) -> None:
        files = handed(two, **given)
        two.supplies.expect(two.host.agent("x"), files)
        await two.run(lambda: two.went > 100_000)
        await two.restart(two.host)
        two.supplies.expect(two.host.agent("x"), files)
        await two.run(lambda: two.host.done == ["x"])
        assert two.supplies.error(two.host.agent("x")) == ""
        assert tree(two.host.directory("x") / "doc") == tree(two.lead.directory("x") / "doc")

    in_two(two, act)


@pytest.mark.parametrize(
    ("data", "digest", "why"),
    [
        (b"x", "0" * 64, "is not what its lead said"),
        (b"\xff", "", "is not UTF-8"),
        (b"a\0b", "", "a NUL byte"),
    ],
)
def test_a_guest_gets_nothing_else(tmp_path: Path, data: bytes, digest: str, why: str) -> None:
    two = Two(tmp_path)
    two.add("x")

    async def act(two: Two) -> None:
        files = handed(two, handoff_md=data)
        files["handoff.md"][1] = digest or files["handoff.md"][1]
        two.supplies.expect(two.host.agent("x"), files)
        await two.run(lambda: two.host.done == ["x"])
        assert why in two.supplies.error(two.host.agent("x"))
        assert not (two.host.directory("x") / "doc/handoff.md").exists()

    in_two(two, act)
