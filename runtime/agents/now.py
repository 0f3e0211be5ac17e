"""``context/now.md``: where an agent is, as its records have it when it is read.

Of each thing no more is read than has room, so that a read costs the same however much there is.
"""

from __future__ import annotations

from typing import Final

from runtime.agents.bundles import Given
from runtime.agents.forking import Room, finished
from runtime.agents.parts import Agents
from runtime.agents.results import CHILD
from runtime.agents.workspace import WORKSPACE, Worktree
from runtime.records.items import Task, Wait, WaitStatus, Work
from runtime.records.model import Agent, Session
from runtime.texts import context
from runtime.texts.names import timestamp

#: children and tasks, and waits, that are looked at: more have no room
_THINGS: Final = 256
_WAITS: Final = 256
_REPORTS: Final = 10


def now(agents: Agents, session: Session) -> str:
    """The text; empty once the agent was removed."""
    agent = agents.registry.get(session.agent_index)
    if agent is None:
        return ""
    parts = (_workspace, _focus, _waits, _things, _reports)
    return context.now(agent.name, session.name, (part(agents, agent) for part in parts))


def _workspace(agents: Agents, agent: Agent) -> context.Part:
    """A worktree, its own or one that it inherits, and in what it differs from what it was made
    of."""
    line = (agent, *reversed(agents.registry.ancestors(agent)))
    whose = next((each for each in line if each.workspace not in ("", "inherit")), agent)
    entries: tuple[context.Entry, ...] = ()
    if whose.workspace == "worktree" and whose.worktree is not None and whose.worktree_made:
        found = Worktree.load(whose.worktree)
        made = (("path", WORKSPACE), ("branch", found.branch), ("base", found.base))
        entries = (context.entry(*made, *found.differs.items()),)
    elif whose.workspace == "worktree" and whose.is_guest:
        entries = (context.entry(*Given(**whose.guest["worktree"]).told().items()),)
    section = context.Section("workspace", "Workspace", entries)
    return context.Part(section, context.NOW_WORKSPACE)


def _focus(agents: Agents, agent: Agent) -> context.Part:
    item = agents.items.named(agent.index, Work, agent.focus) if agent.focus else None
    entries = (_item(agents, agent, item),) if item is not None else ()
    section = context.Section("focus", "Current work item", entries)
    return context.Part(section, context.NOW_FOCUS)


def _item(agents: Agents, agent: Agent, item: Work) -> context.Entry:
    room = Room(context.NOW_FOCUS)
    found = context.WorkItem(
        id=item.name,
        status=item.status.value,
        objective=room.field(item, "objective"),
        acceptance=room.field(item, "acceptance"),
        plan=room.field(item, "plan"),
        blocked_by=item.blocked_by,
        parent=item.parent if item.length("parent") < context.NOW_WAITS else "",
    )
    over = finished(agents.items.of(agent.index, Work))
    return context.item_entry(context.open_of(found, over))


def _waits(agents: Agents, agent: Agent) -> context.Part:
    waits = [w for w in agents.items.of(agent.index, Wait) if w.status is WaitStatus.ARMED]
    entries = tuple(
        context.entry(("id", w.name), ("on", w.on), ("work", w.work), ("deadline", w.deadline))
        for w in waits[:_WAITS]
    )
    section = context.Section("waits", "Waits", entries)
    return context.Part(section, context.NOW_WAITS, more=len(waits[_WAITS:]))


def _things(agents: Agents, agent: Agent) -> context.Part:
    """Tasks, with the handles of children, and children without a handle; in the order of their
    making. If they are many, those that have not ended, then the youngest."""
    found: list[Task | Agent] = list(agents.tasks.known(agent))
    handles = {task.child for task in agents.tasks.known(agent)}
    found += [c for c in agents.registry.children(agent) if c.index not in handles]
    found.sort(key=lambda thing: (thing.created, thing.name))
    places = sorted(
        range(len(found)),
        key=lambda place: (True, -place) if _is_over(found[place]) else (False, place),
    )[:_THINGS]
    entries = tuple(_thing(agents, found[place]) for place in places)
    section = context.Section("things", "Children and tasks", entries)
    more = len(found) - len(places)
    return context.Part(section, context.NOW_THINGS, more=more, order=places)


def _is_over(thing: Task | Agent) -> bool:
    return thing.over if isinstance(thing, Task) else not thing.live and bool(thing.outcome)


def _thing(agents: Agents, thing: Task | Agent) -> context.Entry:
    child = thing if isinstance(thing, Agent) else agents.registry.get(thing.child)
    if isinstance(thing, Agent):
        kind, work, title, started, exit_text = CHILD, "", "", thing.started, ""
        status = thing.outcome or thing.status.value
    else:
        kind, work, title = thing.task_kind, thing.work, agents.results.title(thing)
        started, exit_text = thing.started, thing.exit
        status = agents.tasks.status(thing)
    # what changes least comes first
    return context.entry(
        ("name", thing.name),
        ("kind", kind),
        ("work", work),
        ("title", title),
        ("node", child.node if child is not None else ""),
        ("started_at", _time(started)),
        ("status", status),
        ("exit", exit_text),
        ("reason", thing.reason),
        ("ended_at", _time(thing.ended)),
    )


def _reports(agents: Agents, agent: Agent) -> context.Part:
    """The last reports of its children, as far as they were kept."""
    reports = agents.messages.reports(agent)[-_REPORTS:]
    entries = tuple(
        context.entry(
            *(("child", told.child), ("ts", timestamp(told.created)), ("run", told.run)),
            text=told.text,
        )
        for told in reversed(reports)
    )
    section = context.Section("reports", "Reports of children", entries, newest_first=True)
    return context.Part(section, context.NOW_REPORTS)


def _time(moment: float) -> str:
    return timestamp(moment) if moment else ""
