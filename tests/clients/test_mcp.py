"""What the command lines use of ``ctx mcp``, as the lines say that pass between them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients import record
from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, SECONDS, Cli, User, scripted
from tests.worlds.daemon import daemon_of, read, wait_dead, wait_until, write

Message = dict[str, Any]
RECIPES = Path(__file__).parents[2] / "contrib" / "agents"
#: seconds after which each client is told to give up a call of a tool
PATIENCE = 9
CHANGED = "notifications/tools/list_changed"


def said() -> dict[str, set[str]]:
    """What the table says that each client does."""
    found: dict[str, set[str]] = {cli.name: set() for cli in CLIS}
    for line in (RECIPES / "README.md").read_text().splitlines():
        feature, *uses = (cell.strip() for cell in line.strip("|").split("|"))
        for cli, use in zip(CLIS, uses, strict=False):
            if use == "yes":
                found[cli.name].add(feature)
    return found


SAID = said()


class Recorded(User):
    """A user of a copy of the recipe whose MCP server is between client and ``ctx mcp``."""

    def __init__(self, user: User, *changes: str) -> None:
        self.__dict__.update(user.__dict__)
        own = Path(self.env["HOME"]) / ".config/ctxfs/agents" / self.cli.name
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(RECIPES / self.cli.name, own)
        shutil.copy(record.__file__, own / "files" / "record.py")
        self.lines = self.project / "lines"
        words = ["/recipe/record.py", str(self.lines), *changes]
        if self.cli.name == "codex":
            path = own / "files" / "config.toml"
            text = path.read_text().replace('command = "ctx"', 'command = "python3"')
            text = text.replace('args = ["mcp"]', f"args = {json.dumps(words)}")
            path.write_text(re.sub("tool_timeout_sec = .*", f"tool_timeout_sec = {PATIENCE}", text))
            return
        path = own / "files" / {"claude": "mcp.json", "gemini": "settings.json"}[self.cli.name]
        settings = json.loads(path.read_text())
        server = settings["mcpServers"]["ctx"]
        server.update(command="python3", args=words)
        if self.cli.name == "gemini":
            server["timeout"] = 1000 * PATIENCE
        path.write_text(json.dumps(settings))

    @property
    def heard(self) -> list[tuple[str, Message]]:
        """All lines so far: ">" and what the client said, "<" and what the server said."""
        text = self.lines.read_text() if self.lines.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [(line[0], json.loads(line[2:])) for line in whole.splitlines()]

    def asked(self, method: str, tool: str = "", **given: Any) -> list[Message]:
        """The client's messages of a method; of these the calls of a tool, with these arguments."""
        return [
            message
            for side, message in self.heard
            if side == ">" and message.get("method") == method
            and (not tool or message["params"]["name"] == tool)
            and given.items() <= message.get("params", {}).get("arguments", {}).items()
        ]  # fmt: skip

    def told(self, method: str) -> list[Message]:
        return [message for side, message in self.heard
                if side == "<" and message.get("method") == method]  # fmt: skip

    def answers(self, request: Message) -> list[Message]:
        return [message for side, message in self.heard
                if side == "<" and message.get("id") == request["id"]
                and "method" not in message]  # fmt: skip


@pytest.fixture(params=CLIS, ids=str)
def user(request: pytest.FixtureRequest, socket: Path) -> Iterator[tuple[User, Model]]:
    cli: Cli = request.param
    config = f"networks: {{{cli.network}: {{socket: {socket}, port: 18081}}}}\n"
    with daemon_of(config=config) as daemon, closing(Model(daemon.base, socket)) as model:
        yield User(daemon, model, cli), model


def tool(name: str, **given: Any) -> Message:
    return {"tool": name, "input": given}


def start(user: User, name: str, task: str) -> Path:
    """Spawns an agent that is impatient with tools."""
    words = ["spawn", "--agent", user.cli.name, "--model", user.cli.model, "--name", name]
    user.ctx(*words, "--env", f"MCP_TOOL_TIMEOUT={1000 * PATIENCE}", task)
    return user.agent(name)


def test_features(user: tuple[User, Model]) -> None:
    """What the table of contrib/agents/README.md says."""
    made, model = user
    boss = Recorded(made, "text")
    go = boss.project / "go"
    task = scripted(
        "Do it.",
        tool("AgentList"),
        tool("WorkFocus", id="none"),
        *(
            tool("ExecCommand", cmd="echo at work; exec sleep 1000", task_id=task, **{"yield": 0})
            for task in "ab"
        ),
        tool("TaskOutput", task_id="a", block=True, timeout="6s"),
        tool("TaskOutput", task_id="a", block=True, timeout=60),
        {"shell": f"until test -e {go}; do sleep 0.1; done"},
        tool("TaskOutput", task_id="b", block=True, timeout=60),
        {"text": "the end"},
    )
    agent = start(boss, "boss", task)
    wait = partial(wait_until, timeout=SECONDS)
    wait(lambda: boss.asked("tools/call", "TaskOutput", timeout=60), "it waits")
    boss.daemon.restart()
    write(agent / "task" / "a" / "ctl", "stop")
    wait(lambda: len(model.requests[-1]["results"]) == 6, "it has waited")
    write(agent / "policy", read(agent, "policy").replace("tool:*", "tool:Task*"))
    wait(lambda: boss.told(CHANGED), "it is told of the change")
    if "lists the tools again" in SAID[boss.cli.name]:
        wait(lambda: len(boss.asked("tools/list")) == 2, "it lists them again")
    go.touch()
    wait_dead(agent, timeout=SECONDS)
    assert (read(agent, "reason"), read(agent, "outcome")) == ("exit:0\n", "done\n")

    def asks_progress(request: Message) -> bool:
        return any(told["params"]["progressToken"] == request["params"]["_meta"]["progressToken"]
                   and told["params"]["message"] == "at work"
                   for told in boss.told("notifications/progress"))  # fmt: skip

    results = model.requests[-1]["results"]
    (short,) = boss.asked("tools/call", "TaskOutput", timeout="6s")
    waited, given_up = boss.asked("tools/call", "TaskOutput", timeout=60)
    cancelled = [each["params"]["requestId"] for each in boss.asked("notifications/cancelled")]
    before, after = (len(model.requests[index]["tools"]) for index in (0, -1))
    discovered = [request["params"]["_meta"] for request in boss.asked("server/discover")]
    began = [
        request
        for request in boss.asked("initialize")
        if request["params"]["protocolVersion"] == "2025-06-18"
    ]
    found = {
        "begins with `server/discover` (2026-07-28)": any(
            meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28" for meta in discovered
        ),
        "begins with `initialize` (2025-06-18)": bool(began),
        "gives its model the instructions": all(each["instructed"] for each in model.requests),
        "reads structured output": "public_named" in results[0],
        "reads a refusal": "ENOENT: id: " in results[1],
        "asks for progress": asks_progress(short),
        "is answered after a crash of `ctxd`": len(boss.answers(waited)) == 1,
        "says that it gave up a call": cancelled == [given_up["id"]],
        "asks to be told of other tools": bool(boss.asked("subscriptions/listen")),
        "lists the tools again": len(boss.asked("tools/list")) == 2,
        "has its model use the new list at once": after < before,
    }
    print(*(f"  {side} {json.dumps(message)[:300]}" for side, message in boss.heard), sep="\n")
    assert not boss.answers(given_up)
    assert read(agent, "task/b/status") != "running\n", "it ends with the agent"
    assert {name for name, used in found.items() if used} == SAID[boss.cli.name] & set(found)


@pytest.mark.parametrize("changes", [(), ("hints",)], ids=["as it is", "changed"])
def test_hints(user: tuple[User, Model], changes: tuple[str, ...]) -> None:
    """Two calls of a tool at once, which is annotated as one that only reads, or is not."""
    made, _ = user
    boss = Recorded(made, *changes)
    read_tool = tool("TaskOutput", task_id="a", block=True, timeout=2)
    task = scripted(
        "Do it.",
        tool("ExecCommand", cmd="exec sleep 1000", **{"yield": 0}, task_id="a"),
        {"all": [read_tool, read_tool]},
        read_tool,
        {"text": "the end"},
    )
    agent = start(boss, "boss", task)
    wait_dead(agent, timeout=SECONDS)
    calls = [request["id"] for request in boss.asked("tools/call", "TaskOutput")]
    assert len(calls) == 2
    order = [side for side, message in boss.heard if message.get("id") in calls]
    used = "calls tools at once if they only read" in SAID[boss.cli.name]
    assert "".join(order) == ("><><" if used and changes else ">><<")
