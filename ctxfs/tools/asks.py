"""Tools of the plane of asks: what an agent asks people or its supervisor, and answers its
children."""

from __future__ import annotations

import math
from typing import Any, Final

import trio

from ctxfs.tools.agents import asked_for
from ctxfs.tools.listing import AFTER, LEFT, NEXT, listing
from ctxfs.tools.schemas import flag, listed, shape, text, words
from ctxfs.tools.tasks import duration, seconds
from ctxfs.tools.tool import (
    WAKES,
    Concerns,
    Does,
    Field,
    Request,
    View,
    about,
    first_free,
    tool,
    waking,
)
from ctxfs.tree.items import agent_with
from runtime import crashpoints
from runtime.agents.asks import ADDRESSEES, ANSWERING, ASK_KINDS
from runtime.agents.conditions import answer_facts
from runtime.authority.guard import Act
from runtime.errors import MalformedError, MissingError, WrongStateError
from runtime.records.change import Change
from runtime.records.items import Ask, AskStatus, Wait, WaitStatus
from runtime.records.model import Agent
from runtime.texts.names import dump_json, head, parse_json_object, quote, timestamp

#: of the detail, in a list
_DETAIL_MAX: Final = 1024
_ID: Final = text("the ask's id")
_NAME: Final[Field[Ask]] = (_ID, lambda _, ask: ask.name)
_STATUS: Final = words("its status", *AskStatus)
_ANSWER: Final = {
    "type": ["string", "object"],
    "description": "the answer: a word of the options, a text, or the fields of the form",
}


def _fact(key: str) -> Any:
    return lambda _, ask: answer_facts(Change(), ask)[key]


_STATE: Final[View[Ask]] = View(
    {"ask_id": _NAME, "status": _STATUS},
    {
        "answer": (_ANSWER, _fact("answer")),
        "note": (text("what was said beside the answer"), _fact("note")),
        "by": text("who answered: operator uid:N, or agent:NAME; else who ended it"),
    },
)
_OPEN: Final[View[Ask]] = View(
    {
        "agent_id": (
            text("the agent that asks"),
            lambda request, ask: agent_with(request.base, ask).name,
        ),
        "ask_id": _NAME,
        "kind": (words("what is asked for", *ASK_KINDS), lambda _, ask: ask.ask_kind),
        "to": (
            words("who may answer; operators always may", *ADDRESSEES),
            lambda request, ask: request.agents.asks.addressee(
                agent_with(request.base, ask), ask
            ),
        ),
        "question": text("the question"),
        "options": (
            listed(text("WORD, or WORD LABEL"), "the answers that there are; none: any text"),
            lambda _, ask: ask.options.splitlines(),
        ),
        "asked_at": (text("RFC 3339 time"), lambda _, ask: timestamp(ask.asked)),
    },
    {
        "form": (
            {"type": "object", "description": "a JSON schema of what is to be answered"},
            lambda _, ask: parse_json_object(ask.form) if ask.form else None,
        ),
        "default": text("the answer if there is none before the deadline"),
        "deadline": (
            text("RFC 3339 time"), lambda _, ask: timestamp(ask.expires) if ask.expires else ""
        ),
        "detail": (
            text(f"more about it, its first {_DETAIL_MAX} bytes"),
            lambda _, ask: head(ask.detail, _DETAIL_MAX),
        ),
    },
)
#: fields of the input as their files have them
_FIELDS: Final = ("options", "form", "default", "detail", "deadline", "to")


def _as_written(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"{line}\n" for line in value)
    return dump_json(value) if isinstance(value, dict) else str(value)


async def _until_over(request: Request, output: dict[str, Any], _: bool) -> dict[str, Any]:
    agent, asks = request.subject, request.agents.asks
    if agent is None or not request.input.get("block"):
        return output
    try:
        ask = asks.find(agent, output["ask_id"])
        with trio.move_on_after(seconds(request, "timeout", math.inf)):
            await asks.wait_over(ask)
        asks.check_there(ask)
    except MissingError:
        return output  # it was removed meanwhile
    return _STATE.of(request, ask)


@tool(
    "Ask",
    does=Does.REACHES,
    example={
        "question": "May I push to main?",
        "options": ["yes", "no Not today"],
        "default": "no",
        "deadline": "2h",
    },
    required={"question": text("the question, one line", minLength=1)},
    optional={
        "options": listed(
            text("WORD, or WORD LABEL"), "the answers that there are; without, any text is one"
        ),
        "form": {
            "type": "object",
            "description": "instead of options: a JSON schema of an object with fields of the "
            "types string, number, integer, boolean, or array of choices",
        },
        "default": text("the answer if there is none before the deadline"),
        "detail": text("more about it, such as what exactly you want to do"),
        "deadline": text("duration or time after which it expires"),
        "to": words(
            "operator: only people may answer, by default; supervisor: your supervisor may, too",
            *ADDRESSEES,
        ),
        "id": text("an id for it; ask-1, ask-2 and so on by default", minLength=1),
        "block": flag("wait for the answer"),
        "timeout": duration("how long block waits at most, without a limit by default"),
    },
    output=shape(
        _STATE.required,
        {
            **_STATE.optional,
            "wait_id": text("without block: the id of the wait for the answer"),
            **WAKES,
        },
    ),
    lingers=_until_over,
)
async def _ask(request: Request) -> dict[str, Any]:
    """Ask people something, or your supervisor: whether you may do what you must not decide
    yourself, or what you cannot know. Use it instead of guessing; to tell something without a
    question use Report. Without block, end your run: the answer wakes you. With block, it is
    answered when the ask is, or after timeout: so an agent of mode once waits. If the status is
    open then, say the same again with the ask_id as id to go on waiting. An answer opens nothing:
    what you may do is as before."""
    given, agent, agents = request.input, request.agent, request.agents
    seconds(request, "timeout", math.inf)
    agents.asks.check_asker(request.caller, agent)
    name = given.get("id") or first_free("ask", agents.asks.known(agent))
    ask = agents.items.named(agent.index, Ask, name)
    if ask is not None and ask.question != given["question"]:
        ask = None  # it is not said again: the name is taken
    known = ask is not None
    wait: Wait | None = None

    def asked() -> dict[str, Any]:
        assert ask is not None
        state = _STATE.of(request, ask)
        if wait is None:
            return state
        return waking(request, {**state, "wait_id": wait.name})

    with request.changing(asked) as change:
        if ask is None:
            ask = _begin(request, change, agent, name)
        if not given.get("block"):
            wait = _wait_for_answer(request, change, agent, ask)
    if not known:
        agents.asks.block(agent, ask)
    return asked()


def _begin(request: Request, change: Change, agent: Agent, name: str) -> Ask:
    given, asks = request.input, request.agents.asks
    with about("id"):
        ask = asks.add(change, agent, name)
    for field in _FIELDS:
        if field in given:
            with about(field):
                asks.update(change, agent, ask, field, _as_written(given[field]))
    with about("default"):
        asks.check_default(change, ask)
    with about("question"):
        asks.begin(change, agent, ask, given["question"])
    return ask


def _wait_for_answer(request: Request, change: Change, agent: Agent, ask: Ask) -> Wait:
    """The wait that an earlier call made, if it is armed, else another one."""
    waiting, on = request.agents.waiting, f"answer {ask.name}"
    there = request.agents.items.of(agent.index, Wait)
    for wait in there:
        if wait.on == on and wait.status is WaitStatus.ARMED:
            return wait
    wait = waiting.add(change, agent, first_free("wait", there))
    waiting.begin(change, request.caller, agent, wait, on)
    return wait


@tool(
    "AskWithdraw",
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"ask_id": "ask-1"},
    required={"ask_id": _ID},
    output=shape({"ask_id": _ID}),
)
async def _withdraw(request: Request) -> dict[str, Any]:
    """Withdraw a question of yours, and remove it; one that is over is only removed. Use it when
    you need no answer any more, and to make room for other questions. It cancels no wait of
    another kind: for that use WaitCancel."""
    with about("ask_id"):
        ask = request.agents.asks.find(request.agent, request.input["ask_id"])
    where = f"agent/{request.agent.name}.d/ask"
    return request.remove(where, ask.name, lambda: {"ask_id": ask.name})


@tool(
    "AskList",
    concerns=Concerns.OTHERS,
    does=Does.READS,
    example={},
    optional=AFTER,
    output=shape({"asks": listed(_OPEN.schema, "oldest first"), **LEFT}, NEXT),
)
async def _list(request: Request) -> dict[str, Any]:
    """List the open questions that your children ask you, and your own. Use it to see what a child
    waits for, then AskAnswer. What is asked of operators is not in it, unless you ask it: you
    cannot answer that."""
    asks = request.agents.asks

    def wanted(ask: Ask) -> bool:
        return ask.status is AskStatus.OPEN and request.agents.items.get(ask.index) is ask

    return await listing(request, "asks", asks.seen_by(request.caller), _OPEN, wanted)


@tool(
    "AskAnswer",
    concerns=Concerns.OTHERS,
    does=Does.REACHES,
    example={"agent_id": "reviewer", "ask_id": "ask-1", "answer": "yes"},
    required={"agent_id": text("the agent that asks"), "ask_id": _ID, "answer": _ANSWER},
    optional={
        "note": text("what to say beside the answer"),
        "asked_at": text("as AskList and the message tell it: nothing else is answered"),
    },
    output=_STATE.schema,
)
async def _answer(request: Request) -> dict[str, Any]:
    """Answer a question that a child asks you. Use it for what you can decide; what only people
    should decide, pass on: write operator to the file to of the ask. Give asked_at, as a child may
    withdraw a question and ask another one by its id. It is answered once: if somebody was faster,
    you are told who. For a message to a child use SendMessage."""
    given, agents = request.input, request.agents
    agent = asked_for(request)
    roles = agents.identity.roles(request.caller, agent)
    ANSWERING.check_who(Act.WRITE, "answer", agents, roles, agent)
    with about("ask_id"):
        ask = agents.asks.find(agent, given["ask_id"])
    if given.get("asked_at", timestamp(ask.asked)) != timestamp(ask.asked):
        raise WrongStateError(
            f"{quote(agent.name)} asks something else by this id now: see AskList"
        )
    answer, note = given["answer"], given.get("note", "")
    if isinstance(answer, str) and "\n" in answer:
        raise MalformedError("answer: it is one line: give the rest as note")
    if note and ask.form:
        raise MalformedError("note: a form takes none: omit it")
    said = dump_json(answer) if isinstance(answer, dict) else f"{answer}\n{note}"
    with request.changing(lambda: _STATE.of(request, ask)) as change, about("answer"):
        agents.asks.settle(change, request.caller, agent, ask, said)
    crashpoints.reach("ask.answered")
    return _STATE.of(request, ask)
