"""``context/now.md``: where an agent is, as its records have it when it is read.

Of each thing no more is read than has room, so that a read costs the same however much there is.
"""

from __future__ import annotations

from typing import Final

from runtime.agents.forking import Room, finished, unfinished
from runtime.agents.parts import Agents
from runtime.agents.results import CHILD
from runtime.records.items import Task, Wait, WaitStatus, Work
from runtime.records.model import Agent, Session
from runtime.texts import context
from runtime.texts.names import timestamp

#: children and tasks, and waits, that are looked at: more have no room
_THINGS: Final = 256
_WAITS: Final = 256


def now(agents: Agents, session: Session) -> str:
    """The text; empty once the agent was removed."""
    agent = agents.registry.get(session.agent_index)
    if agent is None:
        return ""
    things, left_out = _things(agents, agent)
    waits = [w for w in agents.items.of(agent.index, Wait) if w.status is WaitStatus.ARMED]
    return context.now(
        context.Now(
            agent=agent.name,
            session=session.name,
            focus=_focus(agents, agent),
            waits=tuple(
                context.Wait(id=wait.name, on=wait.on, work=wait.work, deadline=wait.deadline)
                for wait in waits[:_WAITS]
            ),
            waits_left_out=len(waits[_WAITS:]),
            things=things,
            left_out=left_out,
            reports=reports_of(agents, agent),
        )
    )


def reports_of(agents: Agents, agent: Agent) -> tuple[context.Report, ...]:
    """The last reports of its children, oldest first, as far as they were kept."""
    return tuple(
        context.Report(
            child=report.child, ts=timestamp(report.created), run=report.run, text=report.text
        )
        for report in agents.messages.reports(agent)
    )


def _focus(agents: Agents, agent: Agent) -> context.WorkItem | None:
    item = agents.items.named(agent.index, Work, agent.focus) if agent.focus else None
    if item is None:
        return None
    over = finished(agents.items.of(agent.index, Work))
    room = Room(context.NOW_FOCUS)
    return context.WorkItem(
        id=item.name,
        status=item.status.value,
        objective=room.field(item, "objective"),
        acceptance=room.field(item, "acceptance"),
        plan=room.field(item, "plan"),
        blocked_by=unfinished(item, over),
        parent=item.parent if item.length("parent") < context.NOW_WAITS else "",
    )


def _things(agents: Agents, agent: Agent) -> tuple[tuple[context.Thing, ...], int]:
    """Tasks, with the handles of children, and children without a handle; in the order of their
    making. If they are many, those that have not ended, then the youngest; and how many are
    left out."""
    found: list[Task | Agent] = list(agents.tasks.known(agent))
    handles = {task.child for task in agents.tasks.known(agent)}
    found += [c for c in agents.registry.children(agent) if c.index not in handles]
    found.sort(key=lambda thing: (thing.created, thing.name))
    # what more have no room for is chosen by ``context.now`` in the same order
    places = sorted(
        range(len(found)),
        key=lambda place: (True, -place) if _is_over(found[place]) else (False, place),
    )
    kept = sorted(places[:_THINGS])
    return tuple(_thing(agents, found[place]) for place in kept), len(found) - len(kept)


def _is_over(thing: Task | Agent) -> bool:
    return thing.over if isinstance(thing, Task) else not thing.live and bool(thing.outcome)


def _thing(agents: Agents, thing: Task | Agent) -> context.Thing:
    if isinstance(thing, Agent):
        return context.Thing(
            name=thing.name,
            kind=CHILD,
            status=thing.outcome or thing.status.value,
            reason=thing.reason,
            started_at=_time(thing.started),
            ended_at=_time(thing.ended),
            over=_is_over(thing),
        )
    return context.Thing(
        name=thing.name,
        kind=thing.task_kind,
        status=agents.tasks.status(thing),
        exit=thing.exit,
        reason=thing.reason,
        work=thing.work,
        started_at=_time(agents.tasks.started(thing)),
        ended_at=_time(thing.ended),
        title=agents.results.title(thing),
        over=_is_over(thing),
    )


def _time(moment: float) -> str:
    return timestamp(moment) if moment else ""
