"""Random operations on the planes, against a simple model of what the contract says of them.

The operations are those of the runtime on a real store, without processes; at any point a
new daemon may take over. After each one everything that can be seen is compared: statuses,
queues, the focus, payloads, the histories; and so are the refusals.

``CTXFS_MODEL_EXAMPLES`` in the environment is how many sequences to try, other ones each time.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from runtime.agents import moments, waiting
from runtime.agents.results import exit_of
from runtime.errors import (
    CtxError,
    MalformedError,
    MissingError,
    QuotaError,
    TakenError,
    TooLongError,
    WrongStateError,
)
from runtime.ids import RunId
from runtime.records.change import Change
from runtime.records.items import Item, Message, MessageStatus, Task, TaskCue, Wait, Work
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import Cell
from runtime.texts.names import timestamp
from tests.worlds.histories import kept_histories
from tests.worlds.records import World, add_end, inside, operator, rmdir

_EXAMPLES = int(os.environ.get("CTXFS_MODEL_EXAMPLES", "0"))
SALTS = range(40) if not _EXAMPLES else [secrets.randbits(48) for _ in range(_EXAMPLES // 3)]
#: of the same kind; not in every run of the tests
MORE_SALTS = range(6, 40)
_LIMITS = {"messages": 5, "tasks": 3, "work_items": 3, "waits": 4, "frame_max": 100}
_SETTINGS: dict[str, Any] = dict(_LIMITS)
_USER = operator(1000)
_NOON = 1_800_000_000.0

_PRIORITIES = ("interject", "next", "normal", "background")
_OUTCOMES = {
    "done": "completed",
    "error": "failed",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
}
_OVER = {
    "message": ("processed", "failed", "aborted", "dropped"),
    "task": ("completed", "failed", "cancelled", "interrupted"),
    "work": ("done", "cancelled"),
    "wait": ("fired", "cancelled", "expired"),
}
_SECONDS = {"0s": 0.0, "5s": 5.0, "20s": 20.0, "1h": 3600.0}


class Refused(Exception):
    """What the model expects an operation to be refused with."""

    def __init__(self, error: type[CtxError]) -> None:
        super().__init__(error.__name__)
        self.error = error


# the model


@dataclass(eq=False)
class MMessage:
    #: None for notices, whose ids are nobody's business
    name: str | None
    sender: str
    provenance: str
    priority: str
    text: Any
    asked: bool = False
    first: bool = False
    status: str = "queued"
    run: str = ""
    reply: str = ""
    reason: str = ""
    #: whether it can be asked for when it has ended
    kept: bool = False


@dataclass(eq=False)
class MTask:
    name: str
    child: MAgent | None = None
    cmd: str = ""
    status: str = "made"
    exit: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        return self.status in _OVER["task"]

    @property
    def shown(self) -> str:
        if self.child is not None and not self.over:
            return {"new": "queued", "stopping": "cancelling"}.get(self.child.status, "running")
        return "queued" if self.status == "made" else self.status


@dataclass(eq=False)
class MWork:
    name: str
    status: str = "open"
    objective: str = ""
    blocked_by: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.status in _OVER["work"]


@dataclass(eq=False)
class MWait:
    name: str
    #: in which order they were made
    number: int
    status: str = "new"
    on: str = ""
    work: str = ""
    deadline: str = ""
    due: float = 0.0
    expires: float = 0.0
    payload: Any = None

    @property
    def over(self) -> bool:
        return self.status in _OVER["wait"]


@dataclass(eq=False)
class MAgent:
    name: str
    once: bool
    parent: MAgent | None = None
    #: its parent was removed, or is another incarnation now
    orphan: bool = False
    owned: bool = False
    status: str = "new"
    focus: str = ""
    outcome: str = ""
    reason: str = ""
    messages: list[MMessage] = field(default_factory=list)
    tasks: dict[str, MTask] = field(default_factory=dict)
    work: dict[str, MWork] = field(default_factory=dict)
    waits: dict[str, MWait] = field(default_factory=dict)
    #: of its session, by plane
    events: dict[str, list[tuple[str, ...]]] = field(
        default_factory=lambda: {"message": [], "task": [], "work": [], "wait": []}
    )

    @property
    def takes(self) -> bool:
        return self.status in ("idle", "busy")

    @property
    def live(self) -> bool:
        return self.status in ("idle", "busy", "stopping")

    @property
    def queue(self) -> list[MMessage]:
        waiting = [m for m in self.messages if m.status == "queued"]
        return sorted(waiting, key=lambda m: (not m.first, _PRIORITIES.index(m.priority)))

    @property
    def current(self) -> MMessage | None:
        return next((m for m in self.messages if m.status == "running"), None)

    def is_parents(self, message: MMessage) -> bool:
        return self.parent is not None and message.sender == f"agent:{self.parent.name}"

    def tell(self, plane: str, *words: str) -> None:
        self.events[plane].append(words)


def _need(condition: object, error: type[CtxError]) -> None:
    if not condition:
        raise Refused(error)


class Model:
    """What the contract says of the planes, on plain lists. Operations check, then act."""

    def __init__(self) -> None:
        self.agents: dict[str, MAgent] = {}
        self.now = _NOON
        self._numbers = count()

    def children(self, agent: MAgent) -> list[MAgent]:
        return [a for a in self.agents.values() if a.parent is agent]

    def family(self, agent: MAgent) -> list[MAgent]:
        """It and what it owns, leaves first."""
        owned = [c for c in self.children(agent) if c.owned]
        return [*(member for child in owned for member in self.family(child)), agent]

    def below(self, agent: MAgent) -> list[MAgent]:
        """What it owns, parents first."""
        owned = [c for c in self.children(agent) if c.owned]
        return [member for child in owned for member in (child, *self.below(child))]

    # agents

    def create(self, name: str, parent: MAgent | None, once: bool) -> None:
        _need(name not in self.agents, TakenError)
        if parent is not None:
            _need(parent.takes, WrongStateError)
            self._check_handle(parent, name)
            self._check_room(parent)
        agent = MAgent(name, once, parent, owned=parent is not None)
        self.agents[name] = agent
        self._new_handle(agent)

    @staticmethod
    def _check_handle(parent: MAgent, name: str) -> None:
        task = parent.tasks.get(name)
        _need(task is None or task.child is not None, TakenError)

    @staticmethod
    def _check_room(agent: MAgent) -> None:
        """What ends in a notice is not begun while so many of them are unread."""
        notices = [m for m in agent.queue if m.provenance in ("wait", "task_result")]
        _need(agent.once or len(notices) < _LIMITS["messages"], QuotaError)

    @staticmethod
    def _new_handle(agent: MAgent) -> None:
        if agent.parent is not None and agent.owned:
            agent.parent.tasks.pop(agent.name, None)
            agent.parent.tasks[agent.name] = MTask(agent.name, child=agent)

    def _drop_handle(self, agent: MAgent) -> None:
        parent = agent.parent
        if parent is None or agent.name not in parent.tasks:
            return
        task = parent.tasks[agent.name]
        if task.child is not None:
            del parent.tasks[agent.name]
            self._gone(parent, task)

    def _gone(self, agent: MAgent, task: MTask) -> None:
        """Nothing will come of it any more."""
        if not task.over:
            self._over(agent, f"task {task.name}",
                       self._facts(agent, task.name, task.child, "cancelled", "", ""))

    def _check_parent(self, agent: MAgent) -> None:
        _need(not agent.orphan, WrongStateError)
        _need(agent.parent is None or agent.parent.takes, WrongStateError)

    def start(self, agent: MAgent, text: str) -> None:
        _need(agent.status == "new", WrongStateError)
        self._check_parent(agent)
        agent.status = "busy" if agent.once else "idle"
        if text and not agent.once:
            self._add(
                agent, MMessage("", maker(agent), "delegation", "interject", text, first=True)
            )

    def begin_end(self, agent: MAgent) -> None:
        """What it owns ends with it; what never began is over at once."""
        _need(agent.live and agent.status != "stopping", WrongStateError)
        members = self.family(agent)
        for member in members:
            if member.live:
                member.status = "stopping"
        for member in self.below(agent):
            if member.status == "new":
                self.ended(member, "cancelled", "parent_dead")

    def ended(self, agent: MAgent, outcome: str, reason: str) -> None:
        for wait in list(agent.waits.values()):
            if wait.status == "armed":
                self._leave(agent, wait, "cancelled", None)
        agent.status = "dead"
        agent.outcome, agent.reason = outcome, reason
        # what was worked on first, though it may have been queued after what still waits
        for status, end in (("running", "failed"), ("queued", "dropped")):
            for message in [m for m in agent.messages if m.status == status]:
                self._end_message(agent, message, end, reason=reason)
        for task in agent.tasks.values():
            if not task.over and task.child is None:
                how = "interrupted" if outcome == "interrupted" else "cancelled"
                self._end_task(agent, task, how, "", reason)
        if agent.parent is None:
            return
        handle = agent.parent.tasks.get(agent.name)
        if handle is not None and handle.child is agent and not handle.over:
            self._end_task(agent.parent, handle, _OUTCOMES[outcome], exit_of(reason), reason)
        self._child_over(agent.parent, agent, outcome, reason)

    def _child_over(self, parent: MAgent, child: MAgent, outcome: str, reason: str) -> None:
        self._over(parent, f"child {child.name}", self._of_child(parent, child))
        answer = self._of_end(child, outcome, reason)
        for name in ("", *(f" {message.name}" for message in child.queue)):
            self._over(parent, f"reply {child.name}{name}", answer)

    @staticmethod
    def _of_end(child: MAgent, outcome: str, reason: str) -> dict[str, Any]:
        """What a wait for a reply is told if there is none any more."""
        return {
            "child": child.name, "message": "", "outcome": outcome, "run": "", "reason": reason,
            "reply": "", "truncated": False, "path": "",
        }  # fmt: skip

    def _of_reply(self, parent: MAgent, child: MAgent, message: MMessage) -> dict[str, Any]:
        handle = parent.tasks.get(child.name)
        shown = message.reply and handle is not None and handle.child is child
        path = f"/ctx/agent/{parent.name}.d/task/{child.name}/output"
        return {
            **self._of_end(child, message.status, message.reason),
            "message": message.name, "run": message.run, "reply": message.reply,
            "path": path if shown else "",
        }  # fmt: skip

    @staticmethod
    def _facts(
        agent: MAgent, name: str, child: MAgent | None, status: str, exit_text: str, reason: str
    ) -> dict[str, Any]:
        """What an end is told with, of what nobody has written to."""
        given = {"agent": name, "result": "", "refs": [], "artifacts": []}
        kind = "child_agent_task" if child is not None else "command_task"
        path = f"/ctx/agent/{agent.name}.d/task/{name}/output"
        return {
            "task": name, "kind": kind, "title": "", "status": status, "exit": exit_text,
            "reason": reason, "preview": "", "truncated": False, "output_path": path,
            **(given if child is not None else {}),
        }  # fmt: skip

    def _of_child(self, parent: MAgent, child: MAgent) -> dict[str, Any]:
        dead = child.status == "dead"
        status = _OUTCOMES[child.outcome] if dead else "cancelled"
        reason = child.reason if dead else ""
        facts = self._facts(parent, child.name, child, status, exit_of(reason), reason)
        detached = {"output_path": f"/ctx/agent/{child.name}.d/out"}
        return facts if child.owned else {**facts, **detached}

    def remove(self, agent: MAgent) -> None:
        members = self.family(agent)
        _need(not any(m.live for m in members), WrongStateError)
        if agent.status == "new":
            self.ended(agent, "cancelled", "operator_stop")
        self._drop_handle(agent)
        self._forget(members)

    def _forget(self, members: list[MAgent]) -> None:
        for member in members:
            del self.agents[member.name]
            for child in self.children(member):
                child.parent, child.orphan = None, True

    def reset(self, agent: MAgent) -> None:
        _need(agent.status == "dead", WrongStateError)
        self._check_parent(agent)
        if agent.parent is not None and agent.owned:
            self._check_handle(agent.parent, agent.name)
        self._forget(self.family(agent))
        fresh = MAgent(agent.name, agent.once, agent.parent, owned=agent.owned)
        self.agents[agent.name] = fresh
        self._new_handle(fresh)

    def set_owned(self, agent: MAgent, owned: bool) -> None:
        assert agent.parent is not None
        if owned == agent.owned:
            return
        if owned:
            self._check_handle(agent.parent, agent.name)
            agent.owned = True
            self._new_handle(agent)
        else:
            agent.owned = False
            self._drop_handle(agent)

    def adopt(self, agent: MAgent, parent: MAgent | None) -> None:
        if agent.parent is parent and not agent.orphan:
            return
        if parent is not None:
            _need(parent is not agent and parent not in self.family(agent), MalformedError)
            _need(parent.takes, WrongStateError)
            self._check_handle(parent, agent.name)
            self._check_room(parent)
        former = agent.parent
        self._drop_handle(agent)
        if former is not None:
            self._child_over(former, agent, "", "")
        agent.parent, agent.orphan, agent.owned = parent, False, parent is not None
        self._new_handle(agent)

    # messages

    def send(self, agent: MAgent, message: MMessage) -> None:
        _need(message.priority in _PRIORITIES, MalformedError)
        _need(not agent.once and agent.status not in ("stopping", "dead"), WrongStateError)
        _need(len(message.text) <= _LIMITS["frame_max"], TooLongError)
        _need(len(agent.queue) < _LIMITS["messages"], QuotaError)
        name = message.name
        assert name is not None
        _need(name.isascii() and " " not in name and len(name) <= 128, MalformedError)
        known = [m for m in agent.messages if m.name == name]
        _need(not any(m.kept or m.status in ("queued", "running") for m in known), TakenError)
        self._add(agent, message)

    def _add(self, agent: MAgent, message: MMessage) -> None:
        agent.messages.append(message)
        agent.tell("message", "queued", message.sender, message.provenance, message.priority)
        if message.provenance not in ("wait", "task_result"):
            self._over(agent, "message", message)

    def _notify(self, agent: MAgent, sender: str, provenance: str, text: Any) -> None:
        if agent.takes and not agent.once:
            self._add(agent, MMessage(None, sender, provenance, "normal", text))

    def deliver(self, agent: MAgent) -> MMessage:
        message = agent.queue[0]
        message.status, message.run = "running", "r1"
        agent.status = "busy"
        return message

    def end_message(self, agent: MAgent, message: MMessage, status: str) -> None:
        self._end_message(agent, message, status, reply="so")
        if agent.status == "busy":
            agent.status = "idle"

    def _end_message(
        self, agent: MAgent, message: MMessage, status: str, *, reply: str = "", reason: str = ""
    ) -> None:
        message.status, message.reply, message.reason = status, reply, reason
        message.kept = message.asked or agent.is_parents(message)
        agent.tell("message", "end", message.name or "", status)
        if agent.parent is not None and agent.is_parents(message):
            answer = self._of_reply(agent.parent, agent, message)
            for name in (agent.name, f"{agent.name} {message.name}"):
                self._over(agent.parent, f"reply {name}", answer)

    # tasks

    def _check_new(self, agent: MAgent, there: Any, name: str, counted: int, limit: str) -> None:
        _need(name not in there, TakenError)
        _need(agent.takes, WrongStateError)
        _need(counted < _LIMITS[limit], QuotaError)

    def make_task(self, agent: MAgent, name: str) -> None:
        commands = [t for t in agent.tasks.values() if t.child is None]
        self._check_new(agent, agent.tasks, name, len(commands), "tasks")
        self._check_room(agent)
        agent.tasks[name] = MTask(name)

    def start_task(self, agent: MAgent, task: MTask) -> None:
        _need(task.status == "made", WrongStateError)
        _need(agent.takes, WrongStateError)
        _need(task.cmd, MalformedError)
        task.status = "queued"

    def stop_task(self, agent: MAgent, task: MTask, kill: bool) -> None:
        _need(not task.over and (kill or task.status != "cancelling"), WrongStateError)
        if task.status == "made":
            self._end_task(agent, task, "cancelled", "", "supervisor_stop")  # nobody acts
        else:
            task.status = "cancelling"

    def end_task(self, agent: MAgent, task: MTask, status: str, exit_text: str) -> None:
        allowed = {
            "queued": _OVER["task"],
            "running": _OVER["task"],
            "cancelling": ("cancelled", "interrupted"),
            "made": ("cancelled", "interrupted"),
        }
        _need(status in allowed.get(task.status, ()), WrongStateError)
        self._end_task(agent, task, status, exit_text)

    def _end_task(
        self, agent: MAgent, task: MTask, status: str, exit_text: str, reason: str = ""
    ) -> None:
        task.status, task.exit, task.reason = status, exit_text, reason or exit_text
        agent.tell("task", "end", task.name, status)
        facts = self._of_task(agent, task)
        self._notify(agent, f"task:{task.name}", "task_result", facts)
        self._over(agent, f"task {task.name}", facts)

    def _of_task(self, agent: MAgent, task: MTask) -> dict[str, Any]:
        return self._facts(agent, task.name, task.child, task.status, task.exit, task.reason)

    def remove_task(self, agent: MAgent, task: MTask) -> None:
        _need(task.over or (task.status == "made" and task.child is None), WrongStateError)
        del agent.tasks[task.name]
        self._gone(agent, task)

    # work

    def obstacles(self, agent: MAgent, item: MWork) -> list[str]:
        first = [n for n in item.blocked_by if n in agent.work and not agent.work[n].over]
        return first + [w.name for w in self._armed(agent) if w.work == item.name]

    @staticmethod
    def _armed(agent: MAgent) -> list[MWait]:
        return [w for w in agent.waits.values() if w.status == "armed"]

    @staticmethod
    def _work_is(agent: MAgent, item: MWork, status: str) -> None:
        item.status = status
        agent.tell("work", item.name, status)

    def make_work(self, agent: MAgent, name: str) -> None:
        self._check_new(agent, agent.work, name, len(agent.work), "work_items")
        agent.work[name] = MWork(name)
        self._work_is(agent, agent.work[name], "open")

    def remove_work(self, agent: MAgent, item: MWork) -> None:
        _need(item.status not in ("active", "blocked"), WrongStateError)
        del agent.work[item.name]
        for other in agent.work.values():
            if item.name in other.blocked_by:
                other.blocked_by.remove(item.name)
                self._release(agent, other.name)

    def write_work(self, agent: MAgent, item: MWork, status: str) -> None:
        _need(not item.over, WrongStateError)
        if status == item.status:
            return
        focused = agent.focus == item.name
        if status == "open":
            _need(item.status == "active" or not self.obstacles(agent, item), WrongStateError)
            self._focus(agent, "" if focused else agent.focus)
            if item.status == "blocked" and not self.obstacles(agent, item):
                self._work_is(agent, item, "open")
        elif status == "active":
            self._focus(agent, item.name)
        elif status == "blocked":
            self._work_is(agent, item, "blocked")
        else:
            _need(status == "cancelled" or item.objective, WrongStateError)
            self._work_is(agent, item, status)
            if focused:
                agent.focus = ""
            for wait in self._armed(agent):
                if wait.work == item.name:
                    self._leave(agent, wait, "cancelled", None)
            for other in agent.work.values():
                if item.name in other.blocked_by:
                    self._release(agent, other.name)

    def focus(self, agent: MAgent, name: str) -> None:
        _need(not name or name in agent.work, MissingError)
        _need(not name or not agent.work[name].over, WrongStateError)
        self._focus(agent, name)

    def _focus(self, agent: MAgent, name: str) -> None:
        before = agent.work.get(agent.focus)
        if before is not None and before.name != name and before.status == "active":
            self._work_is(agent, before, "blocked" if self.obstacles(agent, before) else "open")
        agent.focus = name
        if name and agent.work[name].status != "active":
            self._work_is(agent, agent.work[name], "active")

    def write_blocked_by(self, agent: MAgent, item: MWork, names: list[str]) -> None:
        _need(not item.over, WrongStateError)
        names = list(dict.fromkeys(names))
        for name in names:
            _need(name != item.name, MalformedError)
            _need(name in agent.work, MissingError)
        before = self.obstacles(agent, item)
        item.blocked_by = names
        if set(self.obstacles(agent, item)) - set(before):
            self._hold(agent, item)
        elif before:
            self._release(agent, item.name)

    def _hold(self, agent: MAgent, item: MWork) -> None:
        if item.status in ("open", "active"):
            self._work_is(agent, item, "blocked")

    def _release(self, agent: MAgent, name: str) -> None:
        item = agent.work.get(name)
        if item is not None and item.status == "blocked" and not self.obstacles(agent, item):
            self._work_is(agent, item, "active" if agent.focus == name else "open")

    # waits

    def make_wait(self, agent: MAgent, name: str) -> None:
        self._check_new(agent, agent.waits, name, len(agent.waits), "waits")
        self._check_room(agent)
        agent.waits[name] = MWait(name, next(self._numbers))

    def remove_wait(self, agent: MAgent, wait: MWait) -> None:
        if wait.status == "armed":
            self._leave(agent, wait, "cancelled", None)
        del agent.waits[wait.name]

    def arm(self, agent: MAgent, wait: MWait, on: str) -> None:
        _need(agent.takes, WrongStateError)
        _need(wait.status == "new", WrongStateError)
        kind, _, argument = on.partition(" ")
        self._check_work(agent, wait.work)
        answer: Any = None
        if kind == "timer":
            due = self.now + _SECONDS[argument]
            answer = {"due": timestamp(due)} if due <= self.now else None
        elif kind == "task":
            _need(argument in agent.tasks, MissingError)
            task = agent.tasks[argument]
            if task.over:
                answer = self._of_task(agent, task)
        elif kind == "child":
            found = [c for c in self.children(agent) if c.name == argument]
            _need(found, MissingError)
            if found[0].status == "dead":
                answer = self._of_child(agent, found[0])
        elif kind == "reply":
            answer = self._arm_reply(agent, *argument.split(" "))
        elif kind == "message":
            asked = [m for m in agent.queue if m.provenance not in ("wait", "task_result")]
            answer = asked[0] if asked else None
        wait.on, wait.status = on, "armed"
        wait.due = self.now + _SECONDS[argument] if kind == "timer" else 0.0
        wait.expires = self.now + _SECONDS[wait.deadline] if wait.deadline else 0.0
        agent.tell("wait", wait.name, "armed")
        if answer is not None:
            self._leave(agent, wait, "fired", answer)
        elif wait.work:
            self._hold(agent, agent.work[wait.work])

    def _arm_reply(self, agent: MAgent, name: str, wanted: str = "") -> Any:
        child = next((c for c in self.children(agent) if c.name == name), None)
        if child is None or child.once:
            raise Refused(MalformedError)
        if not wanted:
            over = child.status == "dead"
            return self._of_end(child, child.outcome, child.reason) if over else None
        for message in child.messages:
            over = message.status in _OVER["message"]
            if message.name == wanted and (message.kept or not over):
                _need(child.is_parents(message), MissingError)
                return self._of_reply(agent, child, message) if over else None
        raise Refused(MissingError)

    @staticmethod
    def _check_work(agent: MAgent, name: str) -> None:
        _need(not name or name in agent.work, MissingError)
        _need(not name or not agent.work[name].over, WrongStateError)

    def set_wait_work(self, agent: MAgent, wait: MWait, name: str) -> None:
        _need(not wait.over, WrongStateError)
        if wait.work == name:
            return
        self._check_work(agent, name)
        before, wait.work = wait.work, name
        if wait.status == "armed":
            self._release(agent, before)
            if name:
                self._hold(agent, agent.work[name])

    def set_deadline(self, agent: MAgent, wait: MWait, text: str) -> None:
        _need(not wait.over, WrongStateError)
        wait.deadline = text
        if wait.status == "armed":
            wait.expires = self.now + _SECONDS[text] if text else 0.0

    def trigger(self, agent: MAgent, wait: MWait, text: str) -> None:
        _need(wait.status == "armed" and wait.on == "trigger", MissingError)
        self._leave(agent, wait, "fired", text)

    def _over(self, agent: MAgent, on: str, payload: Any) -> None:
        for wait in self._armed(agent):
            if wait.on == on:
                self._leave(agent, wait, "fired", payload)

    def _leave(self, agent: MAgent, wait: MWait, status: str, payload: Any) -> None:
        wait.status = status
        agent.tell("wait", wait.name, status)
        if payload is not None:
            wait.payload = payload
            notice = {"wait": wait.name, "on": wait.on, "status": status, "payload": payload}
            if wait.work:
                notice["work"] = wait.work
            self._notify(agent, f"wait:{wait.name}", "wait", notice)
        self._release(agent, wait.work)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.look_at_clock()

    def look_at_clock(self) -> None:
        while True:
            moments = [
                (moment, wait.number, how, agent, wait)
                for agent in self.agents.values()
                for wait in self._armed(agent)
                for how, moment in (("fired", wait.due), ("expired", wait.expires))
                if moment and moment <= self.now
            ]
            if not moments:
                return
            # what was due at its deadline is there in time
            moment, _, how, agent, wait = min(moments, key=lambda m: (m[0], m[1], m[2] != "fired"))
            name = "due" if how == "fired" else "deadline"
            self._leave(agent, wait, how, {name: timestamp(moment)})


# beside the real thing


class Clock:
    """What the waiting plane takes for the time."""

    LOOK_AGAIN = 60.0
    SET_SECONDS = 0.1
    now = _NOON

    def wall(self) -> float:
        return self.now

    def up(self) -> float:
        return self.now - _NOON + 1000

    def ahead(self) -> float:
        return self.wall() - self.up()


#: which of those there are, the elder more often; from 4 on, of those of any status
AGENTS = (0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6)
RECORDS = (0, 0, 1, 1, 2, 3)
CHILDREN = ("b", "c", "d")
#: names for new ones: of tasks, some that are children's too
TASKS = ("t", "u", "v", "b", "c")
ITEMS = ("w", "x", "y", "z")
WAITS = ("i", "j", "k", "l", "m")
IDS = ("1", "2", "3", "4", "5", "6", "7", "8", "two words", "ä", "x" * 129)
#: numbers stand for a task or a child of the agent's
CAUSES = (
        *("timer 0s", "timer 5s", "timer 20s", "timer 1h", "message", "trigger"),
        *("task 0", "task 0", "task 1", "task 2", "child 0", "child 0", "child 1", "task none"),
        *("reply 0", "reply 0", "reply 1", "reply 0 last", "reply 0 last", "reply 1 last"),
        *("reply none", "reply 0 none", "reply 0 other", "reply 0 other"),
    )
#: of messages; "parent" is the parent of who gets them
SENDERS = ("somebody", "parent")
DURATIONS = ("", "0s", "5s", "20s", "1h")
OUTCOMES = tuple(_OUTCOMES)


def _pick(names: Iterable[str], number: int) -> str:
    """One of those; of none, a name that nothing has."""
    there = list(names)
    return there[number % len(there)] if there else "none"


def maker(agent: MAgent) -> str:
    """Whom the task of an agent is from."""
    return "its maker" if agent.parent is None else f"agent:{agent.parent.name}"


def _rank(record: MTask | MWork | MWait) -> tuple[bool, bool]:
    return record.over, isinstance(record, MTask) and record.child is not None


def _last_message(agent: MAgent | None, *, parents: bool) -> str:
    """The id of the last message of its parent's, or of somebody else's."""
    if agent is None:
        return "none"
    messages = (m for m in reversed(agent.messages) if agent.is_parents(m) is parents)
    return next((m.name for m in messages if m.name), "none")


#: (method, what each of its arguments is chosen from)
OPERATIONS: list[tuple[str, dict[str, Sequence[Any]]]] = []


def operation(**pools: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One of those of which each step is one."""

    def register(act: Callable[..., None]) -> Callable[..., None]:
        OPERATIONS.append((act.__name__, pools))
        return act

    return register


def aimed(
    *wanted: str, **pools: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An operation whose numbers are made names of what there is.

    ``name`` is that of an agent, mostly of one in the ``wanted`` statuses.
    """

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def aim(self: Planes, **values: Any) -> None:
            agents = self.model.agents
            number = values["name"]
            fitting = [a.name for a in agents.values() if a.status in wanted and number < 4]
            values["name"] = _pick(fitting or agents, number)
            agent = agents.get(values["name"])
            if agent is None:
                return
            # first those of which something can still become, and handles last
            planes: dict[str, dict[str, Any]] = {
                "task": agent.tasks,
                "item": agent.work,
                "wait": agent.waits,
            }
            for key, there in planes.items():
                if isinstance(values.get(key), int):
                    values[key] = _pick(sorted(there, key=lambda n: _rank(there[n])), values[key])
            if "on" in values:
                kind, *arguments = values["on"].split(" ")
                if arguments and arguments[0].isdigit():
                    # those first that answer, if that is asked for
                    children = {c.name: c for c in self.model.children(agent)}
                    named = sorted(children, key=lambda n: kind == "reply" and children[n].once)
                    pool: Iterable[str] = agent.tasks if kind == "task" else named
                    arguments[0] = _pick(pool, int(arguments[0]))
                    if arguments[1:] in (["last"], ["other"]):
                        child = children.get(arguments[0])
                        arguments[1] = _last_message(child, parents=arguments[1] == "last")
                    values["on"] = " ".join((kind, *arguments))
            act(self, **values)

        return operation(**pools)(aim)

    return decorate


class Planes(RuleBasedStateMachine):
    """Every operation says the same to both, and hears the same."""

    salt = 0

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._directory = tempfile.TemporaryDirectory(prefix="planes-")
        self._clock = Clock()
        for module in (waiting, moments):
            self._patch.setattr(module, "clock", self._clock)
        self.world = World(Path(self._directory.name), **_SETTINGS)
        self.model = Model()
        self._histories: dict[Path, bytes] = {}
        self._steps = 0

    def teardown(self) -> None:
        self.world.close()
        self._patch.undo()
        self._directory.cleanup()

    # both at once

    def real(self, name: str) -> Agent:
        agent = self.world.agents.registry.named(name)
        assert agent is not None
        return agent

    def both(self, expected: Callable[[], object], actual: Callable[[], object]) -> bool:
        """Whether it was not refused, by either."""
        wanted: type[CtxError] | None = None
        try:
            expected()
        except Refused as refused:
            wanted = refused.error
        try:
            actual()
        except CtxError as error:
            assert wanted is not None, f"refused: {error!r}"
            assert type(error) is wanted, f"{error!r}, not {wanted}"
            return False
        assert wanted is None, f"not refused with {wanted}"
        return True

    def _tidy(self, name: str, plane: str) -> None:
        """Where there is no room any more, what is over makes some."""
        model = self.model.agents.get(name)
        if model is None:
            return
        removals: dict[str, tuple[str, Callable[[str, str], None]]] = {
            "tasks": ("tasks", self._remove_task),
            "work": ("work_items", self._remove_work),
            "waits": ("waits", self._remove_wait),
        }
        limit, remove = removals[plane]
        records: dict[str, Any] = getattr(model, plane)
        over = [n for n, record in records.items() if _rank(record) == (True, False)]
        if len(records) >= _LIMITS[limit] and over:
            remove(name, over[0])

    def item(self, agent: str, cls: type[Any], name: str) -> Any:
        return self.world.agents.items.named(self.real(agent).index, cls, name)

    @rule(seed=st.integers(0, 1 << 48))
    def operate(self, seed: int) -> None:
        """What chance says: what is drawn alone is much alike, from one sequence to the next."""
        self._steps += 1
        random = Random(f"{self.salt} {seed} {self._steps}")
        name, pools = random.choice(OPERATIONS)
        values = {key: random.choice(pool) for key, pool in pools.items()}
        note(f"{name}({values})")
        getattr(self, name)(**values)

    # agents

    @initialize()
    def begin(self) -> None:
        for name, parent, once in (("a", None, False), ("b", "a", False), ("c", "a", True)):
            self._create(name, parent, once)
            if not once:
                self._start(name, "")
        for item in ("w", "x"):
            self._make_work("a", item)
        for wait in ("i", "j"):
            self._make_wait("a", wait)
        self._set_wait_work("a", "i", "w")
        self._arm("a", "i", "child b")
        self._arm("a", "j", "task b")
        self._make_task("a", "t")

    @operation(name=CHILDREN, number=AGENTS, once=(False, False, True))
    def create(self, name: str, number: int, once: bool) -> None:
        """A child, but a root agent if there is none."""
        free = [n for n in ("b", "c", "d") if n not in self.model.agents]
        if "a" not in self.model.agents:
            self._create("a", None, once)
        else:
            name = name if number >= 4 else _pick(free, number)
            self._create(name, _pick((a for a in self.model.agents if a != name), number), once)

    def _create(self, name: str, parent: str | None, once: bool) -> None:
        agents = self.world.agents
        above = None if parent is None else self.model.agents[parent]
        owner = above
        while owner is not None:  # a policy is within those above it
            if owner.orphan:
                return
            self.world.may_create(self.real(owner.name))
            owner = owner.parent
        caller = _USER if parent is None else inside(self.real(parent))
        if self.both(
            lambda: self.model.create(name, above, once), lambda: agents.births.create(caller, name)
        ):
            agents.journal.update(self.real(name), mode="once" if once else "turn")

    @aimed("new", name=AGENTS, text=("", "the task"), early=(False, True))
    def start(self, name: str, text: str, early: bool) -> None:
        if early:
            self._send(name, "early", asked=False, priority="interject")
        self._start(name, text)

    def _start(self, name: str, text: str) -> None:
        if name not in self.model.agents:
            return
        agent, model = self.real(name), self.model.agents[name]
        if model.status != "new":
            return

        def act() -> None:
            agents = self.world.agents
            if why := agents.registry.why_orphaned(agent):
                raise WrongStateError(why)
            status = Status.BUSY if model.once else Status.IDLE
            with agents.journal.changing() as change:
                cell = Cell(cgroup=agents.registry.node_path(agent))
                change.set(agent, status=status, cell=cell)
                if text and not model.once:
                    agents.messages.queue_first(
                        change, agent, text=text, sender=maker(model), provenance="delegation"
                    )

        self.both(lambda: self.model.start(model, text), act)
        for message in model.messages:
            if message.name == "":
                message.name = self.world.agents.messages.pending(agent)[0].name

    @operation(
        number=AGENTS,
        steps=(
                *(("end", "finish"), ("end", "finish"), ("end",), ("finish",)),
                *(("reset", "start"), ("reset", "start"), ("reset",)),
                *(("end", "finish", "reset", "start"), ("remove",), ("end", "finish", "remove")),
            ),
        outcome=OUTCOMES,
        together=(False, True),
    )
    def change_a_life(
        self, number: int, steps: tuple[str, ...], outcome: str, together: bool
    ) -> None:
        """Often several steps of it: by chance alone few come to their end, or to another life."""
        acts: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
            "end": (self.begin_end, ("idle", "busy")),
            "finish": (lambda name: self.finish_end(name, outcome, together), ("stopping",)),
            "remove": (self.remove, ("dead",)),
            "reset": (self.reset, ("dead",)),
            "start": (lambda name: self._start(name, ""), ("new",)),
        }
        wanted = acts[steps[0]][1]
        fitting = [a.name for a in self.model.agents.values() if a.status in wanted]
        # with the eldest all the others end, and only below it they are reset
        if steps[0] != "reset" and "start" not in steps:
            fitting.reverse()
        name = _pick(fitting or [*self.model.agents], number)
        for step in steps:
            acts[step][0](name)
            self.everything_is_as_the_model_has_it()

    def begin_end(self, name: str) -> None:
        model = self.model.agents.get(name)
        if model is None or not model.takes:
            return
        agents, agent = self.world.agents, self.real(name)
        change = Change()
        for member in (agent, *agents.registry.descendants(agent)):
            if member.live:
                change.set(member, status=Status.STOPPING)
        for member in agents.registry.descendants(agent):
            if member.status is Status.NEW:
                add_end(agents, change, member, Outcome.CANCELLED, "parent_dead")
        self.model.begin_end(model)
        agents.journal.note(change)

    def finish_end(self, name: str, outcome: str, together: bool) -> None:
        """As the recorder does it: leaves first, those that are over together in one change."""
        model = self.model.agents.get(name)
        if model is None or model.status != "stopping":
            return
        agents = self.world.agents
        members = [m for m in self.model.family(model) if m.status == "stopping"]
        change = Change()
        for member in members:
            part = Change(change)
            add_end(agents, part, self.real(member.name), Outcome(outcome), "why")
            change.add(part)
            self.model.ended(member, outcome, "why")
            if not together:
                agents.journal.note(change)
                change = Change()
        agents.journal.note(change)

    def remove(self, name: str) -> None:
        if name in self.model.agents:
            self.both(
                lambda: self.model.remove(self.model.agents[name]),
                lambda: self.world.agents.removals.remove(self.real(name)),
            )

    def reset(self, name: str) -> None:
        if name in self.model.agents:
            self.both(
                lambda: self.model.reset(self.model.agents[name]),
                lambda: self.world.agents.births.renew(self.real(name)),
            )

    @operation(name=CHILDREN, owned=(False, True))
    def set_life(self, name: str, owned: bool) -> None:
        model = self.model.agents.get(name)
        if model is None or model.status != "new" or model.parent is None:
            return
        life = ("owned", "private_child") if owned else ("detached", "public_named")
        self.both(
            lambda: self.model.set_owned(model, owned),
            lambda: self.world.agents.births.set_life(self.real(name), *life),
        )

    @operation(name=CHILDREN, parent=("", "a", "b", "c", "d"))
    def adopt(self, name: str, parent: str) -> None:
        model = self.model.agents.get(name)
        if model is None or model.status != "new" or (parent and parent not in self.model.agents):
            return
        if model.parent is not None and model.parent.name == parent:
            return
        self.both(
            lambda: self.model.adopt(model, self.model.agents[parent] if parent else None),
            lambda: self.world.agents.births.adopt(
                self.real(name), self.real(parent) if parent else None
            ),
        )

    @operation()
    def reopen(self) -> None:
        """The daemon is killed, and another one starts."""
        self.world.reopen()

    # messages

    @aimed(
        *("idle", "busy", "new"),
        name=AGENTS,
        identifier=IDS,
        asked=(False, True),
        priority=(*_PRIORITIES, *_PRIORITIES, *_PRIORITIES, "urgent"),
        long=(False, False, False, False, True),
        sender=SENDERS,
    )
    def send(
        self, name: str, identifier: str, asked: bool, priority: str, long: bool, sender: str
    ) -> None:
        self._send(name, identifier, asked, priority, long, sender)

    def _send(
        self,
        name: str,
        identifier: str,
        asked: bool,
        priority: str,
        long: bool = False,
        sender: str = "somebody",
    ) -> None:
        if name not in self.model.agents:
            return
        model = self.model.agents[name]
        text = "x" * 101 if long else f"message {identifier}"[:100]
        who = maker(model) if sender == "parent" else sender

        def act() -> None:
            with self.world.agents.journal.changing() as change:
                self.world.agents.messages.queue(
                    change, self.real(name), text=text, sender=who, provenance="operator",
                    priority=priority, name=identifier, asked="somebody" if asked else "",
                )  # fmt: skip

        message = MMessage(identifier, who, "operator", priority, text, asked=asked)
        self.both(lambda: self.model.send(model, message), act)

    @aimed(
        *("new", "idle", "busy"),
        name=AGENTS,
        wait=WAITS,
        identifier=IDS[:8],
        given_away=(False, True),
    )
    def ask(self, name: str, wait: str, identifier: str, given_away: bool) -> None:
        """A parent sends, and waits for the answer; perhaps the child becomes another's."""
        child = self.model.agents.get(name)
        parent = child.parent if child is not None else None
        if child is None or parent is None:
            return
        self._send(name, identifier, asked=False, priority="normal", sender="parent")
        self._make_wait(parent.name, wait)
        self._arm(parent.name, wait, f"reply {name} {identifier}")
        if given_away:
            self.adopt(name, "")

    @aimed("idle", name=AGENTS)
    def deliver(self, name: str) -> None:
        model = self.model.agents.get(name)
        if model is None or model.status != "idle" or not model.queue:
            return
        agents, agent = self.world.agents, self.real(name)
        expected = self.model.deliver(model)
        message = agents.messages.pending(agent)[0]
        assert (message.priority, message.provenance) == (expected.priority, expected.provenance)
        with agents.journal.changing() as change:
            change.set(agent, status=Status.BUSY)
            agents.messages.deliver(change, agent, message, RunId("r1"))

    @aimed("busy", name=AGENTS, status=("processed", "failed", "aborted"))
    def end_message(self, name: str, status: str) -> None:
        model = self.model.agents.get(name)
        if model is None or model.current is None or model.status != "busy":
            return
        agents, agent = self.world.agents, self.real(name)
        message = agents.messages.current(agent)
        assert message is not None
        self._name(model.current, message)
        self.model.end_message(model, model.current, status)
        with agents.journal.changing() as change:
            change.set(agent, status=Status.IDLE)
            agents.messages.end(change, agent, message, MessageStatus(status), reply="so")

    @aimed("idle", "busy", name=AGENTS, number=range(4))
    def drop_message(self, name: str, number: int) -> None:
        model = self.model.agents.get(name)
        if model is None or not model.live or len(model.queue) <= number:
            return
        agents, agent = self.world.agents, self.real(name)
        expected = model.queue[number]
        message = agents.messages.pending(agent)[number]
        self._name(expected, message)
        self.model._end_message(model, expected, "dropped")
        with agents.journal.changing() as change:
            agents.messages.end(change, agent, message, MessageStatus.DROPPED)

    @staticmethod
    def _name(expected: MMessage, message: Message) -> None:
        if expected.name is None:
            assert (message.sender, message.provenance) == (expected.sender, expected.provenance)
        else:
            assert message.name == expected.name

    # tasks

    @aimed("idle", "busy", name=AGENTS, task=TASKS)
    def make_task(self, name: str, task: str) -> None:
        self._make_task(name, task)

    def _make_task(self, name: str, task: str) -> None:
        self._tidy(name, "tasks")
        if name in self.model.agents:
            self.both(
                lambda: self.model.make_task(self.model.agents[name], task),
                lambda: self.world.agents.tasks.make(_USER, self.real(name), task),
            )

    def command(self, name: str, task: str) -> MTask | None:
        model = self.model.agents.get(name)
        found = model.tasks.get(task) if model is not None else None
        return found if found is not None and found.child is None else None

    @aimed("idle", "busy", name=AGENTS, task=RECORDS, text=("", "true", "true"))
    def configure_task(self, name: str, task: str, text: str) -> None:
        found = self.command(name, task)
        if found is None:
            return

        def expect() -> None:
            _need(found.status == "made", WrongStateError)
            found.cmd = text

        item = self.item(name, Task, task)
        self.both(expect, lambda: self.world.agents.tasks.set(item, cmd=text))

    @aimed("idle", "busy", name=AGENTS, task=RECORDS)
    def start_task(self, name: str, task: str) -> None:
        found = self.command(name, task)
        if found is not None:
            item = self.item(name, Task, task)
            self.both(
                lambda: self.model.start_task(self.model.agents[name], found),
                lambda: self.world.agents.tasks.start(_USER, self.real(name), item),
            )

    @aimed("idle", "busy", name=AGENTS, task=RECORDS)
    def run_task(self, name: str, task: str) -> None:
        found = self.command(name, task)
        if found is None or found.status != "queued":
            return
        item = self.item(name, Task, task)
        found.status = "running"
        with self.world.agents.journal.changing() as change:
            change.put(item, pid=7)
            change.step(item, TaskCue.RUN)

    @aimed("idle", "busy", name=AGENTS, task=RECORDS, kill=(False, True))
    def stop_task(self, name: str, task: str, kill: bool) -> None:
        found = self.command(name, task)
        if found is not None:
            item = self.item(name, Task, task)
            self.both(
                lambda: self.model.stop_task(self.model.agents[name], found, kill),
                lambda: self.world.agents.tasks.stop(_USER, self.real(name), item, kill=kill),
            )

    @aimed(
        *("idle", "busy"),
        name=AGENTS,
        task=RECORDS,
        event=("done", "error", "cancelled", "interrupted"),
        exit_text=("", "exit:0", "signal:9"),
    )
    def end_task(self, name: str, task: str, event: str, exit_text: str) -> None:
        found = self.command(name, task)
        if found is None:
            return
        agents, item = self.world.agents, self.item(name, Task, task)
        status = {
            "done": "completed",
            "error": "failed",
            "cancelled": "cancelled",
            "interrupted": "interrupted",
        }[event]

        def act() -> None:
            with agents.journal.changing() as change:
                agents.tasks.end(
                    change, self.real(name), item, TaskCue(event), exit_text=exit_text
                )

        self.both(
            lambda: self.model.end_task(self.model.agents[name], found, status, exit_text), act
        )

    @aimed("idle", "busy", name=AGENTS, task=RECORDS)
    def remove_task(self, name: str, task: str) -> None:
        self._remove_task(name, task)

    def _remove_task(self, name: str, task: str) -> None:
        if name not in self.model.agents:
            return
        model = self.model.agents[name]

        def expect() -> None:
            _need(task in model.tasks, MissingError)
            self.model.remove_task(model, model.tasks[task])

        self.both(expect, lambda: rmdir(self.world.agents.tasks, _USER, self.real(name), task))

    # work

    @aimed("idle", "busy", name=AGENTS, item=ITEMS)
    def make_work(self, name: str, item: str) -> None:
        self._make_work(name, item)

    def _make_work(self, name: str, item: str) -> None:
        self._tidy(name, "work")
        if name in self.model.agents:
            self.both(
                lambda: self.model.make_work(self.model.agents[name], item),
                lambda: self.world.agents.work.make(_USER, self.real(name), item),
            )

    @aimed("idle", "busy", name=AGENTS, item=RECORDS)
    def remove_work(self, name: str, item: str) -> None:
        self._remove_work(name, item)

    def _remove_work(self, name: str, item: str) -> None:
        if name not in self.model.agents:
            return
        model = self.model.agents[name]

        def expect() -> None:
            _need(item in model.work, MissingError)
            self.model.remove_work(model, model.work[item])

        self.both(expect, lambda: rmdir(self.world.agents.work, _USER, self.real(name), item))

    def _write_work(
        self, name: str, item: str, field: str, text: str, expect: Callable[[MAgent, MWork], None]
    ) -> None:
        model = self.model.agents.get(name)
        if model is None or item not in model.work:
            return
        agent, real = self.real(name), self.item(name, Work, item)
        self.both(
            lambda: expect(model, model.work[item]),
            lambda: self.world.agents.work.set(agent, real, field, text),
        )

    @aimed(
        *("idle", "busy"),
        name=AGENTS,
        item=RECORDS,
        status=("open", "active", "blocked", "done", "cancelled"),
    )
    def write_status(self, name: str, item: str, status: str) -> None:
        self._write_work(
            name, item, "status", status, lambda a, w: self.model.write_work(a, w, status)
        )

    @aimed("idle", "busy", name=AGENTS, item=RECORDS, text=("", "to be done"))
    def write_objective(self, name: str, item: str, text: str) -> None:
        def expect(agent: MAgent, found: MWork) -> None:
            _need(not found.over, WrongStateError)
            found.objective = text

        self._write_work(name, item, "objective", text, expect)

    @aimed(
        *("idle", "busy"),
        name=AGENTS,
        item=RECORDS,
        names=((), ("w",), ("x",), ("x", "w"), ("y", "x", "x")),
    )
    def write_blocked_by(self, name: str, item: str, names: tuple[str, ...]) -> None:
        text = "".join(f"{n}\n" for n in names)
        self._write_work(
            name, item, "blocked_by", text,
            lambda a, w: self.model.write_blocked_by(a, w, list(names)),
        )  # fmt: skip

    @aimed("idle", "busy", name=AGENTS, item=("", "w", "x", "y", "z"))
    def focus(self, name: str, item: str) -> None:
        if name in self.model.agents:
            self.both(
                lambda: self.model.focus(self.model.agents[name], item),
                lambda: self.world.agents.work.focus(self.real(name), item),
            )

    # waits

    @aimed("idle", "busy", name=AGENTS, wait=WAITS)
    def make_wait(self, name: str, wait: str) -> None:
        self._make_wait(name, wait)

    def _make_wait(self, name: str, wait: str) -> None:
        self._tidy(name, "waits")
        if name in self.model.agents:
            self.both(
                lambda: self.model.make_wait(self.model.agents[name], wait),
                lambda: self.world.agents.waiting.make(_USER, self.real(name), wait),
            )

    def _with_wait(
        self,
        name: str,
        wait: str,
        expect: Callable[[MAgent, MWait], None],
        act: Callable[[Agent, Wait], None],
    ) -> None:
        model = self.model.agents.get(name)
        if model is not None and wait in model.waits:
            agent, item = self.real(name), self.item(name, Wait, wait)
            self.both(lambda: expect(model, model.waits[wait]), lambda: act(agent, item))

    @aimed("idle", "busy", name=AGENTS, wait=RECORDS, on=CAUSES)
    def arm(self, name: str, wait: str, on: str) -> None:
        self._arm(name, wait, on)

    def _arm(self, name: str, wait: str, on: str) -> None:
        self._with_wait(
            name, wait,
            lambda a, w: self.model.arm(a, w, on),
            lambda a, w: self.world.agents.waiting.arm(_USER, a, w, on),
        )  # fmt: skip

    @aimed(
        *("idle", "busy"),
        name=AGENTS,
        wait=WAITS,
        item=("", "w", "w", "x"),
        on=CAUSES,
    )
    def block_by_a_wait(self, name: str, wait: str, item: str, on: str) -> None:
        """All three steps, which chance alone seldom puts in this order."""
        self._make_work(name, item or "w")
        self._make_wait(name, wait)
        self._set_wait_work(name, wait, item)
        self._arm(name, wait, on)

    @aimed("idle", "busy", name=AGENTS, wait=RECORDS, item=("", "w", "x", "y"))
    def set_wait_work(self, name: str, wait: str, item: str) -> None:
        self._set_wait_work(name, wait, item)

    def _set_wait_work(self, name: str, wait: str, item: str) -> None:
        self._with_wait(
            name, wait,
            lambda a, w: self.model.set_wait_work(a, w, item),
            lambda a, w: self.world.agents.waiting.set(a, w, "work", item),
        )  # fmt: skip

    @aimed("idle", "busy", name=AGENTS, wait=RECORDS, text=DURATIONS)
    def set_deadline(self, name: str, wait: str, text: str) -> None:
        self._with_wait(
            name, wait,
            lambda a, w: self.model.set_deadline(a, w, text),
            lambda a, w: self.world.agents.waiting.set(a, w, "deadline", text),
        )  # fmt: skip

    @aimed("idle", "busy", name=AGENTS, wait=RECORDS, text=("", "now\n"))
    def trigger(self, name: str, wait: str, text: str) -> None:
        self._with_wait(
            name, wait,
            lambda a, w: self.model.trigger(a, w, text),
            lambda a, w: self.world.agents.waiting.trigger(w, text),
        )  # fmt: skip

    @aimed("idle", "busy", name=AGENTS, wait=RECORDS)
    def remove_wait(self, name: str, wait: str) -> None:
        self._remove_wait(name, wait)

    def _remove_wait(self, name: str, wait: str) -> None:
        self._with_wait(
            name, wait,
            lambda a, w: self.model.remove_wait(a, w),
            lambda a, w: rmdir(self.world.agents.waiting, _USER, a, w.name),
        )  # fmt: skip

    @operation(seconds=(0.0, 1.0, 10.0, 100.0, 5000.0), down=(False, True))
    def pass_time(self, seconds: float, down: bool) -> None:
        """Perhaps while no daemon runs."""
        self._clock.now += seconds
        if down:
            self.world.reopen()
        trio.run(self._look_at_clock)
        self.model.pass_time(seconds)

    async def _look_at_clock(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.world.agents.waiting.moments.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    # what can be seen

    @invariant()
    def everything_is_as_the_model_has_it(self) -> None:
        agents = self.world.agents
        assert {a.name for a in agents.registry} == set(self.model.agents)
        for model in self.model.agents.values():
            agent = self.real(model.name)
            assert (agent.status, agent.focus) == (model.status, model.focus)
            assert [c.name for c in agents.registry.children(agent)] == [
                c.name for c in self.model.children(model)
            ] or model.orphan
            self._compare_messages(agent, model)
            self._compare_tasks(agent, model)
            self._compare_work(agent, model)
            self._compare_waits(agent, model)
            self._compare_events(agent, model)

    def _compare_messages(self, agent: Agent, model: MAgent) -> None:
        messages = self.world.agents.messages
        pending = messages.pending(agent)
        assert len(pending) == len(model.queue)
        for message, expected in zip(pending, model.queue, strict=True):
            self._name(expected, message)
            assert message.priority == expected.priority
            if isinstance(expected.text, str):
                assert message.text == expected.text
            else:
                assert json.loads(message.text) == self._shown(expected.text)
        current = messages.current(agent)
        assert (current is None) is (model.current is None)
        rows = [json.loads(line) for line in messages.lines(agent)]
        assert [row["id"] for row in rows] == [m.name for m in pending]
        kept = {m.name for m in self.items(agent, Message) if m.status in _OVER["message"]}
        assert kept == {m.name for m in model.messages if m.kept}

    def _compare_tasks(self, agent: Agent, model: MAgent) -> None:
        tasks = self.world.agents.tasks
        assert [(t.name, tasks.status(t), t.exit, bool(t.child)) for t in tasks.known(agent)] == [
            (t.name, t.shown, t.exit, t.child is not None) for t in model.tasks.values()
        ]
        for task in tasks.known(agent):
            child = self.world.agents.results.child_of(task)
            assert child is None or child.parent == agent.index
            # whoever waits for it is let go at its end, and not before
            if child is None:
                assert tasks.wait_path(task).is_fifo() is not task.over

    def _compare_work(self, agent: Agent, model: MAgent) -> None:
        found = self.items(agent, Work)
        assert [(w.name, w.status, list(w.blocked_by)) for w in found] == [
            (w.name, w.status, w.blocked_by) for w in model.work.values()
        ]
        for item in found:
            waits = [w for w in model.waits.values() if w.status == "armed" and w.work == item.name]
            shown = [*item.blocked_by, *(f"wait {w.name}" for w in waits)]
            assert self.world.agents.work.blocked_by(agent, item).splitlines() == shown
        active = [w.name for w in found if w.status == "active"]
        assert len(active) <= 1
        assert not active or agent.focus == active[0]
        if agent.focus:
            (focused,) = [w for w in found if w.name == agent.focus]
            assert focused.status in ("active", "blocked")

    def _compare_waits(self, agent: Agent, model: MAgent) -> None:
        found = self.items(agent, Wait)
        assert [(w.name, w.status, w.on, w.work) for w in found] == [
            (w.name, w.status, w.on, w.work) for w in model.waits.values()
        ]
        for wait, expected in zip(found, model.waits.values(), strict=True):
            if expected.payload is None or isinstance(expected.payload, str):
                assert wait.payload == (expected.payload or "")
            else:
                assert json.loads(wait.payload) == self._shown(expected.payload)
            good = expected.status == "armed" and expected.on == "trigger"
            assert (self.world.agents.waiting.with_token(wait.token) is wait) is good

    def items(self, agent: Agent, cls: type[Any]) -> list[Any]:
        return self.world.agents.items.of(agent.index, cls)

    def _shown(self, value: Any) -> Any:
        """What the model means by a message."""
        if isinstance(value, MMessage):
            return {"message": value.name, "from": value.sender,
                    "provenance": value.provenance, "priority": value.priority}  # fmt: skip
        if isinstance(value, dict):
            return {key: self._shown(each) for key, each in value.items()}
        return value

    def _compare_events(self, agent: Agent, model: MAgent) -> None:
        events = [json.loads(line) for line in self.world.lines(agent)]
        assert [e["id"] for e in events] == [f"e{n}" for n in range(1, len(events) + 1)]
        found: dict[str, list[tuple[str, ...]]] = {plane: [] for plane in model.events}
        known = {m.name for m in model.messages if m.name}
        for event in events:
            plane, _, word = event["type"].partition(".")
            if plane == "work":
                found[plane].append((event["work"], event["status"]))
            elif plane == "wait":
                found[plane].append((event["wait"], word))
            elif plane == "task":
                found[plane].append((word, event["task"], event["status"]))
            elif event["type"] == "message.queued":
                sender = event["from"]
                found[plane].append((word, sender, event["provenance"], event["priority"]))
            elif event["type"] == "message.end":
                name = event["message"] if event["message"] in known else ""
                found[plane].append((word, name, event["outcome"]))
        assert found == model.events
        ends = Counter(e["message"] for e in events if e["type"] == "message.end")
        queued = Counter(e["message"] for e in events if e["type"] == "message.queued")
        assert ends <= queued
        left = self.world.agents.messages
        waiting_ids = Counter(m.name for m in left.pending(agent))
        current = left.current(agent)
        assert queued - ends == waiting_ids + Counter([current.name] if current else [])

    @invariant()
    def quotas_hold(self) -> None:
        for agent in self.world.agents.registry:
            assert len(self.items(agent, Work)) <= _LIMITS["work_items"]
            assert len(self.items(agent, Wait)) <= _LIMITS["waits"]
            commands = [t for t in self.items(agent, Task) if not t.child]
            assert len(commands) <= _LIMITS["tasks"]
            senders = Counter(m.sender for m in self.world.agents.messages.pending(agent))
            assert senders["somebody"] <= _LIMITS["messages"]

    @invariant()
    def memory_is_what_the_store_has(self) -> None:
        def told(items: list[Item]) -> dict[int, dict[str, Any]]:
            return {item.index: {"kind": item.kind, **item.dump()} for item in items}

        agents = self.world.agents
        held = [i for a in agents.registry for kind in (Message, Task, Work, Wait)
                for i in self.items(a, kind)]  # fmt: skip
        assert told(held) == told(self.world.store.load_items())
        assert [a.dump() for a in agents.registry] == [
            a.dump() for a in self.world.store.load_agents()
        ]

    @invariant()
    def histories_only_grow(self) -> None:
        kept = kept_histories(self.world.state)
        for path, data in kept.items():
            assert data.startswith(self._histories.get(path, b""))
            assert not data or data.endswith(b"\n")
            self._histories[path] = data
        assert kept.keys() >= self._histories.keys()


@pytest.mark.parametrize(
    "salt",
    [pytest.param(salt, marks=pytest.mark.long if salt in MORE_SALTS else [])
     for salt in SALTS],
)
def test_the_planes_are_as_the_model_has_them(salt: int) -> None:
    salted = type("Planes", (Planes,), {"salt": salt})
    run_state_machine_as_test(
        salted,
        settings=settings(
            max_examples=3,
            stateful_step_count=80,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        ),
    )
