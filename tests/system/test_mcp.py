"""``ctx mcp`` over a real daemon: outside for an operator, and inside a cell."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ctxfs.tools.registry import TOOLS
from ctxfs.tools.tool import Does
from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write
from tests.worlds.fates import CRASH_AT
from tests.worlds.mcp import (
    LEGACY,
    MODERN,
    TIMEOUT,
    Joined,
    McpClient,
    Message,
    check,
    hostile_lines,
    request,
)

VERSIONS = (MODERN, *LEGACY)


@contextmanager
def client_of(daemon: Daemon, name: str, version: str) -> Iterator[McpClient]:
    process = subprocess.Popen(
        [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), "mcp", "--agent", name],
        env={"CTX_ROOT": str(daemon.root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield McpClient(process, version)
    finally:
        process.kill()
        process.communicate()


def boss_of(daemon: Daemon) -> None:
    wait_status(daemon.run("boss", "cat", mode="turn"), "idle")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_tool_by_the_protocol(daemon: Daemon, version: str) -> None:
    boss_of(daemon)
    with client_of(daemon, "boss", version) as client:
        listed = {each["name"]: each for each in client.ask("tools/list")["result"]["tools"]}
        assert listed.keys() == {tool.name for tool in TOOLS}
        for tool in TOOLS:
            shown = listed[tool.name]
            assert shown["inputSchema"] == {
                **tool.schema,
                "properties": {
                    name: field
                    for name, field in tool.schema["properties"].items()
                    if name not in tool.for_some  # there are no nodes
                },
            }
            assert shown["outputSchema"] == tool.output_schema
            assert shown["description"].startswith(tool.description)
            assert shown["annotations"] == {
                "readOnlyHint": Does.READS in tool.does,
                "destructiveHint": Does.DESTROYS in tool.does,
                "idempotentHint": bool(tool.does & (Does.READS | Does.REPEATS)),
                "openWorldHint": Does.REACHES in tool.does,
            }
        spawned = client.call(
            "SpawnAgent", name="kid", initial_message="look", mode="turn", exec="cat"
        )
        assert spawned["structuredContent"]["task_handle"]["task_id"] == "kid"
        assert json.loads(spawned["content"][0]["text"]) == spawned["structuredContent"]
        client.call("ExecCommand", cmd="echo out", task_id="t", **{"yield": 0})
        waited = client.call("TaskOutput", task_id="t", block=True, timeout="10s")
        assert waited["structuredContent"]["preview"] == "out\n"
        short = client.call("TaskOutput", task_id="kid", block=True, timeout=0.01)
        assert short["structuredContent"]["status"] == "running" and not short["isError"]
        refused = client.call("WorkFocus", id="none")
        assert refused["isError"] and refused["content"][0]["text"].startswith("ENOENT: id: ")
        assert client.ask("tools/call", {"name": "Nope"})["error"]["code"] == -32602
        assert client.close() == 0


@pytest.mark.parametrize(("crash_at", "version"), [
    ("write.committed:3", LEGACY[0]),
    ("start.committed", MODERN),
    pytest.param("write.committed:3", MODERN, marks=pytest.mark.long),
    pytest.param("start.committed", LEGACY[0], marks=pytest.mark.long),
])
def test_a_call_is_answered_although_the_daemon_dies(
    daemon: Daemon, version: str, crash_at: str
) -> None:
    boss_of(daemon)
    daemon.kill()
    daemon.env[CRASH_AT] = crash_at
    daemon.start()
    del daemon.env[CRASH_AT]
    with client_of(daemon, "boss", version) as client:
        given = {"name": "kid", "initial_message": "look", "mode": "turn", "exec": "cat"}
        ident = client.send("tools/call", {"name": "SpawnAgent", "arguments": given})
        daemon.wait_killed()
        daemon.start()
        answer = client.answer_of(ident)
        assert answer["result"]["structuredContent"]["agent_id"] == "kid"
        kinds = [event["type"] for event in daemon.events("kid")]
        assert (kinds.count("agent.create"), kinds.count("agent.start")) == (1, 1)
        waiting = client.send(
            "tools/call", {"name": "TaskOutput", "arguments": {"task_id": "kid", "block": True}}
        )
        daemon.restart()
        assert not client.call("AgentStop", agent_id="kid", kill=True)["isError"]
        answers = {each["id"]: each for each in client.heard if "id" in each}
        answer = answers.get(waiting) or client.answer_of(waiting)
        assert answer["result"]["structuredContent"]["status"] == "cancelled"


def test_a_cancelled_call_ends_the_waiting_alone(daemon: Daemon) -> None:
    boss_of(daemon)
    with client_of(daemon, "boss", MODERN) as client:
        client.call("ExecCommand", cmd="sleep 1000", **{"yield": 0}, task_id="t")
        given = {"name": "TaskOutput", "arguments": {"task_id": "t", "block": True}}
        first, second = (client.send("tools/call", given) for _ in range(2))
        params = {"requestId": first}
        client.write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
        wait_status(daemon.agent_dir("boss") / "task" / "t", "running")
        client.call("TaskStop", task_id="t", kill=True)
        if not any(each.get("id") == second for each in client.heard):
            client.answer_of(second)
        assert not any(each.get("id") == first for each in client.heard)


@pytest.mark.parametrize("version", [MODERN, LEGACY[0]])
def test_it_tells_of_other_tools(daemon: Daemon, version: str) -> None:
    """Inside: what operators have does not change."""
    boss = daemon.run("boss", "sleep 1000")
    wait_status(boss, "busy")
    task = boss / "task" / "mcp"
    task.mkdir()
    write(task / "cmd", "exec ctx mcp")
    write(task / "accepts_input", "1")
    write(task / "ctl", "start")
    wait_status(task, "running")
    methods: dict[Any, str] = {}

    def say(ident: int, method: str, params: dict[str, Any] | None = None) -> None:
        methods[ident] = method
        write(task / "input", json.dumps(request(ident, method, version, params)))

    def heard() -> list[dict[str, Any]]:
        whole, _, _ = read(task, "output").rpartition("\n")
        messages = [json.loads(line) for line in whole.splitlines()]
        for each in messages:
            check(each, methods.get(each.get("id"), ""), version)
        return messages

    def tools(ident: int) -> set[str]:
        say(ident, "tools/list")
        wait_until(lambda: any(each.get("id") == ident for each in heard()), "it lists the tools")
        (answer,) = (each for each in heard() if each.get("id") == ident)
        return {each["name"] for each in answer["result"]["tools"]}

    if version == MODERN:
        say(1, "subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    else:
        about = {"name": "test", "version": "1"}
        say(1, "initialize",
            {"protocolVersion": version, "capabilities": {}, "clientInfo": about})
        write(task / "input", '{"jsonrpc":"2.0","method":"notifications/initialized"}')
    assert "AgentStop" in tools(2) and "SpawnAgent" in tools(3)
    write(boss / "policy", f"allow {read(boss, 'label').strip()} tool:Task* execute")
    changed = "notifications/tools/list_changed"
    wait_until(lambda: any(each.get("method") == changed for each in heard()), "it tells")
    assert tools(4) == {"TaskList", "TaskStatus", "TaskOutput", "TaskInput", "TaskStop",
                        "TaskRemove"}
    say(5, "tools/call", {"name": "TaskList"})
    wait_until(lambda: any(each.get("id") == 5 for each in heard()), "it lists the tasks")
    (answer,) = (each for each in heard() if each.get("id") == 5)
    assert answer["result"]["structuredContent"]["tasks"][0]["task_id"] == "mcp"
    write(boss / "ctl", "kill")
    wait_dead(boss)
    assert read(task, "status") == "cancelled\n"


#: becomes `ctx mcp`, at a socket of the test's
_JOIN = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
os.dup2(s.fileno(), 0)
os.dup2(s.fileno(), 1)
os.execvp("ctx", ["ctx", "mcp"])
"""
_READING = ("TaskList", "AgentList", "AgentGet", "TaskStatus", "TaskOutput", "WorkList")


@contextmanager
def servers_in_cells(daemon: Daemon, *agents: str) -> Iterator[list[Joined]]:
    """A `ctx mcp` in the cell of each; of one that is named twice, two."""
    with ExitStack() as kept:
        data = Path(kept.enter_context(tempfile.TemporaryDirectory(dir=daemon.base)))
        data.chmod(0o755)
        (data / "join.py").write_text(_JOIN)
        found: list[Joined] = []
        for name in dict.fromkeys(agents):
            listening = kept.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(data / name))
            (data / name).chmod(0o666)
            listening.listen()
            listening.settimeout(TIMEOUT)
            joins = f"python3 /data/join.py /data/{name} & " * agents.count(name)
            daemon.run(name, f"sh -c {shlex.quote(joins + 'wait')}", mount=f"{data} /data ro")
            found += (Joined(listening.accept()[0]) for _ in range(agents.count(name)))
        yield found
        for each in found:
            each.connection.close()


#: frames; a tenth of them have others between them
HOSTILE = 2500
#: seconds in which who does not listen says as many of them as are taken
DEAF = 2.0


def _hostile_stream() -> Iterator[bytes]:
    for number, line in enumerate(hostile_lines(14, HOSTILE, _READING)):
        yield line
        deep = number % 1200
        if not number % 10:
            params = '{"name":"TaskList","arguments":{"x":' + "[" * deep + "]" * deep + "}}"
            yield (f'{{"jsonrpc":"2.0","id":"d{number}","method":"tools/call","params":{params}}}'
                   ).encode()  # fmt: skip
        if not number % 1000:
            yield b"x" * (5 << 20)
            wide = {"name": "TaskList", "arguments": {"x": "y" * (3 << 20)}}
            yield json.dumps(request(f"w{number}", "tools/call", MODERN, wide)).encode()
            yield json.dumps([request(1, "tools/list", MODERN)] * 50).encode()


@pytest.mark.alone
@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=pytest.mark.long)],
                         ids=["heard", "deaf"])
def test_hostile_frames_hold_up_nobody(daemon: Daemon, reads: bool) -> None:
    """Thousands of them, beside another connection of the agent, and another agent."""
    with servers_in_cells(daemon, "boss", "boss", "other") as (hostile, beside, elsewhere):
        over = threading.Event()
        clients = [McpClient(each, MODERN) for each in (beside, elsewhere)]
        wrong: list[Message] = []

        def say() -> None:
            with suppress(OSError):
                for line in _hostile_stream():
                    hostile.connection.sendall(line + b"\n")
                hostile.connection.sendall(
                    json.dumps(request("last", "server/discover", MODERN)).encode() + b"\n"
                )

        def hear() -> None:
            for line in hostile.stdout:
                message = json.loads(line)
                kinds = message.keys() & {"method", "result", "error"}
                if message["jsonrpc"] != "2.0" or len(kinds) != 1:
                    wrong.append(message)
                if message.get("id") == "last":
                    break
            over.set()

        threads = [threading.Thread(target=say), *([threading.Thread(target=hear)] * reads)]
        for thread in threads:
            thread.start()
        slowest, begun = 0.0, time.monotonic()
        while not over.is_set() and (reads or time.monotonic() - begun < DEAF):
            for client in clients:
                asked = time.monotonic()
                assert not client.call("TaskList")["isError"]
                slowest = max(slowest, time.monotonic() - asked)
        assert not wrong
        hostile.connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(TIMEOUT)
        assert slowest < 2.0
        for client in clients:
            assert client.call("AgentList")["structuredContent"]


def test_ping_tells_who_answers(daemon: Daemon) -> None:
    boss_of(daemon)
    for words in (["ping"], ["ping", "boss"]):
        found = daemon.ctx(*words)
        assert found.returncode == 0 and found.stdout.startswith("pong ")
    assert daemon.ctx("ping", "nobody").returncode == 69
