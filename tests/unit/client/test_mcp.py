"""``ctx mcp``: what it answers in each era of the protocol, over a tree and a socket that are
not the daemon's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from client import calls, mcp
from client.calls import Call, Calls
from client.loop import Loop
from client.mcp import LINE_MAX, Server
from client.root import Root
from tests.unit.client.fakes import FakeRoot, Run, eventually, is_asleep
from tests.worlds.mcp import (
    ABOUT,
    LEGACY,
    META,
    MODERN,
    McpClient,
    Message,
    check,
    hostile_lines,
    initialize,
    meta,
    request,
)

VERSIONS = (MODERN, *LEGACY)
PARSE, INVALID, NO_METHOD, PARAMS, VERSION = -32700, -32600, -32601, -32602, -32022


def make_tool(root: FakeRoot, name: str) -> None:
    directory = root.path / "tool" / f"{name}.d"
    directory.mkdir(parents=True)
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    for file, text in (
        ("description", f"Does {name}.\nAt once."),
        ("schema", json.dumps(schema)),
        ("output_schema", json.dumps({"type": "object"})),
    ):
        (directory / file).write_text(text + "\n")


#: closed after each test
OPENED: list[Callable[[], None]] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop()()


class FakeDaemon:
    """Answers at a socket as ``answer`` says; None is not answered, False ends the connection."""

    def __init__(
        self, root: FakeRoot, answer: Callable[[Message], Any], path: str = "agent/x.sock"
    ) -> None:
        OPENED.append(self.die)
        self.answer = answer
        self.requests: list[Message] = []
        self.connections: list[socket.socket] = []
        self.path = root.path / path
        self.open()

    def open(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        directory = os.open(self.path.parent, os.O_PATH)
        self.socket.bind(f"/proc/self/fd/{directory}/{self.path.name}")
        os.close(directory)
        self.socket.listen()
        threading.Thread(target=self.accept, args=[self.socket], daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.serve, args=[connection], daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                asked = json.loads(line)
                self.requests.append(asked)
                frame = self.answer(asked) if asked["op"] == "tool" else None
                if frame is False:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                if frame is not None:
                    connection.sendall(json.dumps(frame).encode() + b"\n")

    def die(self) -> None:
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def asked(self, op: str = "tool") -> list[Message]:
        return [each for each in self.requests if each["op"] == op]


def echo(asked: Message) -> Message:
    return {"type": "tool", "id": asked["id"], "output": {"name": asked["name"], "ü": "a\nb"}}


@pytest.fixture
def tools(root: FakeRoot) -> FakeRoot:
    for name in ("TaskOutput", "AgentStop", "Fresh"):
        make_tool(root, name)
    (root.path / "self").symlink_to("agent/x.d")
    root.agent("x", status="busy")
    return root


class Heard(Loop):
    """A loop that keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said = bytearray()

    def write(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.said += data
        else:
            super().write(fd, data)


class Talk:
    """A server in this process, in one version; what it says is checked."""

    def __init__(self, root: FakeRoot, version: str, *, begun: bool = True) -> None:
        self.loop = Heard()
        self.server = Server(self.loop, Root(str(root.path)), "x", outside=False)
        self.loop.forget(0)
        OPENED.append(self.server.close)
        self.lines = self.server.lines
        self.version = version
        self.methods: dict[Any, str] = {}
        if begun and version != MODERN:
            self.say(initialize(version))
            self.say({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def say(self, message: Message | bytes) -> list[Message]:
        """What it says at once."""
        if isinstance(message, bytes):
            self.hear(message)
        else:
            if "id" in message and isinstance(message["id"], str | int):
                self.methods[message["id"]] = message.get("method", "")
            self.hear(json.dumps(message).encode() + b"\n")
        return self.said()

    def hear(self, data: bytes) -> None:
        for line in self.lines.add(data):
            self.server.take(line)
        while self.loop.unwritten and self.loop.step(reading=False, most=0):
            pass

    def said(self) -> list[Message]:
        data, self.loop.said = bytes(self.loop.said), bytearray()
        messages = [json.loads(line) for line in data.splitlines()]
        for each in messages:
            check(each, self.methods.get(each.get("id"), ""), self.version)
        return messages

    def ask(self, method: str, params: Message | None = None, **more: Any) -> list[Message]:
        return self.say(request(len(self.methods) + 100, method, self.version, params, **more))

    def until(self, count: int = 1) -> list[Message]:
        """What it says later."""
        deadline, heard = time.monotonic() + 10, self.said()
        while len(heard) < count:
            assert time.monotonic() < deadline, heard
            self.loop.step(most=0.05)
            heard += self.said()
        return heard


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have so many seconds pass, for who asks for the time."""
    now, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + sum(passed))
    return passed.append


@pytest.fixture(params=VERSIONS)
def talk(request: pytest.FixtureRequest, tools: FakeRoot) -> Talk:
    return Talk(tools, request.param)


@pytest.fixture(params=[MODERN, LEGACY[0]])
def either(request: pytest.FixtureRequest, tools: FakeRoot) -> Talk:
    return Talk(tools, request.param)


def code_of(messages: list[Message]) -> int:
    (message,) = messages
    code: int = message["error"]["code"]
    return code


# beginning


@pytest.mark.parametrize(("wanted", "given"), [
    ("2025-11-25", "2025-11-25"), ("2025-06-18", "2025-06-18"), ("2024-11-05", "2025-11-25"),
    (MODERN, "2025-11-25"), ("x", "2025-11-25"),
])  # fmt: skip
def test_a_session_begins_in_a_version_of_both(tools: FakeRoot, wanted: str, given: str) -> None:
    talk = Talk(tools, LEGACY[0], begun=False)
    (answer,) = talk.say(initialize(wanted))
    result = answer["result"]
    assert result["protocolVersion"] == given
    assert result["capabilities"] == {"tools": {"listChanged": True}}
    assert result["serverInfo"]["name"] == "ctx"
    assert talk.ask("ping")[0]["result"] == {}


def test_a_version_is_discovered(tools: FakeRoot) -> None:
    talk = Talk(tools, MODERN)
    (answer,) = talk.ask("server/discover")
    result = answer["result"]
    assert result["supportedVersions"] == [MODERN]
    assert (result["cacheScope"], result["ttlMs"]) == ("public", 3_600_000)
    assert result["_meta"][f"{META}serverInfo"]["name"] == "ctx"


def test_without_a_version_nothing_is_asked_for(tools: FakeRoot) -> None:
    talk = Talk(tools, LEGACY[0], begun=False)
    for method in ("tools/list", "tools/call", "server/discover", "subscriptions/listen", "x"):
        assert code_of(talk.ask(method)) == PARAMS
    assert talk.ask("ping")[0]["result"] == {}
    assert talk.say({"jsonrpc": "2.0", "method": "notifications/initialized"}) == []
    assert not talk.server.initialized


@pytest.mark.parametrize(("about", "code"), [
    ({f"{META}protocolVersion": "1900-01-01", f"{META}clientCapabilities": {}}, VERSION),
    ({f"{META}protocolVersion": "2025-11-25", f"{META}clientCapabilities": {}}, VERSION),
    ({f"{META}protocolVersion": 1, f"{META}clientCapabilities": {}}, PARAMS),
    ({f"{META}protocolVersion": MODERN}, PARAMS),
    ({f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": []}, PARAMS),
    ({**meta(), f"{META}clientInfo": {"name": "x"}}, PARAMS),
    (meta(progressToken=1.5), PARAMS),
    (meta(progressToken=True), PARAMS),
    ([], PARAMS),
])  # fmt: skip
def test_a_request_says_its_version(tools: FakeRoot, about: Any, code: int) -> None:
    talk = Talk(tools, MODERN)
    body = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {"_meta": about}}
    (answer,) = talk.say(body)
    assert answer["error"]["code"] == code and answer["id"] == 1
    if code == VERSION:
        wanted = about[f"{META}protocolVersion"]
        assert answer["error"]["data"] == {"supported": [MODERN], "requested": wanted}


def test_who_names_only_what_must_be_is_answered(tools: FakeRoot) -> None:
    about = {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": {}}
    body = {"jsonrpc": "2.0", "id": "a", "method": "tools/list", "params": {"_meta": about}}
    assert "result" in Talk(tools, MODERN).say(body)[0]


@pytest.mark.parametrize("missing", ["protocolVersion", "capabilities", "clientInfo"])
def test_what_a_session_begins_with(tools: FakeRoot, missing: str) -> None:
    talk = Talk(tools, LEGACY[0], begun=False)
    message = initialize(LEGACY[0])
    del message["params"][missing]
    assert code_of(talk.say(message)) == PARAMS
    assert code_of(talk.ask("tools/list")) == PARAMS


def test_methods_of_the_other_era(tools: FakeRoot) -> None:
    talk = Talk(tools, MODERN)
    for method in ("initialize", "ping", "resources/list", "prompts/get", "tools/x", "x" * 9999):
        assert code_of(talk.ask(method)) == NO_METHOD
    talk = Talk(tools, LEGACY[0])
    for method in ("server/discover", "subscriptions/listen", "logging/setLevel", "tasks/list"):
        assert code_of(talk.ask(method)) == NO_METHOD


def test_both_eras_at_once(tools: FakeRoot) -> None:
    talk = Talk(tools, LEGACY[1])
    assert "ttlMs" not in talk.ask("tools/list")[0]["result"]
    talk.version = MODERN
    assert talk.ask("tools/list")[0]["result"]["ttlMs"] == 30_000


# the list


def test_the_tools_are_listed(talk: Talk) -> None:
    (answer,) = talk.ask("tools/list")
    listed = {each["name"]: each for each in answer["result"]["tools"]}
    assert list(listed) == ["AgentStop", "Fresh", "TaskOutput"]
    assert listed["TaskOutput"]["description"] == "Does TaskOutput.\nAt once."
    assert listed["TaskOutput"]["inputSchema"]["properties"] == {"x": {"type": "string"}}
    assert listed["TaskOutput"]["outputSchema"] == {"type": "object"}
    assert listed["TaskOutput"]["annotations"] == {
        "readOnlyHint": True, "destructiveHint": False, "idempotentHint": True,
        "openWorldHint": False,
    }  # fmt: skip
    assert listed["AgentStop"]["annotations"]["destructiveHint"] is True
    assert "annotations" not in listed["Fresh"], "a later daemon's"
    assert code_of(talk.ask("tools/list", {"cursor": "x"})) == PARAMS


def test_the_list_waits_for_the_daemon(
    talk: Talk, tools: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools.path / "tool").rename(tools.path / "gone")
    (tools.path / "agent").rename(tools.path / "agents")
    assert talk.ask("tools/list") == []
    (tools.path / "gone").rename(tools.path / "tool")
    (tools.path / "agents").rename(tools.path / "agent")
    assert len(talk.until()[0]["result"]["tools"]) == 3
    (tools.path / "tool").rename(tools.path / "gone")
    monkeypatch.setattr(mcp, "LOST_MAX", 0.01)
    said = talk.ask("tools/list") or talk.until()  # on a busy machine it has waited by then
    assert said[0]["error"]["code"] == -32603
    assert talk.server.requests == {}


# calls


def test_a_tool_is_called(talk: Talk, tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, echo)
    talk.ask("tools/call", {"name": "Fresh", "arguments": {"x": "1"}})
    (answer,) = talk.until()
    result = answer["result"]
    assert result["structuredContent"] == {"name": "Fresh", "ü": "a\nb"}
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    assert not result["isError"]
    (asked,) = daemon.asked()
    assert len(asked.pop("id")) == 16
    assert asked == {"op": "tool", "name": "Fresh", "input": {"x": "1"}}
    talk.ask("tools/call", {"name": "Fresh"})
    talk.until()
    assert daemon.asked()[1]["input"] == {}
    assert len(daemon.connections) == 1


@pytest.mark.parametrize("params", [
    {}, {"name": 1}, {"name": ""}, {"name": "../x"}, {"name": ".x"}, {"name": "x" * 200},
    {"name": "a b"}, {"name": "Fresh", "arguments": []}, {"name": "Fresh", "arguments": None},
])  # fmt: skip
def test_a_call_that_is_none(talk: Talk, params: Message) -> None:
    assert code_of(talk.ask("tools/call", params)) == PARAMS


def test_what_the_daemon_refuses_is_a_result(talk: Talk, tools: FakeRoot) -> None:
    FakeDaemon(
        tools,
        lambda asked: {
            "type": "error", "id": asked["id"], "code": asked["input"]["x"], "message": "no"
        },
    )  # fmt: skip
    for code in ("EINVAL", "ENOENT", "EACCES", "EDQUOT"):
        talk.ask("tools/call", {"name": "Fresh", "arguments": {"x": code}})
        (answer,) = talk.until()
        assert answer["result"]["isError"] is True
        assert answer["result"]["content"] == [{"type": "text", "text": f"{code}: no"}]
        assert "structuredContent" not in answer["result"]
    for code in ("ENOENT", "EACCES"):
        talk.ask("tools/call", {"name": "Unknown", "arguments": {"x": code}})
        assert talk.until()[0]["error"] == {"code": PARAMS, "message": "unknown tool: Unknown"}


def test_an_operator_names_the_agent(tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, echo, path="ctxd.sock")
    talk = Talk(tools, MODERN)
    talk.server.outside = True
    make_tool(tools, "TaskList")
    for name, given, wanted in (
        ("TaskList", {}, {"agent_id": "x"}),
        ("TaskList", {"agent_id": "y"}, {"agent_id": "y"}),
        ("AgentStop", {}, {}),
        ("AgentList", {}, {}),
    ):
        talk.ask("tools/call", {"name": name, "arguments": given})
        talk.until()
        assert daemon.asked()[-1]["input"] == wanted


def test_a_waiting_call_is_answered_in_time(tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, echo)
    talk = Talk(tools, MODERN)
    for given, least, most in (
        ({"block": True}, 49.0, 50.0),
        ({"block": True, "timeout": 10}, 9.0, 10.0),
        ({"block": True, "timeout": "2m"}, 119.0, 120.0),
        ({"block": True, "timeout": 0}, 0.0, 0.0),
    ):
        talk.ask("tools/call", {"name": "TaskOutput", "arguments": given})
        talk.until()
        assert least <= daemon.asked()[-1]["input"]["timeout"] <= most
    odds: tuple[Message, ...]
    odds = ({"block": 1}, {"timeout": 5}, {"block": True, "timeout": "soon"},
            {"block": True, "timeout": -1}, {"block": True, "timeout": True})  # fmt: skip
    for odd in odds:
        talk.ask("tools/call", {"name": "TaskOutput", "arguments": odd})
        talk.until()
        assert daemon.asked()[-1]["input"] == odd, "the daemon says what is wrong"


def test_more_calls_than_one_connection_lets_wait(either: Talk, tools: FakeRoot) -> None:
    waiting: list[Message] = []

    def answer(asked: Message) -> Message | None:
        if asked["name"] == "TaskOutput":
            waiting.append(asked)
            return None
        return echo(asked)

    daemon = FakeDaemon(tools, answer)
    for _ in range(40):
        either.ask("tools/call", {"name": "TaskOutput", "arguments": {"block": True}})
    either.ask("tools/call", {"name": "Fresh"})
    assert either.until()[0]["result"]["structuredContent"]["name"] == "Fresh"
    assert len(daemon.connections) == 3
    eventually(lambda: len(waiting) == 40)


def test_there_is_an_end_to_what_waits(
    either: Talk, tools: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "WAITING_MAX", 2)
    for _ in range(2):
        assert either.ask("tools/call", {"name": "Fresh"}) == []  # there is no daemon
    (answer,) = either.ask("tools/call", {"name": "Fresh"})
    assert answer["result"]["content"][0]["text"].startswith("EAGAIN: 2 calls wait")
    monkeypatch.setattr(mcp, "OPEN_MAX", 2)
    assert code_of(either.ask("tools/list")) == -32603


# cancelling


def test_a_cancelled_call_is_not_answered(either: Talk, tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, lambda asked: None)
    for ident in (1, "1"):
        either.say(request(ident, "tools/call", either.version, {"name": "TaskOutput"}))
    eventually(lambda: len(daemon.asked()) == 2)
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled"}
    assert either.say({**cancelled, "params": {"requestId": "1", "reason": "enough"}}) == []
    eventually(lambda: daemon.asked("cancel"))
    assert daemon.asked("cancel")[0]["id"] == daemon.asked()[1]["id"]
    odds: tuple[Any, ...] = (
        {"requestId": "none"}, {"requestId": None}, {"requestId": [1]}, {}, None, [],
    )  # fmt: skip
    for odd in odds:
        assert either.say({**cancelled, "params": odd}) == []
    assert [each.id for each in either.server.requests.values()] == [1]
    late = {"type": "tool", "id": daemon.asked()[1]["id"], "output": {}}
    for frame in (late, {**late, "id": daemon.asked()[0]["id"]}):
        daemon.connections[0].sendall(json.dumps(frame).encode() + b"\n")
    assert [each["id"] for each in either.until()] == [1]


def test_a_call_that_was_never_made_is_cancelled(either: Talk, tools: FakeRoot) -> None:
    either.say(request(1, "tools/call", either.version, {"name": "Fresh"}))
    either.say({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    assert not either.server.calls.waiting and not either.server.requests
    assert not either.server.calls.links


# when the daemon dies


def test_what_was_not_answered_is_said_again(either: Talk, tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, lambda asked: None)
    wait = {"name": "TaskOutput", "arguments": {"block": True, "timeout": 40}}
    for params in ({"name": "Fresh"}, wait):
        either.ask("tools/call", params)
    eventually(lambda: len(daemon.asked()) == 2)
    daemon.die()
    daemon.answer = echo
    threading.Timer(0.3, daemon.open).start()
    answers = either.until(2)
    assert all("structuredContent" in each["result"] for each in answers)
    first, again = daemon.asked()[:2], daemon.asked()[2:]
    assert [each["id"] for each in first] == [each["id"] for each in again]
    assert again[1]["input"]["timeout"] < first[1]["input"]["timeout"], "it has waited already"


def test_a_daemon_that_stays_away_is_told(
    either: Talk, tools: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOST_MAX", 0.2)
    either.ask("tools/call", {"name": "Fresh"})
    (answer,) = either.until()
    assert answer["result"]["isError"]
    assert answer["result"]["content"][0]["text"].startswith("ENOTCONN: ctxd does not answer")
    assert either.server.requests == {}


def test_it_waits_longer_each_time(tools: FakeRoot) -> None:
    made = Calls(Loop(), Root(str(tools.path)), lambda: "agent/x.sock")
    made.add(Call("Fresh", {}, lambda call, frame: None))
    (link,) = made.links
    delays = []
    for _ in range(6):
        delays.append(link.delay)
        link.reopen()
    assert delays == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_an_error_about_nobody_knows_what(either: Talk, tools: FakeRoot) -> None:
    """As of a frame that is too long, which ends the connection: the others are said again, each
    on a connection of its own."""

    def answer(asked: Message) -> Any:
        if asked["name"] == "Long":
            return {"type": "error", "code": "EMSGSIZE", "message": "too long"}
        return None if len(daemon.connections) == 1 else echo(asked)

    daemon = FakeDaemon(tools, answer)
    make_tool(tools, "Long")
    either.say(request("a", "tools/call", either.version, {"name": "Fresh"}))
    either.say(request("b", "tools/call", either.version, {"name": "Long"}))
    answers = {each["id"]: each["result"] for each in either.until(2)}
    assert answers["a"]["structuredContent"]["name"] == "Fresh"
    assert answers["b"]["content"][0]["text"] == "EMSGSIZE: too long"


def test_a_connection_that_ends_at_once_is_not_made_again_at_once(tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, lambda asked: False)
    talk = Talk(tools, MODERN)
    talk.ask("tools/call", {"name": "Fresh"})
    began = time.monotonic()
    while time.monotonic() < began + 0.5 or len(daemon.connections) < 2:
        talk.loop.step(most=0.05)
    assert 2 <= len(daemon.connections) <= 5


# telling


def test_progress_has_rising_seconds_and_the_last_line(
    either: Talk, tools: FakeRoot, wait: Callable[[float], None]
) -> None:
    daemon = FakeDaemon(tools, lambda asked: None)
    tools.part("task", "t", preview="one\ntwo\x1b[0m\n\n")
    params = {"name": "TaskOutput", "arguments": {"task_id": "t", "block": True}}
    ident = request("a", "tools/call", either.version, params, progressToken="p")
    either.say(ident)
    either.say(request("b", "tools/call", either.version, params))
    eventually(lambda: daemon.asked())
    told = []
    for seconds in (1, 3.9, 0.2, 0.9, 4.1, 16.9, 1):
        wait(seconds)
        either.loop.step(most=0)
        told += either.said()
    assert [each["params"]["progress"] for each in told] == [5, 10, 25]
    assert {each["method"] for each in told} == {"notifications/progress"}
    assert told[0]["params"] == {"progressToken": "p", "progress": 5, "message": "two\\x1b[0m"}
    for odd in ("../../x", "", "none", "a/b", "\0"):
        call = Call("TaskOutput", {"task_id": odd}, lambda call, frame: None)
        assert either.server.last_line(call) == ""


def test_other_tools_are_told_of(
    either: Talk, tools: FakeRoot, wait: Callable[[float], None]
) -> None:
    server = either.server

    def later() -> list[Message]:
        wait(31)
        either.loop.step(most=0)
        return either.said()

    if either.version == MODERN:
        assert not server.is_heard()
        for ident, wanted in ((1, {"toolsListChanged": True}), ("2", {"promptsListChanged": True})):
            (first,) = either.say(
                request(ident, "subscriptions/listen", MODERN, {"notifications": wanted})
            )
            assert first["method"] == "notifications/subscriptions/acknowledged"
            honored = {"toolsListChanged": True} if ident == 1 else {}
            about = {f"{META}subscriptionId": ident}
            assert first["params"] == {"notifications": honored, "_meta": about}
        assert code_of(either.ask("subscriptions/listen")) == PARAMS
    assert server.is_heard()
    assert later() == []
    make_tool(tools, "Last")
    (told,) = later()
    assert told["method"] == "notifications/tools/list_changed"
    params = {"_meta": {f"{META}subscriptionId": 1}}
    assert told.get("params") == (params if either.version == MODERN else None)
    assert later() == []
    if either.version == MODERN:
        either.say(
            {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
        )
        assert not server.is_heard()


def test_an_event_of_the_agent_makes_it_look(
    tools: FakeRoot, wait: Callable[[float], None]
) -> None:
    now = time.monotonic()
    talk = Talk(tools, LEGACY[0])
    watch = talk.server.watch
    assert watch.fd in talk.loop.readers and watch.look_at >= now + 30
    watch.look_soon()
    assert watch.look_at <= time.monotonic() + 1.0
    make_tool(tools, "Later")
    wait(1.1)
    talk.loop.step(most=0)
    assert talk.said()[0]["method"] == "notifications/tools/list_changed"


# hostile lines


@pytest.mark.parametrize(("line", "code", "ident"), [
    (b"x", PARSE, None), (b"{", PARSE, None), (b'{"a":NaN}', PARSE, None),
    (b"[" * 100_000, PARSE, None), (b'"\xff"', PARSE, None), (b"9" * 5000, PARSE, None),
    (b'{"jsonrpc":"2.0","id":1e999,"method":"ping"}', PARSE, None),
    (b"[]", INVALID, None), (b"1", INVALID, None), (b'"x"', INVALID, None), (b"{}", INVALID, None),
    (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', INVALID, None),
    (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', INVALID, 1),
    (b'{"id":"a","method":"ping"}', INVALID, "a"),
    (b'{"jsonrpc":"2.0","id":1}', INVALID, 1), (b'{"jsonrpc":"2.0","id":1,"method":2}', INVALID, 1),
    (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', INVALID, None),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', INVALID, None),
    (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', INVALID, None),
    (b'{"jsonrpc":"2.0","id":[1],"method":"ping"}', INVALID, None),
    (b'{"jsonrpc":"2.0","id":{},"result":{},"method":"ping"}', INVALID, None),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":[]}', PARAMS, 1),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":null}', PARAMS, 1),
    (b'{"jsonrpc":"2.0","id":"\\ud800","method":"x","params":{}}', None, "\ud800"),
    (b"x" * (LINE_MAX + 1), INVALID, None),
])  # fmt: skip
def test_bad_lines_get_an_error(talk: Talk, line: bytes, code: int | None, ident: Any) -> None:
    (answer,) = talk.say(line + b"\n")
    assert code is None or answer["error"]["code"] == code
    assert answer.get("id") == ident
    if talk.version == MODERN:
        assert "result" in talk.ask("server/discover")[0]
    else:
        assert talk.ask("ping")[0]["result"] == {}


def test_no_depth_of_nesting_ends_it(talk: Talk) -> None:
    """Python's own limit leaves a few levels that can be read, and not be said again."""
    for depth in (*range(80, 120), *range(950, 1010)):
        given: Message = request(
            depth, "tools/call", talk.version, {"name": "X", "arguments": {"x": "IN"}}
        )
        line = json.dumps(given).replace('"IN"', "[" * depth + "]" * depth).encode()
        said = talk.say(line + b"\n")
        assert not said or said[0]["error"]["code"] == PARSE
        talk.server.take_notification("notifications/cancelled", {"requestId": depth})


@pytest.mark.parametrize("line", [
    b"", b"  \t", b'{"jsonrpc":"2.0","id":1,"result":{}}', b'{"jsonrpc":"2.0","error":{}}',
    b'{"jsonrpc":"2.0","method":"tools/list"}', b'{"jsonrpc":"2.0","method":"x","params":7}',
])  # fmt: skip
def test_what_is_no_request_is_not_answered(talk: Talk, line: bytes) -> None:
    assert talk.say(line + b"\n") == []


def test_a_line_in_pieces(talk: Talk) -> None:
    message = request(7, "tools/list", talk.version)
    for byte in json.dumps(message).encode():
        assert talk.say(bytes([byte])) == []
    talk.methods[7] = "tools/list"
    assert talk.say(b"\r\n")[0]["id"] == 7
    for _ in range(3):
        assert talk.say(b"y" * (LINE_MAX // 2)) == []
    assert talk.lines.size == LINE_MAX + 1, "no more of it is kept"
    assert code_of(talk.say(b"y\n")) == INVALID
    assert talk.lines.size == 0


def test_an_id_is_used_once_at_a_time(either: Talk, tools: FakeRoot) -> None:
    FakeDaemon(tools, lambda asked: None)
    again = request("a", "tools/call", either.version, {"name": "Fresh"})
    assert either.say(again) == []
    assert code_of(either.say(again)) == INVALID
    assert code_of(either.say({**again, "method": "tools/list"})) == INVALID


def test_hostile_lines_end_in_errors(tools: FakeRoot) -> None:
    daemon = FakeDaemon(tools, echo)
    talk = Talk(tools, MODERN)
    for number, line in enumerate(hostile_lines(1, 10_000)):
        talk.hear(line + b"\n")
        for answer in talk.loop.said.splitlines():
            said = json.loads(answer)
            assert said["jsonrpc"] == "2.0" and ("method" in said) is (
                "id" not in said and "error" not in said
            )
        talk.loop.said.clear()
        if number % 1000 == 0:  # what is still open is given up
            for each in list(talk.server.requests.values()):
                talk.say({"jsonrpc": "2.0", "method": "notifications/cancelled",
                          "params": {"requestId": each.id}})  # fmt: skip
    for each in list(talk.server.requests.values()):
        talk.server.take_notification("notifications/cancelled", {"requestId": each.id})
    talk.loop.said.clear()
    assert "result" in talk.ask("server/discover")[0]
    daemon.die()


# as a program


@pytest.fixture(params=VERSIONS)
def client(
    request: pytest.FixtureRequest, tools: FakeRoot, spawned: Callable[..., Any]
) -> Iterator[McpClient]:
    process: subprocess.Popen[bytes] = spawned("mcp", stdin=subprocess.PIPE)
    yield McpClient(process, request.param)


def test_it_serves_until_the_end_of_its_input(client: McpClient, tools: FakeRoot) -> None:
    FakeDaemon(tools, echo)
    assert len(client.ask("tools/list")["result"]["tools"]) == 3
    assert client.call("Fresh", x="1")["structuredContent"]["name"] == "Fresh"
    big = client.call("Fresh", x="x" * 900_000)
    assert not big["isError"]
    client.send("tools/call", {"name": "TaskOutput"})
    assert client.close() == 0
    assert client.process.stderr is not None and client.process.stderr.read() == b""


def test_all_that_was_asked_before_the_end_is_answered(
    spawned: Callable[..., Any], tools: FakeRoot
) -> None:
    """Also the last line, which no newline ends."""
    FakeDaemon(tools, echo)
    asked = [
        initialize(LEGACY[0]),
        *({"id": n, "method": "tools/call", "params": {"name": "Fresh"}} for n in range(2, 40)),
        {"id": 40, "method": "tools/list"},
    ]
    text = "\n".join(json.dumps({"jsonrpc": "2.0", **frame}) for frame in asked)
    process: subprocess.Popen[bytes] = spawned("mcp", stdin=subprocess.PIPE)
    output, errors = process.communicate(text.encode())
    assert (process.returncode, errors) == (0, b"")
    answers = [json.loads(line) for line in output.splitlines()]
    assert sorted(frame["id"] for frame in answers if "result" in frame) == [0, *range(2, 41)]


def test_who_hears_no_answer_is_not_waited_for(
    spawned: Callable[..., Any], tools: FakeRoot
) -> None:
    FakeDaemon(tools, lambda asked: None)
    process: subprocess.Popen[bytes] = spawned("mcp", stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    for frame in (
        initialize(LEGACY[0]),
        {"id": 2, "method": "tools/call", "params": {"name": "Fresh"}},
    ):
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **frame}).encode() + b"\n")
    process.stdin.close()
    process.stdin = None
    assert json.loads(process.stdout.readline())["id"] == 0
    eventually(lambda: is_asleep(process))
    assert process.poll() is None
    process.stdout.close()
    assert process.wait(10) == 0


def test_it_ends_when_nobody_reads(client: McpClient) -> None:
    assert client.process.stdout is not None
    client.process.stdout.close()
    client.send("tools/list")
    assert client.process.wait(10) == 141


def test_a_reader_that_is_late_gets_all(client: McpClient, tools: FakeRoot) -> None:
    FakeDaemon(tools, lambda asked: {**echo(asked), "output": {"x": "x" * 300_000}})
    idents = [client.send("tools/call", {"name": "Fresh"}) for _ in range(8)]
    answers = {client.receive()["id"] for _ in idents}
    assert answers == set(idents)


def test_outside_of_agents_one_is_named(root: FakeRoot, run: Run) -> None:
    status, out, err = run("mcp")
    assert (status, out) == (2, "") and "say which one with --agent NAME" in err
    make_tool(root, "TaskList")
    discover = json.dumps(request(1, "server/discover", MODERN)).encode() + b"\n"
    status, out, _ = run("mcp", "--agent", "x", stdin=discover)
    assert status == 0 and json.loads(out)["id"] == 1
    (root.path / "self").symlink_to("agent/x.d")
    root.agent("x", status="busy")
    status, _, err = run("mcp", "--agent", "y")
    assert status == 2 and "leave out --agent" in err


def test_an_agent_without_a_daemon_waits_for_one(
    tmp_path: Path, spawned: Callable[..., Any]
) -> None:
    environment = {**os.environ, "CTX_ROOT": str(tmp_path / "none"), "CTX_AGENT": "x"}
    client = McpClient(spawned("mcp", stdin=subprocess.PIPE, env=environment), MODERN)
    assert client.ask("server/discover")["result"]["supportedVersions"] == [MODERN]
    ident = client.send("tools/list")
    make_tool(FakeRoot(tmp_path / "mounted"), "Fresh")
    (tmp_path / "mounted").rename(tmp_path / "none")  # all at once
    assert client.answer_of(ident)["result"]["tools"][0]["name"] == "Fresh"
    assert ABOUT["name"] == "test"
