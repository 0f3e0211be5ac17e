"""All tools: which of them a caller has, and how one is called (ctxfs-tools(5), Tools)."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import trio

import ctxfs.tools.asks
import ctxfs.tools.results
import ctxfs.tools.work  # noqa: F401  # they declare tools
from ctxfs.tools.schemas import Schema
from ctxfs.tools.tool import DECLARED, Concerns, Does, Request, Tool, wanted
from ctxfs.tree import numbers
from ctxfs.tree.base import Base
from ctxfs.tree.nodes import Node
from runtime.agents import placing
from runtime.agents.answers import digest
from runtime.caller import OPERATORS, Caller
from runtime.errors import CtxError, DeniedError, MalformedError, MissingError, NoSpaceError
from runtime.ids import CallId
from runtime.records.model import Agent
from runtime.texts.names import dump_json, escape, quote

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

log = logging.getLogger("ctxd.tools")

#: characters of a value that is no text, in a sentence
_SHOWN_MAX: Final = 80
#: of a list in the input of a tool
_ENTRIES_MAX: Final = 1024
#: what makes their inode numbers, and their order
NUMBERS: Final = {name: number for number, name in enumerate(numbers.TOOLS, 1)}
TOOLS: Final = tuple(sorted(DECLARED.values(), key=lambda tool: NUMBERS[tool.name]))
BY_NAME: Final = {tool.name: tool for tool in TOOLS}
BY_NUMBER: Final = {NUMBERS[tool.name]: tool for tool in TOOLS}


#: what a refusal tells who uses files to do, and what it tells who has tools
_IN_TOOLS: Final = (
    ("with rmdir or ", "with "),
    ("with ctl or ", "with "),
    ("with status or ", "with "),
    ("choose another name or rmdir it", "choose another name or remove it with AgentRemove"),
    (", WaitCancel or rmdir", " or WaitCancel"),
    ("rmdir the agent", "remove the agent with AgentRemove"),
    ("and agents (rmdir)", "and agents (AgentRemove)"),
    (", with rmdir", ": ask an operator for it"),
    ("empty the other one", "give one of them"),
    ("write the rest to detail", "give the rest as detail"),
    ("may not see ctl", "may not control this agent"),
    ("may not see inbox", "may not send this agent messages"),
    ("then write fetch to ctl", "then call WorktreeTake"),
    ("write handoff.md before its start, or make", "tell it all by initial_message, or make"),
    ("write result.md", "call ResultWrite"),
    ("write active to go on", "set active to go on"),
)

# which


def visible(base: Base, caller: Caller) -> Iterator[Tool]:
    """Those that the caller has; they are there for no other."""
    return (tool for tool in TOOLS if not refusal(base, caller, tool))


def refusal(base: Base, caller: Caller, tool: Tool) -> str:
    """Why a caller has not got a tool, empty if it has.

    Operators have all: what they may is decided by whom they name.
    """
    agents = base.agents
    if not agents.identity.still(caller):
        return "cannot identify the caller, or it has ended"
    agent = agents.registry.calling(caller)
    if agent is None:
        return ""
    if tool.family not in agents.authority.families(agent):
        return f"{quote(agent.name)} is a {agent.profile}, which lacks {tool.family}"
    if not agents.authority.allows(agent, "tool", tool.name, "execute"):
        return f"tool:{tool.name} execute is not in the effective policy of {quote(agent.name)}"
    return ""


# calling


async def call(
    base: Base,
    root: Node,
    caller: Caller,
    name: str,
    given: Any,
    call_id: CallId | None = None,
    progress: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The answer of a tool, which walks the files from their root.

    A call with an id that is made again, and does more than to read, is carried out once and
    answered the same. Raises what the files would, with the field that it is about. What it is
    decided to answer is noted in its ``progress``: if the daemon is executed again while the tool
    lingers, the next one answers at once.

    ``MissingError`` for an unknown tool, ``DeniedError`` for one that the caller has not
    got, ``MalformedError`` for what its schema does not take.
    """
    request: Request | None = None
    progress = {} if progress is None else progress
    cut_short = "decided" in progress
    output: dict[str, Any]
    mark = base.cache.mark()
    with ExitStack() as until_answered:
        try:
            tool = BY_NAME.get(name)
            if tool is None:
                raise MissingError(f"unknown tool {quote(name)}; use {', '.join(BY_NAME)}")
            if cut_short:
                output = progress["decided"]
            elif call_id is not None and Does.READS not in tool.does:
                answers = base.agents.answers
                async with answers.turn(caller, call_id):
                    until_answered.enter_context(base.calls.one_more())
                    known = answers.find(caller, call_id, digest(name, given))
                    if known is None:
                        request = _request(base, root, caller, tool, given)
                        known = await _handle_once(request, tool, call_id)
                    output = known
            else:
                request = _request(base, root, caller, tool, given)
                if tool.waits is not None:
                    await tool.waits(request)
                    request = _request(base, root, caller, tool, given)
                until_answered.enter_context(base.calls.one_more())
                output = await _handle(request, tool)
            if tool.lingers is not None:
                progress["decided"] = output
                until_answered.close()
                request = Request(base, root, caller, _subject(base, caller, tool, given), given)
                output = await tool.lingers(request, output, cut_short)
                until_answered.enter_context(base.calls.one_more())
        except Exception as error:
            subject = request.subject if request is not None else None
            incarnation = caller.incarnation or (subject.incarnation if subject else None)
            path = f"tool/{name}" if name in BY_NAME else "tool"
            base.reasons.note(error, caller, path, incarnation or None)
            if isinstance(error, CtxError):
                error.args = (_in_tools(error.sentence),)
                raise
            raise _told(error) from error
        # who is answered finds in the files what the answer says
        await base.cache.settled(mark)
        return output


def _in_tools(sentence: str) -> str:
    """A sentence for who has tools and need not have files."""
    for said, meant in _IN_TOOLS:
        sentence = sentence.replace(said, meant)
    return sentence


def _told(error: Exception) -> CtxError:
    """The words that the caller is told of it."""
    told = CtxError("an error inside ctxfs, see the daemon's log")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        told = NoSpaceError("the disk under the daemon's state is full")
    told.kept = True
    return told


async def _handle_once(request: Request, tool: Tool, call_id: CallId) -> dict[str, Any]:
    answers, call = request.agents.answers, digest(tool.name, request.input)
    frees = Does.FREES in tool.does
    with answers.giving(request.caller, call_id, call, frees=frees) as answer:
        output = await _handle(replace(request, answer=answer), tool)
        output = answers.settle(answer, output)
    return output


async def _handle(request: Request, tool: Tool) -> dict[str, Any]:
    # a caller that hangs up cancels nothing that was begun
    with trio.CancelScope(shield=True):
        output = await tool.handler(request)
    return output


def _request(base: Base, root: Node, caller: Caller, tool: Tool, given: Any) -> Request:
    why = refusal(base, caller, tool)
    if why:
        raise DeniedError(why)
    check(tool, given)
    return Request(base, root, caller, _subject(base, caller, tool, given), given)


def _subject(base: Base, caller: Caller, tool: Tool, given: dict[str, Any]) -> Agent | None:
    """The agent that a call concerns: the calling one, or that which an operator names."""
    agents = base.agents
    if caller.agent is not None:
        own = agents.registry.get(caller.agent)
        named = given.get("agent_id") if tool.concerns is not Concerns.OTHERS else None
        if own is not None and named not in (None, own.name):
            raise DeniedError("agent_id: an agent makes this call for itself only: omit it")
        return own
    if tool.concerns is Concerns.OTHERS:
        return None
    if tool.concerns is Concerns.PARENT and "agent_id" not in given:
        return None
    name = wanted("agent_id", given, "an operator must name the agent that the call concerns")
    agent = agents.registry.named(name)
    if agent is None or not agents.identity.roles(caller, agent) & OPERATORS:
        raise MissingError(f"agent_id: no agent {quote(name)}, or the caller is not its operator")
    placing.check_here(agent, "what this tool is about is")
    return agent


# the input


def check(tool: Tool, given: Any) -> None:
    """``MalformedError`` with the field and what it would have been."""
    _check_sizes(tool, given)
    error = next(_validator(tool.name).iter_errors(given), None)
    if error is not None:
        raise MalformedError(_sentence(error))
    _check_texts(given, "")


def _check_sizes(tool: Tool, given: Any) -> None:
    """Refuses input in which the validator would look at very much one by one."""
    if not isinstance(given, dict):
        return
    known = tool.schema.get("properties", {})
    if len(given) > len(known):
        extra = next(key for key in given if key not in known)
        raise MalformedError(f"{escape(extra[:200])}: {_other_keys(known)}")
    for field, value in given.items():
        if isinstance(value, list | dict) and len(value) > _ENTRIES_MAX:
            raise MalformedError(f"{escape(field[:200])}: at most {_ENTRIES_MAX} entries")


def _check_texts(value: Any, field: str) -> None:
    """Texts become files: none has a NUL."""
    if isinstance(value, str) and "\0" in value:
        raise MalformedError(f"{field}: the text contains a NUL byte")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_texts(inner, f"{field}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_texts(inner, f"{field}.{number}")


def check_schemas() -> None:
    """Makes what checks the input of each tool; raises whatever is wrong with it."""
    for name in BY_NAME:
        _validator(name)


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    # with the first call: it is a tenth of what the daemon would load at its start
    from jsonschema import Draft202012Validator

    return Draft202012Validator(BY_NAME[name].schema)


def _sentence(error: ValidationError) -> str:
    """``FIELD: …`` in the words of the other rejections."""
    given: Any = error.instance
    wanted: Any = error.validator_value
    schema: Any = error.schema
    field = ""
    match error.validator:
        case "additionalProperties":
            known = schema.get("properties", {})
            field, what = next(key for key in given if key not in known), _other_keys(known)
        case "required":
            field, what = next(key for key in wanted if key not in given), "is missing"
        case "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            what = f"{_shown(given)} is not of type {' or '.join(kinds)}"
        case "enum":
            what = f"unknown value {_shown(given)}; use {', '.join(map(str, wanted))}"
        case "minLength":
            what = "it is empty"
        case "pattern":
            what = f"{_shown(given)} is not {schema['description']}"
        case "minimum":
            what = f"{_shown(given)} is less than {wanted}"
        case _:
            what = escape(error.message[:200])
    path = ".".join((*map(str, error.absolute_path), *filter(None, [field])))
    return f"{escape(path[:200]) or 'input'}: {what}"


def _shown(given: Any) -> str:
    if isinstance(given, str):
        return quote(given)
    shown = dump_json(given)
    return escape(shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}…")


def _other_keys(known: Schema) -> str:
    return f"unknown key; use {', '.join(known)}"
