"""``agents`` of the root: one line for each agent that the caller may list.

What a line says are values of the agent's files, so the rows of these say who may read them. All
rows of which a key is made are either public, or for insiders: two lines for each agent serve
every caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from ctxfs.files import agent as agent_files
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Shown
from runtime.caller import Caller
from runtime.records.model import Agent
from runtime.texts.names import dump_json, timestamp

#: lines of one piece; and bytes of one read, or lines that are made for it, after which others
#: have their turn
_JOINED: Final = 128
_READ_AT_ONCE: Final = 512 << 10
_MADE_AT_ONCE: Final = 256

_Value = Callable[[Base, Agent], Any]


def _field(name: str) -> _Value:
    return lambda base, agent: getattr(agent, name)


#: by key: the file that shows the same, if there is one, and what is found
KEYS: Final[dict[str, tuple[str, _Value]]] = {
    "name": ("", _field("name")),
    "owner": ("owner", _field("owner")),
    "status": ("status", lambda base, agent: agent.status.value),
    "outcome": ("outcome", _field("outcome")),
    "reason": ("reason", _field("reason")),
    "parent": ("parent", _field("lineage")),
    "supervisor": (
        "supervisor", lambda base, agent: base.agents.registry.supervisor(agent)
    ),
    "profile": ("profile", _field("profile")),
    "mode": ("mode", _field("mode")),
    "tty": ("tty", _field("tty")),
    "viewers": ("tty", lambda base, agent: len(agent.viewers)),
    "run": ("run", lambda base, agent: agent.run.id),
    "pid": ("pid", lambda base, agent: agent.run.pid or None),
    "session": ("session", lambda base, agent: base.agents.sessions.name_of(agent)),
    "queue": ("queue", lambda base, agent: base.agents.messages.count_pending(agent)),
    "created_at": ("", lambda base, agent: timestamp(agent.created)),
    "since": ("status", lambda base, agent: timestamp(agent.since or agent.created)),
    "node": ("node", _field("node")),
    "asks": ("ask", lambda base, agent: base.agents.asks.count_open(agent)),
}  # fmt: skip
_SHOWN: Final = {file: agent_files.LAYOUT.row(file) for file, _ in KEYS.values() if file}
#: what the lines depend on, as changes name it
DEPENDS: Final = frozenset(
    (*KEYS, *(name for row in _SHOWN.values() for name in (row.name, *row.depends)))
)  # fmt: skip
_OPEN: Final = tuple(
    key for key, (file, _) in KEYS.items() if not file or _SHOWN[file].public
)  # fmt: skip


#: of agents with a terminal only
_OF_TERMINAL: Final = frozenset({"tty", "viewers"})


def _line(base: Base, agent: Agent, inside: bool) -> bytes:
    keys = [
        key for key in (KEYS if inside else _OPEN) if agent.tty or key not in _OF_TERMINAL
    ]
    return dump_json({key: KEYS[key][1](base, agent) for key in keys}).encode() + b"\n"


def _text(base: Base, _: Base, caller: Caller) -> Iterator[bytes]:
    """Pieces of whole lines; an empty one after many that had to be made."""
    kept, agents = base.kept_lines, iter(base.agents.registry)
    finds, made = base.view(caller).finds, 0
    while some := list(islice(agents, _JOINED)):
        lines: list[bytes] = []
        # asked for each piece: they are dropped when nobody has asked for a while
        of = {inside: kept.of(inside) for inside in (True, False)}
        for agent in some:
            inside = finds(agent)
            if inside is None or agent.removed:
                continue  # or it went since the first line was read
            line = of[inside].get(agent.index)
            if line is None:
                line = _line(base, agent, inside)
                kept.keep(inside, agent.index, line)
                made += 1
            lines.append(line)
        if lines:
            yield b"".join(lines)
        if made >= _MADE_AT_ONCE:
            made = 0
            yield b""


ROW: Final[Shown[Base]] = Shown(
    name="agents", public=True, generated=True, polled=True, at_once=_READ_AT_ONCE, render=_text,
    doc="one JSON object per line for each agent that the caller may list, in order of creation: "
        f"{' '.join(KEYS)}. A value is that of the file of this name; session is the name of the "
        "session, queue the number of waiting messages, asks that of open asks, pid null if there "
        "is none, since the time at which the status last changed, node the name of the node at "
        "which it runs, empty for this machine, and viewers the number of those who look at the "
        "terminal. A key whose file the caller may not read is left out, and without a terminal "
        "tty and viewers. Each line is consistent, the list as a whole need not be",
)  # fmt: skip
