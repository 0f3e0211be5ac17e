"""What takes bytes that somebody else chose, one function for each.

A target returns, or raises an error of the project's own that says what is wrong with them.
Anything else is a bug: it would be a traceback in the log, and ``EIO`` or a lost connection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import trio

from client.jsonrpc import object_in, objects_in, text_in
from client.keys import Typed
from client.loop import Loop, parse_object
from client.mcp import Server
from client.permits import ASKING, BOTH, End, asks_for, decided, words_for
from client.root import Root
from client.screen import Screen
from client.terminal import Session
from ctxfs.declared import parse as parse_declaration
from ctxfs.tools import registry
from runtime.agents import asks, conditions
from runtime.agents.messages import check_id
from runtime.authority.accounts import Payer, accounts_of
from runtime.authority.loop import Turns
from runtime.cell.record import judge, read_record
from runtime.errors import CtxError, StartupError
from runtime.life import residents
from runtime.metering import passing
from runtime.metering import reading as models
from runtime.metering import settings as meter
from runtime.metering.reading import Form, UncountableError, asked, form_of
from runtime.peers.lease import Grants, Lease
from runtime.peers.peering import BrokenLinkError, Hello, Host, Lead, Message
from runtime.peers.streams import Stream
from runtime.records.change import Change
from runtime.records.config import Config, read_config
from runtime.records.fleet import Fleet, Reader
from runtime.records.history import History
from runtime.records.items import Ask
from runtime.records.model import Agent
from runtime.records.nodes import argv
from runtime.records.settings import Settings
from runtime.records.spent import PLACES, SIZE, VERSION
from runtime.sockets import connection as sockets
from runtime.sockets.replay import check_following
from runtime.texts import mounts, names, policy
from runtime.texts.forms import parse_filled, parse_form
from runtime.texts.names import decode
from tests.fuzz.peers import PEERS
from tests.fuzz.terminals import terminal
from tests.worlds.emulator import Emulator
from tests.worlds.records import ROOT, World, inside

Target = Callable[[bytes], None]
TARGETS: Final[dict[str, Target]] = {}
#: errors that say what is wrong: CtxError to a caller, StartupError to who starts the daemon
EXPECTED: Final = (CtxError, StartupError)


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


def _texts(name: str, parse: Callable[[str], Any]) -> None:
    """A target for a parser of one text, which a file has decoded."""

    def call(data: bytes) -> None:
        parse(decode(data))

    TARGETS[name] = call


for _name, _parse in (
    ("name", names.check_name),
    ("duration", names.parse_duration),
    ("moment", lambda text: names.parse_moment(text, 1e9)),
    ("number", names.parse_number),
    ("size", names.parse_size),
    ("screen", names.parse_screen),
    ("path", names.check_absolute),
    ("env", names.parse_env_line),
    ("command", names.split_command),
    ("json", names.parse_json),
    ("json_object", names.parse_json_object),
    ("unfinished_json", names.is_unfinished_json),
    ("message_id", check_id),
    ("wait_on", conditions.parse),
    ("options", asks.parse_options),
    ("mount_line", mounts.parse_line),
    ("relabel", lambda text: policy.relabel(text, "x_t", "y_t")),
):
    _texts(_name, _parse)

for _target in PEERS:
    target(_target)


@target
def policies(data: bytes) -> None:
    """Two policies: what is parsed is rendered and parsed to the same, and never widened."""
    own, _, above = decode(data).partition("\f")
    rules, parent = policy.parse(own, "x_t"), policy.parse(above, "x_t")
    again = policy.parse(policy.render(rules, "x_t"), "x_t")
    assert policy.render(again, "x_t") == policy.render(rules, "x_t")
    narrowed = policy.effective(rules, parent)
    assert policy.uncovered(narrowed, policy.as_bound(parent)) is None


@target
def mount_tables(data: bytes) -> None:
    own, _, above = decode(data).partition("\f")
    table, parent = mounts.parse(own), mounts.parse(above)
    assert mounts.parse(mounts.render(table)) == table
    index, places = mounts.Index(parent), mounts.TreePlaces("/run/ctxfs/tree", ("/ctx",))
    for mount in table:
        mounts.within(mount, index.covering(mount.source), places.named(mount, 1000))


@target
def forms(data: bytes) -> None:
    """A form, and what somebody filled in."""
    form, _, filled = decode(data).partition("\f")
    parse_filled(parse_form(form), filled)


@cache
def _asking() -> tuple[World, Agent, Ask]:
    """An agent with something that is not asked yet."""
    world = World(_scratch() / "asking")
    agent = world.live(world.agents.births.create(ROOT, "x"))
    return world, agent, world.agents.asks.make(inside(agent), agent, "q")


def _asked(files: Iterable[tuple[str, str]]) -> Change:
    """What asks with these files, of which nothing is kept."""
    world, agent, ask = _asking()
    change, plane = Change(), world.agents.asks
    for file, text in files:
        if file == "question":
            plane.begin(change, agent, ask, text)
        elif file == "to":
            plane.address(change, inside(agent), agent, ask, text)
        else:
            plane.update(change, agent, ask, "ask_kind" if file == "kind" else file, text)
    return change


@target
def ask_files(data: bytes) -> None:
    """The files of an ask, and an answer: what is taken is taken again as it is kept."""
    world, agent, ask = _asking()
    names_ = ("kind", "detail", "options", "form", "default", "deadline", "to", "question")
    *texts, said = decode(data).split("\f")
    change = _asked(zip(names_, texts, strict=False))
    for field in ("options", "form"):
        kept = change.peek(ask, field)
        again = Change()
        world.agents.asks.update(again, agent, ask, field, kept)
        assert again.peek(ask, field) == kept
    answer = world.agents.asks.parse_answer(change, ask, said)
    assert world.agents.asks.parse_answer(change, ask, answer) == answer
    assert answer.endswith("\n")


@target
def hook_input(data: bytes) -> None:
    """What Claude Code says to a hook or a tool, and what a person answers: whatever a tool is
    given, people can be asked about it, and the answer is one that the program reads."""
    event, _, said = data.partition(b"\f")
    found = parse_object(event.strip()) or {}
    tool, given = text_in(found, "tool_name"), object_in(found, "tool_input")
    files = [(file, decode(text).removesuffix("\n")) for file, text in asks_for(tool, given)]
    try:
        _asked(file for file in files if file[0] != "life")  # there is no run here
    except EXPECTED:
        assert tool == ASKING, "only what its model asks can be no form"
    text = said.decode(errors="replace")
    for answer in (text, *(word for word, _ in BOTH)):
        decision = decided(tool, given, End("answered", answer, "operator uid:0"))
        assert decision["behavior"] in ("allow", "deny")
        json.dumps(decision)
    names_ = [text_in(each, "name") for each in objects_in(given, "questions")]
    options = "\n".join(words_for(names_))
    assert len(names_) > 16 or asks.words_of(asks.parse_options(options)) == options.split()


@target
def quoted(data: bytes) -> None:
    """What is shown of others' texts is printable, and on one line."""
    for text in (names.quote(data.decode(errors="replace")), names.escape(data.decode("latin-1"))):
        assert all(char.isprintable() for char in text), text


@cache
def _scratch() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="ctxfs-fuzz-")
    _KEPT.append(directory)
    return Path(directory.name)


_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []


@target
def configuration(data: bytes) -> None:
    path = _scratch() / "config.yaml"
    path.write_bytes(data)
    config, mistakes, doubts = read_config(path, required=True)
    for said in (*mistakes, *doubts):
        assert "\n" not in str(said)
    for node in config.nodes.values():
        command = argv(node, "login", rootless=True)
        assert command[0][0] == "/" or command[-4:] == ["--", node.ssh, "ctx", "peer"]
        assert not any("\0" in word for word in command)


@target
def declaration(data: bytes) -> None:
    """Of an agent: what is wrong is told on one printable line each."""
    found, mistakes = parse_declaration("coder", "coder.yaml", data.decode(errors="replace"))
    assert (found is None) == bool(mistakes)
    for mistake in mistakes:
        assert "\n" not in str(mistake)


@target
def run_record(data: bytes) -> None:
    """What a monitor wrote, torn anywhere."""
    path = _scratch() / "record"
    path.write_bytes(data)
    record = read_record(path)
    if record.over:
        judge(record, oom=False, complaint="")


@target
def viewers(data: bytes) -> None:
    """What a program writes on its terminal, and what viewers of it send."""
    terminal().ask(data)


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _leave(emulator: Emulator, screen: Screen, before: dict[str, object]) -> None:
    """A person's terminal is as it was, and nothing went beyond its screen."""
    for part in screen.undone():
        emulator.feed(part)
    assert emulator.state() == before, (emulator.state(), before)
    assert not emulator.beyond, emulator.beyond
    assert all(title.startswith("[coder] ") for title in emulator.titles)


@target
def shown(data: bytes) -> None:
    """What an agent writes on a person's terminal, in parts: it is the same as at once."""
    whole, parts = Screen("coder"), Screen("coder")
    emulator = Emulator(_12=True, _1007=True)
    before = emulator.state()
    size, data = (data[0] % 9 + 1, data[1:]) if data else (1, b"")
    came = b"".join(parts.feed(piece) for piece in _pieces(data, size))
    assert came == whole.feed(data)
    assert not emulator.feed(came) or parts.talked
    _leave(emulator, parts, before)


@target
def typed(data: bytes) -> None:
    """What a person types, and a terminal says, in parts."""
    whole, parts = Typed(), Typed()
    size, data = (data[0] % 9 + 1, data[1:]) if data else (1, b"")
    came = b""
    for piece in _pieces(data, size):
        if parts.wants == "leave":
            break
        came += parts.feed(piece)
    assert (came, parts.wants) == (whole.feed(data), whole.wants)
    assert (whole.release(), whole.holds) == (parts.release(), parts.holds)


@target
def packets(data: bytes) -> None:
    """What a monitor sends to a viewer at a terminal: kinds, lengths of two bytes, and data."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there = Session(theirs.detach(), "coder", look=False, raw=False, leave=29)
    there.is_screen = there.person = True
    there.screen.heard = there.screen.asks = True
    emulator = Emulator(_12=True, _1007=True)
    before = emulator.state()
    there._flush = lambda: None  # type: ignore[method-assign]
    with ours:
        while data and not there.end:
            length = int.from_bytes(data[1:3], "big")
            ours.send(data[:1] + data[3 : 3 + length])
            data = data[3 + length :]
            there._receive()
            emulator.feed(bytes(there.unshown))
            there.unshown.clear()
    there.viewer.close()
    _leave(emulator, there.screen, before)


@target
def history(data: bytes) -> None:
    """What a loss of power left of a history: the lines that are due are in it afterwards,
    once each, and what is before them is whole."""
    state = _scratch()
    path = state / "events.jsonl"
    path.write_bytes(data)
    due = ['{"id":"e7"}', '{"id":"e8"}']
    History(state).complete("events.jsonl", due)
    History(state).last_number("events.jsonl")
    text = path.read_bytes()
    assert text.endswith(b"\n")
    for line in due:
        assert line.encode() in text


@target
def log(data: bytes) -> None:
    """What a loss of power left of a log of events: what is due comes behind it, if it is not
    there, and all that has a number is read, forwards and backwards."""
    state = _scratch()
    path = state / "events/0/0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    fleet = Fleet(state, History(state), Settings(Config()))
    fleet.complete("events/0", [f'{{"seq":{n},"owner":0,"session":"s","id":"e1"}}' for n in (7, 8)])
    assert path.read_bytes().endswith(b"\n")
    assert fleet.last(0) >= 8
    there = path.read_bytes().splitlines()
    assert all(line in there for line in fleet.tail(None, len(data)).splitlines())
    reader, lines = Reader(fleet, None, 0), len(path.read_bytes().splitlines())
    while reader.read():
        lines -= 1
        assert lines >= 0


@target
def following(data: bytes) -> None:
    """The fields of who asks for events, and lines that are looked at."""
    _, wanted, _ = check_following(names.parse_json_object(decode(data)))
    for kind in ("agent.stop", "run.end"):
        line = f'{{"seq":1,"owner":0,"session":"s","id":"e1","ts":"t","type":"{kind}","agent":"x"}}'
        wanted.has(line.encode())
    wanted.has(data)


@target
def resident_line(data: bytes) -> None:
    """A line that a resident program said."""
    residents._parse(data)
    residents._parse_hello(data)


@target
def tool_input(data: bytes) -> None:
    """The input of a tool, against its schema: the first word names it."""
    word, _, text = decode(data).partition(" ")
    tool = registry.BY_NAME.get(word) or registry.TOOLS[len(word) % len(registry.TOOLS)]
    registry.check(tool, names.parse_json(text))


@target
def frames(data: bytes) -> None:
    """What comes in by a socket: frames, and the requests in them. The peer sends the bytes in
    parts of a size of its own choice."""
    size = data[0] + 1 if data else 1

    async def say(peer: socket.socket) -> None:
        with trio.socket.from_stdlib_socket(peer) as speaking:
            for begin in range(1, len(data), size):
                await speaking.send(data[begin : begin + size])

    async def converse() -> None:
        config = Config(frame_max=256)
        # each part is read by itself
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        stream = cast(trio.SocketStream, SimpleNamespace(socket=ours))
        connection = sockets.Connection(
            sockets.Server(), stream, ROOT, config, accounts_of(config), Turns(), Payer(0)
        )
        with ours:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(say, theirs)
                try:
                    while (line := await connection.receive()) is not None:
                        if line.strip():
                            names.parse_json_object(line)
                except EXPECTED as error:  # or it would be one of a group
                    refused.append(error)
                nursery.cancel_scope.cancel()

    refused: list[Exception] = []
    trio.run(converse)
    for error in refused:
        raise error


@target
def peer(data: bytes) -> None:
    """The other side of a link, in parts: the first byte says which side, and of what size."""
    side, size = (data[0] % 2, data[0] // 2 + 1) if data else (0, 1)
    told = []
    for pieces in (_pieces(data[1:], size), (data[1:],)):
        stream, grants, lease = Stream(), Grants(30.0, 1.0, 0.0), Lease(30.0, 0)
        stream.record("put", "a")
        at: Lead | Host = Lead({"as": "r"}, stream, grants) if side else Host()
        said: list[object] = []
        try:
            for piece in pieces:
                for event in at.feed(piece, 1.0):
                    said.append(event)
                    if isinstance(event, Message):
                        stream.done(event.number, event.line)
                        lease.reach(event.number, 1.0)
                    elif isinstance(event, Hello) and isinstance(at, Lead):
                        if not at.fits(event):
                            stream = Stream()
                        at.go_on(event, new=(stream, grants))
                    elif isinstance(event, Hello) and isinstance(at, Host):
                        at.go_on({"as": "r"}, stream, lease, event)
                        at.tick(1.0)
        except BrokenLinkError as error:
            said.append(str(error))
        while at.outgoing():
            pass
        assert lease.end is None or lease.end <= 31.0
        told.append(said)
    assert told[0] == told[1]


@target
def meter_settings(data: bytes) -> None:
    path = _scratch() / "meter.yaml"
    path.write_bytes(data)
    meter.load(path)


def _form(data: bytes) -> Form:
    """The first byte says which."""
    found = form_of(*_FORMS[data[0] % len(_FORMS) if data else 0])
    assert found is not None
    return found


_FORMS: Final = (
    ("anthropic", "/v1/messages"), ("openai", "/v1/responses"), ("openai", "/v1/chat/completions"),
    ("gemini", "/v1beta/models/m:generateContent"),
)  # fmt: skip


@target
def model_request(data: bytes) -> None:
    """A body: what goes on asks for the same, and has what was put in."""
    with suppress(UncountableError):
        found, body = asked(_form(data), data[1:])
        again, sent = asked(_form(data), body)
        assert (again.model, again.most, again.hides) == (found.model, found.most, False)
        assert sent == body and len(body) == found.size
        assert not found.hides or b'"include_usage":true' in bytes(body)


@target
def model_answer(data: bytes) -> None:
    """An answer, in parts: it is the same as at once, and passes as it is."""
    form, body = _form(data), data[4:]
    size, kind, encoding = (*data[1:4], 0, 0, 0)[:3]
    words = (("text/event-stream", "application/json")[kind % 2], ("", "gzip", "br")[encoding % 3])
    whole, parts = models.Reader(form, *words), models.Reader(form, *words)
    shown = b"".join(parts.feed(piece) for piece in _pieces(body, size + 1)) + parts.finish()
    assert whole.feed(body) + whole.finish() == shown == body
    assert (whole.usage, whole.model, whole.exact) == (parts.usage, parts.model, parts.exact)


@target
def metered(data: bytes) -> None:
    """What comes from an agent by its relay, and what answers it, in parts: the meter has no error
    that it did not expect, and holds nothing afterwards."""
    size, data = (data[0] + 1, data[1:]) if data else (1, b"")
    said, _, answered = data.partition(b"\f")

    async def say(stream: trio.SocketStream, text: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            for piece in _pieces(text, size):
                await stream.send_all(piece)
            await stream.send_eof()
            while await stream.receive_some(65536):
                pass
        await stream.aclose()

    async def converse() -> None:
        there = passing.Meter(meter.Settings({"m": meter.Network("openai", "m", "u")}, 0))
        async with trio.open_nursery() as nursery:

            def pair() -> list[trio.SocketStream]:
                ends = socket.socketpair()
                return [trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in ends]

            @asynccontextmanager
            async def connected(path: str) -> AsyncIterator[trio.SocketStream]:
                ours, theirs = pair()
                nursery.start_soon(say, ours, answered)
                async with theirs:
                    yield theirs

            relay, its = pair()
            passing._connected = connected
            fd = os.open(_counters(), os.O_RDWR)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))]
            await relay.socket.sendmsg([passing._GREETING.ljust(passing._GREETING_SIZE)], rights)
            os.close(fd)
            nursery.start_soon(say, relay, said)
            await there.serve("m", its)
        assert there.memory._free == passing.BODIES_MAX and not there._files._payers

    errors = _Errors()
    passing.log.addHandler(errors)
    try:
        trio.run(converse)
    finally:
        passing.log.removeHandler(errors)
    for error in errors.found:
        raise error


class _Errors(logging.Handler):
    """Keeps those of which a traceback is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])


@cache
def _counters() -> Path:
    path = _scratch() / "counters"
    path.write_bytes(VERSION.to_bytes(8, "little").ljust(SIZE, b"\0"))
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(PLACES["tokens_max"])
        file.write(b"\xff" * 16)
    return path


@target
def mcp_lines(data: bytes) -> None:
    """What a client says to ``ctx mcp`` while there is no daemon: each answer is one of the
    protocol, and nothing else comes of it."""
    loop = Loop()
    server = Server(loop, Root(str(_scratch() / "none")), "x", outside=False)
    size = data[0] + 1 if data else 1
    for piece in (*(data[i : i + size] for i in range(1, len(data), size)), b"\n"):
        for heard in server.lines.add(piece):
            server.take(heard)
    for line in loop.unwritten.get(1, b"").splitlines():
        said = json.loads(line)
        assert said["jsonrpc"] == "2.0"
        assert ("method" in said) + ("result" in said) + ("error" in said) == 1, said
    server.close()


def run(name: str, data: bytes) -> None:
    """One target on these bytes: what is expected is swallowed."""
    try:
        TARGETS[name](data)
    except EXPECTED as error:
        str(error).encode()  # it is shown: no lone surrogate


def corpus(name: str) -> Path:
    return Path(__file__).parent / "corpus" / name
