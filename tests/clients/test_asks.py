"""Claude Code, Codex and Gemini CLI ask people, by their recipes with ``--ask``."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, LOOK, SECONDS, Cli, User, scripted
from tests.clients.test_terminal import ASKS, CTX, DO, leave
from tests.clients.test_terminal import PROMPTS as READY
from tests.worlds.daemon import Daemon, wait_until
from tests.worlds.screens import terminal

#: what the model adds: Codex asks when its model wants out of a sandbox of its own
OUT = {"codex": {"sandbox_permissions": "require_escalated", "justification": "to write a file"}}


@pytest.fixture(params=CLIS, ids=str)
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.param
    return found


@pytest.fixture
def user(daemon: Daemon, model: Model, cli: Cli) -> User:
    return User(daemon, model, cli)


def task(user: User) -> str:
    look = {**LOOK, "as": OUT.get(user.cli.name, {})}
    return scripted("Look.", look, {"text": "found: {last}"})


def options(user: User) -> tuple[str, ...]:
    return ("--ask", "--agent", user.cli.name, "--network", "default", "--model", user.cli.model,
            "--name", "bot")  # fmt: skip


def asked(user: User, process: subprocess.Popen[str] | None = None) -> dict[str, Any]:
    """What is asked, as soon as something is."""
    found: list[dict[str, Any]] = []

    def is_asked() -> bool:
        found[:] = json.loads(user.ctx("asks", "--json"))
        return bool(found) or (process is not None and process.poll() is not None)

    wait_until(is_asked, "something is asked", timeout=SECONDS)
    assert process is None or process.poll() is None, process.communicate()
    (row,) = found
    print(json.dumps(row))
    return row


def word(row: dict[str, Any], allowed: bool) -> str:
    """An option that allows once, or refuses."""
    words: list[str] = [line.partition(" ")[0] for line in row["options"]]
    kinds = ("allow", "proceed_once", "approved") if allowed else ("deny", "reject", "cancel", "ab")
    return next(each for each in words for kind in kinds if each.startswith(kind))


def test_what_it_may_not_do_it_asks(user: User) -> None:
    process = user.start("run", *options(user), task(user))
    row = asked(user, process)
    assert (row["kind"], row["to"]) == ("permission", "operator")
    assert not (user.project / "seen").exists()
    user.ctx("answer", "bot", word(row, True))
    said, errors = process.communicate(timeout=SECONDS)
    assert "I am bot" in said and "found:" in said, errors
    assert (user.project / "seen").exists()
    assert user.ctx("asks", "--json").strip() == "[]"


def test_a_refusal_is_told(user: User, model: Model) -> None:
    process = user.start("run", *options(user), task(user))
    row = asked(user, process)
    user.ctx("answer", "bot", word(row, False), "--note", "not on a Friday")
    process.communicate(timeout=SECONDS)
    assert not (user.project / "seen").exists()
    results = [result for request in model.requests for result in request["results"]]
    if user.cli.name == "claude":  # the protocol of the others takes no note
        assert any("not on a Friday" in result for result in results), results


def test_a_daemon_that_is_killed_meanwhile_loses_no_question(user: User) -> None:
    process = user.start("run", "--keep", *options(user), task(user))
    row = asked(user, process)
    user.daemon.restart()
    user.ctx("answer", "bot", word(row, True))
    wait_until((user.project / "seen").exists, "it goes on", timeout=SECONDS)
    process.communicate(timeout=SECONDS)


@pytest.mark.parametrize("by", ["inbox", "dialogue"])
def test_at_a_terminal_both_ask_and_one_answer_counts(
    daemon: Daemon, model: Model, by: str
) -> None:
    user = User(daemon, model, CLIS[0])
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as at:
        at.run(f"cd {user.project}; clear")
        words = f"--network default --model {user.cli.model} --name bot"
        at.run(f"{CTX} run --tty --ask --agent claude {words}; echo ended: $?")
        at.wait_for(READY["claude"])
        at.tmux("send-keys", "-l", DO)
        at.wait_for(DO[-12:])
        at.type("Enter")
        at.wait_for(ASKS["claude"])
        row = asked(user)
        assert not (user.project / "done").exists()
        if by == "inbox":
            user.ctx("answer", "bot", word(row, True))
        else:
            at.type("Enter")
        at.wait(lambda screen: re.search("^[^>]*this is 4712", screen, re.M), "the reply")
        assert (user.project / "done").exists()
        wait_until(lambda: user.ctx("asks", "--json").strip() == "[]", "the inbox is empty")
        leave(at)


def test_the_model_of_claude_asks_people(daemon: Daemon, model: Model) -> None:
    user = User(daemon, model, CLIS[0])
    question = {"question": "Which colour?", "header": "Colour", "multiSelect": False,
                "options": [{"label": "Deep red", "description": "warm"},
                            {"label": "Blue", "description": "cold"}]}  # fmt: skip
    ask = {"own": "AskUserQuestion", "input": {"questions": [question]}}
    script = scripted("Ask.", ask, {"text": "it is: {last}"})
    process = user.start("run", *options(user), script)
    assert asked(user, process)["question"] == "Which colour?"
    user.ctx("answer", "bot", "answer=Deep red")
    said, errors = process.communicate(timeout=SECONDS)
    assert "it is:" in said and "Deep red" in said, (said, errors)
