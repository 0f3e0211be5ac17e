"""The task plane, ``agent/NAME.d/task``, as rows (ctxfs-tasks(5), Tasks)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ctxfs.files import fields
from ctxfs.files.verbs import Verb
from ctxfs.files.verbs import act as act_on_agent
from ctxfs.tree.base import Base
from ctxfs.tree.items import item_layout
from ctxfs.tree.rows import Control, Directory, Inlet, Link, Output, Row, Shown, Verbs
from ctxfs.tree.rows import one_line as _one
from runtime.agents.tasks import (
    FETCHING,
    INPUT,
    KILLING,
    STARTING,
    STOPPING,
    TASKS,
    WRITING,
    accepts_input,
)
from runtime.authority.guard import Guard
from runtime.caller import PARTIES, Caller
from runtime.errors import MalformedError, MissingError, WrongStateError
from runtime.records.items import Task, Work
from runtime.records.model import Agent
from runtime.texts import names
from runtime.texts.names import parse_usage, quote

_TITLE_MAX: Final = 200
_PARTIES: Final[Guard[Task]] = Guard(who=PARTIES)


def _update(base: Base, task: Task, **values: str | bool) -> None:
    base.agents.tasks.set(task, **values)


def _single(name: str, doc: str, parse: fields.Parse[Task], **more: Any) -> Control[Task]:
    """A control with one value on one line, until the task is started."""
    return fields.single(name, doc, parse, guard=WRITING, update=_update, **more)


def _parse_input(base: Base, task: Task, caller: Caller, line: str) -> bool:
    accepts = names.check_choice(line, ("0", "1")) == "1"
    if accepts and task.tty:
        raise MalformedError(
            f"accepts_input: with tty ({task.tty}) its input is typed: empty tty first"
        )
    return accepts


def _parse_tty(base: Base, task: Task, caller: Caller, line: str) -> str:
    if line:
        names.parse_screen(line)
        if task.accepts_input:
            raise MalformedError("tty: only without accepts_input, which is 1: write 0 there first")
    return line


def _parse_title(line: str) -> str:
    if len(line) > _TITLE_MAX or not line.isprintable():
        raise MalformedError(f"{quote(line)} is not a title: printable, at most {_TITLE_MAX}")
    return line


def _check_work(base: Base, task: Task, caller: Caller, line: str) -> None:
    if line and base.agents.items.named(task.agent, Work, line) is None:
        raise MissingError(f"this agent has no work item {quote(line)}")


def _set_work(base: Base, task: Task, caller: Caller, text: str) -> None:
    base.agents.tasks.check_there(task)
    value = _one(text)
    _check_work(base, task, caller, value)
    with base.agents.journal.changing() as change:
        change.put(task, work=value)


def _title(base: Base, task: Task, caller: Caller) -> str:
    title = base.agents.results.title(task)
    return title + "\n" if title else ""


def _send(base: Base, task: Task, caller: Caller, text: str) -> None:
    """A line that is written to a child's handle is a message to the child."""
    agents = base.agents
    child = agents.results.child_of(task)
    if child is None:
        raise WrongStateError("the agent of this handle was removed")
    agents.messages.send(caller, child, text)


def _feed(base: Base, task: Task) -> Callable[[bytes], int] | None:
    """A command takes bytes, as its standard input."""
    return None if task.child else partial(base.runtime.supervisor.write_input, task)


def _owner(base: Base, task: Task) -> Agent:
    agent = base.agents.registry.get(task.agent)
    if agent is None:
        raise WrongStateError("the agent of this task was removed")
    return agent


def _fetch(base: Base, task: Task, caller: Caller, words: list[str]) -> None:
    base.agents.tasks.check_command(FETCHING, "fetch", caller, _owner(base, task), task)
    base.runtime.supervisor.fetch(task)


_FETCH: Final[Verb[Task]] = Verb(
    "fetch", "take over what a child committed in its worktree", FETCHING, _fetch
)
VERBS: Final[dict[str, Verb[Task]]] = {
    verb.name: verb
    for verb in (
        Verb("start", "run the command", STARTING, lambda base, task, caller, words:
             base.agents.tasks.start(caller, _owner(base, task), task)),
        Verb("stop", "SIGTERM, grace, SIGKILL", STOPPING, lambda base, task, caller, words:
             base.agents.tasks.stop(caller, _owner(base, task), task, kill=False)),
        Verb("kill", "SIGKILL", KILLING, lambda base, task, caller, words:
             base.agents.tasks.stop(caller, _owner(base, task), task, kill=True)),
        _FETCH,
    )
}  # fmt: skip


def _verbs(base: Base, task: Task, caller: Caller) -> str:
    shown = (verb for verb in VERBS.values() if task.child or verb is not _FETCH)
    return "".join(f"{verb.usage}\n" for verb in shown)


def act(base: Base, task: Task, caller: Caller, line: str) -> None:
    """One line of ``ctl``. A child's handle passes it on to the child, but for ``fetch``."""
    verb, words = parse_usage(line, VERBS)
    _owner(base, task)
    if not task.child or verb is _FETCH:
        verb.handler(base, task, caller, words)
        return
    child = base.agents.results.child_of(task)
    if child is None:
        raise WrongStateError("the agent of this handle was removed")
    act_on_agent(base, child, caller, verb.name)


ROWS: Final[tuple[Row[Task], ...]] = (
    Directory(name="", top=True),
    Shown(name="kind", doc="command_task or child_agent_task", render=fields.value("task_kind")),
    _single("title", "its title, one line; for a child's handle: the first line of its task",
            fields.alone(_parse_title), render=_title),
    Control(name="cmd", guard=WRITING, render=fields.value("cmd"),
        commit=lambda base, task, caller, text: _update(base, task, cmd=text.removesuffix("\n")),
        doc="the command, run by sh -c"),
    _single("cwd", "its working directory", fields.alone(fields.check_path), default="the agent's"),
    Control(name="env", mode=0o600, read=PARTIES, guard=WRITING,
        render=fields.text("env"), check=fields.alone(fields.check_variable),
        commit=lambda base, task, caller, text: _update(base, task, env=fields.variables(text)),
        doc="additional environment: KEY=VALUE, one per line"),
    _single("accepts_input", "0, or 1: input is its standard input", _parse_input,
            default="0",
            render=lambda base, task, caller: f"{int(accepts_input(base.agents, task))}\n"),
    _single("tty", "COLSxROWS, without accepts_input: it has a terminal, of this size at first; "
            "then, if an operator made it, its end puts no task_result in the queue, and "
            "removes it", _parse_tty),
    Shown(name="status", instead="ctl", polled=True,
        render=lambda base, task, caller: f"{base.agents.tasks.status(task)}\n",
        doc="queued running cancelling completed failed cancelled interrupted"),
    Shown(name="exit", render=fields.value("exit"), doc="exit:N or signal:N, once it has ended"),
    Shown(name="reason", render=fields.value("reason"),
        doc="why it has ended, such as exit:3 or operator_stop"),
    Shown(name="agent", render=lambda base, task, caller: f"{task.name}\n" if task.child else "",
        doc="for a child's handle: the name of the child"),
    Shown(name="pid", render=fields.value("pid"), volatile=True,
        doc="its shell, as a PID of the host"),
    Output(name="output", content=lambda base, task: base.agents.results.source(task).read,
        size=lambda base, task: base.agents.results.source(task).size(),
        doc="everything it wrote; for a child's handle: the end of its out, then its latest "
        "reply, then its result; a read at offset 0 determines which of these it is"),
    Shown(name="preview", volatile=True,
        render=lambda base, task, caller: base.agents.results.preview(task)[0],
        doc="head and tail of output, at most 8 KiB"),
    Inlet(name="input", guard=INPUT, send=_send, feed=_feed,
        doc="its standard input; for a child's handle: one message per flush"),
    Verbs(name="ctl", guard=_PARTIES, act=act,
        render=_verbs,
        doc="takes start, stop, kill and, for a child with a worktree, fetch, one per "
        "line"),
    Link(name="wait", listed=False,
        target=lambda base, task: str(base.agents.tasks.wait_path(task)),
        doc="reading it blocks until the task has ended; by name only, no listing has it"),
    Control(name="work", guard=_PARTIES, render=fields.value("work"), check=_check_work,
        commit=_set_work, single=True, doc="the work item that it is for"),
    Shown(name="worktree", polled=True,
        render=lambda base, task, caller: base.agents.tasks.worktree(task),
        doc="for a child's handle: state= path= branch= base= commit= reason= of its "
        "worktree, and in what it differs from its parent's workspace"),
    Shown(name="started_at", render=fields.time("started"), depends=("started",),
        doc="RFC 3339 time"),
    Shown(name="ended_at", render=fields.time("ended"), depends=("ended",), doc="RFC 3339 time"),
)

LAYOUT: Final = item_layout(7, "task", ROWS, TASKS, lambda agents: agents.tasks)
