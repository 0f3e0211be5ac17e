"""The recipes of contrib/agents, with stand-ins for the programs, and those of users."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.test_tools import said, script
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_until,
    write,
)

#: leaves a conversation where each of the programs does
STAND_IN = """#!/bin/sh
printf '%s:' "${0##*/}"
printf ' <%s>' "$@" | sed 's/<[0-9a-f-]\\{36\\}>/<ID>/'
echo
echo "key $ANTHROPIC_API_KEY$CODEX_API_KEY$GEMINI_API_KEY"
pwd
touch seen && echo "may write"
[ -t 0 ] || cat
for word; do case $word in *-*-4*-*-*) id=$word ;; esac; done
mkdir -p ~/.claude/projects/p ~/.gemini/tmp/p/chats
touch ~/.claude/projects/p/"$id".jsonl
echo "$id" >> ~/.gemini/tmp/p/chats/c
[ -z "$CODEX_HOME" ] || mkdir -p "$CODEX_HOME/sessions/x"
[ -z "$CODEX_HOME" ] || touch "$CODEX_HOME/sessions/x/rollout-1"
"""
CLAUDE = (
    "<-p> <--dangerously-skip-permissions> <--strict-mcp-config> <--mcp-config> "
    "</recipe/mcp.json> <--settings> </recipe/settings.json> <--model> <m>"
)
CODEX = (
    "<exec> <--dangerously-bypass-approvals-and-sandbox> <--skip-git-repo-check> <--color> "
    "<never> <--model> <m>"
)
GEMINI = "<--yolo> <--policy> </recipe/policy.toml> <--model> <m>"
#: of the only run in mode once; of the first message; and of later ones
ARGUMENTS = {
    "claude": (CLAUDE, f"{CLAUDE} <--session-id> <ID>", f"{CLAUDE} <--resume> <ID>"),
    "codex": (f"{CODEX} <->", f"{CODEX} <->", f"{CODEX} <resume> <--last> <->"),
    "gemini": (
        f"{GEMINI} <-p> <>",
        f"{GEMINI} <--session-id> <ID> <-p> <>",
        f"{GEMINI} <--resume> <ID> <-p> <>",
    ),
}
#: at a terminal, of the first life of a name and of later ones
AT_TERMINAL = {
    "claude": [CLAUDE.removeprefix("<-p> <--dangerously-skip-permissions> ")
               + f" <{option}> <ID> <say hello>" for option in ("--session-id", "--resume")],
    "codex": [
        f"{resume}<-c> <model_provider=api> <-c> <model_providers.api.name=api> <-c> "
        "<model_providers.api.base_url=https://api.openai.com/v1> <-c> "
        "<model_providers.api.wire_api=responses> <-c> "
        "<model_providers.api.env_key=CODEX_API_KEY> <--model> <m> <say hello>"
        for resume in ("", "<resume> <--last> ")
    ],
    "gemini": [f"{GEMINI.removeprefix('<--yolo> ')} <{option}> <ID> <-i> <say hello>"
               for option in ("--session-id", "--resume")],
}  # fmt: skip
KEYS = ("ANTHROPIC_API_KEY", "CODEX_API_KEY", "GEMINI_API_KEY")

Ctx = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def project(daemon: Daemon) -> Path:
    path = daemon.base / "project"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def ctx(daemon: Daemon, project: Path) -> Ctx:
    """What a user with the three programs does in the directory of a project."""
    programs = daemon.base / "bin"
    programs.mkdir()
    for name in ARGUMENTS:
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    (programs / "node").write_text("#!/bin/sh\necho v22.0.0\n")  # what gemini needs
    (programs / "node").chmod(0o755)
    home = daemon.base / "home"
    home.mkdir()
    env = {
        "CTX_ROOT": str(daemon.root), "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home), **dict.fromkeys(KEYS, "k-123"),
    }  # fmt: skip

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), *words],
            env={**env, **more}, cwd=project, text=True, capture_output=True, timeout=TIMEOUT,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


@pytest.fixture
def configured() -> Iterator[Daemon]:
    with daemon_of(config="grace: 5s\n") as daemon:
        yield daemon


def test_agents_make_agents_by_recipes_of_the_machine(configured: Daemon) -> None:
    """A shell lets them; with tools alone they look which there are, and name one."""
    daemon = configured
    for name, program in {"shout": "tr a-z A-Z", "whisper": "tr A-Z a-z"}.items():
        recipe = daemon.base / "agents" / name
        recipe.mkdir(parents=True)
        (recipe / "exec").write_text(f"{program}\n")
        (recipe / "README.md").write_text(f"# What can {name}\n")
    boss = daemon.make("boss", script(
        said("AgentList", recipes=True),
        said("SpawnAgent", recipe="shout", initial_message="make it loud", name="kid"),
        said("TaskOutput", task_id="kid", block=True),
        said("SpawnAgent", recipe="whisper", initial_message="x") + "; echo $?",
    ))  # fmt: skip
    with (boss / "policy").open("a") as policy:
        policy.write("allow boss_t recipe:sh* use\n")
    write(boss / "ctl", "start")
    wait_dead(boss)
    listed, made, output, refused = map(json.loads, read(boss, "out").splitlines())
    assert listed["recipes"] == [{"recipe": "shout", "description": "What can shout"}]
    assert made["agent_id"] == "kid"
    assert output["result"] == "MAKE IT LOUD\n"
    assert refused == 13
    assert "recipe:whisper use is not in the effective policy" in read(boss, "log")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_task(ctx: Ctx, daemon: Daemon, project: Path, name: str) -> None:
    result = ctx("spawn", "--agent", name, "--network", "default", "--model", "m", "--wait", "--rm",
                 "say", "hello")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{name}: {ARGUMENTS[name][0]}", "key k-123", str(project), "may write", "say hello",
    ]  # fmt: skip
    assert not daemon.agent_dir(f"{name}-1").exists()
    homes = daemon.state / "tree/agent/0" / f"{name}-1"
    assert not homes.exists(), "nobody named it, so nothing of it stays"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_conversation(ctx: Ctx, daemon: Daemon, name: str) -> None:
    """It goes on in the next message and the next life, and not in another session."""
    made = ("run", "--agent", name, "--network", "default", "--model", "m", "--name", "bot")
    _, first, later = ARGUMENTS[name]

    def of(result: subprocess.CompletedProcess[str]) -> str:
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()[0].removeprefix(f"{name}: ")

    assert of(ctx(*made, "--keep", "first")) == first
    assert of(ctx("send", "bot", "second")) == later
    ctx("session", "bot", "other")
    assert of(ctx("send", "bot", "third")) == first
    ctx("stop", "--wait", "bot")
    ctx("rm", "bot")
    assert of(ctx(*made, "fourth")) == later


@pytest.mark.parametrize("name", AT_TERMINAL)
def test_at_a_terminal(ctx: Ctx, daemon: Daemon, name: str) -> None:
    for line in AT_TERMINAL[name]:
        result = ctx("spawn", "--tty", "--agent", name, "--network", "default", "--model", "m",
                     "--name", "bot", "--wait", "say", "hello")  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[0] == f"{name}: {line}"
        assert "timeout=max" in read(daemon.agent_dir("bot"), "limits")
        ctx("rm", "bot")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_no_task_is_introduced(ctx: Ctx, daemon: Daemon, name: str) -> None:
    ctx("run", "--agent", name, "--network", "default", "--name", "bot", "--keep", "first")
    bot = daemon.agent_dir("bot")
    command = "sh -c 'echo halfway > $CTX_SELF/report; echo the result'"
    kid = daemon.make("bot-kid", command, parent="agent:bot")
    write(kid / "ctl", "start")
    told = bot / "session" / "messages.jsonl"
    wait_until(lambda: "(The end of task:bot-kid, as JSON:)" in told.read_text(), "it was told")
    assert "(A report of your child agent:bot-kid:)\\nhalfway" in told.read_text()
    result = ctx("send", "bot", "(The end of task:bot-kid, as JSON:)")
    assert result.stdout.splitlines()[-1] == "(The end of task:bot-kid, as JSON:)"
    assert "as JSON:)\n(" not in result.stdout, "a task is not introduced, whatever it says"


def test_a_users_own(ctx: Ctx, daemon: Daemon) -> None:
    directory = daemon.base / "home" / ".config" / "ctxfs" / "agents" / "shout"
    directory.mkdir(parents=True)
    (directory / "exec").write_text("tr a-z A-Z\n")
    (directory / "workspace").write_text("inherit\n")
    result = ctx("run", "--agent", "shout", "make it loud")
    assert (result.stdout, result.stderr, result.returncode) == ("MAKE IT LOUD\n", "", 0)


@pytest.mark.parametrize(
    ("file", "text", "where"),
    [
        ("policy", "# x\nallow @label@ tool:* execute\nallow @label@ nonsense\n", "policy:3"),
        ("mount", "/usr /a ro\n/usr /b rx\n", "mount:2"),
        ("mount", "/usr /a ro\n/usr /a ro\n", "mount"),
        ("limits", "timeout=1h\ntimeout=soon\n", "limits:2"),
        ("env", "A=1\n\nCTX_AGENT=2\n", "env:3"),
        ("mode", "twice\n", "mode:1"),
        ("homedir", "/root\n", "homedir:1"),
    ],
)
def test_a_refusal_of_the_daemon_names_file_and_line(
    ctx: Ctx, daemon: Daemon, file: str, text: str, where: str
) -> None:
    directory = daemon.base / "bad"
    directory.mkdir()
    (directory / "exec").write_text("true\n")
    (directory / file).write_text(text)
    result = ctx("spawn", "--agent", str(directory), "--name", "bad", "go")
    assert result.returncode == 1
    said = f"ctx: {directory}/{where}: agent/bad.d/{file}: .* \\(EINVAL\\)"
    assert re.match(said, result.stderr), result.stderr
    assert not daemon.agent_dir("bad").exists()


def test_agents_make_agents_by_the_recipes_of_etc(ctx: Ctx, daemon: Daemon) -> None:
    """A recipe of the parent's view, with a name that its policy lets it make."""
    directory = daemon.base / "etc"
    (directory / "echo").mkdir(parents=True)
    (directory / "echo" / "exec").write_text("cat\n")
    agent = daemon.make("boss", "ctx spawn --agent /r/echo --wait hello",
                        mount=f"{directory} /r ro")  # fmt: skip
    write(agent / "policy", "allow boss_t agent:boss-* create\n")
    write(agent / "ctl", "start")
    subprocess.run(["cat", str(agent / "wait")], timeout=TIMEOUT, check=True)
    assert read(agent, "out") == "hello", read(agent, "log")
    assert read(daemon.agent_dir("boss-echo-1"), "parent").startswith("agent:boss ")
