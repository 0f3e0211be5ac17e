"""The task plane, ``agent/NAME.d/task``, as rows (ctxfs(5), Tasks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ctxfs.files.verbs import act as act_on_agent
from ctxfs.handles import ChildInputHandle, TaskInputHandle, TaskOutputHandle, VerbHandle
from ctxfs.nodes import Call, Handle
from ctxfs.rows import ITEM, ItemPlane, Kind, Plane, Render, Row, RowNode, Table
from ctxfs.rows import one_line as _one
from runtime import names
from runtime.caller import PARTIES, Caller, Role
from runtime.errors import DeniedError, MalformedError, MissingError, WrongStateError
from runtime.items import Task, Work
from runtime.names import quote, timestamp

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem

_TITLE_MAX: Final = 200


def _value(attribute: str) -> Render:
    def render(fs: Filesystem, task: Task, caller: Caller) -> str:
        value = getattr(task, attribute)
        return f"{value}\n" if value else ""

    return render


def _time(attribute: str) -> Render:
    def render(fs: Filesystem, task: Task, caller: Caller) -> str:
        value = getattr(task, attribute)
        return timestamp(value) + "\n" if value else ""

    return render


def _settable(fs: Filesystem, task: Task) -> None:
    fs.runtime.agents.tasks.check_settable(task)


def _single(name: str, doc: str, parse: Callable[[str], Any], **more: Any) -> Row:
    """A control with one value on one line, until the task is started."""

    def check(fs: Filesystem, task: Task, caller: Caller, line: str) -> None:
        parse(line)

    def commit(fs: Filesystem, task: Task, caller: Caller, text: str) -> None:
        fs.runtime.agents.tasks.set(task, **{name: parse(_one(text))})

    values: dict[str, Any] = {"render": _value(name), **more}
    return Row(name=name, doc=doc, mode=0o644, write=PARTIES, writable=_settable,
               check=check, commit=commit, single=True, **values)


def _parse_title(line: str) -> str:
    if len(line) > _TITLE_MAX or not line.isprintable():
        raise MalformedError(f"{quote(line)} is not a title: printable, at most {_TITLE_MAX}")
    return line


def _parse_cwd(line: str) -> str:
    return names.check_absolute(line) if line else ""


def _parse_flag(line: str) -> bool:
    return names.check_choice(line, ("0", "1")) == "1"


def _set_cmd(fs: Filesystem, task: Task, caller: Caller, text: str) -> None:
    fs.runtime.agents.tasks.set(task, cmd=text.removesuffix("\n"))


def _cmd(fs: Filesystem, task: Task, caller: Caller) -> str:
    return task.cmd + "\n" if task.cmd else ""


def _check_env(fs: Filesystem, task: Task, caller: Caller, line: str) -> None:
    if line:
        names.parse_env_line(line)


def _set_env(fs: Filesystem, task: Task, caller: Caller, text: str) -> None:
    lines = [line for line in text.split("\n") if line]
    for line in lines:
        names.parse_env_line(line)
    fs.runtime.agents.tasks.set(task, env="".join(f"{line}\n" for line in lines))


def _check_work(fs: Filesystem, task: Task, caller: Caller, line: str) -> None:
    if line and fs.runtime.agents.items.named(task.agent, Work, line) is None:
        raise MissingError(f"this agent has no work item {quote(line)}")


def _set_work(fs: Filesystem, task: Task, caller: Caller, text: str) -> None:
    fs.runtime.agents.tasks.check_there(task)
    value = _one(text)
    _check_work(fs, task, caller, value)
    with fs.runtime.agents.journal.changing() as change:
        change.put(task, work=value)


def _status(fs: Filesystem, task: Task, caller: Caller) -> str:
    return fs.runtime.agents.tasks.status(task) + "\n"


def _title(fs: Filesystem, task: Task, caller: Caller) -> str:
    title = fs.runtime.agents.tasks.title(task)
    return title + "\n" if title else ""


def _accepts(fs: Filesystem, task: Task, caller: Caller) -> str:
    return f"{int(accepts_input(fs, task))}\n"


def accepts_input(fs: Filesystem, task: Task) -> bool:
    """Whether something can be written to it; a child takes messages, unless it is ``once``."""
    child = fs.runtime.agents.tasks.child_of(task)
    return child.how.holds_cell if child is not None else task.accepts_input


def _open_output(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    return TaskOutputHandle(fs, node, call.caller, writing=False)


def _open_input(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    task: Task = node.obj
    if not accepts_input(fs, task):
        raise DeniedError(f"the task {quote(task.name)} takes no input: accepts_input is 0")
    if task.over:
        raise WrongStateError(f"the task {quote(task.name)} is {task.status.shown}")
    handle = ChildInputHandle if task.child else TaskInputHandle
    return handle(fs, node, call.caller, writing=True)


def _open_verbs(fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
    return VerbHandle(fs, node, call.caller, fs.runtime.config.control_max)


_VERBS: Final = ("start", "stop", "kill", "fetch")


def _verbs(fs: Filesystem, task: Task, caller: Caller) -> str:
    return "".join(f"{verb}\n" for verb in _VERBS if task.child or verb != "fetch")


def act(fs: Filesystem, task: Task, caller: Caller, line: str) -> None:
    """One line of ``ctl``; that of a handle is said to its child."""
    tasks = fs.runtime.agents.tasks
    verb = line.strip(" \t")
    if verb not in _VERBS:
        raise MalformedError(f"unknown verb {quote(verb)}; use {', '.join(_VERBS)}")
    agent = fs.runtime.agents.registry.get(task.agent)
    if agent is None:
        raise WrongStateError("the agent of this task is gone")
    if verb == "fetch":
        tasks.check_fetch(caller, agent, task)
        fs.runtime.supervisor.fetch(task)
    elif task.child:
        child = tasks.child_of(task)
        if child is None:
            raise WrongStateError("the agent of this handle is gone")
        act_on_agent(fs, child, caller, verb)
    elif verb == "start":
        tasks.start(caller, agent, task)
    else:
        tasks.stop(caller, agent, task, kill=verb == "kill")


def _worktree(fs: Filesystem, task: Task, caller: Caller) -> str:
    return fs.runtime.agents.tasks.worktree(task)


ROWS: Final = (
    Row(name="", within=ITEM, kind=Kind.DIRECTORY, mode=0o755),
    Row(name="kind", doc="command_task or child_agent_task", render=_value("task_kind")),
    _single("title", "its title, one line; for a child's handle: the first line of its task",
            _parse_title, render=_title),
    Row(name="cmd", mode=0o644, write=PARTIES, writable=_settable, render=_cmd, commit=_set_cmd,
        doc="the command, run by sh -c"),
    _single("cwd", "its working directory", _parse_cwd, default="the agent's"),
    Row(name="env", mode=0o600, read=PARTIES, write=PARTIES, writable=_settable,
        render=lambda fs, task, caller: str(task.env), check=_check_env,
        commit=_set_env, doc="additional environment: KEY=VALUE, one per line"),
    _single("accepts_input", "0, or 1: input is its standard input", _parse_flag,
            default="0", render=_accepts),
    Row(name="status", polled=True, render=_status,
        doc="queued running cancelling completed failed cancelled interrupted"),
    Row(name="exit", render=_value("exit"), doc="exit:N or signal:N, once it has ended"),
    Row(name="pid", render=_value("pid"), volatile=True, doc="its shell, as a PID of the host"),
    Row(name="output", volatile=True, opener=_open_output,
        size=lambda fs, task: fs.runtime.agents.tasks.output_size(task),
        doc="everything it wrote; for a child's handle: its latest reply, then its result"),
    Row(name="preview", volatile=True,
        render=lambda fs, task, caller: fs.runtime.agents.tasks.preview(task)[0],
        doc="head and tail of output, at most 8 KiB"),
    Row(name="input", mode=0o222, read=Role.NONE, write=PARTIES, opener=_open_input,
        doc="its standard input; for a child's handle: one message per flush"),
    Row(name="ctl", mode=0o666, write=PARTIES, opener=_open_verbs, commit=act,
        render=_verbs,
        doc="takes start, stop, kill and, for a child with a worktree, fetch, one per line"),
    Row(name="wait", kind=Kind.LINK, mode=0o777,
        target=lambda fs, task: str(fs.runtime.agents.tasks.wait_path(task)),
        doc="reading it blocks until the task has ended"),
    Row(name="work", mode=0o644, write=PARTIES, render=_value("work"), check=_check_work,
        commit=_set_work, single=True, doc="the work item that it is for"),
    Row(name="worktree", render=_worktree, polled=True,
        doc="for a child's handle: state= path= branch= base= commit= reason= of its worktree"),
    Row(name="started_at", render=_time("started"), depends=("started",), doc="RFC 3339 time"),
    Row(name="ended_at", render=_time("ended"), depends=("ended",), doc="RFC 3339 time"),
)

TABLE: Final = Table(Plane.TASK, ROWS)
PLANE: Final = ItemPlane(name="task", cls=Task, table=TABLE, records=lambda agents: agents.tasks)
