"""Gathering what a forked child inherits (``runtime.texts.context`` derives it)."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.records.items import Task, Wait, WaitStatus, Work
from runtime.records.model import Agent, Session
from runtime.texts import context

#: of the messages that are looked at, and of the hand-off in which names are looked for
_TAIL: Final = 64 << 10
_HANDOFF: Final = 32 << 10
#: of the texts that tell which items belong together, in characters
_PARENTS: Final = 1 << 20
#: of the children, the newest: their channels are without number
_CHILDREN: Final = 256


class Room:
    """How much is still read: texts after that would have no room in the result."""

    def __init__(self, size: int) -> None:
        self._left = size

    def file(self, path: str) -> context.Taken:
        """The beginning of a file of which no link is followed; nothing if there is none."""
        try:
            if self._left <= 0:
                st = os.lstat(path)
                there = stat.S_ISREG(st.st_mode) and st.st_size
                return context.Beginning("", st.st_size) if there else ""
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                return ""
            data = os.pread(fd, self._left, 0)
        finally:
            os.close(fd)
        self._left -= len(data)
        text = data.decode(errors="replace")
        return text if len(data) == st.st_size else context.Beginning(text, st.st_size)

    def field(self, item: Work, name: str) -> context.Taken:
        """A text of a record."""
        length = item.length(name)
        if self._left <= 0 < length:
            return context.Beginning("", length)
        text: str = getattr(item, name)
        self._left = max(0, self._left - len(text.encode()))
        return text


def inherit(agents: Agents, parent: Agent, child: Agent) -> context.Inherited:
    """The context that a child inherits of its parent as that is now, within ``fork_limit``."""
    session = agents.sessions.get(parent.session)
    assert session is not None
    work = agents.items.of(parent.index, Work)
    handoff = _beginning(agents.documents.path(child, "handoff.md"), _HANDOFF)
    room = Room(agents.settings.config.fork_limit)
    directory = agents.sessions.directory(session) / "context"
    focus = agents.items.named(parent.index, Work, parent.focus)
    snapshot = context.Snapshot(
        agent=parent.name,
        session=session.name,
        run=parent.run.id,
        items=tuple(_items(work, focus, room)),
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
            if focus is not None and wait.work == focus.name and wait.status is WaitStatus.ARMED
        ),
        memory=partial(room.file, f"{directory}/memory.md"),
        episodes={
            item.name: partial(room.file, f"{directory}/episode/{item.name}.md") for item in work
        },
        children=tuple(_children(agents, parent, session, room)) if focus is not None else (),
        tail=tuple(_tail(agents, parent, session)),
        over=finished(work),
    )
    return context.derive(snapshot, handoff, agents.settings.config.fork_limit)


def _items(work: list[Work], focus: Work | None, room: Room) -> Iterator[context.WorkItem]:
    size = focus.length("parent") if focus is not None else 0
    left = _PARENTS
    for item in work:
        # a long one is read if it may be the same
        alike = size == item.length("parent") <= left
        left -= size if alike else 0
        yield context.WorkItem(
            id=item.name,
            status=item.status.value,
            objective=partial(room.field, item, "objective"),
            acceptance=partial(room.field, item, "acceptance"),
            plan=partial(room.field, item, "plan"),
            blocked_by=item.blocked_by,
            parent=item.parent if alike else "",
        )


def finished(work: Iterable[Work]) -> frozenset[str]:
    """The names of the items that are over."""
    return frozenset(item.name for item in work if item.over)


def _beginning(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def _children(
    agents: Agents, parent: Agent, session: Session, room: Room
) -> Iterator[context.Child]:
    for name, index in sorted(agents.sessions.channels(session.index)[-_CHILDREN:]):
        child = agents.registry.recall(index)
        if child is None:
            continue
        handle = agents.items.named(parent.index, Task, name)
        yield context.Child(
            name=name,
            status=child.outcome or child.status.value,
            result=partial(room.file, str(agents.documents.path(child, "result.md"))),
            work=handle.work if handle is not None and handle.child == index else "",
        )


def _tail(agents: Agents, parent: Agent, session: Session) -> list[context.Line]:
    """The lines that were said last in the current run, the message that it works on first."""
    found = []
    current = agents.messages.current(parent)
    if current is not None:
        found.append(context.Line(role="user", sender=current.sender, content=current.text))
    if not parent.run.id:
        return found
    try:
        with (agents.sessions.directory(session) / "messages.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return found
    said: list[context.Line] = []
    for line in reversed(lines):
        try:
            message = json.loads(line)
        except ValueError:
            continue  # the first, which may be cut
        if message.get("run") == parent.run.id:
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content)
            role, sender = str(message.get("role")), str(message.get("from"))
            said.append(context.Line(role=role, sender=sender, content=text))
            if len(said) == context.TAIL_MESSAGES:
                break
    return found + said[::-1]
