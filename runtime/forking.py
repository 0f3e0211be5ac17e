"""Gathering what a forked child inherits (``runtime.context`` derives it)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from runtime import context
from runtime.agents import Agents
from runtime.model import Agent, Session
from runtime.planes import Task, Wait, Work

#: of a history, and of each text, that is looked at
_TAIL: Final = 256 << 10
_TEXT: Final = 1 << 20
#: of all texts of one kind: far more than ever has room
_TEXTS: Final = 16 << 20


def inherit(agents: Agents, parent: Agent, child: Agent) -> context.Inherited:
    """What a child inherits of its parent as that is now, within ``fork_limit``."""
    session = agents.session(parent.session)
    assert session is not None
    work = agents.items.of(parent.index, Work)
    directory = agents.session_directory(session) / "context"
    snapshot = context.Snapshot(
        agent=parent.name,
        session=session.name,
        run=parent.run,
        items=tuple(
            context.Item(
                id=item.name,
                objective=item.objective,
                plan=item.plan,
                acceptance=item.acceptance,
                status=item.status.value,
                blocked_by=item.blocked_by,
                parent=item.parent,
                updated=item.updated,
            )
            for item in work
        ),
        focus=parent.focus,
        waits=tuple(
            context.Wait(
                id=wait.name,
                on=wait.on,
                work=wait.work,
                status=wait.status.value,
                deadline=wait.deadline,
                payload=wait.payload,
            )
            for wait in agents.items.of(parent.index, Wait)
        ),
        memory=_text(directory / "memory.md", _TEXT),
        episodes=_episodes(directory / "episode", [item.name for item in work]),
        children=tuple(_children(agents, parent, session)),
        tail=tuple(_tail(agents, parent, session)),
    )
    handoff = _text(agents.document(child, "handoff.md"), _TEXT)
    return context.derive(snapshot, handoff, agents.config.fork_limit)


def _text(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(min(limit, _TEXT)).decode(errors="replace")
    except OSError:
        return ""


def _episodes(directory: Path, items: list[str]) -> dict[str, str]:
    """By the id of their work item; the agent's own files, of which no link is followed."""
    found = {}
    room = _TEXTS
    for item in items:
        path = directory / f"{item}.md"
        if room > 0 and not path.is_symlink() and path.is_file():
            found[item] = _text(path, room)
            room -= len(found[item])
    return found


def _children(agents: Agents, parent: Agent, session: Session) -> list[context.Child]:
    found = []
    room = _TEXTS
    for name, index in agents.channels(session.index):
        child = agents.recall(index)
        if child is None:
            continue
        result = _text(agents.document(child, "result.md"), room) if room > 0 else ""
        room -= len(result)
        handle = agents.items.named(parent.index, Task, name)
        found.append(
            context.Child(
                name=name,
                status=child.outcome or child.status.value,
                result=result,
                work=handle.work if handle is not None and handle.child == index else "",
            )
        )
    return found


def _tail(agents: Agents, parent: Agent, session: Session) -> list[context.Message]:
    """What was said in the current run, the message that it works on first."""
    found = []
    current = agents.messages.current(parent)
    if current is not None:
        found.append(context.Message(role="user", sender=current.sender, content=current.text))
    if not parent.run:
        return found
    try:
        with (agents.session_directory(session) / "messages.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return found
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # the first, which may be cut
        if message.get("run") == parent.run:
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content)
            role, sender = str(message.get("role")), str(message.get("from"))
            found.append(context.Message(role=role, sender=sender, content=text))
    return found
