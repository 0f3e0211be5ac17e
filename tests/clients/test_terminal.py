"""The command lines at a person's terminal, by their recipes: run --tty."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import Model
from tests.clients.test_clients import CLIS, SECONDS, Cli, User
from tests.worlds.daemon import Daemon, wait_dead, wait_status
from tests.worlds.screens import Terminal, terminal

CTX = Path(sys.executable).with_name("ctx")
#: what each shows when it takes a message
PROMPTS = {
    "claude": "? for shortcuts",
    "codex": "Ask Codex to do anything",
    "gemini": "Type your message",
}
#: and when it asks whether it may run a command; Codex has its own sandbox do so without a question
ASKS = {"claude": "Do you want to proceed?", "gemini": "Allow execution"}
SAY = 'Say it. <script>[{"text": "so it is 4711"}]</script>'
DO = 'Do it. <script>[{"shell": "echo hi > done"}, {"text": "this is 4712"}]</script>'


@pytest.fixture(params=CLIS, ids=str)
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.param
    return found


@pytest.fixture
def user(daemon: Daemon, model: Model, cli: Cli) -> User:
    return User(daemon, model, cli)


@pytest.fixture
def at(user: User) -> Iterator[Terminal]:
    with terminal(100, 40, {**user.env, "PS1": "shell$ "}) as opened:
        opened.run(f"cd {user.project}; clear")
        yield opened


def run(user: User, at: Terminal, text: str) -> None:
    """Until it has been told something; it is a person who types."""
    options = f"--agent {user.cli.name} --network default --model {user.cli.model}"
    at.run(f"{CTX} run --tty {options} --name it; echo ended: $?")
    at.wait_for(PROMPTS[user.cli.name])
    if text:
        at.tmux("send-keys", "-l", text)
        at.wait_for(text[-12:])  # at once, Enter would count as a part of a paste
        at.type("Enter")


def leave(at: Terminal) -> None:
    at.type("C-c", "C-c", "C-d", "C-d")
    at.wait(lambda screen: re.search("^ended: [0-9]", screen, re.M), "its end")


def test_it_is_there_without_a_question(user: User, at: Terminal) -> None:
    before = at.tty(), at.state()
    run(user, at, SAY)
    at.wait(lambda screen: re.search("^[^>]*so it is 4711", screen, re.M), "the reply")
    at.type("C-]", "d")
    at.wait_for("come back: ctx attach it")
    assert (at.tty(), at.state()) == before
    wait_status(user.agent("it"), "busy")
    with terminal(80, 30, user.env) as other:
        other.run(f"{CTX} attach it; echo ended: $?")
        other.wait_for("so it is 4711")
        other.resize(90, 35)
        leave(other)
    wait_dead(user.agent("it"), timeout=SECONDS)


def test_it_asks_and_goes_on_with_its_conversation(user: User, at: Terminal) -> None:
    run(user, at, DO)
    if user.cli.name in ASKS:
        at.wait_for(ASKS[user.cli.name])
        assert not (user.project / "done").exists()
        while ASKS[user.cli.name] in at.screen():  # a dialogue that is new takes no key
            at.type("Enter")
            time.sleep(0.5)
    at.wait(lambda screen: re.search("^[^>]*this is 4712", screen, re.M), "the reply")
    assert (user.project / "done").exists()
    leave(at)
    assert not user.agent("it").exists()
    at.type("clear", "Enter")
    run(user, at, "")
    at.wait(lambda screen: re.search("^[^>]*this is 4712", screen, re.M), "what was said before")
