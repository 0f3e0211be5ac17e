"""The client of the protocol's own SDK against ``ctx mcp`` (make test-mcp)."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from ctxfs.tools.registry import TOOLS
from tests.worlds.daemon import Daemon, read, wait_status, write

sdk = pytest.importorskip("mcp", reason="make test-mcp installs it")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]

MODES = ("legacy", "auto", "2026-07-28")
VERSIONS = {"legacy": "2025-11-25", "auto": "2026-07-28", "2026-07-28": "2026-07-28"}


@asynccontextmanager
async def client_of(daemon: Daemon, mode: str, **more: Any) -> AsyncIterator[Any]:
    server = sdk.StdioServerParameters(
        command=sys.executable,
        args=["-IS", str(daemon.root / "bin" / "ctx"), "mcp", "--agent", "boss"],
        env={"CTX_ROOT": str(daemon.root)},
    )
    async with sdk.Client(server, mode=mode, read_timeout_seconds=60, **more) as client:
        yield client


def boss_of(daemon: Daemon) -> None:
    wait_status(daemon.run("boss", "cat", mode="turn"), "idle")


def talk(daemon: Daemon, mode: str, story: Callable[[Any], Awaitable[None]], **more: Any) -> None:
    async def tell() -> None:
        async with client_of(daemon, mode, **more) as client:
            await story(client)

    trio.run(tell)


@pytest.mark.parametrize("mode", MODES)
def test_every_method(daemon: Daemon, mode: str) -> None:
    boss_of(daemon)

    async def story(client: Any) -> None:
        assert client.protocol_version == VERSIONS[mode]
        if mode == "legacy":
            await client.send_ping()
        if mode != "2026-07-28":  # which asks for nothing before it begins
            assert client.server_info.name == "ctx"
            assert client.server_capabilities.tools.list_changed is True
            assert "waits" in client.instructions
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == {tool.name for tool in TOOLS}
        assert all(tool.annotations is not None and tool.output_schema for tool in listed)
        spawned = await client.call_tool(
            "SpawnAgent",
            {"name": "kid", "initial_message": "look", "mode": "turn", "exec": "cat"},
        )
        assert spawned.structured_content["agent_id"] == "kid"
        assert json.loads(spawned.content[0].text) == spawned.structured_content
        for name, given in (
            ("AgentGet", {}), ("AgentList", {}), ("TaskList", {}),
            ("TaskStatus", {"task_id": "kid"}),
            ("SendMessage", {"agent_id": "boss", "text": "more"}),
            ("WorkCreate", {"objective": "x", "id": "w"}), ("WorkUpdate", {"id": "w", "plan": "1"}),
            ("WorkList", {}), ("WorkFocus", {"id": "w"}), ("WorkFocus", {"id": None}),
            ("WorkRemove", {"id": "w"}),
            ("ExecCommand",
             {"cmd": "read x; echo $x", "task_id": "t", "accepts_input": True, "yield": 0}),
            ("WaitFor", {"wake": "external", "id": "e"}), ("WaitCancel", {"wait_id": "e"}),
        ):  # fmt: skip
            answer = await client.call_tool(name, given)  # it checks the schema
            assert not answer.is_error, (name, answer)
        with trio.fail_after(30):
            while (await client.call_tool("TaskStatus", {"task_id": "t"})).structured_content[
                "status"
            ] != "running":
                await trio.sleep(0.05)
        await client.call_tool("TaskInput", {"task_id": "t", "text": "hello\n"})
        ended = await client.call_tool(
            "TaskOutput", {"task_id": "t", "block": True, "timeout": "30s"}
        )
        assert ended.structured_content["preview"] == "hello\n"
        assert not (await client.call_tool("TaskRemove", {"task_id": "t"})).is_error
        assert not (await client.call_tool("AgentStop", {"agent_id": "kid"})).is_error
        await client.call_tool("TaskOutput", {"task_id": "kid", "block": True})
        assert not (await client.call_tool("AgentRemove", {"agent_id": "kid"})).is_error
        refused = await client.call_tool("ResultWrite", {"text": "not by an operator"})
        assert refused.is_error and refused.content[0].text.startswith("EACCES: ")
        with pytest.raises(sdk.MCPError) as caught:
            await client.call_tool("Nope", {})
        assert caught.value.error.code == -32602

    talk(daemon, mode, story)


@pytest.mark.parametrize("mode", MODES)
def test_progress_and_cancelling(daemon: Daemon, mode: str) -> None:
    boss_of(daemon)
    told: list[tuple[float, str | None]] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async def story(client: Any) -> None:
        command = {"cmd": "echo at work; sleep 1000", "task_id": "t", "yield": 0}
        await client.call_tool("ExecCommand", command)
        given = {"task_id": "t", "block": True}
        short = await client.call_tool(
            "TaskOutput", {**given, "timeout": 6}, progress_callback=heard
        )
        assert short.structured_content["status"] == "running" and not short.is_error
        with trio.move_on_after(1) as scope:
            await client.call_tool("TaskOutput", given)
        assert scope.cancelled_caught
        assert not (await client.call_tool("TaskStatus", {"task_id": "t"})).is_error

    talk(daemon, mode, story)
    assert told == [(5, "at work")]
    assert read(daemon.agent_dir("boss"), "task/t/status") == "running\n"


@pytest.mark.parametrize("mode", MODES)
def test_the_daemon_dies_between_a_request_and_its_answer(daemon: Daemon, mode: str) -> None:
    boss_of(daemon)

    async def story(client: Any) -> None:
        await client.call_tool("ExecCommand", {"cmd": "sleep 1000", "task_id": "t", "yield": 0})
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await client.call_tool("TaskOutput", {"task_id": "t", "block": True}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await client.call_tool("TaskList", {})
            await trio.to_thread.run_sync(daemon.restart)
            stopped = await client.call_tool("TaskStop", {"task_id": "t", "kill": True})
            assert not stopped.is_error
        assert answers[0].structured_content["status"] == "cancelled"

    talk(daemon, mode, story)


def test_a_subscription_is_acknowledged(daemon: Daemon) -> None:
    boss_of(daemon)

    async def story(client: Any) -> None:
        async with client.listen(tools_list_changed=True, prompts_list_changed=True) as heard:
            assert heard.honored.tools_list_changed is True
            assert not heard.honored.prompts_list_changed
            write(daemon.agent_dir("boss") / "meta.json", "{}")
            assert (await client.list_tools()).tools

    talk(daemon, "2026-07-28", story)
