"""`ctx acp`: frames of an editor, over a fake tree and agents that are sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client.acp import Editor, Prompt, Session, Source, recipe_files, text_of_prompt
from client.exits import Failure
from client.jsonrpc import Refused
from client.loop import Loop
from client.recipes import find
from client.root import Root
from tests.unit.client.fakes import (
    ASKED,
    DONE,
    START,
    FakeAgent,
    FakeRoot,
    Run,
    delta,
    eventually,
    is_asleep,
    message,
)
from tests.worlds.daemon import TIMEOUT

INITIALIZE = {"protocolVersion": 1, "clientCapabilities": {}}


class Acp:
    """The command, and what an editor would write and read."""

    def __init__(self, program: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-IS", program, "acp", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.count = 0

    def line(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def begin(self, method: str, **params: Any) -> int:
        self.count += 1
        self.line(json.dumps({"id": self.count, "method": method, "params": params}))
        return self.count

    def frame(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, method: str, **params: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The answer, and the updates before it."""
        ident = self.begin(method, **params)
        updates = []
        while (frame := self.frame()).get("id") != ident:
            updates.append(frame["params"]["update"])
        return frame, updates

    def result(self, method: str, **params: Any) -> Any:
        answer, _ = self.ask(method, **params)
        return answer["result"]

    def code(self, method: str, **params: Any) -> Any:
        answer, _ = self.ask(method, **params)
        return answer["error"]["code"]

    def end(self) -> int:
        _, errors = self.process.communicate(timeout=TIMEOUT)
        assert errors == b""
        return self.process.returncode


@pytest.fixture
def start(root: FakeRoot, program: Path) -> Iterator[Callable[..., Acp]]:
    there: list[Acp] = []

    def begin(*words: str) -> Acp:
        there.append(Acp(program, *words))
        return there[-1]

    yield begin
    for each in there:
        each.process.kill()
        each.process.communicate()


def prompt(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def said(updates: list[dict[str, Any]]) -> str:
    return "".join(update["content"]["text"] for update in updates)


def test_the_newest_version_is_offered_to_whoever_wants_another(
    root: FakeRoot, start: Callable[..., Acp]
) -> None:
    editor = start("x")
    for wanted in (1, 0, 2, 65535, "2024-11-05", None, True):
        result = editor.result("initialize", protocolVersion=wanted)
        assert result["protocolVersion"] == 1
        assert result["protocolVersion"] is not True
    assert result["authMethods"] == []
    assert result["agentCapabilities"]["loadSession"] is True
    assert editor.end() == 0
    editor = start("--agent", recipe(root.path.parent / "r", exec="x"))
    assert editor.result("initialize", **INITIALIZE)["agentCapabilities"]["loadSession"] is False


def test_nothing_is_offered_before(start: Callable[..., Acp]) -> None:
    editor = start("x")
    assert editor.code("session/new", cwd="/", mcpServers=[]) == -32601
    editor.result("initialize", **INITIALIZE)
    assert editor.code("session/new", cwd="/", mcpServers=[]) == -32603, "there is no such agent"
    assert editor.code("session/set_mode", sessionId="x") == -32601
    for method in ("session/prompt", "session/close", "session/resume", "session/load"):
        assert editor.code(method, sessionId="x", prompt=prompt("x")) in (-32002, -32603)
    editor.line('{"method":"session/cancel","params":{"sessionId":"x"}}')
    editor.line("{")
    assert editor.frame()["error"]["code"] == -32700
    assert editor.end() == 0


def test_what_is_said_without_an_id_is_not_done(
    root: FakeRoot, start: Callable[..., Acp]
) -> None:
    """But a cancel: nobody would hear of a session, or of the end of a turn."""
    editor, session = opened(root, start)
    for method in ("initialize", "session/new", "session/load", "session/prompt", "session/cancel"):
        params = {"sessionId": session, "cwd": "/", "prompt": prompt("x")}
        editor.line(json.dumps({"method": method, "params": params}))
    assert editor.ask("session/cancel", sessionId=session) == (
        {"jsonrpc": "2.0", "id": editor.count, "result": {}}, [])  # fmt: skip
    assert editor.result("session/close", sessionId=session) == {}
    assert editor.end() == 0


def opened(root: FakeRoot, start: Callable[..., Acp]) -> tuple[Acp, str]:
    """An editor with a session; the agent takes no other connections then."""
    root.agent("x", status="idle")
    # whether it is there; and its events, which the editor may not see
    fake = FakeAgent(root, ASKED, {"type": "error", "code": "EACCES"}, times=2)
    editor = start("x")
    editor.result("initialize", **INITIALIZE)
    session = editor.result("session/new", cwd="/", mcpServers=[])["sessionId"]
    fake.thread.join()
    (root.path / "agent" / "x.sock").unlink()
    return editor, session


@pytest.mark.parametrize(
    ("frames", "stop", "text"),
    [
        ([delta("one, "), delta("two"), message("one, two"), DONE], "end_turn", "one, two"),
        ([message("all"), DONE], "end_turn", "all"),
        ([delta("so far"), message("else"), DONE], "end_turn", "so far\n\nelse"),
        ([{**DONE, "status": "aborted", "reason": "operator_aborted"}], "cancelled", ""),
        ([{**DONE, "status": "dropped"}], "cancelled", ""),
        ([{**DONE, "status": "failed", "reason": "max_tokens: much"}], "max_tokens", ""),
        ([{**DONE, "status": "failed", "reason": "refusal"}], "refusal", ""),
        ([{**DONE, "status": "failed", "reason": "exit:3"}], None, ""),
        ([{"type": "error", "code": "EBUSY", "message": "it is busy"}], None, ""),
    ],
)
def test_how_a_turn_ends(
    root: FakeRoot, start: Callable[..., Acp], frames: list[Any], stop: str | None, text: str
) -> None:
    editor, session = opened(root, start)
    frames = [{"status": "processed", **f} if f.get("type") == "done" else f for f in frames]
    fake = FakeAgent(root, START, *frames)
    answer, updates = editor.ask("session/prompt", sessionId=session, prompt=prompt("go"))
    fake.thread.join()
    assert fake.requests[0]["input"] == "go"
    assert said(updates) == text
    if stop is not None:
        assert answer["result"] == {"stopReason": stop}
    else:
        assert answer["error"]["message"] in ("exit:3", "it is busy (EBUSY)")


def test_a_lost_connection_is_made_again(root: FakeRoot, start: Callable[..., Acp]) -> None:
    """The message is the same one, and what was said is not said again."""
    editor, session = opened(root, start)
    first = FakeAgent(root, START, delta("one, "), delta("tw"))
    ident = editor.begin("session/prompt", sessionId=session, prompt=prompt("go"))
    updates = [editor.frame(), editor.frame()]
    first.thread.join()
    (root.path / "agent" / "x.sock").unlink()
    again = FakeAgent(
        root, START, delta("one"), delta(", two"), delta(", three"),
        message("one, two, three"), {**DONE, "status": "processed"},
    )  # fmt: skip
    while "id" not in updates[-1]:
        updates.append(editor.frame())
    again.thread.join()
    assert updates.pop()["id"] == ident
    assert said([frame["params"]["update"] for frame in updates]) == "one, two, three"
    assert first.requests == again.requests


def test_what_was_closed_while_nobody_answered_is_not_opened_again(
    root: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def nobody(_: Root, name: str) -> None:
        tried.append(name)
        raise Failure("nobody is there")

    monkeypatch.setattr("client.acp.connect", nobody)
    loop, there = Loop(), Root(str(root.path))
    editor = Editor(loop, there, Source(there, "x"))
    session = Session(editor, "x", "default")  # which tries for the first time
    for closed in (False, True):
        session.watch.over = False
        session.watch.reopen()
        if closed:
            session.watch.close()
        (_, again), loop.times = loop.times[0], []
        again()
    assert tried == 4 * ["x"]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (prompt("a") + prompt("b"), "ab"),
        ([*prompt("see "), {"type": "resource_link", "uri": "file:///x", "name": "x"}],
         "see file:///x"),
        ([{"type": "resource", "resource": {"uri": "file:///x", "text": "in it"}}],
         "file:///x:\nin it\n"),
        (prompt("\ud800"), "?"),
    ],
)  # fmt: skip
def test_the_text_of_a_prompt(blocks: list[dict[str, Any]], text: str) -> None:
    assert text_of_prompt(blocks) == text


@pytest.mark.parametrize(
    "blocks",
    [
        [], prompt(" "), [{}], [{"type": "image", "data": ""}], [{"type": "resource"}],
        [{"type": "resource", "resource": {"uri": "x", "blob": ""}}], [{"type": "text"}],
    ],
)  # fmt: skip
def test_what_is_no_prompt(blocks: list[dict[str, Any]]) -> None:
    with pytest.raises(Refused) as refused:
        text_of_prompt(blocks)
    assert refused.value.error["code"] == -32602


# recipes


def recipe(path: Path, **files: str) -> str:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return str(path)


def lines_of(root: FakeRoot, path: str, cwd: Path) -> dict[str, list[str]]:
    """The lines of the files of an agent by a recipe, in the order of writing."""
    files = recipe_files(Root(str(root.path)), find(path), "n-1", str(cwd))
    return {
        file: [line if isinstance(line, str) else line.text for line in lines]  # type: ignore[union-attr]
        for file, lines in files
    }


def test_an_agent_of_a_recipe_may_change_one_directory(root: FakeRoot, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    path = recipe(
        tmp_path / "r", exec="x @name@\n", mount="/a /b ro\n@cwd@ /elsewhere rw\n",
        workspace="explicit_root:@cwd@\n", homedir="durable\n",
        policy="allow @label@ tool:* execute\n",
    )  # fmt: skip
    assert lines_of(root, path, work) == {
        "mount": ["/a\t/b\tro", f"{work}\t{work}\trw\t-"],
        "cwd": [str(work)],
        "exec": ["x n-1"],
        "mode": ["turn"],
        "policy": ["allow n-1_t tool:* execute"],
    }
    path = recipe(tmp_path / "other", exec="x\n", mode="resident\n")
    assert lines_of(root, path, work)["mode"] == ["resident"]


def test_no_agent_may_change_the_users_settings(
    root: FakeRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors without a project may name the home directory."""
    path, home = recipe(tmp_path / "r", exec="x"), tmp_path / "home"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for directory in (home, tmp_path, Path("/")):
        with pytest.raises(Failure, match="has your settings: open the directory of a project"):
            recipe_files(Root(str(root.path)), find(path), "n-1", str(directory))
    assert recipe_files(Root(str(root.path)), find(path), "n-1", str(home / "project"))


def test_a_recipe_that_is_refused(root: FakeRoot, tmp_path: Path) -> None:
    path = recipe(tmp_path / "wide", exec="x", mount="/a /b ro\n/c\t/d\trw\t-\n")
    with pytest.raises(Failure, match="mount:2: only the editor's directory may be rw"):
        lines_of(root, path, tmp_path)
    path = recipe(tmp_path / "odd", exec="x")
    for name in ("a\nb", "a\tb"):
        (tmp_path / name).mkdir()
        with pytest.raises(Failure, match=r"^cwd: .* has a newline or a TAB"):
            lines_of(root, path, tmp_path / name)
    path = recipe(tmp_path / "poor", exec="x", needs="program nowhere-to-be-found\n")
    with pytest.raises(Failure, match="the recipe poor lacks program nowhere-to-be-found"):
        lines_of(root, path, tmp_path)


@pytest.mark.parametrize("words", [[], ["x", "--agent", "y"]])
def test_an_agent_or_a_recipe(run: Run, words: list[str]) -> None:
    assert run("acp", *words) == (2, "", "ctx: name an agent that is there, or a recipe with "
                                         "--agent\n")  # fmt: skip


def test_a_prompt_is_answered_before_the_end(root: FakeRoot, start: Callable[..., Acp]) -> None:
    editor, session = opened(root, start)
    FakeAgent(root, START, message("four"), {**DONE, "status": "processed"})
    ident = editor.begin("session/prompt", sessionId=session, prompt=prompt("two and two?"))
    output, errors = editor.process.communicate(timeout=TIMEOUT)  # which closes its input
    answer = json.loads(output.splitlines()[-1])
    assert (answer["id"], answer["result"]) == (ident, {"stopReason": "end_turn"})
    assert (editor.process.returncode, errors) == (0, b"")


class Passing(Source):
    """Agents that end with their conversations."""

    lasting = False

    def open(self, cwd: str) -> tuple[str, str]:
        return self.name, self.name


def test_the_end_of_the_editor_cancels_what_its_agents_do(root: FakeRoot) -> None:
    loop, where = Loop(), Root(str(root.path))
    editor = Editor(loop, where, Passing(where, "x"))
    session = editor.sessions["x"] = Session(editor, "x", "x")
    asked = Prompt(session, 1, "go on")
    session.prompts.append(asked)
    editor.end()
    assert asked.cancelled and not loop.over
    asked.done("aborted", "cancelled")
    assert json.loads(loop.unwritten[1])["result"] == {"stopReason": "cancelled"}
    assert loop.over


def test_it_ends_in_order(start: Callable[..., Acp]) -> None:
    editor = start("x")
    editor.result("initialize", **INITIALIZE)
    eventually(lambda: is_asleep(editor.process))
    editor.process.terminate()
    assert editor.process.wait(TIMEOUT) == os.EX_OK
