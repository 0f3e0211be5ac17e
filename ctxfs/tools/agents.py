"""Tools for agents: making, looking at, speaking to and ending agents."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ctxfs.recipes import Recipe
from ctxfs.tools.listing import AFTER, CURSOR, LEFT, NEXT, PART_MAX, Page, listing
from ctxfs.tools.recipes import RECIPE, all_of, files_of, may_use, named
from ctxfs.tools.schemas import count, flag, listed, shape, text, words
from ctxfs.tools.tasks import HANDLE, WORKTREE
from ctxfs.tools.tool import (
    WAKES,
    Concerns,
    Does,
    Field,
    Request,
    View,
    about,
    lines,
    tool,
    waking,
    wanted,
)
from ctxfs.tools.waiting import MESSAGE_ID, WAIT, WAITED, WAITS, send, waiting_for_task
from runtime.agents.messages import check_id
from runtime.caller import INSIDERS, PARTIES
from runtime.errors import CtxError, DeniedError, MalformedError, MissingError, UnsupportedError
from runtime.ids import MessageId
from runtime.records.items import (
    PRIORITIES,
    Message,
    MessageStatus,
    Task,
    TaskStatus,
    Wait,
    WaitStatus,
)
from runtime.records.lifecycle import Status
from runtime.records.model import FAMILIES, LIVES, PROFILES, Agent, Outcome, Profile
from runtime.records.modes import MODES
from runtime.texts.names import quote

#: field of the input of SpawnAgent: the file that it is written to, in this order
_FILES: Final = {
    "life": "life",
    "mode": "mode",
    "tty": "tty",
    "context": "context",
    "workspace_mode": "workspace",
    "exec": "exec",
    "model": "model",
}
_ID: Final = text("its name")
_NAME: Final[Field[Agent]] = _ID, lambda _, agent: agent.name
_STATUS: Final = words("its status", *Status)
_OUTCOME: Final = words("how it ended, empty before", "", *Outcome)
_STOPPING: Final[View[Agent]] = View({"agent_id": _NAME, "status": _STATUS})
_CHILD: Final[View[Agent]] = View({"agent_id": _NAME, "status": _STATUS, "outcome": _OUTCOME})
#: what a list tells, too
_SUMMARY: Final[View[Agent]] = View({
    "agent_id": _NAME,
    "profile": words("its relation to its parent", *PROFILES),
    "visibility": words("whether others may see it", "private", "public"),
    "parent": (
        text("its creator: operator uid:N, or agent:NAME and more"),
        lambda _, agent: agent.lineage,
    ),
    "supervisor": (
        text("agent:NAME; operator, of a root agent; none, of a detached child"),
        lambda request, agent: request.agents.registry.supervisor(agent),
    ),
    "mode": words("how its program runs", *MODES),
    "status": _STATUS,
    "outcome": _OUTCOME,
})  # fmt: skip


def _armed(request: Request, agent: Agent) -> Page:
    page = Page(request, PART_MAX)
    for wait in request.agents.items.of(agent.index, Wait):
        if wait.status is WaitStatus.ARMED:
            page.add(wait, WAIT)
    return page


def _children(request: Request, agent: Agent) -> Page:
    page = Page(request, PART_MAX, after=0)
    for child in request.agents.registry.children(agent):
        page.add(child, _CHILD)
    return page


def _tasks(request: Request, agent: Agent) -> dict[str, int]:
    tasks = request.agents.tasks
    return Counter(tasks.status(task) for task in tasks.known(agent))


def _handle(request: Request, agent: Agent) -> dict[str, Any] | None:
    """The handle that its parent has of an agent, for those who see the parent's tasks."""
    agents = request.agents
    parent = agents.registry.parent_of(agent)
    if parent is None or not agents.identity.roles(request.caller, parent) & PARTIES:
        return None
    task = agents.items.named(parent.index, Task, agent.name)
    if task is None or task.child != agent.index:
        return None
    return HANDLE.of(request, task)


_FACTS: Final[View[Agent]] = View(
    {
        **_SUMMARY.fields,
        "ownership": words("its supervisor", "parent_supervised", "self_owned"),
        "life": words("whether it ends with its parent", *LIVES),
        "model": text("the model that it uses, empty if none is set"),
        "families": (
            listed(words("a family", *FAMILIES), "its families of tools"),
            lambda request, agent: list(request.agents.authority.families(agent)),
        ),
        "ingress": words("who may send it messages", "supervisor_only", "operators_and_policy"),
        "session": (
            text("name of its current session"),
            lambda request, agent: request.agents.sessions.name_of(agent),
        ),
        "reason": text("why, such as exit:3"),
        "run": (
            text("id of its current run, empty if there is none"), lambda _, agent: agent.run.id
        ),
        "queue": (
            count("how many messages wait for it"),
            lambda request, agent: len(request.agents.messages.pending(agent)),
        ),
        "workspace": text("inherit, worktree or explicit_root:/PATH"),
        "work_focus": (
            text("id of the work item that it works on, or empty"),
            lambda _, agent: agent.focus,
        ),
        "waiting": (
            listed(WAIT.schema, "what it waits for"),
            lambda request, agent: _armed(request, agent).entries,
        ),
        "children": (
            listed(_CHILD.schema, "its children, oldest first"),
            lambda request, agent: _children(request, agent).entries,
        ),
        "tasks": (
            {
                "type": "object",
                "description": "how many tasks it has, by status",
                "propertyNames": {"enum": sorted({s.shown for s in TaskStatus})},
                "additionalProperties": count("how many"),
            },
            _tasks,
        ),
    },
    {
        "task_handle": (HANDLE.schema, _handle),
        "node": text("the node at which it runs; it is at this machine without one"),
        "worktree": (WORKTREE, lambda request, agent: request.agents.results.worktree_of(agent)),
        "waiting_left": (
            count("how many more it waits for, which this answer leaves out"),
            lambda request, agent: _armed(request, agent).left,
        ),
        "waiting_next": (
            text("give it as after, to get more of waiting"),
            lambda request, agent: _armed(request, agent).next,
        ),
        "children_left": (
            count("how many more children it has: AgentList with parent lists them"),
            lambda request, agent: _children(request, agent).left,
        ),
    },
)
_USAGE: Final = {
    "type": "object",
    "description": "what it and all that it owns use, by the keys of its file usage, if that can "
    "be told now; tokens.left and cost.left are what limits leave of what models say was used",
    "additionalProperties": {"type": "number", "minimum": 0},
}
_SENT: Final[View[Message]] = View({
    "message_id": (text("its id"), lambda _, message: message.name),
    "status": words("its status", *MessageStatus),
})  # fmt: skip


@tool(
    "SpawnAgent",
    family="agent_creation",
    concerns=Concerns.PARENT,
    does=Does.REACHES,
    example={"initial_message": "List the bugs in the parser.", "name": "reviewer", "mode": "turn"},
    optional={
        "preset": words("its relation to its parent; private_child by default", *PROFILES),
        "name": text(
            "its name; by default of the first line that lets the parent create agents and "
            "of which a name is free: PREFIX1, PREFIX2 and so on for agent:PREFIX*, "
            "PARENT-1, PARENT-2 and so on for agent:*"
        ),
        "initial_message": text("its task, or its first message"),
        "recipe": text(
            "a recipe, which says its program, mode, mounts and more; AgentList with recipes lists "
            "those that you may use. What you say here comes before what it says"
        ),
        "exec": text("its program and arguments, one line; the parent's by default"),
        "mode": words("its mode; once by default", *MODES),
        "tty": text(
            "COLSxROWS, such as 80x24, in mode once: its program has a terminal of this size, for "
            "people to attach to; without it, standard input is its task"
        ),
        "context": words("fresh, or fork: its parent's context", "fresh", "fork"),
        "workspace_mode": text("inherit, worktree or explicit_root:/PATH"),
        "model": text("the model to use, subject to policy"),
        "placement": text(
            "the machine at which it runs: node=NAME, or node=PREFIX* for the one with most room "
            "of those whose name begins so; this machine by default"
        ),
        "life": words(
            "of a private_child: owned, or temp, which is removed when it has ended; "
            "owned by default",
            *(life for life in LIVES if life != "detached"),
        ),
        "wait": flag(
            "for a private_child in mode turn or resident: wake the calling agent when "
            "initial_message has ended, with the reply"
        ),
    },
    for_some={"placement": lambda base, caller: base.agents.nodes.may_place(caller)},
    output=shape({"agent_id": _ID}, {"task_handle": HANDLE.schema, **WAITED, **WAKES}),
)
async def _spawn(request: Request) -> dict[str, Any]:
    """Create another agent with its own context, and start it. Use it for work that needs a context
    of its own; for one command use ExecCommand. A private_child works on initial_message for you.
    You get a task_handle; its end wakes you with a task_result message, which has its result. To
    send it messages later, give it the mode turn or resident: a once child takes none. Such a child
    goes on when initial_message has ended: you are told if that fails, and with wait you are told
    the reply, too. If your own
    mode is once, nothing wakes you and the answer has wakes=false: use TaskOutput with block. A
    public_named agent has no supervisor and outlives you; it needs a name and the policy detach.
    Once you have the result of a child, AgentRemove makes room for others; with life=temp it is
    removed at its end. By default it runs your own program; by recipe, another one that is set up
    here. Values that you omit are as after mkdir. To give it less authority, create it with files
    instead."""
    # mkdir, the files, start; if any of it is refused, or the daemon dies before all of it is done,
    # all of it never was
    given, parent = request.input, request.subject
    private = given.get("preset", Profile.PRIVATE_CHILD) == Profile.PRIVATE_CHILD
    if private:
        if parent is None:
            why = "a private_child needs a parent: name one, or choose the preset public_named"
            raise MalformedError(f"agent_id: {why}")
        wanted("initial_message", given, "a private_child needs a task: write it here")
    else:
        wanted("name", given, "a public_named agent needs a name: choose one")
        if parent is None and "recipe" not in given:
            why = "a root agent has no parent whose program it could be"
            wanted("exec", given, f"{why}: write it here, or name a recipe")
        if "life" in given:
            raise MalformedError("life: a public_named agent is always detached: omit it")
        if given.get("wait"):
            raise MalformedError("wait: a public_named agent is not your child: omit it")
    recipe = await named(request) if "recipe" in given else None
    births = request.agents.births
    with about("name"):
        name = given.get("name") or births.free_name(request.caller, request.agent)
        with request.agents.journal.starting():
            request.paths.mkdir("agent", f"{name}.d")
    agent = request.agents.registry.named(name)
    assert agent is not None

    def started() -> dict[str, Any] | None:
        if agent.status is Status.NEW:
            return None
        if parent is None or not private:
            return waking(request, {"agent_id": name})
        task = request.agents.tasks.find(parent, name)
        answer = {"agent_id": name, "task_handle": HANDLE.of(request, task)}
        waits = {"wait_id": made[0].name} if made else {}
        return waking(request, {**answer, **waits})

    made: list[Wait] = []
    meanwhile = waiting_for_task(request, agent, made) if given.get("wait") else None
    files = _files(request, agent, parent, recipe)
    undo = partial(request.agents.removals.unmake, agent)
    return await request.start(f"agent/{name}.d", files, undo, started, meanwhile)


def _files(
    request: Request, agent: Agent, parent: Agent | None, recipe: Recipe | None
) -> Iterator[tuple[str, str, str]]:
    given = request.input
    # first: only the creator writes it for a private child, and an operator names another next
    if "initial_message" in given:
        yield "initial_message", "handoff.md", lines(given["initial_message"])
    if parent is not None and agent.parent != parent.index:  # an operator made it
        yield "agent_id", "parent", f"agent:{parent.name}\n"
    yield "preset", "profile", f"{given.get('preset', Profile.PRIVATE_CHILD.value)}\n"
    if "placement" in given:  # before what depends on it
        yield "placement", "placement", lines(given["placement"])
    if recipe is not None:
        own = {file for field, file in _FILES.items() if field in given}
        for file, text in files_of(request, recipe, agent, parent):
            if file not in own:
                yield "recipe", file, text
    for field, file in _FILES.items():
        if field in given:
            yield field, file, lines(given[field])


@tool(
    "AgentGet",
    concerns=Concerns.OTHERS,
    does=Does.READS,
    example={"agent_id": "reviewer"},
    optional={
        "agent_id": text("the agent; required for operators"),
        "after": text("waiting_next of an earlier answer", **CURSOR),
    },
    output=shape(_FACTS.required, {**_FACTS.optional, "usage": _USAGE}),
)
async def _get(request: Request) -> dict[str, Any]:
    """Get what an agent is and what it does. Use it to see whether a child lives, how it ended, and
    how many messages wait for it (queue); for what it has written use TaskOutput, for names
    AgentList. The answer has profile, mode, model, status, current run, work focus, armed waits,
    children with their statuses, number of tasks, and what it uses (usage); for its supervisor also
    the task_handle.
    Without agent_id it is about you; about others as policy allows. Do not call it again and again
    to wait for an end: use WaitFor."""
    agent = asked_for(request)
    agents = request.agents
    if not agents.identity.roles(request.caller, agent) & INSIDERS:
        raise DeniedError(f"agent_id: the caller may not look at {quote(agent.name)}")
    answer = _FACTS.of(request, agent)
    payer = agents.identity.payer(request.caller).owner
    with suppress(CtxError, OSError):  # somebody holds up who looks
        answer["usage"] = await request.base.runtime.supervisor.meter.usage(agent, payer)
    return answer


def asked_for(request: Request) -> Agent:
    """The agent of ``agent_id``, by default the caller; ``MissingError`` for a hidden one."""
    if request.subject is not None and "agent_id" not in request.input:
        return request.subject
    name = wanted("agent_id", request.input, "an operator must name the agent")
    agent = request.agents.registry.named(name)
    if agent is None or not request.base.visible(agent, request.caller):
        raise MissingError(f"agent_id: no agent {quote(name)}, or the caller may not see it")
    return agent


@tool(
    "AgentList",
    concerns=Concerns.OTHERS,
    does=Does.READS,
    example={"name": "rev*"},
    optional={
        "name": text("only this one, or with a * at the end, those whose name begins so"),
        "parent": text("only the children of this agent"),
        "status": words("only those with this status", *Status),
        "recipes": flag("list the recipes that you may use for SpawnAgent, and no agents"),
        **AFTER,
    },
    output=shape(
        {"agents": listed(_SUMMARY.schema, "oldest first"), **LEFT},
        {"recipes": listed(RECIPE.schema, "with recipes: those that you may use"), **NEXT},
    ),
)
async def _list(request: Request) -> dict[str, Any]:
    """List the agents that you may see, with status, mode and supervisor. Use it to find an agent;
    for more about one use AgentGet, for your own children and commands that have not ended use
    TaskList. A long list has left, how many more there are: choose by name, parent or status, or
    go on with after. With recipes, it lists instead by what SpawnAgent can make an agent."""
    given, registry = request.input, request.agents.registry
    view, name = request.base.view(request.caller), given.get("name", "*")
    if given.get("recipes"):
        there = await all_of(request)
        found = await listing(
            request, "recipes", there, RECIPE, lambda recipe: may_use(request, recipe.name)
        )
        return {"agents": [], **found}
    above = registry.named(given["parent"]) if "parent" in given else None

    def wanted(agent: Agent) -> bool:
        begins = name.endswith("*") and agent.name.startswith(name[:-1])
        child = "parent" not in given or (above is not None and agent.parent == above.index)
        chosen = (begins or agent.name == name) and given.get("status") in (None, agent.status)
        return chosen and child and view.lists(agent)

    return await listing(request, "agents", registry, _SUMMARY, wanted)


def _receiver(request: Request) -> Agent:
    """The agent of ``agent_id``: the caller's supervisor even where that is hidden from it."""
    if request.subject is not None:
        supervisor = request.agents.registry.supervisor_of(request.subject)
        if supervisor is not None and request.input["agent_id"] == supervisor.name:
            return supervisor
    return asked_for(request)


@tool(
    "Report",
    concerns=Concerns.OTHERS,
    does=Does.ADDS,
    example={"text": "half of the tests pass"},
    required={"text": text("what to tell", minLength=1)},
    optional={"id": text("an id; a report with a known id is not sent again", minLength=1)},
    output=shape(
        {"message_id": text("its id"), "to": text("who gets it: agent:NAME, operator or none")}
    ),
)
async def _report(request: Request) -> dict[str, Any]:
    """Tell your supervisor something while you go on working. Use it for progress, a finding or a
    question; for your final answer use ResultWrite. Your supervisor gets a message, at most 64 KiB;
    no policy is needed. Without a supervisor, operators read it in your history."""
    # as a write to report
    agent = request.subject
    if agent is None:
        raise DeniedError("only an agent reports: it tells its own supervisor")
    messages, name = request.agents.messages, request.input.get("id", "")
    if name:
        with about("id"):
            check_id(name)
    to = request.agents.registry.supervisor(agent)
    given = MessageId(name or secrets.token_hex(8))

    def reported() -> dict[str, Any]:
        return {"message_id": given, "to": to}

    with request.deciding(reported):
        messages.report(
            request.caller, agent, request.input["text"], name=given, again=bool(name)
        )
    return reported()


@tool(
    "SendMessage",
    concerns=Concerns.OTHERS,
    does=Does.REACHES,
    example={"agent_id": "reviewer", "text": "Look at the tests, too."},
    required={"agent_id": text("the agent"), "text": text("the message", minLength=1)},
    optional={"priority": words("normal by default", *PRIORITIES), "id": MESSAGE_ID, "wait": WAITS},
    output=shape(_SENT.required, WAITED),
)
async def _send(request: Request) -> dict[str, Any]:
    """Send a message to an agent of mode turn or resident. Use it to ask or tell another agent
    something; to create one for a task use SpawnAgent, to write to a command TaskInput. An agent of
    mode once takes none. The message is queued, and the reply goes to the agent's history.
    TaskOutput shows the reply of a child; with wait, the reply wakes you. A message to your own
    supervisor is a report. Supervisors, operators and agents with policy write may send."""
    agent, to = request.subject, f"agent:{request.input['agent_id']}"
    if agent is not None and agent.is_guest and to == agent.guest["supervisor"]:
        return _send_to_lead(request, agent)
    return send(request, _receiver(request), partial(_SENT.of, request))


def _send_to_lead(request: Request, agent: Agent) -> dict[str, Any]:
    """To a supervisor on another machine: a report."""
    if request.input.get("wait"):
        raise UnsupportedError("wait: your supervisor is on another machine: omit it")
    name = request.input.get("id", "")
    if name:
        with about("id"):
            check_id(name)
    given = MessageId(name or secrets.token_hex(8))

    def sent() -> dict[str, Any]:
        return {"message_id": given, "status": MessageStatus.QUEUED.value}

    with request.deciding(sent):
        request.agents.messages.report(
            request.caller, agent, request.input["text"], name=given, again=bool(name)
        )
    return sent()


@tool(
    "AgentStop",
    concerns=Concerns.OTHERS,
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"agent_id": "reviewer"},
    required={"agent_id": text("the agent")},
    optional={"kill": flag("skip the grace period; an agent cannot use it on itself")},
    output=_STOPPING.schema,
)
async def _stop(request: Request) -> dict[str, Any]:
    """End an agent and everything it owns: SIGTERM, a grace period, SIGKILL. Use it for a child
    that you no longer need, also for a turn or resident child that is idle: those do not end by
    themselves. For a command use TaskStop. It answers before the agent has ended. Its history
    remains, and its name is taken until AgentRemove. You may end yourself, your children, and
    others by policy."""
    agent = asked_for(request)

    def stopping() -> dict[str, Any] | None:
        if agent.accepts_children or agent.status is Status.NEW:
            return None
        return _STOPPING.of(request, agent)

    return await request.end(f"agent/{agent.name}.d/ctl", stopping)


@tool(
    "AgentRemove",
    concerns=Concerns.OTHERS,
    does=Does.DESTROYS | Does.REPEATS | Does.FREES,
    example={"agent_id": "reviewer"},
    required={"agent_id": text("the agent")},
    output=shape({"agent_id": _ID}),
)
async def _remove(request: Request) -> dict[str, Any]:
    """Remove an agent that has ended, with its ended descendants and its task handle. Use it when
    you have read what a child wrote and may create more: the name and the place among your ended
    children are free again. A live agent is refused, unless it waits for its turn to start: call
    AgentStop and wait for its end first. A notice of
    its end that you have not been given yet is dropped. What it gave back stays in context/child of
    your session. You may remove agents that you created."""
    agent = asked_for(request)

    def removed() -> dict[str, Any] | None:
        return {"agent_id": agent.name} if agent.removed else None

    return request.remove("agent", f"{agent.name}.d", removed)
