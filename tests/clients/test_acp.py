"""claude-agent-acp, codex-acp and Gemini CLI, unchanged, as resident agents by ``ctx bridge acp``;
and an agent of ctxfs in an editor that is made with the protocol's npm library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients import BIN, MODULES, PROGRAMS, machine
from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, HANG, LOOK, SECONDS, User, scripted
from tests.system.test_modes import Talk, TalkTo, kinds, talk_to, text_of
from tests.worlds.daemon import (
    Daemon,
    daemon_of,
    end_process,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

__all__ = ["talk_to"]

PORT = 18081
URL = f"http://127.0.0.1:{PORT}"
RECIPES = Path(__file__).parents[2] / "contrib" / "agents"
TOOLS = "/tools/node_modules"
CODEX = {
    "model": "gpt-5",
    "model_provider": "api",
    "model_providers": {
        "api": {"name": "api", "base_url": f"{URL}/v1", "wire_api": "responses",
                "env_key": "CODEX_API_KEY"},
    },
    "agents": {"enabled": False},
    "features": {"multi_agent_v2": False},
}  # fmt: skip


@dataclass(frozen=True)
class Agent:
    """A program that speaks the protocol, and what it is given."""

    name: str
    #: a script of node's below node_modules, and its arguments
    script: str
    env: dict[str, str]
    #: more arguments of a command in a shell
    shell: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


AGENTS = (
    Agent("claude-agent-acp", "@agentclientprotocol/claude-agent-acp/dist/index.js", {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "claude-sonnet-4-5",
        "CLAUDE_CODE_EXECUTABLE": f"{TOOLS}/{PROGRAMS['claude'].format(machine())}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "false",
    }),
    Agent("codex-acp", "@agentclientprotocol/codex-acp/dist/index.js", {
        "CODEX_PATH": f"{TOOLS}/{PROGRAMS['codex'].format(machine())}",
        "CODEX_API_KEY": "none",
        "CODEX_CONFIG": json.dumps(CODEX),
        "MODEL_PROVIDER": "api",
        "INITIAL_AGENT_MODE": "workspace-write",
        "NO_BROWSER": "1",
    }, {"sandbox_permissions": "require_escalated", "justification": "its own does not start"}),
    Agent("gemini", "@google/gemini-cli/bundle/gemini.js --acp --model gemini-2.5-pro"
          " --policy /recipes/gemini/files/policy.toml", {
        "GOOGLE_GEMINI_BASE_URL": URL,
        "GEMINI_API_KEY": "none",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }),
)  # fmt: skip
POLICY = "allow bot_t network:api connect\nallow bot_t tool:* execute\n"


class Resident:
    """One of them, in a cell with one API and without a key."""

    def __init__(self, daemon: Daemon, model: Model, agent: Agent, *options: str) -> None:
        self.daemon = daemon
        self.model = model
        self.agent = agent
        self.project = daemon.base / "project"
        self.project.mkdir()
        self.project.chmod(0o777)
        node = BIN / "node"
        there = f"{TOOLS}/{node.resolve().relative_to(MODULES)}" if node.exists() else "node"
        # the settings of Claude Code and of Gemini CLI, where each reads its own
        begin = "".join(
            f"mkdir -p ~/.{name}; cp /recipes/{name}/files/settings.json ~/.{name}/; "
            for name in ("claude", "gemini")
        )
        files = {"policy": POLICY, "restart": "on-failure", "homedir": "durable"}
        done = daemon.ctx(
            "spawn", "bot", "--mode", "resident", "--cwd", "/src",
            *("--mount", f"{MODULES}:{TOOLS}", "--mount", f"{self.project}:/src:rw"),
            *("--mount", f"{RECIPES}:/recipes"),
            *(f"--set={name}={value}" for name, value in files.items()),
            *(f"--env={name}={value}" for name, value in agent.env.items()),
            "--", "ctx", "bridge", "acp", *options,
            "--", "sh", "-c", f"{begin} exec {there} {TOOLS}/{agent.script}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.dir = daemon.agent_dir("bot")
        wait_status(self.dir, "ready", timeout=SECONDS)

    def shell(self, command: str) -> dict[str, Any]:
        return {"shell": command, "as": self.agent.shell}

    def send(self, talk: Talk, text: str, ident: str) -> list[dict[str, Any]]:
        """The frames of a message, if it comes to an end."""
        try:
            return talk.send(text, ident)
        except TimeoutError:
            raise AssertionError(f"no end: {read(self.dir, 'log')}") from None


Make = Callable[..., Resident]


@pytest.fixture(params=AGENTS, ids=str)
def make(request: pytest.FixtureRequest, socket: Path) -> Iterator[Make]:
    """Makes the agent; its arguments are options of the bridge."""
    config = f"networks: {{api: {{socket: {socket}, port: {PORT}}}}}\n"
    with daemon_of(config=config) as daemon, closing(Model(daemon.base, socket)) as model:
        yield partial(Resident, daemon, model, request.param)



def pids(agent: Path) -> list[int]:
    """Of all processes of an agent."""
    return [json.loads(line)["pid"] for line in read(agent, "processes").splitlines()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


RECALL = scripted("And now?", {"text": "I remember: {memory}"})


def test_a_turn(make: Make, talk_to: TalkTo) -> None:
    """Deltas, the reply, tool calls in `out`, a permission that is given."""
    bot = make()
    talk = talk_to(bot.daemon, "bot")
    tools = {"tool": "AgentList", "input": {}}
    task = scripted("Look.", bot.shell(LOOK["shell"]), tools, {"text": "found: {last}"})
    frames = bot.send(talk, task, "m1")
    assert frames[0]["type"] == "start" and kinds(frames, "delta"), frames
    assert frames[-1]["status"] == "processed"
    assert "found:" in text_of(frames, "message") and "public_named" in text_of(frames, "message")
    assert text_of(frames, "delta") == text_of(frames, "message")
    assert (bot.project / "seen").exists()
    results = [result for request in bot.model.requests for result in request["results"]]
    assert any("I am bot in /src" in result for result in results)
    calls = [json.loads(line) for line in read(bot.dir, "out").splitlines()]
    assert {call["type"] for call in calls} == {"tool_call"}
    done = [call for call in calls if call["status"] == "completed"]
    assert [call["message"] for call in done] == ["m1", "m1"], calls
    assert done[0]["kind"] == "execute" and "AgentList" in done[1]["title"], done
    assert {request["key"].removeprefix("Bearer ") for request in bot.model.requests} == {"none"}
    offered = {name for request in bot.model.requests for name in request["tools"]}
    assert not offered & {name for cli in CLIS for name in cli.own}, "it has agents of its own"
    write(bot.dir / "ctl", "stop")
    wait_dead(bot.dir, timeout=SECONDS)


def test_a_permission_is_refused(make: Make, talk_to: TalkTo) -> None:
    bot = make("--allow", "read")
    talk = talk_to(bot.daemon, "bot")
    task = scripted("Look.", bot.shell(LOOK["shell"]), {"text": "found: {last}"})
    frames = bot.send(talk, task, "m1")
    # Codex ends its turn at a refusal; the others tell their model
    assert frames[-1]["status"] == ("failed" if bot.agent.name == "codex-acp" else "processed")
    assert not (bot.project / "seen").exists()
    assert "not permitted: execute: " in read(bot.dir, "log")
    assert "I remember:" in text_of(bot.send(talk, RECALL, "m2"), "message")


def test_an_abort_ends_the_turn_and_a_respawn_goes_on(make: Make, talk_to: TalkTo) -> None:
    """The same run after an abort; another one after the program was killed."""
    bot = make()
    talk = talk_to(bot.daemon, "bot")
    bot.send(talk, scripted("Zebras are striped.", {"text": "yes"}), "m1")
    talk.ask(op="send", id="m2", input=scripted("Take long.", bot.shell(HANG["shell"]),
                                                {"text": "never"}))  # fmt: skip
    wait_until(lambda: (bot.project / "hangs").exists(), "its command runs", timeout=SECONDS)
    write(bot.dir / "ctl", "abort")
    assert talk.frames()[-1]["status"] == "aborted"
    write(bot.dir / "ctl", "resume")
    frames = bot.send(talk, RECALL, "m3")
    assert "Zebras are striped." in text_of(frames, "message"), frames
    assert read(bot.dir, "run") == "r1\n"
    wait_until(lambda: not any("/dev/null" in command_of(pid) for pid in pids(bot.dir)),
               "the command that hung is ended", timeout=SECONDS)  # fmt: skip
    commands = {pid: command_of(pid) for pid in pids(bot.dir)}
    if bot.agent.name == "gemini":
        # it names the file of a conversation after the minute, and writes over one that it loads
        # in the same minute
        begun = time.time()
        wait_until(lambda: time.time() // 60 > begun // 60, "the next minute", timeout=SECONDS)
    for pid, command in commands.items():
        if f"{TOOLS}/" in command and "bridge" not in command:
            end_process(pid)
    wait_until(lambda: "restart 1 of" in read(bot.dir, "log"), "it ends", timeout=SECONDS)
    wait_status(bot.dir, "ready", timeout=SECONDS)
    frames = bot.send(talk_to(bot.daemon, "bot"), RECALL, "m4")
    assert text_of(frames, "message").count("Zebras are striped.") == 1, read(bot.dir, "log")
    assert "yes" not in text_of(frames, "delta"), "what is replayed is not said"
    assert read(bot.dir, "run") == "r2\n"


SDK = MODULES / "@agentclientprotocol" / "sdk" / "dist" / "v1" / "stable" / "acp.js"
HELLO = ["initialize", {"protocolVersion": 1, "clientCapabilities": {}}]


class Edited:
    """What an editor got."""

    def __init__(self, user: User, words: Sequence[str], *steps: list[Any]) -> None:
        ctx = [sys.executable, "-IS", str(user.daemon.root / "bin" / "ctx"), "acp", *words]
        script = Path(__file__).with_name("editor.mjs")
        node = BIN / "node" if (BIN / "node").exists() else "node"
        done = subprocess.run(
            [node, script, SDK, user.project, json.dumps([HELLO, *steps]), *ctx], env=user.env,
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["status"] == 0, done.stderr
        #: of the steps, after the one that begins
        hello, *self.results = found["results"]
        assert hello["result"]["protocolVersion"] == 1
        self.updates: list[dict[str, Any]] = found["updates"]

    def said(self, kind: str = "agent_message_chunk") -> str:
        found = [each for each in self.updates if each["sessionUpdate"] == kind]
        return "".join(each["content"]["text"] for each in found)


def prompt(text: str, session: str | None = None, *cancel: str) -> list[Any]:
    params = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
    return ["session/prompt", params, *cancel]


@pytest.fixture
def editing(socket: Path) -> Iterator[tuple[User, Model]]:
    config = f"networks: {{anthropic: {{socket: {socket}, port: {PORT}}}}}\n"
    with daemon_of(config=config) as daemon, closing(Model(daemon.base, socket)) as model:
        yield User(daemon, model, CLIS[0]), model


def test_an_editor_of_the_npm_library(editing: tuple[User, Model]) -> None:
    """It has Claude Code by a recipe, and then the agent of a name."""
    user, _ = editing
    where = str(user.project)
    new = ["session/new", {"cwd": where, "mcpServers": []}]
    build = {"tool": "ExecCommand", "input": {"cmd": "echo built", "task_id": "build"}}
    wait = {"tool": "TaskOutput", "input": {"task_id": "build", "block": True}}
    look = scripted("Zebras are striped.", build, wait, {"text": "found: {last}"})
    long = prompt(scripted("Take long.", HANG, {"text": "never"}), None, f"{where}/hangs")
    edited = Edited(user, ["--agent", "claude"], new, prompt(look), long, prompt(RECALL),
                    prompt("x", "another"))  # fmt: skip
    _, looked, cancelled, recalled, refused = edited.results
    assert looked["result"]["stopReason"] == recalled["result"]["stopReason"] == "end_turn"
    assert cancelled["result"]["stopReason"] == "cancelled"
    assert "no session" in refused["error"]
    assert "found: " in edited.said() and "built" in edited.said()
    assert "I remember: Zebras are striped." in edited.said()
    calls = [each for each in edited.updates if each["sessionUpdate"].startswith("tool_call")]
    assert [(each["toolCallId"].partition(".")[0], each["status"]) for each in calls] == [
        ("build", "in_progress"), ("build", "completed")], calls  # fmt: skip
    # an agent that is there already, and stays
    user.ctx("run", "--agent", "claude", "--keep", "--name", "bot",
             scripted("Zebras are striped.", {"text": "so they are"}))  # fmt: skip
    load = ["session/load", {"sessionId": "default", "cwd": where, "mcpServers": []}]
    edited = Edited(user, ["bot"], load, prompt(RECALL, "default"))
    assert edited.said("user_message_chunk").startswith("Zebras are striped.")
    assert edited.said().startswith("so they are") and "I remember: Zebras" in edited.said()
    assert read(user.agent("bot"), "status") == "idle\n"
