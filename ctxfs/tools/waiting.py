"""Tools of the waiting plane: what wakes the agent, and what it then knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ctxfs.tools.schemas import flag, shape, text, words
from ctxfs.tools.tool import (
    WAKES,
    Does,
    Field,
    Request,
    View,
    about,
    first_free,
    tool,
    waking,
    wanted,
)
from runtime import crashpoints
from runtime.agents.messages import check_id
from runtime.errors import MalformedError
from runtime.records.change import Change
from runtime.records.items import Message, Wait, WaitStatus
from runtime.records.model import Agent
from runtime.texts.names import quote

#: what wakes: (word of the file ``on``, what ``resource`` is then)
_WAKES: Final = {
    "timer": ("timer", "a duration such as 30s, a time, or every DURATION [until WHEN]"),
    "task_result": ("task", "the id of a task"),
    "child": ("child", "the name of a child"),
    "child_reply": ("reply", "the name of a child, and perhaps the id of one message to it"),
    "answer": ("answer", "the id of an ask"),
    "message": ("message", ""),
    "external": ("trigger", ""),
    "externals": ("triggers", ""),
}
#: of tools that send a child a message
WAITS: Final = flag(
    "for a child in mode turn or resident: wake the calling agent when this message has ended, "
    "with the reply"
)
MESSAGE_ID: Final = text("an id; a message with a known id is not sent again", minLength=1)
WAITED: Final = {"wait_id": text("with wait: the id of the wait for the reply")}
_ID: Final = text("the wait's id")
_NAME: Final[Field[Wait]] = (_ID, lambda _, wait: wait.name)
_STATUS: Final = words("its status", *WaitStatus)
WAIT: Final[View[Wait]] = View(
    {"wait_id": _NAME, "status": _STATUS, "on": text("what it waits for, as in the file on")},
    {
        "work": text("id of the work item that it blocks"),
        "deadline": text("when it expires, as it was given"),
        "payload": text("what fired it"),
    },
)
_CANCELLED: Final[View[Wait]] = View({"wait_id": _NAME, "status": _STATUS})


def _line(given: dict[str, Any]) -> str:
    """The line that would be written to the file ``on``."""
    word, resource = _WAKES[given["wake"]]
    wake = f"wake={given['wake']}"
    if resource:
        return f"{word} {wanted('resource', given, f'{wake} needs {resource}')}"
    if "resource" in given:
        raise MalformedError(f"resource: {quote(given['resource'])}: {wake} takes none: omit it")
    return word


@tool(
    "WaitFor",
    does=Does.ADDS,
    example={"wake": "child", "resource": "reviewer", "deadline": "10m"},
    required={
        "wake": words(
            "what wakes the agent: a time, or one time after the other, the end of a task or a "
            "child, a child's reply, the answer to an ask, any message, a write to a token "
            "(external), or every write to it (externals)",
            *_WAKES,
        )
    },
    optional={
        "resource": text(
            "timer: a duration such as 30s, a time, or every DURATION, perhaps until a duration or "
            "time, as in every 10m until 8h; task_result: the task's id; "
            "child: its name; child_reply: its name, for its next reply to this agent, or "
            "its name and a message_id, for the reply to that message; answer: the ask's id; "
            "otherwise none"
        ),
        "work": text("id of the work item that is blocked until then"),
        "deadline": text("duration or time after which it expires"),
        "id": text("an id for it; wait-1, wait-2 and so on by default", minLength=1),
    },
    output=shape(
        WAIT.required,
        {
            **WAIT.optional,
            "token": text("external, externals: a write to this file fires the wait"),
            **WAKES,
        },
    ),
)
async def _wait_for(request: Request) -> dict[str, Any]:
    """Wait for something without running. Use this instead of polling: arm it, then end your run. A
    message wakes you when it happens, or at once if it has already happened. The end of a task or
    child of yours wakes you in any case; arm a wait for it to give a deadline, or to block a work
    item until then. A timer that is due every DURATION, and externals, stay armed and wake you each
    time, until WaitCancel. If your mode is once, no message comes and the answer has wakes=false:
    use TaskOutput with block."""
    # mkdir, the files, and on last, as one change
    given, agent, waiting = request.input, request.live_agent, request.agents.waiting
    line = _line(given)
    name = given.get("id") or first_free("wait", request.agents.items.of(agent.index, Wait))

    def armed() -> dict[str, Any]:
        view = WAIT.of(request, wait)
        if wait.has_token:
            view["token"] = request.path(f"trigger/{wait.token}")
        return waking(request, view)

    with request.changing(armed) as change:
        with about("id"):
            wait = waiting.add(change, agent, name)
        for field in ("work", "deadline"):
            if given.get(field):
                with about(field):
                    waiting.update(change, agent, wait, field, given[field])
        with about("resource" if "resource" in given else "wake"):
            waiting.begin(change, request.caller, agent, wait, line)
    return armed()


def send(
    request: Request, to: Agent, shown: Callable[[Message], dict[str, Any]]
) -> dict[str, Any]:
    """Sends the message that a call's input describes, as ``send`` on the agent's socket does; with
    ``wait`` also makes a wait of the calling agent for its end, in the same change. What is
    ``shown`` of the message is answered, and the id of the wait.

    An ``id`` that is said again gets what it got before, of which nothing changes.
    """
    given, messages = request.input, request.agents.messages
    name, waits = given.get("id", ""), given.get("wait", False)
    message: Message | None = None
    wait: Wait | None = None

    def sent() -> dict[str, Any]:
        assert message is not None
        answer = shown(message)
        return answer if wait is None else {**answer, "wait_id": wait.name}

    if name:
        with about("id"):
            message = messages.meant(request.caller, to, check_id(name))
    if message is not None and message.asked == request.caller.key:
        wait = _wait_before(request, to, message) if waits else None
        if wait is not None or not waits:
            return sent()
    else:
        message = None
    with request.changing(sent) as change:
        if message is None:
            message = messages.send_in(
                change,
                request.caller,
                to,
                given["text"],
                priority=given.get("priority", "normal"),
                name=name,
                asked=request.caller.key if name else "",
            )
        if waits:
            wait = _wait_for_reply(request, change, to, message)
    crashpoints.reach("message.queued")
    return sent()


@contextmanager
def waiting_for_task(request: Request, child: Agent, made: list[Wait]) -> Iterator[None]:
    """A start of the child's meanwhile also makes a wait of the calling agent for the end of its
    task, in the same change: it is put into ``made``. ``MalformedError`` if that cannot be."""
    told = request.agents.messages.when_queued

    def queued(change: Change, agent: Agent, message: Message) -> None:
        if agent is child and message.first:
            made[:] = [_wait_for_reply(request, change, child, message)]

    _waiter(request)
    if not child.how.takes_messages:
        raise MalformedError(
            f"wait: {quote(child.name)} is a once agent, which answers no messages: omit it, its "
            "end wakes you; or give it the mode turn or resident"
        )
    told.append(queued)
    try:
        yield
    finally:
        told.remove(queued)


def _wait_before(request: Request, child: Agent, message: Message) -> Wait | None:
    """The wait that an earlier call made for the same message; ``MalformedError``."""
    agent = _waiter(request)
    for wait in reversed(request.agents.items.of(agent.index, Wait)):
        # an older one is for a message to an earlier child of that name
        if wait.on == _reply(child, message) and wait.created >= message.created:
            return wait
    return None


def _wait_for_reply(request: Request, change: Change, child: Agent, message: Message) -> Wait:
    """``MalformedError``, and whatever making and arming a wait raise."""
    agent, waiting = _waiter(request), request.agents.waiting
    name = first_free("wait", request.agents.items.of(agent.index, Wait))
    wait = waiting.add(change, agent, name)
    with about("wait"):
        waiting.begin(change, request.caller, agent, wait, _reply(child, message))
    return wait


def _reply(child: Agent, message: Message) -> str:
    return f"reply {child.name} {message.name}"


def _waiter(request: Request) -> Agent:
    """The calling agent; ``MalformedError`` for an operator, whom nothing wakes."""
    if request.caller.agent is None:
        raise MalformedError(
            "wait: an operator is not woken: omit it, and read the reply in the agent's session"
        )
    return request.live_agent


@tool(
    "WaitCancel",
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"wait_id": "wait-1"},
    required={"wait_id": _ID},
    output=_CANCELLED.schema,
)
async def _cancel(request: Request) -> dict[str, Any]:
    """Remove a wait in any status; an armed wait is cancelled. Use it when you no longer need to
    know, and to make room for more waits. It does not end what you waited for: for that use
    TaskStop or AgentStop."""
    with about("wait_id"):
        wait = request.agents.waiting.find(request.agent, request.input["wait_id"])
        return request.remove(
            f"agent/{request.agent.name}.d/waiting", wait.name, lambda: _CANCELLED.of(request, wait)
        )
