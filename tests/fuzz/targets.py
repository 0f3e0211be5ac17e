"""What takes bytes that somebody else chose, one function for each.

A target returns, or raises an error of the project's own that says what is wrong with them.
Anything else is a bug: it would be a traceback in the log, and ``EIO`` or a lost connection.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import trio

from client.loop import Loop
from client.mcp import Server
from client.root import Root
from ctxfs.declared import parse as parse_declaration
from ctxfs.tools import registry
from runtime.agents import asks, conditions
from runtime.agents.messages import check_id
from runtime.authority.accounts import Payer, accounts_of
from runtime.authority.loop import Turns
from runtime.cell.record import judge, read_record
from runtime.errors import CtxError, StartupError
from runtime.life import residents
from runtime.records.config import Config, load_config
from runtime.records.fleet import Fleet, Reader
from runtime.records.history import History
from runtime.records.settings import Settings
from runtime.sockets import connection as sockets
from runtime.sockets.replay import check_following
from runtime.texts import mounts, names, policy
from runtime.texts.forms import parse_filled, parse_form
from runtime.texts.names import decode
from tests.fuzz.terminals import terminal
from tests.worlds.records import ROOT

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


@target
def quoted(data: bytes) -> None:
    """What is shown of others' texts is printable, and on one line."""
    for text in (names.quote(data.decode(errors="replace")),
                 names.escape(data.decode("latin-1"))):
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
    load_config(path, required=True)


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

