"""Claude Code, Codex and Gemini CLI ask people, by their recipes with ``--ask``.

With ``-m long``, they wait for an answer for longer than they do unless they are told to.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, LOOK, SECONDS, Cli, User, scripted
from tests.clients.test_terminal import ASKS, CTX, DO, leave
from tests.clients.test_terminal import PROMPTS as READY
from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until
from tests.worlds.screens import Terminal, terminal

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


def killed_twice(user: User, row: dict[str, Any]) -> None:
    """ctxd dies between question and answer, and between answer and reply."""
    user.daemon.env["CTXD_CRASH_AT"] = "ask.answered"
    user.daemon.restart()
    user.ctx("answer", "bot", word(row, True), status=69)
    user.daemon.wait_killed()
    del user.daemon.env["CTXD_CRASH_AT"]
    user.daemon.start()
    user.ctx("answer", f"bot/{row['ask']}", word(row, False), status=1)


def ends(user: User, name: str = "bot") -> list[tuple[str, str]]:
    """How what an agent asked has ended, and by whom."""
    events = user.daemon.events(name)
    return [(each["status"], each["by"]) for each in events if each["type"] == "ask.end"]


def test_a_daemon_that_is_killed_meanwhile_loses_no_question_and_no_answer(user: User) -> None:
    process = user.start("run", "--keep", *options(user), task(user))
    killed_twice(user, asked(user, process))
    wait_until((user.project / "seen").exists, "it goes on", timeout=SECONDS)
    process.communicate(timeout=SECONDS)
    assert ends(user) == [("answered", "operator uid:0")]
    assert user.ctx("asks", "--json").strip() == "[]"


def test_an_abort_withdraws(user: User) -> None:
    process = user.start("run", "--keep", *options(user), task(user))
    asked(user, process)
    user.ctx("abort", "bot")
    process.communicate(timeout=SECONDS)
    assert [status for status, _ in ends(user)] == ["withdrawn"]
    assert user.ctx("asks", "--json").strip() == "[]"
    assert not (user.project / "seen").exists()


def test_a_parent_answers_its_child_and_passes_a_question_on(user: User) -> None:
    asks = "ctx ask --to supervisor -o yes -o no 'May I push?'; ctx ask --to supervisor 'When?'"
    child = {"name": "boss-kid", "exec": f"sh -c {shlex.quote(asks)}", "initial_message": "Push."}
    begin = scripted("Have it done.", {"tool": "SpawnAgent", "input": child}, {"text": "{last}"})
    assert "boss-kid" in user.make("run", "--keep", "--name", "boss", begin)
    boss, kid = user.agent("boss"), user.agent("boss-kid")
    heard = boss / "session/messages.jsonl"
    wait_until(lambda: '"provenance":"child"' in heard.read_text(), "it is told", timeout=SECONDS)
    wait_status(boss, "idle", timeout=SECONDS)
    second = "$CTX_ROOT/agent/boss-kid.d/ask/ask-2"
    answer = {"agent_id": "boss-kid", "answer": "yes"}
    script = scripted(
        "See to it.", {"tool": "AskAnswer", "input": {**answer, "ask_id": "ask-1"}},
        {"shell": f"until grep -q open {second}/status; do sleep 0.1; done; "
                  f"echo operator > {second}/to"},
        {"tool": "AskAnswer", "input": {**answer, "ask_id": "ask-2"}},
        {"text": "then: {last}; before: {memory}"},
    )  # fmt: skip
    said = user.ctx("send", "boss", script)
    assert "is for operators" in said and "May I push?" in said, said
    assert asked(user)["question"] == "When?"
    user.ctx("answer", "boss-kid", "on", "Monday")
    wait_dead(kid, timeout=SECONDS)
    assert read(kid, "out") == "yes\non Monday\n"
    (_, parent), person = ends(user, "boss-kid")
    assert parent.startswith("agent:boss run:") and person == ("answered", "operator uid:0")


def silent(seconds: float, what: Callable[[], object]) -> None:
    """Nobody answers for so long, and something stays as it is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert what(), f"{until - time.monotonic():.0f} s too early"
        time.sleep(5)


def is_asked(user: User) -> bool:
    return len(json.loads(user.ctx("asks", "--json"))) == 1


@pytest.mark.long
def test_an_answer_to_a_tool_after_35_minutes(daemon: Daemon, model: Model) -> None:
    """Claude Code ends a silent tool after 30 minutes, unless it is told otherwise."""
    user = User(daemon, model, CLIS[0])
    process = user.start("run", *options(user), task(user))
    row = asked(user, process)
    silent(35 * 60, lambda: process.poll() is None and is_asked(user))
    assert not (user.project / "seen").exists()
    user.ctx("answer", "bot", word(row, True))
    said, errors = process.communicate(timeout=SECONDS)
    assert "I am bot" in said and "found:" in said, errors
    assert (user.project / "seen").exists()
    assert user.ctx("asks", "--json").strip() == "[]"


def dialogue(user: User, at: Terminal, text: str = DO, asks: str = ASKS["claude"]) -> None:
    """Claude Code at a terminal, until it asks."""
    at.run(f"cd {user.project}; clear")
    words = f"--network default --model {user.cli.model} --name bot"
    at.run(f"{CTX} run --tty --ask --agent claude {words}; echo ended: $?")
    at.wait_for(READY["claude"])
    at.tmux("send-keys", "-l", text)
    at.wait_for(text[-12:])
    at.type("Enter")
    at.wait_for(asks)


@pytest.mark.long
def test_an_answer_to_a_hook_after_11_minutes(daemon: Daemon, model: Model) -> None:
    """Claude Code ends a hook after 10 minutes, unless it is told otherwise."""
    user = User(daemon, model, CLIS[0])
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as at:
        dialogue(user, at)
        row = asked(user)
        silent(11 * 60, lambda: ASKS["claude"] in at.screen() and is_asked(user))
        assert not (user.project / "done").exists()
        user.ctx("answer", "bot", word(row, True))
        at.wait(lambda screen: re.search("^[^>]*this is 4712", screen, re.M), "the reply")
        assert (user.project / "done").exists()
        assert user.ctx("asks", "--json").strip() == "[]"
        leave(at)


@pytest.mark.parametrize("by", ["inbox", "dialogue", "killed"])
def test_at_a_terminal_both_ask_and_one_answer_counts(
    daemon: Daemon, model: Model, by: str
) -> None:
    user = User(daemon, model, CLIS[0])
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as at:
        dialogue(user, at)
        row = asked(user)
        assert not (user.project / "done").exists()
        if by == "inbox":
            user.ctx("answer", "bot", word(row, True))
        elif by == "killed":
            killed_twice(user, row)
        else:
            at.type("Enter")
        at.wait(lambda screen: re.search("^[^>]*this is 4712", screen, re.M), "the reply")
        assert (user.project / "done").exists()
        wait_until(lambda: user.ctx("asks", "--json").strip() == "[]", "the inbox is empty")
        assert [status for status, _ in ends(user)] == [
            "withdrawn" if by == "dialogue" else "answered"
        ]
        leave(at)


@pytest.mark.parametrize("key", ["Escape", "3"])
def test_who_refuses_in_the_dialogue_withdraws(daemon: Daemon, model: Model, key: str) -> None:
    """By Esc, or the answer No; Ctrl-C does nothing there."""
    user = User(daemon, model, CLIS[0])
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as at:
        dialogue(user, at)
        asked(user)
        while ASKS["claude"] in at.screen():  # a dialogue that is new takes no key
            at.type(key)
            time.sleep(0.5)
        wait_until(lambda: user.ctx("asks", "--json").strip() == "[]", "the inbox is empty")
        assert [status for status, _ in ends(user)] == ["withdrawn"]
        assert not (user.project / "done").exists()
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


def test_what_the_model_asked_at_the_terminal_leaves_the_inbox(
    daemon: Daemon, model: Model
) -> None:
    """At once, before what it asks next."""
    user = User(daemon, model, CLIS[0])
    question = {"question": "Which colour?", "header": "Colour", "multiSelect": False,
                "options": [{"label": "Deep red", "description": "warm"},
                            {"label": "Blue", "description": "cold"}]}  # fmt: skip
    ask = {"own": "AskUserQuestion", "input": {"questions": [question]}}
    script = scripted("Ask.", ask, {"shell": "echo hi > done"}, {"text": "it is done"})
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as at:
        dialogue(user, at, script, "Enter to select")
        assert asked(user)["question"] == "Which colour?"
        at.type("Enter")
        at.wait_for(ASKS["claude"])
        wait_until(lambda: is_asked(user), "one thing is asked")
        assert asked(user)["question"].startswith("Bash:")
        at.type("Escape")
