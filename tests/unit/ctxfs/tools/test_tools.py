"""The tools: what each takes and answers, who has it, and that what fails leaves nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyfuse3
import pytest
import trio
import trio.testing
from jsonschema import Draft202012Validator

from ctxfs.tools import registry
from ctxfs.tools.registry import BY_NAME, TOOLS
from ctxfs.tools.tool import Concerns
from runtime.agents.workspace import Worktree
from runtime.authority.disk import Share
from runtime.caller import Caller
from runtime.errors import (
    CtxError,
    DeniedError,
    MalformedError,
    MissingError,
    NotEmptyError,
    NotRunningError,
    QuotaError,
    TakenError,
    TooLargeError,
    TooLongError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import CallId, Incarnation, RunId
from runtime.life.conclusions import end_message
from runtime.life.elsewhere import Elsewhere
from runtime.records.change import Change
from runtime.records.items import MessageStatus, TaskCue, TaskStatus
from runtime.records.lifecycle import Status
from runtime.records.model import FAMILIES, Agent, Outcome
from runtime.records.modes import MODES
from runtime.records.nodes import Node
from runtime.records.run import Said
from tests.worlds.records import ROOT, add_end, inside
from tests.worlds.tree import STRANGER, USER, Mounted, mounted_in

NAMES = sorted(BY_NAME)

Input = dict[str, Any]


class Desk:
    """An agent ``coder`` of uid 1000 that works, and calls on its behalf."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted
        self.agents = mounted.agents
        self.coder = self.agent("coder", "agent:* create,start,stop,read,write,detach")
        self.me = inside(self.coder)

    def agent(self, name: str, *rules: str, caller: Caller = USER) -> Agent:
        """A live agent with more policy than by default."""
        agent = self.mounted.make(name, caller)
        more = "".join(f"allow {agent.label} {rule}\n" for rule in rules)
        self.agents.journal.update(
            agent, exec="sh -c true", mode="turn", policy=agent.policy + more
        )
        return self.mounted.live(agent)

    def call(self, name: str, given: Any = None, caller: Caller | None = None) -> dict[str, Any]:
        who = caller if caller is not None else self.me
        found = {} if given is None else given
        if name == "ExecCommand" and isinstance(found, dict):
            found = {"yield": 0, **found}
        try:
            return trio.run(
                registry.call, self.mounted.base, self.mounted.fs.root, who, name, found
            )
        except CtxError as error:
            # who has tools need not have files
            assert not re.search(r"\b(rmdir|mkdir|ctl|echo)\b", error.sentence), error.sentence
            raise

    def end(self, task: str, cue: TaskCue = TaskCue.DONE, text: str = "exit:0") -> None:
        """As its monitor would tell."""
        found = self.agents.tasks.find(self.coder, task)
        with self.agents.journal.changing() as change:
            if found.status is TaskStatus.QUEUED:
                change.put(found, status=TaskStatus.RUNNING)
            self.agents.tasks.end(change, self.coder, found, cue, exit_text=text)

    def go_on(self, name: str) -> Agent:
        """A child that takes messages is done with its task."""
        child = self.agents.registry.named(name)
        assert child is not None
        (task,) = self.agents.messages.pending(child)
        with self.agents.journal.changing() as change:
            self.agents.messages.deliver(change, child, task, RunId("r0"))
            self.agents.messages.end(change, child, task, MessageStatus.PROCESSED)
        return child

    def gone(self, name: str) -> Agent:
        """A child that has ended."""
        self.call("SpawnAgent", {"initial_message": "look", "name": name})
        return self.end_child(name)

    def end_child(self, name: str) -> Agent:
        child = self.agents.registry.named(name)
        assert child is not None
        change = Change()
        add_end(self.agents, change, child, Outcome.DONE)
        self.agents.journal.note(change)
        return child

    def write(self, task: str, data: bytes) -> None:
        """What a command wrote, as its monitor keeps it."""
        found = self.agents.tasks.find(self.coder, task)
        directory = self.agents.results.directory(self.coder, found)
        directory.mkdir(parents=True)
        (directory / "0").write_bytes(data)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with mounted_in(tmp_path, document_max=4096) as mounted:
        yield Desk(mounted)


def refused(error: type[CtxError], match: str | None = None) -> Any:
    return pytest.raises(error, match=match)


# the table


def test_no_two_tools_have_one_name() -> None:
    assert len(BY_NAME) == len(TOOLS)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_schemas_are_schemas_and_take_no_other_keys(tool: Any) -> None:
    for schema in (tool.schema, tool.output_schema):
        Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) <= set(schema["properties"])
    assert all(field["description"] for field in tool.schema["properties"].values())
    assert tool.family in FAMILIES
    assert tool.description.endswith(".")


# every one of them, by the agent itself and by an operator


def _unfocused(desk: Desk) -> None:
    desk.call("WorkFocus", {"id": None})


def _nothing(desk: Desk) -> None:
    pass


def _task(desk: Desk, name: str = "t") -> None:
    desk.call("ExecCommand", {"cmd": "cat", "task_id": name, "accepts_input": True})


def _running(desk: Desk) -> None:
    _task(desk)
    task = desk.agents.tasks.find(desk.coder, "t")
    with desk.agents.journal.changing() as change:
        change.put(task, status=TaskStatus.RUNNING)
    desk.mounted.run_task(desk.coder, "t")


def _ended(desk: Desk) -> None:
    _task(desk)
    desk.end("t")


def _dead(desk: Desk) -> None:
    desk.gone("helper")


def _has_worktree(desk: Desk, name: str) -> None:
    """A child has one, which is kept; git is no part of this world."""
    child = desk.agents.registry.named(name)
    assert child is not None
    kept = Worktree(name=name, root="/srv", common="/srv/.git", base="0").kept("not clean")
    desk.agents.journal.update(child, worktree=kept.dump(), worktree_made=True)


def _worked(desk: Desk) -> None:
    desk.gone("rev")
    _has_worktree(desk, "rev")


def _work(desk: Desk) -> None:
    desk.call("WorkCreate", {"id": "w", "objective": "fix it"})


def _wait(desk: Desk) -> None:
    desk.call("WaitFor", {"wake": "message", "id": "x"})


def _ask(desk: Desk) -> None:
    desk.call("Ask", {"question": "May I?", "options": ["yes", "no Not now"], "id": "q"})


def _asked_by_child(desk: Desk) -> None:
    _kid(desk)
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    desk.mounted.world.live(kid)
    given = {"question": "May I?", "options": ["yes", "no"], "to": "supervisor", "id": "q"}
    desk.call("Ask", given, inside(kid))


def _kid(desk: Desk) -> None:
    """A child that takes messages."""
    desk.call("SpawnAgent", {"initial_message": "look", "name": "kid", "mode": "turn"})
    desk.go_on("kid")


def _helper(desk: Desk) -> None:
    desk.agent("helper")


class Sample(NamedTuple):
    """A call; the first of each tool knows also the largest that an agent may say of it where
    there is much already (`adapter/test_cost.py`), and is not refused."""

    before: Callable[[Desk], None]
    given: Input
    answer: Input
    largest: Input | None = None


_PLAN = "- a step\n" * 7000
_LONG = "x" * 1_000_000
#: several of one tool have other names
KEPT = {
    "state": "kept",
    "branch": "ctx/rev",
    "path": "/srv/.git/ctx/rev/work",
    "commit": "",
    "reason": "not clean; repair that, or copy what you need from there without git, and remove "
    '"/srv/.git/ctx/rev"; then call WorktreeTake',
}
CALLS: dict[str, Sample] = {
    "SpawnAgent": Sample(
        _nothing,
        {"initial_message": "look", "name": "rev", "mode": "turn", "context": "fork"},
        {
            "agent_id": "rev",
            "task_handle": {
                "task_id": "rev",
                "task_kind": "child_agent_task",
                "status": "running",
                "initial_output": "",
            },
        },
        {"name": "k-spawned", "initial_message": _LONG},
    ),
    "SpawnAgent public": Sample(
        _nothing,
        {"preset": "public_named", "name": "rev", "exec": "cat", "model": "big"},
        {"agent_id": "rev"},
    ),
    "AgentGet": Sample(
        _wait, {"agent_id": "coder"}, {"status": "busy", "children": [], "tasks": {}},
        {},
    ),
    "AgentList": Sample(_helper, {}, {}, {}),
    "SendMessage": Sample(
        _helper,
        {"agent_id": "helper", "text": "hello", "priority": "next", "id": "m"},
        {"message_id": "m", "status": "queued"},
        {"agent_id": "k1", "text": _LONG, "priority": "interject"},
    ),
    "Report": Sample(
        _nothing,
        {"text": "half of it is done", "id": "half"},
        {"message_id": "half", "to": "operator"},
        {"text": "x" * 65_536, "id": "x" * 128},
    ),
    "AgentStop": Sample(
        _helper, {"agent_id": "helper"}, {"agent_id": "helper", "status": "stopping"},
        {"agent_id": "k2", "kill": True},
    ),
    "AgentStop kill": Sample(_helper, {"agent_id": "helper", "kill": True}, {"status": "stopping"}),
    "AgentRemove": Sample(
        _dead, {"agent_id": "helper"}, {"agent_id": "helper"}, {"agent_id": "k9"},
    ),
    "ResultWrite": Sample(
        _nothing,
        {"text": "all is well", "refs": [{"path": "artifact/log", "summary": "the log"}]},
        {"result_path": "/ctx/agent/coder.d/result.md"},
        {"text": "x" * 500_000, "refs": [{"path": f"artifact/{n:0200}"} for n in range(1024)]},
    ),
    "WorkCreate": Sample(
        _nothing,
        {"objective": "fix it", "plan": "1. look", "acceptance": "green", "focus": True},
        {"id": "work-1", "objective": "fix it", "status": "active", "focus": True},
        {"objective": "x" * 60_000, "plan": _PLAN, "acceptance": _PLAN, "focus": True},
    ),
    "WorkUpdate": Sample(
        _work,
        {"id": "w", "plan": "done", "parent": "chain", "status": "done"},
        {"id": "w", "status": "done", "parent": "chain"},
        {
            "id": "W2",
            "plan": _PLAN,
            "acceptance": _PLAN,
            "blocked_by": [f"W{n}" for n in range(3, 100)],
        },
    ),
    "WorkList": Sample(_work, {"all": True}, {"focus": ""}, {"all": True}),
    "WorkFocus": Sample(_work, {"id": "w"}, {"focus": "w"}, {"id": "W2"}),
    "WorkRemove": Sample(_work, {"id": "w"}, {"id": "w"}, {"id": "W1"}),
    "WorkFocus none": Sample(_work, {"id": None}, {"focus": ""}),
    "ExecCommand": Sample(
        _work,
        {
            "cmd": "make test",
            "title": "tests",
            "cwd": "/tmp",
            "env": {"A": "1 = 2", "B": ""},
            "work": "w",
        },
        {
            "task_handle": {
                "task_id": "task-1",
                "task_kind": "command_task",
                "status": "queued",
                "initial_output": "",
            }
        },
        {"cmd": "x" * 60_000, "env": {f"A{n}": "x" * 50 for n in range(1000)}},
    ),
    "TaskList": Sample(_task, {}, {}, {}),
    "TaskStatus": Sample(
        _ended, {"task_id": "t"}, {"status": "completed", "exit": "exit:0"},
        {"task_id": "T2"},
    ),
    "TaskOutput": Sample(
        _ended,
        {"task_id": "t", "block": True, "timeout": 5.5},
        {
            "status": "completed",
            "preview": "",
            "truncated": False,
            "output_path": "/ctx/agent/coder.d/task/t/output",
        },
        {"task_id": "T2"},
    ),
    "TaskInput": Sample(
        _running, {"task_id": "t", "text": "line\n"}, {"accepted": 5},
        {"task_id": "T2", "text": _LONG},
    ),
    "TaskStop": Sample(
        _running, {"task_id": "t", "kill": True}, {"status": "cancelling"},
        {"task_id": "T2"},
    ),
    "TaskRemove": Sample(_ended, {"task_id": "t"}, {"task_id": "t"}, {"task_id": "T9"}),
    "WorktreeTake": Sample(
        _worked,
        {"task_id": "rev"},
        {"task_id": "rev", "worktree": KEPT},
        {"task_id": "k8"},
    ),
    "WaitFor": Sample(
        _work,
        {"wake": "timer", "resource": "1h", "work": "w", "deadline": "2h"},
        {"wait_id": "wait-1", "status": "armed", "on": "timer 1h", "work": "w", "deadline": "2h"},
        {"wake": "external", "work": "W2", "deadline": "1h"},
    ),
    "WaitFor task": Sample(_task, {"wake": "task_result", "resource": "t"}, {"on": "task t"}),
    "WaitFor over": Sample(_ended, {"wake": "task_result", "resource": "t"}, {"status": "fired"}),
    "WaitFor message": Sample(_nothing, {"wake": "message", "id": "w1"}, {"wait_id": "w1"}),
    "WaitFor reply": Sample(
        _kid, {"wake": "child_reply", "resource": "kid"}, {"status": "armed", "on": "reply kid"}
    ),
    "WaitFor external": Sample(
        _nothing, {"wake": "external"}, {"status": "armed", "on": "trigger"}
    ),
    "WaitCancel": Sample(
        _wait, {"wait_id": "x"}, {"wait_id": "x", "status": "cancelled"},
        {"wait_id": "A2"},
    ),
    "Ask": Sample(
        _nothing,
        {
            "question": "May I push?",
            "options": ["yes", "no Not today"],
            "default": "no",
            "deadline": "1h",
        },
        {"ask_id": "ask-1", "status": "open", "wait_id": "wait-1"},
        {
            "question": "x" * 1024,
            "form": {
                "type": "object",
                "properties": {
                    f"f{n}": {"type": "string", "enum": [f"{n}{'x' * 80}"]} for n in range(64)
                },
            },
            "detail": "x\n" * 32_000,
        },
    ),
    "Ask and wait": Sample(
        _nothing, {"question": "May I?", "block": True, "timeout": 0}, {"status": "open"}
    ),
    "Ask again": Sample(
        _ask, {"question": "May I?", "id": "q"},
        {"ask_id": "q", "status": "open", "wait_id": "wait-1"},
    ),
    "AskWithdraw": Sample(_ask, {"ask_id": "q"}, {"ask_id": "q"}, {"ask_id": "Q9"}),
    "AskList": Sample(_asked_by_child, {}, {"left": 0}, {}),
    "AskAnswer": Sample(
        _asked_by_child,
        {"agent_id": "kid", "ask_id": "q", "answer": "yes", "note": "but slowly"},
        {"ask_id": "q", "status": "answered", "answer": "yes", "note": "but slowly"},
        {"agent_id": "k1", "ask_id": "Q", "answer": "yes", "note": "x\n" * 30_000},
    ),
    "WaitFor answer": Sample(
        _ask, {"wake": "answer", "resource": "q"}, {"status": "armed", "on": "answer q"}
    ),
}


_FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
#: nobody else does these for an agent
BY_THE_AGENT_ALONE = ("ResultWrite", "Report", "Ask")


def test_every_tool_is_called() -> None:
    assert {name.split()[0] for name in CALLS} == set(NAMES)


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("operator", [False, True], ids=["agent", "operator"])
def test_every_tool_answers_what_its_schema_says(desk: Desk, which: str, operator: bool) -> None:
    before, given, wanted, _ = CALLS[which]
    name = which.split()[0]
    before(desk)
    if operator and BY_NAME[name].concerns is not Concerns.OTHERS:
        given = {**given, "agent_id": "coder"}
    if operator and name in BY_THE_AGENT_ALONE:
        with refused(DeniedError):
            desk.call(name, given, USER)
        return
    output = desk.call(name, given, USER if operator else desk.me)
    Draft202012Validator(BY_NAME[name].output_schema).validate(output)
    json.dumps(output)
    assert {key: output.get(key) for key in wanted} == wanted


# what is refused


def test_an_unknown_tool_is_missing(desk: Desk) -> None:
    with refused(MissingError, "WaitCancel"):
        desk.call("Shell")


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("SpawnAgent", [], "input"),
        ("SpawnAgent", "x", "input"),
        ("SpawnAgent", {"prompt": "x"}, "prompt"),
        ("SpawnAgent", {}, "initial_message"),
        ("SpawnAgent", {"initial_message": " \n"}, "initial_message"),
        ("SpawnAgent", {"initial_message": 5}, "initial_message"),
        ("SpawnAgent", {"initial_message": "x", "preset": "root"}, "preset"),
        ("SpawnAgent", {"initial_message": "x", "name": "a/b"}, "name"),
        ("SpawnAgent", {"initial_message": "x", "name": "current"}, "name"),
        ("SpawnAgent", {"initial_message": "x", "mode": "daemon"}, "mode"),
        ("SpawnAgent", {"initial_message": "x", "context": "full"}, "context"),
        ("SpawnAgent", {"initial_message": "x", "workspace_mode": "copy"}, "workspace_mode"),
        ("SpawnAgent", {"initial_message": "x", "exec": "sh -c 'x"}, "exec"),
        ("SpawnAgent", {"initial_message": "x", "exec": "a\nb"}, "exec"),
        ("SpawnAgent", {"initial_message": "x", "model": "a\nb"}, "model"),
        ("SpawnAgent", {"initial_message": "x\0"}, "initial_message"),
        ("SpawnAgent", {"preset": "public_named"}, "name"),
        ("AgentGet", {"name": "coder"}, "name"),
        ("AgentGet", {"agent_id": ""}, "agent_id"),
        ("AgentList", {"all": True}, "all"),
        ("SendMessage", {"text": "x"}, "agent_id"),
        ("SendMessage", {"agent_id": "coder", "text": ""}, "text"),
        ("SendMessage", {"agent_id": "coder", "text": "x", "priority": "high"}, "priority"),
        ("SendMessage", {"agent_id": "coder", "text": "x", "id": "a b"}, "id"),
        ("SpawnAgent", {"initial_message": "x", "life": "detached"}, "life"),
        ("SpawnAgent", {"preset": "public_named", "name": "x", "life": "owned"}, "life"),
        ("AgentStop", {}, "agent_id"),
        ("AgentRemove", {}, "agent_id"),
        ("AgentRemove", {"agent_id": "a", "kill": True}, "kill"),
        ("ResultWrite", {}, "text"),
        ("ResultWrite", {"text": ""}, "text"),
        ("ResultWrite", {"text": "x", "refs": "artifact/x"}, "refs"),
        ("ResultWrite", {"text": "x", "refs": [{"path": "artifact/x"}, {}]}, "refs.1.path"),
        ("ResultWrite", {"text": "x", "refs": [{"path": "a", "size": 1}]}, "refs.0.size"),
        ("ResultWrite", {"text": "x", "refs": [{"path": "artifact/x"}, {"path": "../x"}]}, "refs"),
        ("TaskRemove", {}, "task_id"),
        ("WorkRemove", {}, "id"),
        ("WorktreeTake", {}, "task_id"),
        ("AgentStop", {"agent_id": "coder", "kill": 1}, "kill"),
        ("WorkCreate", {}, "objective"),
        ("WorkCreate", {"objective": ""}, "objective"),
        ("WorkCreate", {"objective": "x", "id": "a b"}, "id"),
        ("WorkCreate", {"objective": "x", "parent": "a\nb"}, "parent"),
        ("WorkCreate", {"objective": "x", "status": "done"}, "status"),
        ("WorkUpdate", {"objective": "x"}, "id"),
        ("WorkUpdate", {"id": "w", "status": "finished"}, "status"),
        ("WorkUpdate", {"id": "w", "blocked_by": ["w"]}, "blocked_by"),
        ("WorkUpdate", {"id": "w", "blocked_by": ["a", 1]}, "blocked_by.1"),
        ("WorkList", {"all": "yes"}, "all"),
        ("WorkFocus", {}, "id"),
        ("WorkFocus", {"id": 1}, "id"),
        ("ExecCommand", {"command": "ls"}, "command"),
        ("ExecCommand", {}, "cmd"),
        ("ExecCommand", {"cmd": ""}, "cmd"),
        ("ExecCommand", {"cmd": "x\0y"}, "cmd"),
        ("ExecCommand", {"cmd": "x", "title": "a\nb"}, "title"),
        ("ExecCommand", {"cmd": "x", "cwd": "src"}, "cwd"),
        ("ExecCommand", {"cmd": "x", "env": ["A=1"]}, "env"),
        ("ExecCommand", {"cmd": "x", "env": {"A": 1}}, "env.A"),
        ("ExecCommand", {"cmd": "x", "env": {"A": "1\nB=2"}}, "env.A"),
        ("ExecCommand", {"cmd": "x", "env": {"A=B": "1"}}, "env.A=B"),
        ("ExecCommand", {"cmd": "x", "env": {"CTX_SELF": "1"}}, "env.CTX_SELF"),
        ("ExecCommand", {"cmd": "x", "env": {"A": "\0"}}, "env.A"),
        ("ExecCommand", {"cmd": "x", "task_id": "../x"}, "task_id"),
        ("ExecCommand", {"cmd": "x", "yield": -1}, "yield"),
        ("ExecCommand", {"cmd": "x", "yield": "1m"}, "yield"),
        ("TaskList", {"all": 1}, "all"),
        ("TaskList", {"after": "x"}, "after"),
        ("WorkList", {"status": "x"}, "status"),
        ("AgentList", {"status": "x"}, "status"),
        ("AgentGet", {"after": 1}, "after"),
        ("TaskStatus", {"task": "t"}, "task"),
        ("TaskStatus", {}, "task_id"),
        ("TaskOutput", {"task_id": "t", "timeout": -1}, "timeout"),
        ("TaskOutput", {"task_id": "t", "timeout": "5"}, "timeout"),
        ("TaskOutput", {"task_id": "t", "timeout": "soon", "block": True}, "timeout"),
        ("TaskOutput", {"task_id": "t", "block": None}, "block"),
        ("TaskInput", {"task_id": "t"}, "text"),
        ("TaskStop", {"task_id": ["t"]}, "task_id"),
        ("WaitFor", {}, "wake"),
        ("WaitFor", {"wake": "trigger"}, "wake"),
        ("WaitFor", {"wake": "timer"}, "resource"),
        ("WaitFor", {"wake": "timer", "resource": "soon"}, "resource"),
        ("WaitFor", {"wake": "timer", "resource": "1s 2s"}, "resource"),
        ("WaitFor", {"wake": "message", "resource": "coder"}, "resource"),
        ("WaitFor", {"wake": "message", "deadline": "later"}, "deadline"),
        ("WaitFor", {"wake": "message", "id": "x.d"}, "id"),
        ("WaitCancel", {}, "wait_id"),
        ("Ask", {}, "question"),
        ("Ask", {"question": ""}, "question"),
        ("Ask", {"question": "a\nb"}, "question"),
        ("Ask", {"question": "x" * 2048}, "question"),
        ("Ask", {"question": "x", "options": ["yes"], "form": _FORM}, "form"),
        ("Ask", {"question": "x", "options": [f"o{n}" for n in range(17)]}, "options"),
        ("Ask", {"question": "x", "options": ["yes", "yes Again"]}, "options"),
        ("Ask", {"question": "x", "options": ["yes"], "default": "maybe"}, "default"),
        ("Ask", {"question": "x", "form": _FORM, "default": "{}"}, "default"),
        ("Ask", {"question": "x", "form": {"type": "object"}}, "form"),
        ("Ask", {"question": "x", "form": {"type": "object", "properties": {"a": {}}}}, "form"),
        ("Ask", {"question": "x", "deadline": "soon"}, "deadline"),
        ("Ask", {"question": "x", "to": "somebody"}, "to"),
        ("Ask", {"question": "x", "id": "a b"}, "id"),
        ("Ask", {"question": "x", "block": True, "timeout": "soon"}, "timeout"),
        ("AskWithdraw", {}, "ask_id"),
        ("AskList", {"all": True}, "all"),
        ("AskAnswer", {"agent_id": "coder", "ask_id": "q"}, "answer"),
        ("AskAnswer", {"agent_id": "coder", "ask_id": "q", "answer": 1}, "answer"),
    ],
)
def test_bad_input_is_told_with_its_field(desk: Desk, name: str, given: Any, field: str) -> None:
    _task(desk)
    _work(desk)
    before = _everything(desk)
    with pytest.raises(MalformedError) as caught:
        desk.call(name, given)
    assert caught.value.sentence.startswith(f"{field}: ")
    assert _everything(desk) == before
    with desk.mounted.as_(desk.me):
        assert f"EINVAL tool/{name}: {field}: " in desk.mounted.reason


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("TaskStatus", {"task_id": 3}, "task_id: 3 is not of type string"),
        ("WorkList", {"after": "t9"}, 'after: "t9" is not next of an earlier answer: go on after '
                                      "what that had"),
        ("TaskStop", {"task_id": ["t"]}, 'task_id: ["t"] is not of type string'),
        ("TaskOutput", {"task_id": "t", "timeout": -1}, "timeout: -1 is less than 0"),
        ("WorkList", {"all": "yes"}, 'all: "yes" is not of type boolean'),
        ("WorkFocus", {"id": [1] * 999}, f"id: [{'1,' * 39}1… is not of type"),
        ("WaitFor", {"wake": "noon"}, 'wake: unknown value "noon"; use timer'),
        ("AgentList", {"all": True}, "all: unknown key; use name, parent, status, recipes, after"),
        ("TaskStatus", {"task": "t"}, "task: unknown key; use task_id"),
    ],
)
def test_bad_input_is_shown_as_it_was_given(
    desk: Desk, name: str, given: Any, sentence: str
) -> None:
    with pytest.raises(MalformedError) as caught:
        desk.call(name, given)
    assert caught.value.sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("name", "given", "error", "field"),
    [
        ("SpawnAgent", {"initial_message": "x", "name": "coder"}, TakenError, "name"),
        ("SpawnAgent", {"initial_message": "x", "name": "t"}, TakenError, "name"),
        ("SpawnAgent", {"initial_message": "x" * 5000}, TooLargeError, "initial_message"),
        ("AgentGet", {"agent_id": "nobody"}, MissingError, "agent_id"),
        ("SendMessage", {"agent_id": "nobody", "text": "x"}, MissingError, "agent_id"),
        ("AgentStop", {"agent_id": "nobody"}, MissingError, "agent_id"),
        ("AgentStop", {"agent_id": "coder", "kill": True}, DeniedError, ""),
        ("AgentRemove", {"agent_id": "nobody"}, MissingError, "agent_id"),
        ("AgentRemove", {"agent_id": "coder"}, DeniedError, ""),
        ("ResultWrite", {"text": "x" * 5000}, TooLargeError, "text"),
        ("TaskRemove", {"task_id": "none"}, MissingError, "task_id"),
        ("WorktreeTake", {"task_id": "none"}, MissingError, "task_id"),
        ("WorkCreate", {"objective": "x", "id": "w"}, TakenError, "id"),
        ("WorkCreate", {"objective": "x" * 70000}, TooLongError, "objective"),
        ("WorkUpdate", {"id": "none"}, MissingError, "id"),
        ("WorkUpdate", {"id": "w", "blocked_by": ["none"]}, MissingError, "blocked_by"),
        ("WorkFocus", {"id": "none"}, MissingError, "id"),
        ("WorkRemove", {"id": "none"}, MissingError, "id"),
        ("ExecCommand", {"cmd": "x", "task_id": "t"}, TakenError, "task_id"),
        ("ExecCommand", {"cmd": "x", "work": "none"}, MissingError, "work"),
        ("ExecCommand", {"cmd": "x" * 70000}, TooLongError, "cmd"),
        ("TaskStatus", {"task_id": "none"}, MissingError, "task_id"),
        ("TaskOutput", {"task_id": "none"}, MissingError, "task_id"),
        ("TaskInput", {"task_id": "none", "text": "x"}, MissingError, "task_id"),
        ("TaskInput", {"task_id": "t", "text": "x"}, WrongStateError, ""),
        ("TaskStop", {"task_id": "none"}, MissingError, "task_id"),
        ("WaitFor", {"wake": "task_result", "resource": "none"}, MissingError, "resource"),
        ("WaitFor", {"wake": "child", "resource": "none"}, MissingError, "resource"),
        ("WaitFor", {"wake": "child_reply", "resource": "none"}, MalformedError, "resource"),
        ("WaitFor", {"wake": "message", "work": "none"}, MissingError, "work"),
        ("WaitFor", {"wake": "message", "id": "x"}, TakenError, "id"),
        ("WaitCancel", {"wait_id": "none"}, MissingError, "wait_id"),
        ("WaitFor", {"wake": "answer", "resource": "none"}, MissingError, "resource"),
        ("Ask", {"question": "x", "detail": "x" * 70000}, TooLongError, "detail"),
        ("AskWithdraw", {"ask_id": "none"}, MissingError, "ask_id"),
        ("AskAnswer", {"agent_id": "nobody", "ask_id": "q", "answer": "y"}, MissingError,
         "agent_id"),
        ("AskAnswer", {"agent_id": "coder", "ask_id": "q", "answer": "y"}, DeniedError, ""),
    ],
)
def test_refusals_are_those_of_the_files(
    desk: Desk, name: str, given: Input, error: type[CtxError], field: str
) -> None:
    _task(desk)
    _work(desk)
    _wait(desk)
    before = _everything(desk)
    with pytest.raises(error) as caught:
        desk.call(name, given)
    assert caught.type is error
    assert caught.value.sentence.startswith(f"{field}: " if field else "")
    assert _everything(desk) == before


def test_a_limit_is_a_limit_for_tools_too(tmp_path: Path) -> None:
    with mounted_in(tmp_path, tasks=1, work_items=1, waits=1, children=1, messages=1) as mounted:
        desk = Desk(mounted)
        _task(desk)
        _work(desk)
        _wait(desk)
        # its task is the one message that may wait
        desk.call("SpawnAgent", {"initial_message": "x", "mode": "turn"})
        message = {"agent_id": "coder-1", "text": "x"}
        before = _everything(desk)
        for name, given, remedy in (
            ("ExecCommand", {"cmd": "x"}, "end one with TaskStop$"),
            ("WorkCreate", {"objective": "x"}, "finish or cancel one with WorkUpdate$"),
            ("WaitFor", {"wake": "message"}, "cancel one with WaitCancel$"),
            ("SpawnAgent", {"initial_message": "x"}, "end one with AgentStop$"),
            ("SendMessage", message, "send again .* remove it with AgentRemove$"),
        ):
            with refused(QuotaError, remedy):
                desk.call(name, given)
        assert _everything(desk) == before


def test_an_owner_of_too_many_agents_is_told_what_to_do(tmp_path: Path) -> None:
    with mounted_in(tmp_path, agents=1) as mounted:
        desk = Desk(mounted)
        with refused(QuotaError, "remove agents that have ended, with AgentRemove$"):
            desk.call("SpawnAgent", {"initial_message": "x"})


def test_notices_that_are_not_read_are_told_of(tmp_path: Path) -> None:
    with mounted_in(tmp_path, messages=1) as mounted:
        desk = Desk(mounted)
        _ended(desk)
        with refused(QuotaError, "end the run at hand, or remove what .* or WaitCancel$"):
            desk.call("SpawnAgent", {"initial_message": "x"})


def _queued(desk: Desk) -> list[str]:
    return [message.sender for message in desk.agents.messages.pending(desk.coder)]


def test_who_removes_what_has_ended_need_not_be_told_of_it(tmp_path: Path) -> None:
    with mounted_in(tmp_path, messages=5, children=2, tasks=2, waits=2) as mounted:
        desk = Desk(mounted)
        for _ in range(20):
            desk.gone("rev")
            desk.call("WaitFor", {"wake": "child", "resource": "rev", "id": "x"})
            _ended(desk)
            assert _queued(desk) == ["task:rev", "wait:x", "task:t"]
            desk.call("AgentRemove", {"agent_id": "rev"})
            assert _queued(desk) == ["wait:x", "task:t"]
            desk.call("WaitCancel", {"wait_id": "x"})
            desk.call("TaskRemove", {"task_id": "t"})
            assert not _queued(desk)
        events = map(json.loads, mounted.world.lines(desk.coder))
        ends = [event for event in events if event["type"] == "message.end"]
        assert len(ends) == 60
        assert {(event["outcome"], event["reason"]) for event in ends} == {("dropped", "removed")}


def test_what_another_removes_is_still_told_of(desk: Desk) -> None:
    desk.gone("rev")
    desk.call("AgentRemove", {"agent_id": "rev"}, ROOT)
    desk.gone("rev")
    assert _queued(desk) == ["task:rev", "task:rev"]
    # it takes back what tells of this child, not of the one before it
    desk.call("AgentRemove", {"agent_id": "rev"})
    assert _queued(desk) == ["task:rev"]


def test_a_bug_is_told_as_one_and_ends_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(desk.mounted.base, "view", fail)
    with refused(CtxError, "an error inside ctxfs"):
        desk.call("AgentList")


# who has which


def _visible(desk: Desk, caller: Caller) -> set[str]:
    return {tool.name for tool in registry.visible(desk.mounted.base, caller)}


def test_a_public_agent_has_all_and_so_have_those_in_no_agent(desk: Desk) -> None:
    for caller in (desk.me, ROOT, USER, STRANGER):
        assert _visible(desk, caller) == set(NAMES)


def test_a_private_child_has_what_its_families_have(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    child = desk.agents.registry.named("rev")
    assert child is not None
    desk.mounted.world.live(child)
    assert _visible(desk, inside(child)) == set(NAMES) - {"SpawnAgent"}
    with refused(DeniedError, "agent_creation"):
        desk.call("SpawnAgent", {"initial_message": "x"}, inside(child))


def test_policy_takes_a_tool_away_at_once(desk: Desk) -> None:
    kept = desk.coder.policy.replace("tool:* execute", "tool:Task* execute")
    desk.agents.journal.update(desk.coder, policy=kept)
    assert _visible(desk, desk.me) == {"TaskList", "TaskStatus", "TaskOutput", "TaskInput",
                                       "TaskStop", "TaskRemove"}  # fmt: skip
    with refused(DeniedError, "tool:AgentList execute"):
        desk.call("AgentList")


def test_a_trigger_needs_its_family(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        desk.agents.authority, "families", lambda agent: ("core", "local_environment")
    )
    with refused(DeniedError, "external_trigger"):
        desk.call("WaitFor", {"wake": "external"})
    assert desk.call("WaitFor", {"wake": "message"})["status"] == "armed"


@pytest.mark.parametrize("which", ["unknown", "dead", "earlier"])
def test_who_is_nobody_has_nothing(desk: Desk, which: str) -> None:
    caller = Caller(0, 0, 7, known=False)
    if which == "dead":
        caller = desk.me
        desk.agents.journal.update(desk.coder, status=Status.DEAD)
    elif which == "earlier":
        caller = Caller(1000, 1000, 7, desk.coder.index, Incarnation("0123456789abcdef"))
    assert _visible(desk, caller) == set()
    with refused(DeniedError):
        desk.call("AgentList", {}, caller)


# whom a call concerns


OF_ONE = [tool.name for tool in TOOLS if tool.concerns is Concerns.CALLER]


@pytest.mark.parametrize("which", [n for n in CALLS if n in OF_ONE])
def test_operators_name_an_agent_that_is_theirs(desk: Desk, which: str) -> None:
    before, given, _, _ = CALLS[which]
    before(desk)
    with refused(MalformedError, "^agent_id: "):
        desk.call(which, given, USER)
    for name in ("coder", "nobody"):
        with refused(MissingError, "^agent_id: "):
            desk.call(which, {**given, "agent_id": name}, STRANGER)


@pytest.mark.parametrize("which", [n for n in CALLS if n in [*OF_ONE, "SpawnAgent"]])
def test_an_agents_calls_concern_itself(desk: Desk, which: str) -> None:
    before, given, _, _ = CALLS[which]
    before(desk)
    desk.agent("helper")
    with refused(DeniedError, "^agent_id: "):
        desk.call(which, {**given, "agent_id": "helper"})
    desk.call(which, {**given, "agent_id": "coder"})


def test_operators_name_whom_they_look_at(desk: Desk) -> None:
    with refused(MalformedError, "^agent_id: "):
        desk.call("AgentGet", {}, USER)
    with refused(DeniedError, "^agent_id: "):
        desk.call("AgentGet", {"agent_id": "coder"}, STRANGER)


def test_private_agents_are_not_there_for_others(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev", "mode": "turn"})
    other = inside(desk.agent("other"))
    blind = desk.agents.registry.named("other")
    assert blind is not None
    desk.agents.journal.update(
        blind, policy=blind.policy.replace("create,start,stop,read,write", "create")
    )
    for name, given in (
        ("AgentGet", {}),
        ("AgentStop", {}),
        ("SendMessage", {"text": "x"}),
    ):
        for caller in (other, STRANGER):
            with refused(MissingError, "^agent_id: "):
                desk.call(name, {"agent_id": "rev", **given}, caller)
    listed = [each["agent_id"] for each in desk.call("AgentList", {}, other)["agents"]]
    assert listed == ["coder", "other"]
    listed = [each["agent_id"] for each in desk.call("AgentList")["agents"]]
    assert listed == ["coder", "rev", "other"]


def test_what_ctl_and_inbox_deny_tools_deny(desk: Desk) -> None:
    other = desk.agent("other")
    desk.agents.journal.update(other, policy="allow other_t tool:* execute\n")
    with refused(DeniedError):
        desk.call("AgentStop", {"agent_id": "coder"}, inside(other))
    with refused(DeniedError):
        desk.call("SendMessage", {"agent_id": "coder", "text": "x"}, inside(other))
    with refused(DeniedError):
        desk.call("AgentGet", {"agent_id": "coder"}, inside(other))
    assert desk.call("AgentGet", {"agent_id": "other"}, desk.me)["status"] == "busy"


# SpawnAgent


def _everything(desk: Desk) -> dict[str, Any]:
    """All that tells of what was made: records, names, files; not what is in waiting rubbish."""
    agents = desk.agents
    state = desk.mounted.world.state
    rows = desk.mounted.world.store._db.execute
    return {
        "agents": [agent.name for agent in agents.registry],
        "records": rows("SELECT idx, channel, removed FROM agents WHERE removed=0").fetchall(),
        "names": rows("SELECT name, owner FROM names").fetchall(),
        "sessions": rows("SELECT agent, name FROM sessions").fetchall(),
        "items": rows("SELECT kind, data FROM items ORDER BY idx").fetchall(),
        "channels": [agents.sessions.channels(agent.session) for agent in agents.registry],
        "children": [
            [child.name for child in agents.registry.children(agent)] for agent in agents.registry
        ],
        "focus": desk.coder.focus,
        "files": sorted(
            str(path.relative_to(state))
            for top in ("agent", "home")
            for path in (state / top).rglob("*")
            if (top, path.name) != ("agent", "doc") and "/." not in str(path)  # discarded
        ),
        "waits": sorted(os.listdir(desk.mounted.world.path / "wait")),
        "events": desk.mounted.world.lines(desk.coder),
    }


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"name": "a b"}, MalformedError),
        ({"name": "forbidden"}, DeniedError),
        ({"preset": "public_named", "name": "forbidden"}, DeniedError),
        ({"preset": "public_named", "name": "named", "mode": "turn"}, DeniedError),
        ({"workspace_mode": "nowhere"}, MalformedError),
        ({"workspace_mode": "explicit_root:/"}, MalformedError),
        ({"exec": "sh -c 'open"}, MalformedError),
        ({"exec": ""}, None),
        ({"model": "forbidden"}, DeniedError),
        ({"initial_message": "x" * 5000}, TooLargeError),
        ({}, None),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("operator", [False, True], ids=["agent", "operator"])
def test_a_spawn_that_fails_leaves_nothing(
    desk: Desk,
    given: Input,
    error: type[CtxError] | None,
    operator: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = (
        "allow coder_t tool:* execute\nallow coder_t agent:coder-* create\n"
        "allow coder_t agent:named create\nallow coder_t model:small use\n"
    )
    desk.agents.journal.update(desk.coder, policy=policy)
    if operator and error is DeniedError and "model" not in given:
        return  # operators need no policy
    if error is None:  # the last step: the start itself

        def start(agent: Agent) -> None:
            raise NotRunningError("no start today")

        monkeypatch.setattr(desk.mounted.supervisor, "start", start)
        error = NotRunningError
    before = _everything(desk)
    whole = {"initial_message": "look", "mode": "turn", "model": "small", **given}
    if operator:
        whole["agent_id"] = "coder"
    with pytest.raises(error):
        desk.call("SpawnAgent", whole, USER if operator else desk.me)
    assert _everything(desk) == before
    desk.agents.removals.remove_strays()
    assert len(list((desk.mounted.world.state / "agent").glob("[!.]*"))) == 1
    # and nothing of it comes back
    agents = desk.mounted.world.reopen()
    assert [agent.name for agent in agents.registry] == ["coder"]
    assert agents.sessions.agents(1000) == ["coder"]


def test_the_name_of_a_failed_spawn_is_free_again(desk: Desk) -> None:
    for _ in range(3):
        with refused(MalformedError):
            desk.call("SpawnAgent", {"initial_message": "x", "name": "rev", "exec": "'"})
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    assert desk.agents.sessions.of(1000, "rev")[0][0] == "default"
    child = desk.agents.registry.named("rev")
    assert child is not None
    events = [json.loads(line)["type"] for line in desk.mounted.world.lines(child)]
    assert events.count("agent.create") == 1


def test_a_failed_spawn_keeps_what_an_earlier_child_of_the_name_left(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    child = desk.agents.registry.named("rev")
    assert child is not None
    desk.agents.journal.update(child, status=Status.DEAD)
    desk.agents.removals.remove(child)
    with refused(MalformedError):
        desk.call("SpawnAgent", {"initial_message": "x", "name": "rev", "exec": "'"})
    assert [name for name, _ in desk.agents.sessions.of(1000, "rev")] == ["default"]
    assert [index for _, index in desk.agents.sessions.channels(desk.coder.session)] == [
        child.index
    ]


def test_names_of_children_are_the_first_that_are_free(desk: Desk) -> None:
    desk.agent("coder-2")
    desk.call("ExecCommand", {"cmd": "x", "task_id": "coder-3"})
    made = [desk.call("SpawnAgent", {"initial_message": "x"})["agent_id"] for _ in range(2)]
    assert made == ["coder-1", "coder-4"]
    first = desk.agents.registry.named("coder-1")
    assert first is not None
    desk.agents.journal.update(first, status=Status.DEAD)
    desk.agents.removals.remove(first)
    assert desk.call("SpawnAgent", {"initial_message": "x"})["agent_id"] == "coder-1"


def test_a_name_that_another_user_had_is_not_free(desk: Desk) -> None:
    desk.mounted.make("coder-1", STRANGER)
    other = desk.agents.registry.named("coder-1")
    assert other is not None
    desk.agents.removals.remove(other)
    assert desk.call("SpawnAgent", {"initial_message": "x"})["agent_id"] == "coder-2"


@pytest.mark.parametrize(
    ("objects", "names"),
    [
        (["rev-*"], ["rev-1", "rev-2", "rev-3"]),
        (["rev*"], ["rev1", "rev2", "rev3"]),
        (["tester", "b*", "a*"], ["a1", "a2", "a3"]),
        (["one", "two", "zz*"], ["one", "two", "zz1"]),
        # without a name that is allowed, the next
        (["a" * 64 + "*", "-*", "b:c*", "z*"], ["z1", "z2", "z3"]),
        (["a" * 63 + "*", "z*"], [f"{'a' * 63}{n}" for n in (1, 2, 3)]),
        (["a*", "*"], ["coder-1", "coder-2", "coder-3"]),
    ],
)
def test_names_are_those_that_the_policy_has(
    desk: Desk, objects: list[str], names: list[str]
) -> None:
    lines = "".join(f"allow coder_t agent:{name} create\n" for name in objects)
    tools = "allow coder_t tool:* execute\nallow coder_t agent:other* read\n"
    desk.agents.journal.update(desk.coder, policy=tools + lines)
    made = [desk.call("SpawnAgent", {"initial_message": "x"})["agent_id"] for _ in range(3)]
    assert made == names


def test_without_a_name_to_be_had_none_is_made_up(desk: Desk) -> None:
    tools = "allow coder_t tool:* execute\n"
    desk.agents.journal.update(desk.coder, policy=tools)
    with refused(DeniedError, "^name: no agent create is in the effective policy"):
        desk.call("SpawnAgent", {"initial_message": "x"})
    desk.agents.journal.update(desk.coder, policy=f"{tools}allow coder_t agent:rev create\n")
    desk.call("SpawnAgent", {"initial_message": "x"})
    with refused(TakenError, "^name: no name .* is free: remove"):
        desk.call("SpawnAgent", {"initial_message": "x"})
    # what an agent may not, its operator may
    given = {"initial_message": "x", "agent_id": "coder"}
    assert desk.call("SpawnAgent", given, USER)["agent_id"] == "coder-1"


def test_another_user_cannot_hold_all_names(desk: Desk) -> None:
    for power in range(20):
        desk.mounted.world.store.claim_name(f"coder-{2 ** power}", STRANGER.uid)
    for _ in range(3):
        name = desk.call("SpawnAgent", {"initial_message": "x"})["agent_id"]
        assert int(name.removeprefix("coder-")).bit_count() > 1


def test_a_long_name_gives_children_names_too(desk: Desk) -> None:
    parent = desk.agent("a" * 64, "agent:* create")
    output = desk.call("SpawnAgent", {"initial_message": "x"}, inside(parent))
    assert output["agent_id"] == "a" * 58 + "-1"


def test_a_spawned_child_is_what_the_files_would_make(desk: Desk) -> None:
    given = {
        "initial_message": "Review it.\nAll of it.",
        "exec": "cat -n",
        "mode": "turn",
        "context": "fork",
        "workspace_mode": "explicit_root:/srv",
        "model": "big",
    }
    assert desk.call("SpawnAgent", given)["agent_id"] == "coder-1"
    child = desk.agents.registry.named("coder-1")
    assert child is not None
    assert child.parent == desk.coder.index
    assert (child.profile, child.life) == ("private_child", "owned")
    assert (child.exec, child.mode, child.context, child.model) == ("cat -n", "turn", "fork", "big")
    assert child.workspace == "explicit_root:/srv"
    assert desk.agents.documents.read(child, "handoff.md") == b"Review it.\nAll of it.\n"
    assert desk.agents.results.title(desk.agents.tasks.find(desk.coder, "coder-1")) == "Review it."
    assert desk.mounted.supervisor.said == [("start", "coder-1")]


def test_a_public_one_belongs_to_nobody(desk: Desk) -> None:
    given = {"preset": "public_named", "name": "peer", "initial_message": "begin"}
    assert desk.call("SpawnAgent", given) == {"agent_id": "peer"}
    peer = desk.agents.registry.named("peer")
    assert peer is not None
    assert (peer.life, peer.private) == ("detached", False)
    assert desk.call("TaskList") == {"tasks": [], "left": 0}


def test_an_operator_makes_root_agents_and_children(desk: Desk) -> None:
    for given in ({}, {"initial_message": "x"}):
        with refused(MalformedError, "^agent_id: .* or choose the preset public_named"):
            desk.call("SpawnAgent", given, USER)
    with refused(MalformedError, "^exec: .*, or name a recipe"):
        desk.call("SpawnAgent", {"preset": "public_named", "name": "root"}, USER)
    given = {"preset": "public_named", "name": "root", "exec": "cat"}
    assert desk.call("SpawnAgent", given, USER) == {"agent_id": "root"}
    root = desk.agents.registry.named("root")
    assert root is not None
    assert root.parent is None
    output = desk.call("SpawnAgent", {"initial_message": "x", "agent_id": "coder"}, USER)
    child = desk.agents.registry.named(output["agent_id"])
    assert child is not None
    assert child.parent == desk.coder.index
    assert output["task_handle"]["task_id"] == "coder-1"


def test_nothing_is_made_below_an_agent_that_is_ending(desk: Desk) -> None:
    desk.agents.journal.update(desk.coder, status=Status.STOPPING)
    with refused(WrongStateError):
        desk.call("SpawnAgent", {"initial_message": "x"})
    with refused(WrongStateError):
        desk.call("SpawnAgent", {"initial_message": "x", "agent_id": "coder"}, USER)
    assert [agent.name for agent in desk.agents.registry] == ["coder"]


def test_a_worktree_is_refused_where_there_is_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(agent: Agent) -> None:
        raise MalformedError("there is no workspace to make it of")

    monkeypatch.setattr(desk.mounted.supervisor, "start", start)
    before = _everything(desk)
    with refused(MalformedError):
        desk.call("SpawnAgent", {"initial_message": "x", "workspace_mode": "worktree"})
    assert _everything(desk) == before


# messages


def test_a_message_that_is_sent_again_is_the_same(desk: Desk) -> None:
    helper = desk.agent("helper")
    given = {"agent_id": "helper", "text": "hello", "id": "m"}
    assert desk.call("SendMessage", given) == desk.call("SendMessage", given)
    assert len(desk.agents.messages.pending(helper)) == 1
    with refused(TakenError):
        desk.call("SendMessage", given, USER)
    first = desk.call("SendMessage", {"agent_id": "helper", "text": "a"})["message_id"]
    assert first != desk.call("SendMessage", {"agent_id": "helper", "text": "a"})["message_id"]


def test_a_report_that_is_sent_again_is_the_same(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "kid"})
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    me = inside(desk.mounted.world.live(kid))
    given = {"text": "half", "id": "m"}
    for caller, to in ((me, "agent:coder"), (desk.me, "operator")):
        answer = desk.call("Report", given, caller)
        assert answer == desk.call("Report", given, caller) == {"message_id": "m", "to": to}
    assert [m.text for m in desk.agents.messages.pending(desk.coder)] == ["half"]
    assert [r.text for r in desk.agents.messages.reports(desk.coder)] == ["half"]
    # the same message, however it is said
    assert desk.call("SendMessage", {**given, "agent_id": "coder"}, me)["message_id"] == "m"
    with refused(MalformedError, "id: "):
        desk.call("Report", {"text": "x", "id": "a b"})


def test_a_supervisor_is_told_even_where_it_is_hidden(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "kid", "mode": "turn"})
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    kid = desk.mounted.world.live(desk.mounted.world.may_create(kid))
    desk.call("SpawnAgent", {"initial_message": "x", "name": "grandkid"}, inside(kid))
    grandkid = desk.agents.registry.named("grandkid")
    assert grandkid is not None
    me = inside(desk.mounted.world.live(grandkid))
    for tool in ("AgentGet", "AgentStop"):
        with refused(MissingError):
            desk.call(tool, {"agent_id": "kid"}, me)
    desk.call("SendMessage", {"agent_id": "kid", "text": "look"}, me)
    waiting = desk.agents.messages.pending(kid)
    assert [m.provenance for m in waiting] == ["delegation", "child"]


def _asked(desk: Desk, child: str = "kid") -> list[str]:
    """The texts that wait for a child, and what its parent waits for."""
    agent = desk.agents.registry.named(child)
    assert agent is not None
    texts = [message.text for message in desk.agents.messages.pending(agent)]
    return texts + [wait["on"] for wait in desk.call("AgentGet")["waiting"]]


@pytest.mark.parametrize("name", ["SendMessage", "TaskInput"])
def test_a_question_is_sent_with_a_wait_for_its_answer(desk: Desk, name: str) -> None:
    _kid(desk)
    about = {"SendMessage": "agent_id", "TaskInput": "task_id"}[name]
    answer = desk.call(name, {about: "kid", "text": "why?", "wait": True})
    Draft202012Validator(BY_NAME[name].output_schema).validate(answer)
    child = desk.agents.registry.named("kid")
    assert child is not None
    (message,) = desk.agents.messages.pending(child)
    assert answer["wait_id"] == "wait-1"
    assert answer.get("accepted", 4) == 4
    assert answer.get("message_id", message.name) == message.name
    assert _asked(desk) == ["why?", f"reply kid {message.name}"]
    desk.call("WaitCancel", {"wait_id": "wait-1"})
    plain = desk.call(name, {about: "kid", "text": "so", "wait": False})
    assert "wait_id" not in plain
    assert _asked(desk) == ["why?", "so"]


@pytest.mark.parametrize(("name", "about"), [("SendMessage", "agent_id"), ("TaskInput", "task_id")])
def test_a_question_that_is_asked_again_has_the_same_wait(
    desk: Desk, name: str, about: str
) -> None:
    _kid(desk)
    given = {about: "kid", "text": "why?", "id": "m", "wait": True}
    first = desk.call(name, given)
    Draft202012Validator(BY_NAME[name].output_schema).validate(first)
    assert desk.call(name, given) == first
    assert _asked(desk) == ["why?", "reply kid m"]
    child = desk.agents.registry.named("kid")
    assert child is not None
    with desk.agents.journal.changing() as change:
        (message,) = desk.agents.messages.pending(child)
        desk.agents.messages.deliver(change, child, message, RunId("r1"))
        desk.agents.messages.end(change, child, message, MessageStatus.PROCESSED, reply="so")
    again = desk.call(name, given)
    assert again == first | ({"status": "processed"} if "status" in first else {})
    wait = desk.agents.waiting.find(desk.coder, first["wait_id"])
    assert json.loads(wait.payload)["reply"] == "so"
    desk.call("WaitCancel", {"wait_id": wait.name})
    later = desk.agents.waiting.find(desk.coder, desk.call(name, given)["wait_id"])
    assert later.status == "fired", "its answer is still known"


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("name", "about"), [("SendMessage", "agent_id"), ("TaskInput", "task_id")])
def test_a_message_that_is_sent_again_changes_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str, about: str, wait: bool
) -> None:
    _kid(desk)
    given = {about: "kid", "text": "why?", "id": "m", "wait": wait}
    first = desk.call(name, given)
    assert first["message_id"] == "m"
    commits: list[Change] = []
    monkeypatch.setattr(desk.agents.journal, "commit", commits.append)
    assert desk.call(name, {**given, "text": "who?"}) == first
    assert commits == []


def test_a_wait_for_a_message_that_was_sent_without_one(desk: Desk) -> None:
    _kid(desk)
    given = {"agent_id": "kid", "text": "why?", "id": "m"}
    assert "wait_id" not in desk.call("SendMessage", given)
    assert desk.call("SendMessage", {**given, "wait": True})["wait_id"] == "wait-1"
    assert _asked(desk) == ["why?", "reply kid m"]


@pytest.mark.parametrize("together", [True, False])
def test_a_question_to_another_child_of_that_name_has_a_wait_of_its_own(
    desk: Desk, together: bool
) -> None:
    given = {"agent_id": "kid", "text": "why?", "id": "m", "wait": True}
    _kid(desk)
    first = desk.call("SendMessage", given)["wait_id"]
    child = desk.agents.registry.named("kid")
    assert child is not None
    with desk.agents.journal.changing() as change:
        add_end(desk.agents, change, child, Outcome.DONE, "exit:0")
    desk.agents.removals.remove(child)
    _kid(desk)
    if not together:
        desk.call("SendMessage", {**given, "wait": False})
    assert desk.call("SendMessage", given)["wait_id"] != first
    assert _asked(desk) == ["why?", "reply kid m"]


SPAWNED: Input = {"name": "kid", "initial_message": "look", "mode": "turn"}


def _end_task(desk: Desk, status: MessageStatus, **how: Any) -> None:
    """What a child was made for ends, and the child goes on."""
    child = desk.agents.registry.named("kid")
    assert child is not None
    message = desk.agents.messages.pending(child)[0]
    with desk.agents.journal.changing() as change:
        desk.agents.messages.deliver(change, child, message, RunId("r1"))
        end_message(change, desk.agents, child, message, status, **how)


def _told(desk: Desk) -> list[dict[str, Any]]:
    return [json.loads(message.text) for message in desk.agents.messages.pending(desk.coder)]


def test_a_parent_is_told_that_the_task_of_a_child_that_goes_on_failed(desk: Desk) -> None:
    desk.call("SpawnAgent", SPAWNED)
    _end_task(desk, MessageStatus.FAILED, reason="exit:3")
    (told,) = _told(desk)
    assert _notices(desk) == ["task_result"]
    assert (told["task"], told["status"], told["exit"]) == ("kid", "failed", "exit:3")
    assert (told["agent"], told["reason"], bool(told["message"])) == ("kid", "exit:3", True)
    assert desk.call("TaskStatus", {"task_id": "kid"})["status"] == "running"
    desk.call("SendMessage", {"agent_id": "kid", "text": "again"})
    _end_task(desk, MessageStatus.FAILED, reason="exit:3")
    assert len(_told(desk)) == 1, "whoever sends a message may wait for it"


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (MessageStatus.PROCESSED, {}, []),
        (MessageStatus.ABORTED, {}, ["cancelled"]),
        (MessageStatus.ABORTED, {"caused_by": "operator uid:0"}, ["cancelled"]),
        (MessageStatus.ABORTED, {"caused_by": "agent:coder run:r1"}, []),
        (MessageStatus.FAILED, {"last": True}, []),
    ],
)
def test_of_which_task_a_parent_is_told(
    desk: Desk, status: MessageStatus, said: dict[str, Any], expected: list[str]
) -> None:
    desk.call("SpawnAgent", SPAWNED)
    child = desk.agents.registry.named("kid")
    assert child is not None
    if by := said.pop("caused_by", ""):
        run = dataclasses.replace(child.run, caused_by=by)
        desk.agents.journal.update(child, run=run)
    _end_task(desk, status, **said)
    assert [told["status"] for told in _told(desk)] == expected


@pytest.mark.parametrize("status", [MessageStatus.PROCESSED, MessageStatus.FAILED])
def test_a_child_is_made_with_a_wait_for_its_first_reply(desk: Desk, status: MessageStatus) -> None:
    answer = desk.call("SpawnAgent", {**SPAWNED, "wait": True})
    Draft202012Validator(BY_NAME["SpawnAgent"].output_schema).validate(answer)
    assert (answer["wait_id"], answer["task_handle"]["task_id"]) == ("wait-1", "kid")
    child = desk.agents.registry.named("kid")
    assert child is not None
    (task,) = desk.agents.messages.pending(child)
    assert _asked(desk) == ["look\n", f"reply kid {task.name}"]
    _end_task(desk, status, reply="so", reason="")
    (told,) = _told(desk)
    assert (told["wait"], told["payload"]["outcome"]) == ("wait-1", status.value), "and once only"


@pytest.mark.parametrize(
    ("given", "who", "match"),
    [
        ({"mode": "once"}, None, "wait: .* is a once agent"),
        ({"preset": "public_named"}, None, "wait: a public_named agent"),
        ({"agent_id": "coder"}, USER, "wait: an operator"),
    ],
)
def test_where_no_wait_for_a_first_reply_can_be_nothing_is_made(
    desk: Desk, given: Input, who: Caller | None, match: str
) -> None:
    before, hooks = _everything(desk), list(desk.agents.messages.when_queued)
    with refused(MalformedError, match):
        desk.call("SpawnAgent", {**SPAWNED, **given, "wait": True}, who)
    assert _everything(desk) == before
    assert desk.agents.messages.when_queued == hooks


def test_a_child_that_cannot_be_waited_for_is_not_made(tmp_path: Path) -> None:
    with mounted_in(tmp_path, waits=1) as mounted:
        desk = Desk(mounted)
        _wait(desk)
        before = _everything(desk)
        with refused(QuotaError, "WaitCancel"):
            desk.call("SpawnAgent", {**SPAWNED, "wait": True})
        assert _everything(desk) == before


def test_where_no_wait_can_be_nothing_is_sent(desk: Desk) -> None:
    _kid(desk)
    _running(desk)
    desk.agent("helper")
    before = _everything(desk)
    for caller, name, given, error, match in (
        (None, "SendMessage", {"agent_id": "helper"}, MalformedError, "^wait: .* has no child"),
        (ROOT, "SendMessage", {"agent_id": "helper"}, MalformedError, "^wait: an operator"),
        (None, "TaskInput", {"task_id": "t"}, MalformedError, "^wait: .* is a command"),
        (None, "TaskInput", {"task_id": "t", "id": "m", "wait": False}, MalformedError, "^id: .*"),
        (ROOT, "TaskInput", {"task_id": "kid", "agent_id": "coder"}, DeniedError, "the creator"),
    ):
        with refused(error, match):
            desk.call(name, {"wait": True, **given, "text": "why?"}, caller)
        assert _everything(desk) == before
    assert _asked(desk) == []


@pytest.mark.parametrize("settings", [{"waits": 0}, {"messages": 0}])
def test_where_there_is_no_room_nothing_is_sent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    _kid(desk)
    before = _everything(desk)
    config = dataclasses.replace(desk.agents.settings.config, **settings)
    monkeypatch.setattr(desk.agents.settings, "config", config)
    for name, about in (("SendMessage", "agent_id"), ("TaskInput", "task_id")):
        with refused(QuotaError):
            desk.call(name, {about: "kid", "text": "why?", "wait": True})
    assert _everything(desk) == before


def test_once_agents_take_no_messages(desk: Desk) -> None:
    helper = desk.agent("helper")
    desk.agents.journal.update(helper, mode="once")
    with refused(WrongStateError):
        desk.call("SendMessage", {"agent_id": "helper", "text": "x"})


# tasks


def test_a_command_is_what_the_files_would_make(desk: Desk) -> None:
    CALLS["ExecCommand"][0](desk)
    desk.call("ExecCommand", CALLS["ExecCommand"][1])
    task = desk.agents.tasks.find(desk.coder, "task-1")
    assert (task.cmd, task.title, task.cwd, task.work) == ("make test", "tests", "/tmp", "w")
    assert task.env == "A=1 = 2\nB=\n"
    assert task.status is TaskStatus.QUEUED
    assert desk.call("ExecCommand", {"cmd": "y"})["task_handle"]["task_id"] == "task-2"


def test_a_command_of_a_paused_agent_is_not_left_behind(desk: Desk) -> None:
    desk.agents.journal.update(desk.coder, frozen=True)
    before = _everything(desk)
    with refused(WrongStateError):
        desk.call("ExecCommand", {"cmd": "x", "agent_id": "coder"}, USER)
    assert _everything(desk) == before


def test_only_live_tasks_are_listed(desk: Desk) -> None:
    _ended(desk)
    desk.call("ExecCommand", {"cmd": "x", "task_id": "on"})
    desk.call("SpawnAgent", {"initial_message": "look", "name": "rev"})
    tasks = desk.call("TaskList")["tasks"]
    assert [(task["task_id"], task["status"]) for task in tasks] == [
        ("on", "queued"),
        ("rev", "running"),
    ]
    counted = desk.call("AgentGet")["tasks"]
    assert counted == {"completed": 1, "queued": 1, "running": 1}


#: of a command that is waited for, however long it takes
COMMAND: Input = {"cmd": "echo it", "task_id": "t", "yield": 50}


def _notices(desk: Desk) -> list[str]:
    return [message.provenance for message in desk.agents.messages.pending(desk.coder)]


def test_a_command_that_ends_in_time_is_answered_with_its_output_and_told_no_more(
    desk: Desk,
) -> None:
    def end() -> None:
        desk.write("t", b"it\n")
        desk.end("t", TaskCue.ERROR, "exit:3")
        assert _notices(desk) == ["task_result"]

    answer = _blocked(desk, end, "ExecCommand", COMMAND)
    assert answer == {"task_handle": {
        "task_id": "t", "task_kind": "command_task", "status": "failed",
        "initial_output": "it\n", "exit": "exit:3", "reason": "exit:3",
    }}  # fmt: skip
    Draft202012Validator(BY_NAME["ExecCommand"].output_schema).validate(answer)
    assert _notices(desk) == []


def test_who_did_not_call_is_told_of_the_end(desk: Desk) -> None:
    given = {**COMMAND, "agent_id": "coder"}
    answer = _blocked(desk, lambda: desk.end("t"), "ExecCommand", given, caller=USER)
    assert answer["task_handle"]["exit"] == "exit:0"
    assert _notices(desk) == ["task_result"]


def test_a_command_that_goes_on_is_answered_with_what_it_wrote(desk: Desk) -> None:
    async def ask() -> dict[str, Any]:
        return await registry.call(
            desk.mounted.base, desk.mounted.fs.root, desk.me, "ExecCommand", COMMAND
        )

    desk.agents.journal.update(desk.coder, mode="once")
    answer = trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))
    assert answer["wakes"] is False
    assert answer["task_handle"]["status"] == "queued"
    assert "exit" not in answer["task_handle"]
    desk.end("t")


def test_a_command_that_is_removed_while_it_is_waited_for_is_answered(desk: Desk) -> None:
    def remove() -> None:
        desk.agents.tasks.remove(desk.coder, desk.agents.tasks.find(desk.coder, "t"))

    answer = _blocked(desk, remove, "ExecCommand", COMMAND)
    assert answer["task_handle"]["status"] == "queued"


def test_a_repeated_call_of_a_command_has_its_end(desk: Desk) -> None:
    once = CallId("once")
    first = _blocked(desk, lambda: desk.end("t"), "ExecCommand", COMMAND, call_id=once)
    assert first["task_handle"]["exit"] == "exit:0"
    base, root = desk.mounted.base, desk.mounted.fs.root
    again = trio.run(registry.call, base, root, desk.me, "ExecCommand", COMMAND, once)
    assert again == first
    assert len(desk.agents.tasks.known(desk.coder)) == 1


def test_a_daemon_that_is_executed_again_does_not_wait_for_who_waits(desk: Desk) -> None:
    progress: dict[str, Any] = {}
    noted: list[str] = []

    def execute() -> None:
        assert not desk.mounted.base.calls, "nothing keeps it from being executed"
        noted.append(json.dumps(progress))
        desk.end("t")

    _blocked(desk, execute, "ExecCommand", COMMAND, progress=progress)
    _task(desk, "t2")
    decided = json.loads(noted[0].replace('"t"', '"t2"'))
    call = partial(registry.call, progress=decided)
    answer = trio.run(
        call, desk.mounted.base, desk.mounted.fs.root, desk.me, "ExecCommand", COMMAND
    )
    assert answer == decided["decided"], "the next one answers at once"
    assert len(desk.agents.tasks.known(desk.coder)) == 2


def test_input_needs_somebody_who_reads(desk: Desk) -> None:
    desk.call("ExecCommand", {"cmd": "x", "task_id": "deaf"})
    with refused(DeniedError, "accepts_input"):
        desk.call("TaskInput", {"task_id": "deaf", "text": "x"})
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev", "mode": "turn"})
    child = desk.go_on("rev")
    assert desk.call("TaskInput", {"task_id": "rev", "text": "more"})["accepted"] == 4
    assert [message.text for message in desk.agents.messages.pending(child)] == ["more"]


def test_stopping_a_handle_stops_the_child(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    assert desk.call("TaskStop", {"task_id": "rev"})["status"] == "cancelling"
    assert desk.mounted.supervisor.said[-1] == ("supervisor_stop", "rev")


def test_a_long_output_is_shown_in_part(desk: Desk) -> None:
    _running(desk)
    desk.write("t", b"begin\n" + b"x" * 20000 + b"\nend\n")
    output = desk.call("TaskOutput", {"task_id": "t"})
    assert output["truncated"]
    assert output["preview"].startswith("begin\n")
    assert output["preview"].endswith("\nend\n")
    assert len(output["preview"]) <= 8 << 10
    assert "left out" in output["preview"]


def _blocked(
    desk: Desk,
    then: Callable[[], None],
    name: str = "TaskOutput",
    given: Input | None = None,
    **how: Any,
) -> Any:
    """What a call answers that waits, TaskOutput by default, if this happens once it does."""
    found = given or {"task_id": "t", "block": True}
    who = how.pop("caller", desk.me)

    async def both() -> Any:
        answers: list[Any] = []

        async def ask() -> None:
            base, root = desk.mounted.base, desk.mounted.fs.root
            try:
                answers.append(await registry.call(base, root, who, name, found, **how))
            except CtxError as error:
                answers.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            then()
        return answers[0]

    return trio.run(both)


def test_output_can_be_waited_for(desk: Desk) -> None:
    _running(desk)
    output = _blocked(desk, lambda: desk.end("t", TaskCue.ERROR, "exit:3"))
    assert (output["status"], output["exit"]) == ("failed", "exit:3")


def test_what_an_ended_child_gave_back_is_offered(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "look", "name": "kid"})
    child = desk.agents.registry.named("kid")
    assert child is not None
    running = desk.call("TaskOutput", {"task_id": "kid"})
    assert running.keys() & {"result", "refs", "artifacts"} == set()
    desk.agents.documents.write(child, "result.md", b"good\n")
    desk.agents.documents.write(child, "refs.jsonl", b'{"path":"a"}\n')
    change = Change()
    add_end(desk.agents, change, child, Outcome.ERROR, "exit:7")
    desk.agents.journal.note(change)
    output = desk.call("TaskOutput", {"task_id": "kid"})
    assert (output["result"], output["refs"], output["artifacts"]) == (
        "good\n", [{"path": "a"}], [],
    )  # fmt: skip
    assert output["output_path"].endswith("/context/child/kid/result.md")
    status = desk.call("TaskStatus", {"task_id": "kid"})
    assert (status["exit"], status["reason"], status["status"]) == ("exit:7", "exit:7", "failed")


def test_waiting_for_output_ends_with_the_time(desk: Desk) -> None:
    _running(desk)
    given = {"task_id": "t", "block": True, "timeout": 0.01}
    assert desk.call("TaskOutput", given)["status"] == "running"


def test_waiting_for_output_ends_with_the_task(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "t"})
    child = desk.agents.registry.named("t")
    assert child is not None
    answer = _blocked(desk, lambda: desk.agents.births.set_life(child, "detached", "public_named"))
    assert isinstance(answer, MissingError)


def test_who_is_gone_is_not_answered(desk: Desk) -> None:
    _running(desk)

    def end() -> None:
        desk.end("t")
        desk.agents.journal.update(desk.coder, status=Status.DEAD)

    assert isinstance(_blocked(desk, end), DeniedError)


def test_the_policy_is_looked_at_again_after_waiting(desk: Desk) -> None:
    _running(desk)

    def narrow() -> None:
        desk.agents.journal.update(desk.coder, policy="")
        desk.end("t")

    assert isinstance(_blocked(desk, narrow), DeniedError)


# work


def test_an_update_is_all_or_nothing(desk: Desk) -> None:
    _work(desk)
    before = _everything(desk)
    with refused(MissingError):
        desk.call("WorkUpdate", {"id": "w", "plan": "new", "blocked_by": ["none"]})
    assert _everything(desk) == before
    with refused(TooLongError):
        desk.call("WorkCreate", {"objective": "x", "plan": "x" * 70000, "focus": True})
    assert _everything(desk) == before


def test_what_is_over_is_listed_only_when_asked_for(desk: Desk) -> None:
    _work(desk)
    desk.call("WorkUpdate", {"id": "w", "status": "cancelled"})
    with refused(WrongStateError):
        desk.call("WorkUpdate", {"id": "w", "plan": "more"})
    assert desk.call("WorkList")["items"] == []
    assert [item["id"] for item in desk.call("WorkList", {"all": True})["items"]] == ["w"]


def test_a_work_item_is_what_the_files_show(desk: Desk) -> None:
    CALLS["WorkCreate"][0](desk)
    desk.call("WorkCreate", CALLS["WorkCreate"][1])
    directory = "agent/coder.d/work/work-1"
    assert desk.mounted.get(f"{directory}/plan.md") == "1. look\n"
    assert desk.mounted.get(f"{directory}/acceptance.md") == "green\n"
    assert desk.mounted.get("agent/coder.d/work/current") == "work-1\n"
    desk.call("WorkCreate", {"objective": "first", "id": "first"})
    desk.call("WorkUpdate", {"id": "work-1", "blocked_by": ["first"]})
    assert desk.mounted.get(f"{directory}/status") == "blocked\n"


def test_a_work_item_is_removed_once_it_is_not_at_hand(desk: Desk) -> None:
    _work(desk)
    desk.call("WorkFocus", {"id": "w"})
    with refused(WrongStateError, "is active: end it or open it first"):
        desk.call("WorkRemove", {"id": "w"})
    desk.call("WorkUpdate", {"id": "w", "status": "done"})
    assert desk.call("WorkRemove", {"id": "w"}) == {"id": "w"}
    assert desk.call("WorkList", {"all": True})["items"] == []


def test_the_planes_of_an_agent_that_does_not_live_are_not_changed(desk: Desk) -> None:
    _work(desk)
    desk.agents.journal.update(desk.coder, status=Status.DEAD)
    for name, given in (
        ("WorkUpdate", {"id": "w", "plan": "x"}),
        ("WorkFocus", {"id": "w"}),
        ("WorkCreate", {"objective": "x"}),
        ("WaitFor", {"wake": "message"}),
        ("ExecCommand", {"cmd": "x"}),
    ):
        with refused(WrongStateError):
            desk.call(name, {**given, "agent_id": "coder"}, USER)
    assert len(desk.call("WorkList", {"agent_id": "coder"}, USER)["items"]) == 1


# waits


def test_a_wait_blocks_its_work_and_is_seen(desk: Desk) -> None:
    _work(desk)
    desk.call("WaitFor", {"wake": "message", "work": "w", "id": "x"})
    assert desk.call("WorkList")["items"][0]["blocked_by"] == ["wait x"]
    seen = desk.call("AgentGet")
    assert seen["waiting"] == [{"wait_id": "x", "status": "armed", "on": "message", "work": "w"}]
    assert desk.call("WaitCancel", {"wait_id": "x"})["status"] == "cancelled"
    assert desk.call("WorkList")["items"][0]["status"] == "open"
    with refused(MissingError):
        desk.call("WaitCancel", {"wait_id": "x"})


def test_a_token_is_a_file_to_write_to(desk: Desk) -> None:
    token = desk.call("WaitFor", {"wake": "external", "id": "x"})["token"]
    assert token.startswith("/ctx/trigger/")
    desk.mounted.put(token.removeprefix("/ctx/"), "done")
    assert desk.mounted.get("agent/coder.d/waiting/x/payload") == "done"
    assert desk.call("WaitCancel", {"wait_id": "x"})["status"] == "fired"


def test_a_wait_that_is_refused_is_not_there(desk: Desk) -> None:
    before = _everything(desk)
    with refused(MissingError):
        desk.call("WaitFor", {"wake": "task_result", "resource": "none", "deadline": "1h"})
    assert _everything(desk) == before


# lists


def _many(desk: Desk) -> None:
    for n in range(80):
        objective = f"{n} " + "x" * 990
        desk.call("WorkCreate", {"id": f"w{n}", "objective": objective, "parent": f"{n % 2}"})
    for n in range(200):
        desk.call("ExecCommand", {"cmd": "x", "task_id": f"t{n}", "title": "x" * 100})
        desk.call("WaitFor", {"wake": "timer", "resource": "1h", "id": f"x{n}"})
    for n in range(300):
        desk.agents.births.create(desk.me, f"k{n}")


@pytest.fixture
def busy_desk(desk: Desk) -> Desk:
    """One with more of everything than an answer has room for."""
    _many(desk)
    return desk


def _all_of(desk: Desk, name: str, key: str, given: Input) -> list[list[Input]]:
    """The pages of a list, each of which is bounded and tells what it leaves out."""
    pages: list[list[Input]] = []
    cursor: Input = {}
    lefts: list[int] = []
    while True:
        answer = desk.call(name, {**given, **cursor})
        Draft202012Validator(BY_NAME[name].output_schema).validate(answer)
        assert len(json.dumps(answer, ensure_ascii=False).encode()) < 80_000 / 2 + 1000
        pages.append(answer[key])
        lefts.append(answer["left"])
        if not answer["left"]:
            assert "next" not in answer
            break
        cursor = {"after": answer["next"]}
    total = sum(map(len, pages))
    done = [sum(map(len, pages[: n + 1])) for n in range(len(pages))]
    assert lefts == [total - each for each in done]
    return pages


def test_a_long_list_is_bounded_and_goes_on_where_it_ended(busy_desk: Desk) -> None:
    for name, key, id_key, wanted in (
        ("WorkList", "items", "id", [f"w{n}" for n in range(80)]),
        ("TaskList", "tasks", "task_id", [f"t{n}" for n in range(200)]),
        ("AgentList", "agents", "agent_id", ["coder", *(f"k{n}" for n in range(300))]),
    ):
        pages = _all_of(busy_desk, name, key, {})
        assert len(pages) > 1, name
        found = [entry[id_key] for page in pages for entry in page]
        assert [each for each in found if each in wanted] == wanted, name
        assert len(set(found)) == len(found), name


def test_a_list_goes_on_though_what_it_ended_with_is_gone(busy_desk: Desk) -> None:
    first = busy_desk.call("TaskList", {"task_kind": "command_task"})
    last = first["tasks"][-1]["task_id"]
    busy_desk.end(last)
    busy_desk.call("TaskRemove", {"task_id": last})
    second = busy_desk.call("TaskList", {"task_kind": "command_task", "after": first["next"]})
    assert second["tasks"][0]["task_id"] == f"t{len(first['tasks'])}"


def test_a_list_is_of_what_is_chosen(busy_desk: Desk) -> None:
    desk = busy_desk
    desk.end("t3")

    def listed(name: str, key: str, given: Input) -> list[Any]:
        return [entry for page in _all_of(desk, name, key, given) for entry in page]

    odd = listed("WorkList", "items", {"parent": "1"})
    assert [item["id"] for item in odd] == [f"w{n}" for n in range(1, 80, 2)]
    assert listed("WorkList", "items", {"status": "done"}) == []
    commands = listed("TaskList", "tasks", {"task_kind": "command_task"})
    assert {task["task_kind"] for task in commands} == {"command_task"}
    ended = {task["task_id"] for task in listed("TaskList", "tasks", {"all": True})}
    assert "t3" in ended
    assert "t3" not in {task["task_id"] for task in listed("TaskList", "tasks", {})}
    names = [agent["agent_id"] for agent in listed("AgentList", "agents", {"name": "k19*"})]
    assert names == ["k19", *(f"k{n}" for n in range(190, 200))]
    assert [a["agent_id"] for a in listed("AgentList", "agents", {"name": "k19"})] == ["k19"]
    assert len(listed("AgentList", "agents", {"parent": "coder", "status": "new"})) == 300
    assert listed("AgentList", "agents", {"parent": "nobody"}) == []


def test_what_an_agent_is_has_room_for_some_of_its_children_and_waits(busy_desk: Desk) -> None:
    facts = busy_desk.call("AgentGet")
    assert len(json.dumps(facts).encode()) < 80_000 / 2
    assert len(facts["children"]) + facts["children_left"] == 300
    assert len(facts["waiting"]) + facts["waiting_left"] == 200
    more = busy_desk.call("AgentGet", {"after": facts["waiting_next"]})
    assert more["children"] == facts["children"]
    assert more["waiting"][0]["wait_id"] == f"x{len(facts['waiting'])}"


# removing


def test_an_agent_is_removed_once_it_has_ended(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    with refused(WrongStateError, "stop it"):
        desk.call("AgentRemove", {"agent_id": "rev"})
    child = desk.end_child("rev")
    assert desk.call("TaskStatus", {"task_id": "rev"})["status"] == "completed"
    assert desk.call("AgentRemove", {"agent_id": "rev"}) == {"agent_id": "rev"}
    assert desk.agents.registry.named("rev") is None
    with refused(MissingError):
        desk.call("TaskStatus", {"task_id": "rev"})
    channels = desk.agents.sessions.channels(desk.coder.session)
    assert channels == [("rev", child.index)]
    with refused(MissingError, "^agent_id: "):
        desk.call("AgentRemove", {"agent_id": "rev"})


def test_what_others_made_is_not_removed(desk: Desk) -> None:
    desk.gone("rev")
    other = desk.agent("other")
    with refused(MissingError, "^agent_id: "):
        desk.call("AgentRemove", {"agent_id": "rev"}, inside(other))
    desk.agents.journal.update(other, status=Status.DEAD)
    with refused(DeniedError):
        desk.call("AgentRemove", {"agent_id": "other"})
    assert desk.agents.registry.named("rev") is not None


def test_a_handle_is_removed_with_its_agent_and_only_so(desk: Desk) -> None:
    desk.gone("rev")
    with refused(WrongStateError, "AgentRemove"):
        desk.call("TaskRemove", {"task_id": "rev"})
    assert desk.agents.tasks.find(desk.coder, "rev").child


def test_a_handle_without_its_agent_is_removed_as_a_task(desk: Desk) -> None:
    _worked(desk)
    desk.call("AgentRemove", {"agent_id": "rev"})
    with refused(NotEmptyError, "not clean.*; then call WorktreeTake$"):
        desk.call("TaskRemove", {"task_id": "rev"})
    assert desk.call("WorktreeTake", {"task_id": "rev"})["worktree"] == KEPT
    assert desk.mounted.supervisor.said[-1] == ("fetch", "rev")


def test_what_became_of_a_worktree_is_told_wherever_its_child_is(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev"})
    _has_worktree(desk, "rev")
    assert desk.call("TaskOutput", {"task_id": "rev"})["worktree"] == KEPT
    desk.end_child("rev")
    for name, given in (
        ("TaskStatus", {"task_id": "rev"}),
        ("TaskOutput", {"task_id": "rev"}),
        ("AgentGet", {"agent_id": "rev"}),
    ):
        assert desk.call(name, given)["worktree"] == KEPT, name
    (notice,) = desk.agents.messages.pending(desk.coder)
    assert json.loads(notice.text)["worktree"] == KEPT


def test_what_has_no_worktree_says_nothing_of_one(desk: Desk) -> None:
    desk.gone("rev")
    _ended(desk)
    for task in ("rev", "t"):
        assert "worktree" not in desk.call("TaskStatus", {"task_id": task})
        assert "worktree" not in desk.call("TaskOutput", {"task_id": task})
        with refused(MalformedError, "has no worktree$"):
            desk.call("WorktreeTake", {"task_id": task})
    for notice in desk.agents.messages.pending(desk.coder):
        assert "worktree" not in json.loads(notice.text)


def test_a_status_tells_whose_handle_it_is_and_what_it_takes(desk: Desk) -> None:
    _kid(desk)
    _task(desk)
    facts = [desk.call("TaskStatus", {"task_id": task}) for task in ("kid", "t")]
    keys = ("agent", "accepts_input", "wait_policy")
    assert [[each[key] for key in keys] for each in facts] == [
        ["kid", True, "background"], ["", True, "background"],
    ]  # fmt: skip
    desk.call("ExecCommand", {"cmd": "x", "task_id": "u"})
    assert desk.call("TaskStatus", {"task_id": "u"})["accepts_input"] is False


def test_a_task_is_removed_once_it_has_ended(desk: Desk) -> None:
    _running(desk)
    with refused(WrongStateError):
        desk.call("TaskRemove", {"task_id": "t"})
    desk.end("t")
    desk.call("TaskRemove", {"task_id": "t"})
    assert desk.agents.tasks.known(desk.coder) == []


def test_a_child_can_be_temporary(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "x", "name": "rev", "life": "temp"})
    child = desk.agents.registry.named("rev")
    assert child is not None
    assert (child.life, child.profile) == ("temp", "private_child")


# results


def _results(desk: Desk) -> tuple[str, str]:
    with desk.mounted.as_(desk.me):
        return (
            desk.mounted.get("agent/coder.d/result.md"),
            desk.mounted.get("agent/coder.d/refs.jsonl"),
        )


def test_a_result_replaces_what_was_there(desk: Desk) -> None:
    refs = [{"path": "artifact/log", "kind": "log"}, {"path": "/srv/x"}]
    desk.call("ResultWrite", {"text": "a long first result", "refs": refs})
    written = '{"path":"artifact/log","kind":"log"}\n{"path":"/srv/x"}\n'
    assert _results(desk) == ("a long first result\n", written)
    desk.call("ResultWrite", {"text": "second\n"})
    assert _results(desk) == ("second\n", written)
    desk.call("ResultWrite", {"text": "third", "refs": refs[1:]})
    assert _results(desk) == ("third\n", '{"path":"/srv/x"}\n')
    desk.call("ResultWrite", {"text": "fourth", "refs": []})
    assert _results(desk) == ("fourth\n", "")


@pytest.mark.parametrize(
    "given",
    [
        {"text": "x" * 5000, "refs": []},
        {"text": "x", "refs": [{"path": "/" + "x" * 5000}]},
        {"text": "x", "refs": [{"path": "artifact/new"}, {"path": "artifact/../x"}]},
    ],
)
def test_a_result_that_is_refused_changes_nothing(desk: Desk, given: Input) -> None:
    desk.call("ResultWrite", {"text": "first", "refs": [{"path": "artifact/a"}]})
    before = _results(desk)
    with refused(CtxError):
        desk.call("ResultWrite", given)
    assert _results(desk) == before


def test_a_result_needs_room_for_all_of_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(share: Share, caller: Caller, size: int) -> None:
        asked.append(size)
        raise QuotaError("no room")

    monkeypatch.setattr(Share, "check", check)
    with refused(QuotaError, "^no room"):
        desk.call("ResultWrite", {"text": "x" * 9, "refs": [{"path": "artifact/a"}]})
    assert asked == [len('{"path":"artifact/a"}\n') + 10]
    assert _results(desk) == ("", "")


def test_a_result_that_was_written_is_not_made_anew(desk: Desk) -> None:
    for write in (
        lambda: desk.call("ResultWrite", {"text": "mine"}),
        lambda: desk.mounted.put("agent/coder.d/result.md", "mine\n"),
    ):
        desk.agents.journal.update(desk.coder, said=Said(result_from_output=True))
        with desk.mounted.as_(desk.me):
            write()
        assert not desk.coder.said.result_from_output
        assert _results(desk)[0] == "mine\n"


# AgentGet and AgentList


def test_what_an_agent_uses_is_what_its_file_says(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {"cpu_usec": 5, "tokens.in": 7, "cost": 0.5}

    async def told(agent: Agent, payer: int) -> dict[str, int | float]:
        if not usage:
            raise OSError(errno.EAGAIN, "somebody holds up who looks")
        return {**usage, "processes": payer}

    monkeypatch.setattr(desk.mounted.supervisor.meter, "usage", told)
    assert desk.call("AgentGet")["usage"] == {**usage, "processes": 1000}
    usage.clear()
    assert "usage" not in desk.call("AgentGet")


def test_an_agent_is_what_its_files_show(desk: Desk) -> None:
    given = {"mode": "turn", "model": "big", "workspace_mode": "explicit_root:/srv", "life": "temp"}
    desk.call("SpawnAgent", {"initial_message": "look", "name": "rev", **given})
    for name, caller in (("rev", desk.me), ("coder", desk.me), ("rev", USER)):
        seen = desk.call("AgentGet", {"agent_id": name}, caller)
        with desk.mounted.as_(caller):
            for file in (
                "profile", "visibility", "ownership", "life", "parent", "supervisor", "mode",
                "model", "ingress", "status", "outcome", "reason", "run", "workspace",
            ):  # fmt: skip
                assert seen[file] == desk.mounted.get(f"agent/{name}.d/{file}").strip(), file
            families = desk.mounted.get(f"agent/{name}.d/families").split()
            queue = desk.mounted.get(f"agent/{name}.d/queue").splitlines()
        assert seen["families"] == families
        assert seen["queue"] == len(queue) == (name == "rev")
        assert seen["session"] == "default"
    assert desk.call("AgentGet")["children"] == [
        {"agent_id": "rev", "status": "starting", "outcome": ""}
    ]
    desk.end_child("rev")
    assert desk.call("AgentGet")["children"] == [], "it was there for a time"
    desk.call("SpawnAgent", {"initial_message": "look", "name": "kept"})
    desk.end_child("kept")
    assert desk.call("AgentGet")["children"] == [
        {"agent_id": "kept", "status": "dead", "outcome": "done"}
    ]


def test_who_sees_the_tasks_of_its_parent_sees_the_handle_of_a_child(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "look", "name": "rev"})
    child = desk.agents.registry.named("rev")
    assert child is not None
    desk.mounted.world.live(child)
    reader = inside(desk.agent("reader", "agent:rev read"))
    for caller in (desk.me, USER):
        handle = desk.call("AgentGet", {"agent_id": "rev"}, caller)["task_handle"]
        assert (handle["task_id"], handle["status"]) == ("rev", "running")
    for caller in (inside(child), reader):
        assert "task_handle" not in desk.call("AgentGet", {"agent_id": "rev"}, caller)
    assert "task_handle" not in desk.call("AgentGet")


def test_a_list_tells_who_supervises_whom(desk: Desk) -> None:
    desk.call("SpawnAgent", {"initial_message": "look", "name": "rev"})
    desk.call("SpawnAgent", {"preset": "public_named", "name": "peer", "mode": "turn"})
    found = {agent["agent_id"]: agent for agent in desk.call("AgentList")["agents"]}
    keys = ("profile", "supervisor", "mode", "status", "outcome")
    assert {name: [agent[key] for key in keys] for name, agent in found.items()} == {
        "coder": ["public_named", "operator", "turn", "busy", ""],
        "rev": ["private_child", "agent:coder", "once", "starting", ""],
        "peer": ["public_named", "none", "turn", "starting", ""],
    }
    assert found["rev"]["parent"] == "agent:coder session:default"


# nodes


def _nodes(desk: Desk) -> None:
    settings = desk.agents.settings
    nodes = {name: Node(ssh=name, users={"1000": "me"}) for name in ("gpu1", "gpu2", "n2")}
    settings.config = dataclasses.replace(settings.config, nodes=nodes)


def test_a_child_is_placed_where_its_parent_may(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(_: Elsewhere, agent: Agent) -> str:
        return desk.agents.nodes.candidates(agent)[0]

    monkeypatch.setattr(Elsewhere, "choose", choose)
    _nodes(desk)
    boss = desk.agent("boss", "agent:boss-* create", "node:gpu* place")
    given = {"initial_message": "look", "placement": "node=gpu1"}
    name = desk.call("SpawnAgent", given, inside(boss))["agent_id"]
    child = desk.agents.registry.named(name)
    assert child is not None
    assert (child.placement, child.node) == ("node=gpu1\n", "gpu1")
    for wanted, error, why in (
        ("node=n2", DeniedError, "^placement: node:n2 place is not in the effective policy"),
        ("node=n3", MalformedError, "^placement: .*no such node; you may use gpu1, gpu2$"),
        ("gpu1", MalformedError, "^placement: .*is not node=NAME"),
    ):
        with pytest.raises(error, match=why):
            desk.call("SpawnAgent", {**given, "placement": wanted}, inside(boss))
    assert len(desk.agents.registry.children(boss)) == 1
    talker = desk.call("SpawnAgent", {**given, "mode": "turn"}, inside(boss))["agent_id"]
    spoken_to = desk.agents.registry.named(talker)
    assert spoken_to is not None and (spoken_to.mode, spoken_to.node) == ("turn", "gpu1")


def test_who_may_place_nobody_is_not_told_how(desk: Desk) -> None:
    boss = desk.agent("boss", "agent:boss-* create", "node:gpu* place")
    tool, base = BY_NAME["SpawnAgent"], desk.mounted.base

    def told(caller: Caller) -> bool:
        return "placement" in tool.schema_for(base, caller)["properties"]

    assert (told(inside(boss)), told(desk.me), told(USER)) == (True, False, False)
    _nodes(desk)
    assert (told(inside(boss)), told(desk.me), told(USER)) == (True, False, True)
    with pytest.raises(DeniedError, match=r"^placement: node:n2 place"):
        desk.call("SpawnAgent", {"initial_message": "x", "placement": "node=n2"})


def test_a_tool_about_who_runs_at_a_node_names_it(desk: Desk) -> None:
    far = desk.agent("far")
    assert "node" not in desk.call("AgentGet", {"agent_id": "far"}, USER)
    desk.agents.journal.update(far, node="n2", peer="n1")
    assert desk.call("AgentGet", {"agent_id": "far"}, USER)["node"] == "n2"
    for name, given in (
        ("TaskList", {}), ("ExecCommand", {"cmd": "true"}), ("WorkList", {}),
        ("WaitFor", {"wake": "message"}), ("SpawnAgent", {"initial_message": "x"}),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r'^"far" runs at the node n2, and what'):
            desk.call(name, {"agent_id": "far", **given}, USER)


# recipes


def _recipes(desk: Desk, policy: str = "recipe:r* use") -> Agent:
    """A machine with some, and an agent that may use one of them."""
    places = desk.mounted.base.recipe_places = (desk.mounted.base.runtime.places.state / "agents",)
    for name, files in {
        "rev": {"exec": "cat -v\n", "mode": "turn\n", "README.md": "# Reviews\n",
                "env": "KEY\n", "homedir": "durable\n",
                "policy": "allow @label@ agent:@name@-* create\nallow @label@ shared:x read\n"},
        "rich": {"exec": "cat\n", "needs": "network api\nkey KEY\n"},
        "odd": {"exec": "cat\n"},
    }.items():
        directory = places[0] / name
        directory.mkdir(parents=True)
        for file, text in files.items():
            (directory / file).write_text(text)
    boss = desk.agent("boss", "agent:boss-* create", *([policy] if policy else []))
    desk.agents.journal.update(boss, env="KEY=k\n")
    return boss


def test_an_agent_is_made_by_a_recipe(desk: Desk) -> None:
    boss = _recipes(desk)
    given = {"initial_message": "look", "recipe": "rev"}
    name = desk.call("SpawnAgent", given, inside(boss))["agent_id"]
    child = desk.agents.registry.named(name)
    assert child is not None
    assert (child.exec, child.mode, child.env, child.homedir) == (
        "cat -v", "turn", "KEY=k\n", "private",
    )  # fmt: skip
    assert child.policy == f"allow {name}_t agent:{name}-* create\n", "no more than its parent has"
    given = {**given, "name": "boss-x", "mode": "once", "exec": "tac"}
    desk.call("SpawnAgent", given, inside(boss))
    other = desk.agents.registry.named("boss-x")
    assert other is not None
    assert (other.exec, other.mode, other.homedir) == ("tac", "once", "durable")


def test_a_recipe_at_a_node_is_that_of_the_node(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "choose", lambda _, agent: "gpu1")
    _nodes(desk)
    boss = _recipes(desk, "recipe:* use")
    more = "allow boss_t node:gpu* place\nallow boss_t network:far connect\n"
    desk.agents.journal.update(boss, policy=boss.policy + more)
    directory = desk.mounted.base.recipe_places[0] / "far"
    directory.mkdir()
    for file, text in {
        "exec": "sh /recipe/run @program:nowhere@\n", "needs": "program nowhere\nnetwork far\n",
        "mount": "@files@ /recipe ro\n@program:nowhere@\n",
        "policy": "allow @label@ network:@network@ connect\n",
    }.items():  # fmt: skip
        (directory / file).write_text(text)
    given = {"initial_message": "look", "recipe": "far"}
    with pytest.raises(UnsupportedError, match="program nowhere: not found"):
        desk.call("SpawnAgent", given, inside(boss))
    placed = {**given, "placement": "node=gpu1"}
    name = desk.call("SpawnAgent", placed, inside(boss))["agent_id"]
    child = desk.agents.registry.named(name)
    assert child is not None
    assert (child.placement, child.exec) == ("node=gpu1\n", "sh /recipe/run nowhere")
    assert child.mount == "node:recipes/far/files\t/recipe\tro\n"
    assert child.policy == f"allow {name}_t network:far connect\n"


def test_an_operator_makes_root_agents_and_children_by_recipes(desk: Desk) -> None:
    boss = _recipes(desk)
    given = {"preset": "public_named", "name": "rev", "recipe": "rev"}
    assert desk.call("SpawnAgent", given, USER) == {"agent_id": "rev"}
    root = desk.agents.registry.named("rev")
    assert root is not None and root.parent is None
    assert (root.exec, root.env, root.homedir) == ("cat -v", "", "durable")
    assert root.policy == "allow rev_t agent:rev-* create\nallow rev_t shared:x read\n"
    # in the name of a parent that may neither detach one nor create one of that name
    given = {**given, "name": "other", "agent_id": "boss"}
    desk.call("SpawnAgent", given, USER)
    other = desk.agents.registry.named("other")
    assert other is not None
    assert (other.parent, other.life, other.env) == (boss.index, "detached", "KEY=k\n")
    assert other.policy == "allow other_t agent:other-* create\n"
    given = {"initial_message": "x", "agent_id": "boss"}
    assert desk.call("SpawnAgent", given, USER)["agent_id"] == "boss-1"


def test_recipes_are_listed_as_policy_allows(desk: Desk) -> None:
    boss = _recipes(desk)
    found = desk.call("AgentList", {"recipes": True}, inside(boss))
    assert found == {"agents": [], "left": 0, "recipes": [
        {"recipe": "rev", "description": "Reviews"}, {"recipe": "rich", "description": ""},
    ]}  # fmt: skip
    Draft202012Validator(BY_NAME["AgentList"].output_schema).validate(found)
    everything = desk.call("AgentList", {"recipes": True}, USER)["recipes"]
    assert [each["recipe"] for each in everything] == ["odd", "rev", "rich"]
    assert desk.call("AgentList", {"recipes": True})["recipes"] == [], "by default none"


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("odd", DeniedError, 'recipe:odd use is not in the effective policy of "boss"'),
        ("../x", DeniedError, "recipe"),
        ("rx", MissingError, "AgentList with recipes"),
        ("rich", UnsupportedError, "needs network:api, configured .* with KEY in the env"),
    ],
)
def test_what_cannot_be_made_by_a_recipe_is_not(
    desk: Desk, name: str, error: type[CtxError], match: str
) -> None:
    boss = _recipes(desk)
    before = _everything(desk)
    with refused(error, match):
        desk.call("SpawnAgent", {"initial_message": "x", "recipe": name}, inside(boss))
    assert _everything(desk) == before


def test_a_child_has_no_recipe_that_its_parent_could_not_use(desk: Desk) -> None:
    boss = _recipes(desk)
    child = desk.mounted.make("boss-kid", inside(boss))
    with desk.mounted.as_(inside(boss)):
        for wanted, allowed in (("rev", True), ("odd", False), ("*", False)):
            line = f"allow {child.label} recipe:{wanted} use\n"
            if allowed:
                desk.mounted.put("agent/boss-kid.d/policy", line)
                continue
            with pytest.raises(pyfuse3.FUSEError, match="denied"):
                desk.mounted.put("agent/boss-kid.d/policy", line)
            assert "exceeds" in desk.mounted.reason
    given = {"agent_id": "boss", "initial_message": "x", "recipe": "odd"}
    with refused(DeniedError, "recipe:odd use"):  # an operator makes it a child of boss
        desk.call("SpawnAgent", given, USER)


# a caller that gets no messages


@pytest.mark.parametrize("which", ["SpawnAgent", "SpawnAgent public", "ExecCommand", "WaitFor"])
@pytest.mark.parametrize("mode", MODES)
def test_an_agent_that_nothing_wakes_is_told_so(desk: Desk, which: str, mode: str) -> None:
    before, given, _, _ = CALLS[which]
    before(desk)
    desk.agents.journal.update(desk.coder, mode=mode)
    name = which.split()[0]
    answer = desk.call(name, given)
    assert answer.get("wakes") == (False if mode == "once" else None)
    Draft202012Validator(BY_NAME[name].output_schema).validate(answer)


# the examples


def _turn(desk: Desk) -> None:
    """The reviewer runs, as far as records tell."""
    child = desk.agents.registry.named("reviewer")
    assert child is not None
    desk.mounted.world.live(child)


def _asking(desk: Desk) -> None:
    child = desk.agents.registry.named("reviewer")
    assert child is not None
    given = {"question": "May I?", "options": ["yes", "no"], "to": "supervisor"}
    desk.call("Ask", given, inside(child))


def _running_task(desk: Desk) -> None:
    task = desk.agents.tasks.find(desk.coder, "task-1")
    with desk.agents.journal.changing() as change:
        change.put(task, status=TaskStatus.RUNNING)
    desk.mounted.run_task(desk.coder, "task-1")


def _reviewed(desk: Desk) -> None:
    desk.end_child("reviewer")
    _has_worktree(desk, "reviewer")


def _fetched(desk: Desk) -> None:
    child = desk.agents.registry.named("reviewer")
    assert child is not None
    desk.agents.journal.update(child, worktree=None)


#: a story that an orchestrator could tell, and what happens beside it before a call
STORY: dict[str, Callable[[Desk], None]] = {
    "SpawnAgent": _nothing,
    "AgentList": _turn,
    "AgentGet": _nothing,
    "SendMessage": _nothing,
    "AskAnswer": _asking,
    "Ask": _nothing,
    "AskList": _nothing,
    "AskWithdraw": _nothing,
    "WorkCreate": _nothing,
    "WorkUpdate": _nothing,
    "WorkFocus": _nothing,
    "WorkList": _nothing,
    "WorkRemove": _unfocused,
    "ExecCommand": _nothing,
    "TaskList": _running_task,
    "TaskStatus": _nothing,
    "TaskInput": _nothing,
    "TaskStop": _nothing,
    "TaskOutput": lambda desk: desk.end("task-1", TaskCue.CANCELLED, "signal:15"),
    "TaskRemove": _nothing,
    "WaitFor": _nothing,
    "WaitCancel": _nothing,
    "AgentStop": _nothing,
    "WorktreeTake": _reviewed,
    "AgentRemove": _fetched,
    "ResultWrite": _nothing,
}


def test_the_examples_tell_a_story(desk: Desk) -> None:
    # a tool that nothing has to happen for comes last
    for name in [*STORY, *(name for name in NAMES if name not in STORY)]:
        tool = BY_NAME[name]
        STORY.get(name, _nothing)(desk)
        Draft202012Validator(tool.schema).validate(tool.example)
        answer = desk.call(name, tool.example)
        Draft202012Validator(tool.output_schema).validate(answer)
    assert desk.call("TaskList")["tasks"] == desk.call("AgentGet")["children"] == []


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_model_is_told_when_to_use_a_tool_and_when_another(tool: Any) -> None:
    others = set(NAMES) - {tool.name}
    assert re.search(r"\bUse (it|this)\b", tool.description)
    assert any(re.search(rf"\b{name}\b", tool.description) for name in others)
    assert tool.described.endswith("}")
    assert json.loads(tool.described.rpartition("Example: ")[2]) == tool.example


@pytest.mark.parametrize("again", [False, True], ids=["this daemon", "the next one"])
def test_who_asks_and_waits_hears_the_answer(desk: Desk, again: bool) -> None:
    """Also a call that a daemon has handed to the next one: the question was asked by then."""
    given = {"question": "May I?", "options": ["yes", "no"], "block": True}
    progress: dict[str, Any] = {}
    if again:
        progress["decided"] = desk.call("Ask", {**given, "timeout": 0})
    heard = []

    async def main() -> None:
        async def ask() -> None:
            base, root = desk.mounted.base, desk.mounted.fs.root
            heard.append(
                await registry.call(base, root, desk.me, "Ask", given, progress=progress)
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert not heard
            (found,) = desk.agents.asks.known(desk.coder)
            with desk.agents.journal.acting(USER):
                desk.agents.asks.answer(USER, desk.coder, found, "no\nnot today\n")

    trio.run(main)
    assert heard == [{"ask_id": "ask-1", "status": "answered", "answer": "no",
                      "note": "not today", "by": "operator uid:1000"}]  # fmt: skip


def test_an_ask_is_said_again_by_its_id_to_go_on_waiting(desk: Desk) -> None:
    given = {"question": "May I?", "block": True, "timeout": 0, "id": "q"}
    assert desk.call("Ask", given) == desk.call("Ask", given) == {"ask_id": "q", "status": "open"}
    assert len(desk.agents.asks.known(desk.coder)) == 1
    with refused(TakenError, "^id: "):
        desk.call("Ask", {**given, "question": "May I go?"})


def test_a_question_that_was_replaced_is_not_answered(desk: Desk) -> None:
    _asked_by_child(desk)
    (listed,) = desk.call("AskList")["asks"]
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    desk.call("AskWithdraw", {"ask_id": "q"}, inside(kid))
    given = {"question": "May I remove it?", "options": ["yes"], "to": "supervisor", "id": "q"}
    desk.call("Ask", given, inside(kid))
    (now,) = desk.agents.asks.known(kid)
    with desk.agents.journal.changing() as change:
        change.put(now, asked=now.asked + 1)  # a clock may be slow
    answer = {key: listed[key] for key in ("agent_id", "ask_id", "asked_at")} | {"answer": "yes"}
    with refused(WrongStateError, "asks something else by this id now"):
        desk.call("AskAnswer", answer)
    (listed,) = desk.call("AskList")["asks"]
    answer["asked_at"] = listed["asked_at"]
    assert desk.call("AskAnswer", answer)["status"] == "answered"


def test_what_only_people_decide_no_parent_answers(desk: Desk) -> None:
    _asked_by_child(desk)
    kid = desk.agents.registry.named("kid")
    assert kid is not None
    desk.mounted.put("agent/kid.d/ask/q/to", "operator\n")
    answer = {"agent_id": "kid", "ask_id": "q", "answer": "yes"}
    for caller in (desk.me, inside(kid)):
        with refused(DeniedError):
            desk.call("AskAnswer", answer, caller)
    assert desk.call("AskList")["asks"] == []
    assert desk.call("AskAnswer", answer, USER)["by"] == "operator uid:1000"
    with refused(WrongStateError, r'answered by operator uid:1000 at .*: "yes"'):
        desk.call("AskAnswer", answer, ROOT)
