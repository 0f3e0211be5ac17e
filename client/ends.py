"""The ends of agents and tasks, and their exit statuses."""

from __future__ import annotations

import os

from client.events import last_events
from client.exits import (
    CANNOT_START,
    FAILED,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    TIMED_OUT,
)
from client.files import first_line
from client.root import Root, agent, label
from client.words import SESSION_ENDS


def session_of(root: Root, owner: str) -> str:
    """Return the path of an agent's session, empty if the caller may not see it."""
    try:
        target = os.readlink(root.join(f"{owner}/session"))
    except OSError:
        return ""
    return os.path.normpath(os.path.join(owner, target))


def ending(root: Root, owner: str, session: str = "") -> tuple[str, str]:
    """Return the outcome and the reason of a dead agent, each empty if the caller may not see it.

    The path of its session also gives the end of an agent that was already removed or reset.
    A parent sees at least the outcome of its child.
    """
    for event in last_events(root, session) if session else ():
        if event.get("type") == "agent.stop":
            return str(event.get("status")), str(event.get("reason"))
    outcome, reason = root.value(f"{owner}/outcome"), root.value(f"{owner}/reason")
    if not outcome:
        status = first_line(root.join(f"self/session/context/child/{label(owner)}/status"))
        outcome = status if status in SESSION_ENDS else ""
    return outcome, reason


def awaited_restart(root: Root, name: str) -> str:
    """Return the restart that an agent waits for, and the end that caused it."""
    for event in last_events(root, agent(name, "session")):
        reason = str(event.get("reason"))
        if event.get("type") == "agent.status" and reason.startswith("restart:"):
            return f"{reason} after {event.get('after')}"
    return ""


def identity(root: Root, name: str) -> int:
    """Return a number that differs between incarnations of a name, 0 if it does not exist."""
    try:
        return os.stat(root.join(agent(name))).st_ino
    except OSError:
        return 0


def exit_status(outcome: str, reason: str) -> int:
    """Return the exit status for the end of an agent or a run."""
    kind, _, detail = reason.partition(",")[0].partition(":")
    number = int(detail) if detail.isascii() and detail.isdigit() else FAILED
    if outcome == "done":
        return OK
    if outcome == "cancelled":
        return TIMED_OUT if kind == "timeout" else INTERRUPTED
    if outcome != "error":
        return FAILED
    by_kind = {
        "exit": number,
        "signal": 128 + number,
        "oom": OUT_OF_MEMORY,
        "start_failed": CANNOT_START,
        "timeout": TIMED_OUT,
    }
    return by_kind.get(kind, FAILED)


#: the outcome of an agent that corresponds to the last status of a task
TASK_OUTCOMES = {"completed": "done", "failed": "error", "cancelled": "cancelled"}


def task_ending(root: Root, owner: str) -> tuple[str, str]:
    """Return the last status of a task, and the exit of its command."""
    return root.value(f"{owner}/status"), root.value(f"{owner}/exit")
