"""How agents and tasks ended, and the exit status that stands for it."""

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
    """Return the path of an agent's session, empty if it is kept from the caller."""
    try:
        target = os.readlink(root.join(f"{owner}/session"))
    except OSError:
        return ""
    return os.path.normpath(os.path.join(owner, target))


def ending(root: Root, owner: str, session: str = "") -> tuple[str, str]:
    """Return the outcome and the reason of a dead agent, as far as the caller may know them.

    With the path of its session also when it was removed, or reset, as soon as it was dead.
    An agent knows at least the outcome of its own child.
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
    """Return which restart an agent waits for, and the end that is the reason for it."""
    for event in last_events(root, agent(name, "session")):
        reason = str(event.get("reason"))
        if event.get("type") == "agent.status" and reason.startswith("restart:"):
            return f"{reason} after {event.get('after')}"
    return ""


def identity(root: Root, name: str) -> int:
    """Return a number that is another one for each incarnation of a name, 0 if there is none."""
    try:
        return os.stat(root.join(agent(name))).st_ino
    except OSError:
        return 0


def exit_status(outcome: str, reason: str) -> int:
    """Return the exit status that stands for the end of an agent, or of a run."""
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


#: what the end of a task would be as that of an agent
TASK_OUTCOMES = {"completed": "done", "failed": "error", "cancelled": "cancelled"}


def task_ending(root: Root, owner: str) -> tuple[str, str]:
    """Return the last status of a task, and how its command exited."""
    return root.value(f"{owner}/status"), root.value(f"{owner}/exit")
