"""``context/pack.md``: what the children of a session gave back, in a bounded space.

Of each child so much is looked at as is shown, and of the children the newest: what this
costs depends neither on how many there were nor on how much they wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.errors import MalformedError
from runtime.records.model import Agent, Session
from runtime.texts.names import escape, parse_json_object

#: bytes of all, and children that are looked at
SIZE_MAX: Final = 64 << 10
CHILDREN_MAX: Final = 128
#: of each child: bytes of either end of its result, bytes of its references that are looked
#: at, references and artifacts that are shown
_PART: Final = 4 << 10
_REFS: Final = 16 << 10
_LINES: Final = 100
#: files and directories of artifacts that are looked at, of all children together
_ENTRIES: Final = 2000
#: for the line that says how many children are left out
_ROOM: Final = 100


def pack(agents: Agents, session: Session, status: Callable[[Agent], str]) -> str:
    """The text; ``status`` says what is shown as a child's."""
    channels = agents.sessions.channels(session.index)
    parts: list[str] = []
    room, shown = SIZE_MAX - _ROOM, 0
    entries = iter(range(_ENTRIES))
    for name, index in reversed(channels[-CHILDREN_MAX:]):
        child = agents.registry.recall(index)
        if child is not None:
            heading = f"# {name}: {status(child)}\n\n"
            part = heading + "".join(_given(agents, child, name, entries))
            room -= len(part.encode())
            if room < 0:
                break
            parts.append(part)
        shown += 1
    left = len(channels) - shown
    if left:
        parts.append(f"[{left} older children left out: see child/]\n")
    return "".join(parts)


def _given(agents: Agents, child: Agent, name: str, entries: Iterator[int]) -> Iterator[str]:
    """What one child gave back: its result, then references and artifacts."""
    result = _ends(agents.documents.path(child, "result.md"), f"child/{name}/result.md")
    if result:
        yield result.rstrip("\n") + "\n\n"
    lines: list[str] = []
    paths: set[str] = set()
    refs, left = _refs(agents.documents.path(child, "refs.jsonl"))
    for path, summary in refs[:_LINES]:
        paths.add(path)
        lines.append(f"- {escape(path)}{': ' if summary else ''}{escape(summary)}\n")
    if left or len(refs) > _LINES:
        lines.append(f"[more references left out: see child/{name}/refs.jsonl]\n")
    found, more = _artifacts(agents.documents.path(child, "artifact"), entries)
    found = [path for path in found if path not in paths]
    lines += [f"- {escape(path)}\n" for path in found[:_LINES]]
    if more or len(found) > _LINES:
        lines.append(f"[more artifacts left out: see child/{name}/artifact]\n")
    if lines:
        yield "".join(lines) + "\n"


def _ends(path: Path, where: str) -> str:
    """A text, or its head and tail."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            head = os.pread(file.fileno(), 2 * _PART, 0)
            if size <= 2 * _PART:
                return head.decode(errors="replace")
            tail = os.pread(file.fileno(), _PART, size - _PART)
    except FileNotFoundError:
        return ""
    first = head[:_PART].decode(errors="ignore")
    last = tail.decode(errors="ignore")
    left = size - len(first.encode()) - len(last.encode())
    return f"{first}\n[{left} bytes left out: see {where}]\n{last}"


def _refs(path: Path) -> tuple[list[tuple[str, str]], bool]:
    """(path, summary) of the first references, and whether there are more."""
    try:
        with open(path, "rb") as file:
            data = file.read(_REFS)
            more = bool(file.read(1))
    except FileNotFoundError:
        return [], False
    if more:
        data = data[: data.rfind(b"\n") + 1]
    found = []
    for line in data.decode(errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            ref = parse_json_object(line)
        except MalformedError:
            continue  # as an earlier version took it
        found.append((str(ref.get("path", "")), str(ref.get("summary") or "")))
    return found, more


def _artifacts(root: Path, entries: Iterator[int]) -> tuple[list[str], bool]:
    """The paths of files below ``artifact/``, and whether there are more that were not
    looked at."""
    found: list[str] = []
    left = ["artifact"]
    while left:
        directory = left.pop()
        try:
            with os.scandir(root.parent / directory) as there:
                for entry in there:
                    if next(entries, None) is None:
                        return sorted(found), True
                    path = f"{directory}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        left.append(path)
                    else:
                        found.append(path)
        except OSError:
            continue  # removed meanwhile
    return sorted(found), False
