"""Tools of the task plane: commands beside an agent's program, and handles of its children."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import trio

from ctxfs.tools.listing import AFTER, LEFT, NEXT, listing
from ctxfs.tools.schemas import count, flag, listed, shape, text, words
from ctxfs.tools.tool import WAKES, Does, Field, Request, View, about, first_free, tool, waking
from ctxfs.tools.waiting import MESSAGE_ID, WAITED, WAITS, send
from runtime.agents.results import CHILD, COMMAND
from runtime.agents.tasks import accepts_input
from runtime.agents.workspace import WorktreeState
from runtime.errors import MalformedError, MissingError, WrongStateError
from runtime.records.items import Task, TaskStatus
from runtime.texts.names import parse_duration, parse_env_line, quote, timestamp

_tool = partial(tool, family="local_environment")
_ID: Final = text("the task's id")
_OF_TASK: Final = {"task_id": _ID}
_NAME: Final[Field[Task]] = (_ID, lambda _, task: task.name)
_KIND: Final = words("a command, or the handle of a child", COMMAND, CHILD)
_STATUS: Final[Field[Task]] = (
    words("its status", *dict.fromkeys(status.shown for status in TaskStatus)),
    lambda request, task: request.agents.tasks.status(task),
)
_EXIT: Final = text("exit:N or signal:N, once it has ended by itself")
_REASON: Final = text("why it has ended, such as exit:3 or operator_stop")
#: what became of a child's work in git
WORKTREE: Final = {
    **shape({
        "state": words(
            "whether the parent has its commits: kept, if it has not all of them; reason says why",
            *WorktreeState,
        ),
        "branch": text("the branch in the parent's repository"),
        "path": text("the child's files"),
        "commit": text("the commit that the branch was moved to, empty if it was not"),
        "reason": text("why it is kept, and what can be done"),
    }),
    "description": "of a child with a worktree: what became of it",
}  # fmt: skip
_WORKTREE: Final[Field[Task]] = (
    WORKTREE,
    lambda request, task: request.agents.results.worktree_of(
        request.agents.results.child_of(task)
    ),
)
_FACTS: Final[View[Task]] = View({
    "task_id": _NAME,
    "task_kind": _KIND,
    "agent": (
        text("of a child's handle: the child"), lambda _, task: task.name if task.child else ""
    ),
    "accepts_input": (
        flag("whether TaskInput can write to it"),
        lambda request, task: accepts_input(request.agents, task),
    ),
    "tty": text("COLSxROWS of its terminal at first, empty if it has none"),
    "wait_policy": (
        words("you go on while it runs, and its end wakes you", "background"),
        lambda _, task: "background",
    ),
    "title": (text("its title"), lambda request, task: request.agents.results.title(task)),
    "status": _STATUS,
    "exit": _EXIT,
    "reason": _REASON,
    "work": text("id of the work item that it is for"),
    "started_at": (
        text("RFC 3339 time, empty before"),
        lambda _, task: _time(task.started),
    ),
    "ended_at": (text("RFC 3339 time, empty before"), lambda _, task: _time(task.ended)),
}, {"worktree": _WORKTREE})  # fmt: skip
#: the answer of a call that starts something
HANDLE: Final[View[Task]] = View({
    "task_id": _NAME,
    "task_kind": _KIND,
    "status": _STATUS,
    "initial_output": (
        text("what it has written so far, head and tail"),
        lambda request, task: request.agents.results.preview(task)[0],
    ),
}, {"exit": _EXIT, "reason": _REASON})  # fmt: skip
_ENDING: Final[View[Task]] = View({"task_id": _NAME, "status": _STATUS})
_TAKEN: Final[View[Task]] = View({"task_id": _NAME, "worktree": _WORKTREE})
_OUTCOME: Final[View[Task]] = View(
    {"task_id": _NAME, "status": _STATUS, "exit": _EXIT, "reason": _REASON},
    {"worktree": _WORKTREE},
)
#: what is shown of the output of a task, and what more there is of a child that has ended
_SEEN: Final = {
    "preview": text("head and tail, at most 8 KiB"),
    "output_path": text("the file with all of it"),
    "truncated": flag("whether something is left out"),
}
#: seconds that ExecCommand waits, and at most: clients of MCP give up after 60
_YIELD: Final = 10.0
_YIELD_MAX: Final = 50.0
_GIVEN: Final = {
    "result": text("of an ended child: head and tail of its result.md"),
    "refs": listed({"type": "object"}, "of an ended child: its references"),
    "artifacts": listed(text("a path"), "of an ended child: the files below its artifact/"),
}


def _time(when: float | None) -> str:
    return timestamp(when) if when else ""


def _path(request: Request, task_id: str, file: str) -> str:
    return f"agent/{request.agent.name}.d/task/{task_id}/{file}"


def _find(request: Request) -> Task:
    with about("task_id"):
        return request.agents.tasks.find(request.agent, request.input["task_id"])


def duration(what: str) -> dict[str, Any]:
    return {
        "type": ["number", "string"],
        "minimum": 0,
        "description": f'{what}: seconds such as 10, or a duration such as "10s" or "5m"',
    }


def seconds(
    request: Request, field: str, default: float, most: float = math.inf
) -> float:
    """``MalformedError``."""
    given: float | str = request.input.get(field, default)
    with about(field):
        found = parse_duration(given) if isinstance(given, str) else given
        if found > most:
            raise MalformedError(f"{given} is more than {most:g} s: use TaskOutput with block")
    return found


async def _until_ended(
    request: Request, output: dict[str, Any], cut_short: bool
) -> dict[str, Any]:
    agent, tasks = request.subject, request.agents.tasks
    try:
        if agent is None:
            return output
        task = tasks.find(agent, output["task_handle"]["task_id"])
        if not cut_short:
            with trio.move_on_after(seconds(request, "yield", _YIELD)):
                await tasks.wait_over(task)
        tasks.check_there(task)
    except MissingError:
        return output  # it was removed meanwhile
    seen = {"task_handle": HANDLE.of(request, task)}
    if not task.over:
        return {**output, **seen}
    tasks.end_told(request.caller, agent, task)
    return seen


@_tool(
    "ExecCommand",
    does=Does.DESTROYS | Does.REACHES,
    example={"cmd": "make test", "title": "the tests", "accepts_input": True},
    required={"cmd": text("the command", minLength=1)},
    optional={
        "title": text("its title, one line"),
        "cwd": text("its working directory, an absolute path; the agent's by default"),
        "env": {
            "type": "object",
            "description": "additional environment",
            "additionalProperties": {"type": "string"},
        },
        "accepts_input": flag("whether TaskInput may write to its standard input"),
        "tty": text(
            "COLSxROWS, such as 80x24: it has a terminal of this size, at which people type; not "
            "with accepts_input"
        ),
        "work": text("id of the work item that it is for"),
        "task_id": text("an id for it; task-1, task-2 and so on by default", minLength=1),
        "yield": duration(
            f"how long to wait for its end before you are answered, {_YIELD:g} s by default and at "
            f"most {_YIELD_MAX:g}; 0 answers at once"
        ),
    },
    output=shape({"task_handle": HANDLE.schema}, WAKES),
    lingers=_until_ended,
)
async def _exec(request: Request) -> dict[str, Any]:
    """Run a command with sh -c beside your program, in your view and with your authority. Use it
    for any command, short or long; for work that needs a context of its own use SpawnAgent. What
    ends within yield is answered with its output (initial_output) and exit, and does not wake you.
    Anything else goes on while you do something else, and its end wakes you with a task_result
    message. If your mode is once, nothing wakes you and the answer has wakes=false: use TaskOutput
    with block. When it has ended and you have read it, TaskRemove makes room for others."""
    # mkdir, the files, start; if any of it is refused, or the daemon dies before all of it is done,
    # the task is removed again
    given, agent = request.input, request.agent
    seconds(request, "yield", _YIELD, _YIELD_MAX)
    name = given.get("task_id") or first_free("task", request.agents.tasks.known(agent))
    values = {
        "cmd": given["cmd"],
        "title": given.get("title", ""),
        "cwd": given.get("cwd", ""),
        "env": "".join(_env_line(*item) for item in given.get("env", {}).items()),
        "accepts_input": str(int(given.get("accepts_input", False))),
        "tty": given.get("tty", ""),
        "work": given.get("work", ""),
    }

    def queued() -> dict[str, Any] | None:
        task = request.agents.tasks.find(agent, name)
        if task.status is TaskStatus.MADE:
            return None
        return waking(request, {"task_handle": HANDLE.of(request, task)})

    where = f"agent/{agent.name}.d/task"
    with about("task_id"), request.agents.journal.starting():
        request.paths.mkdir(where, name)
    files = ((field, field, value) for field, value in values.items() if value)
    undo = partial(request.paths.rmdir, where, name)
    return await request.start(f"{where}/{name}", files, undo, queued)


def _env_line(key: str, value: str) -> str:
    with about(f"env.{key}"):
        line = f"{key}={value}"
        if "\n" in line or parse_env_line(line) != (key, value):
            raise MalformedError(f"{quote(line)} is not a variable on one line")
    return line + "\n"


@_tool(
    "TaskList",
    does=Does.READS,
    example={"task_kind": COMMAND},
    optional={
        "all": flag("include those that have ended"),
        "task_kind": words("only commands, or handles of children", COMMAND, CHILD),
        **AFTER,
    },
    output=shape({"tasks": listed(_FACTS.schema, "oldest first"), **LEFT}, NEXT),
)
async def _list(request: Request) -> dict[str, Any]:
    """List your tasks that have not ended: commands, and handles of children. Use it to see what
    you still wait for; for one of them use TaskStatus, for its output TaskOutput. A long list has
    left, how many more there are: choose by task_kind, or go on with after."""
    given, items = request.input, request.agents.items
    kind, every = given.get("task_kind"), given.get("all", False)

    def wanted(task: Task) -> bool:
        there = items.get(task.index) is task
        return there and kind in (None, task.task_kind) and (every or not task.over)

    return await listing(
        request, "tasks", request.agents.tasks.known(request.agent), _FACTS, wanted
    )


@_tool(
    "TaskStatus",
    does=Does.READS,
    example={"task_id": "task-1"},
    required=_OF_TASK,
    output=_FACTS.schema,
)
async def _status(request: Request) -> dict[str, Any]:
    """Get the status of one task, whether it has ended or not. Use it for status and times only;
    TaskOutput has the status and the output, WaitFor waits without asking again."""
    return _FACTS.of(request, _find(request))


async def _until_over(request: Request) -> None:
    timeout = seconds(request, "timeout", math.inf)
    if request.input.get("block"):
        task = _find(request)
        with trio.move_on_after(timeout):
            await request.agents.tasks.wait_over(task)


@_tool(
    "TaskOutput",
    does=Does.READS,
    example={"task_id": "task-1", "block": True, "timeout": 60},
    required=_OF_TASK,
    optional={
        "block": flag("wait for the end of the task"),
        "timeout": duration("how long block waits at most, without a limit by default"),
    },
    output=shape({**_OUTCOME.required, **_SEEN}, {**_GIVEN, **_OUTCOME.optional}),
    waits=_until_over,
)
async def _output(request: Request) -> dict[str, Any]:
    """Get head and tail of the output of a task, and the path of all of it. Use it to read what a
    command wrote, and what a child did: the end of its output until it replies, then its latest
    reply, and once it has ended its result, references and artifacts, and what became of its
    worktree; for status and times use TaskStatus. With block, it answers when the task has ended,
    or after timeout: so an agent of mode once waits for it. In modes turn and resident, end your
    run instead: the end of the task wakes you with the same content."""
    task = _find(request)
    shown: dict[str, Any]
    if task.over:
        facts = request.agents.tasks.facts(request.agent, task)
        shown = {key: facts[key] for key in (*_SEEN, *_GIVEN) if key in facts}
    else:
        preview, truncated = request.agents.results.preview(task)
        path = request.path(_path(request, task.name, "output"))
        shown = {"preview": preview, "output_path": path, "truncated": truncated}
    return {**_OUTCOME.of(request, task), **shown}


@_tool(
    "TaskInput",
    does=Does.DESTROYS | Does.REACHES,
    example={"task_id": "task-1", "text": "yes\n"},
    required={**_OF_TASK, "text": text("what to write; a line ends with a newline", minLength=1)},
    optional={"id": MESSAGE_ID, "wait": WAITS},
    output=shape(
        {"task_id": _ID, "accepted": count("number of accepted bytes")},
        {"message_id": text("with id or wait: the id of the message"), **WAITED},
    ),
)
async def _input(request: Request) -> dict[str, Any]:
    """Write to the standard input of a running command that accepts it, or send a child a message.
    Use it for commands started with accepts_input; to a child, SendMessage does the same and takes
    a priority. A once child takes no messages. With wait, the reply of a child wakes you. A command
    that does not read its input takes only what fits into the pipe: see accepted."""
    given, task = request.input, _find(request)
    asked = next((key for key in ("wait", "id") if given.get(key)), "")
    if not asked:
        request.begin()
        accepted = await request.paths.write_some(_path(request, task.name, "input"), given["text"])
        return {"task_id": task.name, "accepted": accepted}
    child = request.agents.results.child_of(task)
    if child is None:
        what = f"{quote(task.name)} is a command, which takes bytes, and answers no messages"
        raise MalformedError(f"{asked}: {what}: omit it")
    sent = {"task_id": task.name, "accepted": len(given["text"].encode())}
    return send(request, child, lambda message: {**sent, "message_id": message.name})


@_tool(
    "TaskStop",
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"task_id": "task-1"},
    required=_OF_TASK,
    optional={"kill": flag("skip the grace period")},
    output=_ENDING.schema,
)
async def _stop(request: Request) -> dict[str, Any]:
    """End a task: SIGTERM, a grace period, SIGKILL; for a handle, the child. Use it for a command
    that you no longer need; for an agent that is not your child use AgentStop. It answers before
    the task has ended."""
    task = _find(request)
    return await request.end(
        _path(request, task.name, "ctl"), lambda: _ENDING.of(request, task)
    )


@_tool(
    "TaskRemove",
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"task_id": "task-1"},
    required=_OF_TASK,
    output=shape({"task_id": _ID}),
)
async def _remove(request: Request) -> dict[str, Any]:
    """Remove a command that has ended, and its output. Use it when you have read the output and
    will run more: the number of tasks is limited. A running one is refused: call TaskStop first.
    The handle of a child goes with the child: use AgentRemove."""
    task = _find(request)
    child = request.agents.registry.get(task.child) if task.child else None
    if child is not None:
        raise WrongStateError(
            f"{quote(task.name)} is the handle of an agent: remove the agent (AgentRemove)"
        )
    where = f"agent/{request.agent.name}.d/task"
    return request.remove(where, task.name, lambda: {"task_id": task.name})


@_tool(
    "WorktreeTake",
    does=Does.DESTROYS | Does.REPEATS,
    example={"task_id": "reviewer"},
    required=_OF_TASK,
    output=_TAKEN.schema,
)
async def _take(request: Request) -> dict[str, Any]:
    """Take over again what a child committed in its worktree, into the branch ctx/NAME of your
    repository. Use it when the worktree of a child that has ended is kept, after you have done what
    its reason says, or to have the commits of a child that still works; at its end they are taken
    over without it. It answers at once, with the state fetching: TaskStatus tells when that is
    fetched or kept, and why. Once it is fetched, AgentRemove or TaskRemove takes the worktree
    away."""
    task = _find(request)

    def taking() -> dict[str, Any]:
        return _TAKEN.of(request, task)

    ctl = _path(request, task.name, "ctl")
    await request.paths.say(ctl, "fetch", request.deciding(taking))
    return taking()
