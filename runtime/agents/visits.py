"""Visits at terminals, in changes that others commit: somebody comes, has gone, or it is over.

A visit is in the record of an agent or a task, and its history tells of both its ends once, by
whichever daemon: so what a record does not have any more was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runtime.errors import UnsupportedError
from runtime.records.change import Change
from runtime.records.items import Task
from runtime.records.model import Agent
from runtime.records.visits import Visit
from runtime.texts.names import quote

#: how a visit ends: its viewer said so, or closed, or what it looked at is over
DETACHED: Final = "detached"
CLOSED: Final = "closed"
ENDED: Final = "ended"


def check_terminal(agent: Agent, task: Task | None) -> None:
    """``UnsupportedError`` if there is none to be looked at."""
    if task is not None and task.child:
        raise UnsupportedError(
            f"{quote(task.name)} is the handle of an agent: name the agent, not a task"
        )
    if not (task or agent).tty:
        what = f"the task {quote(task.name)}" if task is not None else quote(agent.name)
        raise UnsupportedError(
            f"{what} has no terminal: ctx enter {agent.name} opens a shell where it is"
        )


def of(change: Change, agent: Agent, task: Task | None) -> tuple[Visit, ...]:
    """Those that there are once a change is applied."""
    found: tuple[Visit, ...] = (
        change.peek_agent(agent, "viewers") if task is None else change.peek(task, "viewers")
    )
    return found


def _set(change: Change, agent: Agent, task: Task | None, **values: Any) -> None:
    if task is None:
        change.set(agent, **values)
    else:
        change.put(task, **values)


def come(change: Change, agent: Agent, task: Task | None, visit: Visit) -> None:
    """Adds that somebody looks."""
    _set(change, agent, task, viewers=(*of(change, agent, task), visit))
    where = {"run": change.peek_agent(agent, "run").id} if task is None else {"task": task.name}
    change.tell(agent, "terminal.attach", viewer=visit.number, **where, look=visit.looks)


def go(change: Change, agent: Agent, task: Task | None, gone: Mapping[int, str]) -> None:
    """Adds that viewers have gone, by their numbers, and why."""
    there = of(change, agent, task)
    _set(change, agent, task, viewers=tuple(each for each in there if each.number not in gone))
    went = [each for each in there if each.number in gone]
    for each in went:
        change.tell(agent, "terminal.leave", viewer=each.number, reason=gone[each.number])
    hung_up = [each for each in went if each.hangs_up and gone[each.number] == CLOSED]
    if hung_up:
        window = "remove" if any(each.removes for each in hung_up) else "end"
        _set(change, agent, task, window=window)


def end(change: Change, agent: Agent, task: Task | None = None) -> bool:
    """Adds that there is nothing to look at any more; whether somebody who did wants it removed."""
    there = of(change, agent, task)
    if there:
        go(change, agent, task, {each.number: ENDED for each in there})
    return any(each.removes for each in there)
