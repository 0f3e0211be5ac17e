"""Tools of the work plane: what the agent works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ctxfs.tools.listing import AFTER, LEFT, NEXT, listing
from ctxfs.tools.schemas import Schema, flag, listed, shape, text, words
from ctxfs.tools.tool import Does, Request, View, about, first_free, lines, tool
from runtime.records.change import Change
from runtime.records.items import Work, WorkStatus
from runtime.records.model import Agent
from runtime.texts.names import timestamp

#: of the objective in a view
_OBJECTIVE_MAX: Final = 1000
#: fields of the input as their files have them; the status last, for it may need the others
_AS_WRITTEN: Final[dict[str, Callable[[Any], str]]] = {
    **dict.fromkeys(("objective", "plan", "acceptance"), lines),
    "parent": str,
    "blocked_by": lambda names: "".join(f"{name}\n" for name in names),
    "status": str,
}

_ID: Final = text("the item's id")
_FOCUS: Final = text("id of the item that has the focus, or empty")
_VIEW: Final[View[Work]] = View({
    "id": (_ID, lambda _, item: item.name),
    "objective": (
        text(f"its objective, the first {_OBJECTIVE_MAX} characters"),
        lambda _, item: item.objective.strip()[:_OBJECTIVE_MAX],
    ),
    "status": words("its status", *WorkStatus),
    "blocked_by": (
        listed(text("an id, or wait NAME"), "what blocks it"),
        lambda request, item: request.agents.work.blocked_by(request.agent, item).splitlines(),
    ),
    "parent": text("id of a chain that it belongs to"),
    "focus": (
        flag("whether it has the focus"),
        lambda request, item: request.agent.focus == item.name,
    ),
    "updated_at": (
        text("RFC 3339 time of its last change"), lambda _, item: timestamp(item.updated)
    ),
    "path": (
        text("its directory, with plan.md and acceptance.md"),
        lambda request, item: request.path(f"agent/{request.agent.name}.d/work/{item.name}"),
    ),
})  # fmt: skip
_FIELDS: Final[dict[str, Schema]] = {
    "plan": text("its plan and progress"),
    "acceptance": text("how to tell that it is done"),
    "parent": text("id of a chain that it belongs to, any line"),
}
_OBJECTIVE: Final = text("its objective", minLength=1)


def _set(request: Request, change: Change, agent: Agent, item: Work) -> None:
    """The fields that are given."""
    for field, as_written in _AS_WRITTEN.items():
        if field in request.input:
            with about(field):
                value = as_written(request.input[field])
                request.agents.work.update(change, agent, item, field, value)


@tool(
    "WorkCreate",
    does=Does.ADDS,
    example={
        "objective": "Make the tests pass",
        "plan": "1. run them\n2. mend what fails",
        "focus": True,
    },
    required={"objective": _OBJECTIVE},
    optional={
        "id": text("an id for it; work-1, work-2 and so on by default", minLength=1),
        **_FIELDS,
        "focus": flag("give it the focus at once"),
    },
    output=_VIEW.schema,
)
async def _create(request: Request) -> dict[str, Any]:
    """Create a work item: something that you have to achieve. Use it to keep an objective and its
    plan beyond this run; to have something done by a program use ExecCommand, by another agent
    SpawnAgent."""
    agent, work = request.live_agent, request.agents.work
    there = request.agents.items.of(agent.index, Work)
    name = request.input.get("id") or first_free("work", there)
    with request.changing(lambda: _VIEW.of(request, item)) as change:
        with about("id"):
            item = work.add(change, agent, name)
        _set(request, change, agent, item)
        if request.input.get("focus"):
            with about("focus"):
                work.turn_to(change, agent, name)
    return _VIEW.of(request, item)


def _find(request: Request) -> Work:
    with about("id"):
        return request.agents.work.find(request.agent, request.input["id"])


@tool(
    "WorkUpdate",
    does=Does.DESTROYS | Does.REPEATS,
    example={"id": "work-1", "plan": "1. run them: done\n2. mend what fails"},
    required={"id": _ID},
    optional={
        "objective": _OBJECTIVE,
        **_FIELDS,
        "blocked_by": listed(_ID, "ids of the items that come first; replaces the list"),
        "status": words("its new status", *WorkStatus),
    },
    output=_VIEW.schema,
)
async def _update(request: Request) -> dict[str, Any]:
    """Change a work item that has not ended: all given values, or none. Use it to record progress
    in plan, and to say that it is done. To turn to another item use WorkFocus, to block one until
    something happens use WaitFor with work. done needs an objective; done and cancelled are final
    and cancel its waits."""
    agent, item = request.live_agent, _find(request)
    with request.changing(lambda: _VIEW.of(request, item)) as change:
        with about("id"):
            request.agents.work.check_open(item)
        _set(request, change, agent, item)
    return _VIEW.of(request, item)


@tool(
    "WorkList",
    does=Does.READS,
    example={"all": True},
    optional={
        "all": flag("include those that have ended"),
        "status": words("only those with this status", *WorkStatus),
        "parent": text("only those of this chain"),
        **AFTER,
    },
    output=shape(
        {"items": listed(_VIEW.schema, "oldest first"), "focus": _FOCUS, **LEFT}, NEXT
    ),
)
async def _list(request: Request) -> dict[str, Any]:
    """List the work items that have not ended, and the one that has the focus. Use it at the start
    of a run to see what you were working on; for commands and children use TaskList. A long list
    has left, how many more there are: choose by status or parent, or go on with after."""
    given, items = request.input, request.agents.items
    every = given.get("all", False) or "status" in given

    def wanted(item: Work) -> bool:
        there = items.get(item.index) is item
        chosen = all(given.get(key) in (None, getattr(item, key)) for key in ("status", "parent"))
        return there and chosen and (every or not item.over)

    found = items.of(request.agent.index, Work)
    answer = await listing(request, "items", found, _VIEW, wanted)
    return {**answer, "focus": request.agent.focus}


@tool(
    "WorkFocus",
    does=Does.REPEATS,
    example={"id": "work-1"},
    required={"id": {"type": ["string", "null"], "description": "the item's id"}},
    output=shape({"focus": _FOCUS}),
)
async def _focus(request: Request) -> dict[str, Any]:
    """Give a work item the focus: it becomes active, and the previous one open. Use it when you
    turn to another item; WorkUpdate changes what an item says. Null removes the focus."""
    agent = request.live_agent
    with about("id"), request.changing(lambda: {"focus": agent.focus}) as change:
        request.agents.work.turn_to(change, agent, request.input["id"] or "")
    return {"focus": agent.focus}


@tool(
    "WorkRemove",
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"id": "work-1"},
    required={"id": _ID},
    output=shape({"id": _ID}),
)
async def _remove(request: Request) -> dict[str, Any]:
    """Remove a work item and its plan. Use it for items that have ended and that you will not look
    at again: their number is limited. An active or blocked one is refused: end it with WorkUpdate,
    or turn to another with WorkFocus, first."""
    item = _find(request)
    where = f"agent/{request.agent.name}.d/work"
    return request.remove(where, item.name, lambda: {"id": item.name})
