"""``context/pack.md``: what the children of a session gave back, in a bounded space.

Of each child so much is looked at as is shown, and of the children the newest: what this
costs depends neither on how many there were nor on how much they wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from runtime.agents.parts import Agents
from runtime.agents.results import artifacts_of, ends_of, file_source, refs_of
from runtime.records.model import Agent, Session
from runtime.texts.names import escape

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
    """The lines on what one child gave back: its result, then references and artifacts."""
    source = file_source(agents.documents.path(child, "result.md"))
    result, _ = ends_of(source, _PART, 2 * _PART, f"child/{name}/result.md")
    if result:
        yield result.rstrip("\n") + "\n\n"
    lines: list[str] = []
    paths: set[str] = set()
    refs, left = refs_of(agents.documents.path(child, "refs.jsonl"), _REFS)
    for ref in refs[:_LINES]:
        path, summary = str(ref.get("path", "")), str(ref.get("summary") or "")
        paths.add(path)
        lines.append(f"- {escape(path)}{': ' if summary else ''}{escape(summary)}\n")
    if left or len(refs) > _LINES:
        lines.append(f"[more references left out: see child/{name}/refs.jsonl]\n")
    found, more = artifacts_of(agents.documents.path(child, "artifact"), entries)
    found = [path for path in found if path not in paths]
    lines += [f"- {escape(path)}\n" for path in found[:_LINES]]
    if more or len(found) > _LINES:
        lines.append(f"[more artifacts left out: see child/{name}/artifact]\n")
    if lines:
        yield "".join(lines) + "\n"
