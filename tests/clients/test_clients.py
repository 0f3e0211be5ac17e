"""Claude Code, Codex and Gemini CLI, unchanged, as agents by their recipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client import recipes
from tests.clients import BIN
from tests.clients.conftest import Model
from tests.worlds.daemon import (
    Daemon,
    alive,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
)

SECONDS = 120.0


@dataclass(frozen=True)
class Cli:
    """What differs between them."""

    name: str
    #: where its API is, after the model's URL, and its key
    url: str
    path: str
    key: str
    #: one whose tools the model server knows
    model: str
    #: its own way to start agents, of which it gets none
    own: tuple[str, ...]
    #: the network that its recipe asks for
    network: str

    def __str__(self) -> str:
        return self.name


CLIS = (
    Cli("claude", "ANTHROPIC_BASE_URL", "", "ANTHROPIC_API_KEY", "claude-sonnet-4-5",
        ("Agent", "Task", "Workflow", "ListAgents"), "anthropic"),
    Cli("codex", "OPENAI_BASE_URL", "/v1", "CODEX_API_KEY", "gpt-5",
        ("spawn_agent", "collaboration/spawn_agent", "multi_agent_v1/spawn_agent"), "openai"),
    Cli("gemini", "GOOGLE_GEMINI_BASE_URL", "", "GEMINI_API_KEY", "gemini-2.5-pro",
        ("invoke_agent",), "gemini"),
)  # fmt: skip


def scripted(text: str, *steps: dict[str, Any]) -> str:
    return f"{text} <script>{json.dumps(steps)}</script>"


class User:
    """Somebody with these programs in the PATH, in the directory of a project."""

    def __init__(self, daemon: Daemon, model: Model, cli: Cli) -> None:
        self.daemon = daemon
        self.cli = cli
        self.project = daemon.base / "project"
        self.project.mkdir()
        self.project.chmod(0o777)
        home = daemon.base / "user"
        home.mkdir()
        self.given = {cli.url: model.url + cli.path, cli.key: "key-of-the-user"}
        self.env = {
            "CTX_ROOT": str(daemon.root),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            **self.given,
        }

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-IS", str(self.daemon.root / "bin" / "ctx"), *words],
            **{"env": self.env, "cwd": self.project, "text": True, "stdin": subprocess.DEVNULL,
               "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        )  # fmt: skip

    def ctx(self, *words: str, status: int = 0) -> str:
        """What a command says."""
        process = self.start(*words)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == status, f"{words}: {process.returncode} {out}{err}"
        return out

    def make(self, verb: str, *words: str) -> str:
        options = ("--agent", self.cli.name, "--network", "default", "--model", self.cli.model)
        return self.ctx(verb, *options, *words)

    def agent(self, name: str) -> Path:
        return self.daemon.agent_dir(name)

    @contextlib.contextmanager
    def sending(self, name: str, text: str) -> Iterator[list[int]]:
        """While somebody waits for the answer; the exit status, once there is one."""
        statuses: list[int] = []
        process = self.start("send", name, text)
        waiting = threading.Thread(target=lambda: statuses.append(process.wait(SECONDS)))
        waiting.start()
        try:
            yield statuses
        finally:
            waiting.join(SECONDS)
            process.kill()
            process.communicate()


@pytest.fixture(params=CLIS, ids=str)
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.param
    return found


@pytest.fixture
def user(daemon: Daemon, model: Model, cli: Cli) -> User:
    return User(daemon, model, cli)


@pytest.fixture
def connected(cli: Cli, socket: Path) -> Iterator[tuple[User, Model]]:
    """A user of a machine on which the CLI's API is a network."""
    config = f"networks: {{{cli.network}: {{socket: {socket}, port: 18081}}}}\n"
    with daemon_of(config=config) as daemon, closing(Model(daemon.base, socket)) as model:
        yield User(daemon, model, cli), model


#: says who it is; {last} has it then
LOOK = {"shell": "echo I am $CTX_AGENT in $PWD; touch seen"}
HANG = {"shell": "echo $$ > hangs; exec tail -f /dev/null"}


def hangs(user: User) -> int:
    """The pid, in its cell, of the command of a run that does not end."""
    path = user.project / "hangs"
    wait_until(lambda: path.exists() and path.read_text(), "its command runs", timeout=SECONDS)
    pid = int(path.read_text())
    path.unlink()
    return pid


def test_the_list_of_recipes_says_that_only_a_network_is_missing(user: User) -> None:
    rows = {row["name"]: row for row in json.loads(user.ctx("agents", "--json"))}
    assert [lack.partition(":")[0] for lack in rows[user.cli.name]["lacks"]] == ["network"]


@pytest.mark.parametrize("network", ["default", "none"])
def test_what_recipes_need_is_in_a_cell(user: User, network: str) -> None:
    """As the README of recipes lists it."""
    readme = Path(recipes.__file__).parents[1] / "contrib" / "agents" / "README.md"
    _, _, section = readme.read_text().partition("## What recipes need in a cell\n")
    lines = section.partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1:3] for line in lines if "`" in line and "|" in line]
    needs = {name.strip(): re.findall("`([^`]+)`", cell) for name, cell in rows}
    offline = needs.pop("variables without a network")
    tests = [f"test -e {path}" for path in needs.pop("files")]
    tests += [f"printenv {name}" for name in needs.pop("variables")]
    tests += [f"{'! ' * (network == 'default')}printenv {name}" for name in offline]
    tests += [f"command -v {name}" for names in needs.values() for name in names]
    script = "\n".join(f"{{ {test}; }} >/dev/null || echo '{test}'" for test in tests)
    (user.project / "look").write_text(script)
    options = ("--agent", user.cli.name, "--network", network, "--model", user.cli.model)
    assert len(tests) > 25
    assert user.ctx("spawn", *options, "--set", "exec=sh look", "--wait", "--rm", "look") == ""


def test_once(user: User, model: Model) -> None:
    said = user.make(
        "spawn", "--wait", "--rm", scripted("Look.", LOOK, {"text": "found: {last}"})
    )
    assert f"I am {user.cli.name}-1 in {user.project}" in said and "found:" in said
    assert (user.project / "seen").exists()
    offered = {tool for request in model.requests for tool in request["tools"]}
    assert not offered & set(user.cli.own), "it has agents of its own"
    assert {request["key"].removeprefix("Bearer ") for request in model.requests} == {
        "key-of-the-user"
    }


def test_a_conversation_goes_on(user: User) -> None:
    """In the next run, after a crash of the daemon, and in the next life of the name."""
    recall = scripted("And now?", {"text": "I remember: {memory}"})
    user.make("run", "--keep", "--name", "bot", scripted("Zebras are striped.", {"text": "yes"}))
    if user.cli.name == "gemini":
        # It makes another file in another minute, and would remove both in a run after that.
        begun = time.time()
        wait_until(lambda: time.time() // 60 > begun // 60, "the next minute", timeout=SECONDS)
    assert "Zebras are striped." in user.ctx("send", "bot", recall)
    user.daemon.restart()
    assert "Zebras are striped. And now?" in user.ctx("send", "bot", recall)
    user.ctx("session", "bot", "another")
    assert "Zebras" not in user.ctx("send", "bot", recall), "another session, another conversation"
    user.ctx("session", "bot", "default")
    user.ctx("stop", "--wait", "bot")
    user.ctx("rm", "bot")
    assert "Zebras are striped. And now?" in user.make("run", "--name", "bot", recall)


def test_an_abort_ends_the_run_and_not_the_conversation(user: User) -> None:
    user.make("run", "--keep", "--name", "bot", scripted("Zebras are striped.", {"text": "yes"}))
    with user.sending("bot", scripted("Take long.", HANG, {"text": "never"})) as statuses:
        hangs(user)
        user.ctx("abort", "bot")
    assert statuses == [130]
    user.ctx("resume", "bot")
    recall = scripted("And now?", {"text": "I remember: {memory}"})
    assert "Zebras are striped." in user.ctx("send", "bot", recall)


def test_a_stop_reaches_it_in_mid_run(user: User) -> None:
    user.make("spawn", "--name", "bot", scripted("Take long.", HANG, {"text": "never"}))
    hangs(user)
    user.ctx("stop", "--wait", "bot")
    assert read(user.agent("bot"), "reason") == "operator_stop\n"
    assert read(user.agent("bot"), "processes") == ""


def reviewer(user: User, name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    """The call that spawns one that is the same program; it does not inherit `env`."""
    words = ["sh", "/recipe/run", *_program(user.cli.name)]
    given = [f"{key}={value}" for key, value in user.given.items()]
    return {
        "tool": "SpawnAgent",
        "input": {
            "name": f"boss-{name}",
            "exec": shlex.join(["env", *given, *words]),
            "model": user.cli.model,
            "initial_message": scripted(f"Review {name}.", *steps),
        },
    }


def _program(name: str) -> list[str]:
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{BIN}:{path}"
    try:
        return recipes.program_words(name)
    finally:
        os.environ["PATH"] = path


def test_a_parent_hears_its_reviewers_and_takes_them_along(user: User, model: Model) -> None:
    quick = reviewer(
        user, "quick",
        {"tool": "Report", "input": {"text": "halfway through"}},
        {"text": "the review of quick: fine"},
    )  # fmt: skip
    slow = reviewer(user, "slow", {"shell": "exec tail -f /dev/null"}, {"text": "never"})
    task = scripted("Have it reviewed.", quick, slow, {"text": "spawned: {last}"})
    said = user.make("run", "--keep", "--name", "boss", task)
    assert "spawned:" in said and "boss-slow" in said, said
    boss, child = user.agent("boss"), user.agent("boss-slow")
    wait_dead(user.agent("boss-quick"), timeout=SECONDS)
    assert read(user.agent("boss-quick"), "outcome") == "done\n"
    assert "the review of quick" in read(user.agent("boss-quick"), "result.md")

    def heard() -> bool:
        conversation = read(boss, "session/messages.jsonl")
        return "task_result" in conversation and read(boss, "status") == "idle\n"

    wait_until(heard, "its parent has read the result", timeout=SECONDS)
    reply = user.ctx("send", "boss", scripted("What do they say?", {"text": "heard: {memory}"}))
    assert "(A report of your child agent:boss-quick:)" in reply and "halfway through" in reply
    assert "the review of quick: fine" in reply
    wait_status(child, "busy")
    with user.sending("boss", scripted("Take long.", HANG, {"text": "never"})):
        hangs(user)
        user.ctx("kill", "--wait", "boss")
    assert (read(child, "outcome"), read(child, "reason")) == ("cancelled\n", "parent_dead\n")
    assert read(boss, "processes") == ""


def test_a_parent_that_is_killed_in_the_middle_leaves_no_child(user: User, model: Model) -> None:
    """It waits for one child, reads its result, and dies beside another."""
    quick = reviewer(user, "quick", LOOK, {"text": "fine, as I see it"})
    slow = reviewer(user, "slow", HANG, {"text": "never"})
    wait = {"tool": "TaskOutput", "input": {"task_id": "boss-quick", "block": True, "timeout": 60}}
    task = scripted("Have it reviewed.", quick, wait, slow,
                    {"shell": "touch all; exec tail -f /dev/null"}, {"text": "never"})  # fmt: skip
    user.make("spawn", "--name", "boss", task)
    inside = hangs(user)
    wait_until(lambda: (user.project / "all").exists(), "its parent goes on", timeout=SECONDS)
    answers = [result for request in model.requests for result in request["results"]]
    assert any("fine, as I see it" in answer for answer in answers), "it read the result"
    boss, child = user.agent("boss"), user.agent("boss-slow")
    pids = [json.loads(line)["pid"] for line in read(boss, "processes").splitlines()]
    assert inside and len(pids) >= 2
    os.kill(int(read(boss, "pid")), signal.SIGKILL)
    wait_dead(boss, timeout=SECONDS)
    wait_dead(child, timeout=SECONDS)
    assert read(boss, "reason") == "signal:9\n"
    assert (read(child, "outcome"), read(child, "reason")) == ("cancelled\n", "parent_dead\n")
    assert not [pid for pid in pids if alive(pid)]


def test_by_one_api_and_without_a_key(connected: tuple[User, Model]) -> None:
    """Children have the same, by what they inherit: the program, the mounts and the policy."""
    user, model = connected
    rows = {row["name"]: row for row in json.loads(user.ctx("agents", "--json"))}
    assert rows[user.cli.name]["lacks"] == []
    child = {"tool": "SpawnAgent", "input": {
        "name": "boss-kid", "model": user.cli.model,
        "initial_message": scripted("Look.", LOOK, {"text": "the kid has looked"}),
    }}  # fmt: skip
    wait = {"tool": "TaskOutput", "input": {"task_id": "boss-kid", "block": True, "timeout": 60}}
    task = scripted("Have it looked at.", {"shell": "env; wc -l < /proc/net/route"}, child, wait,
                    {"text": "said: {last}"})  # fmt: skip
    options = ("--agent", user.cli.name, "--model", user.cli.model, "--name", "boss", "--wait")
    said = user.ctx("spawn", *options, task)
    assert "the kid has looked" in said, said
    assert {request["key"].removeprefix("Bearer ") for request in model.requests} == {"none"}
    told = "\n".join(result for request in model.requests for result in request["results"])
    assert "I am boss-kid in" in told
    assert "CTX_NET_" in told and "key-of-the-user" not in told
    assert "key-of-the-user" not in read(user.agent("boss"), "env")
    usage = read(user.agent("boss"), "usage")
    assert f"net.{user.cli.network}.connections=" in usage


@pytest.mark.parametrize("cli", CLIS[:1], ids=str, indirect=True)
def test_claude_without_any_network(user: User, model: Model) -> None:
    """It reaches its API by a socket that is mounted."""
    options = ["--agent", "claude", "--network", "none", "--model", user.cli.model]
    options += ["--mount", f"{model.socket}:/api.sock", "--wait", "--rm"]
    options += ["--env", "ANTHROPIC_UNIX_SOCKET=/api.sock", "--env", f"{user.cli.url}=http://api"]
    routes = {"shell": "wc -l < /proc/net/route"}
    said = user.ctx("spawn", *options, scripted("Look.", routes, {"text": "routes: {last}"}))
    assert said.split() == ["routes:", "1"], "the heading alone"
