"""Homes: all that outlives the agents of a user, ``home/UID``, as rows (ctxfs(5), Sessions)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from ctxfs.files import history
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import node_of
from ctxfs.tree.rows import Directory, Link
from runtime.caller import INSIDERS, Role
from runtime.records.spaces import tree_of_home

_UID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _history_visible(base: Base, uid: int, name: str, call: Call) -> bool:
    found = base.agents.registry.named(name)
    if found is not None and found.owner == uid:
        roles = base.agents.identity.roles(call.caller, found)
        return not found.private or bool(roles & (INSIDERS | Role.SESSION_READER))
    # of removed agents: the names of other users' private ones are not told
    caller = call.caller
    return caller.known and (caller.agent is not None or caller.uid in (0, uid))


def _list_histories(base: Base, uid: int, call: Call) -> Iterator[str]:
    for name in base.agents.sessions.agents(uid):
        if _history_visible(base, uid, name, call):
            yield name


def _find_history(base: Base, uid: int, call: Call, name: str) -> Node | None:
    if not _history_visible(base, uid, name, call):
        return None
    first = base.agents.sessions.first(uid, name)
    return node_of(base, history.LAYOUT, first, (uid, name)) if first is not None else None


async def _make_ready(base: Base, uid: int, call: Call) -> None:
    """A user's own tree is made when that user needs it first; a cell has it by a line."""
    if call.caller.agent is None and call.caller.uid == uid:
        await base.runtime.trees.ready_home(uid, call.gid)


LAYOUT: Final[Layout[int]] = Layout(
    number=5,
    name="home",
    rows=(
        Directory(name="", top=True, public=True),
        Directory(name="agent", public=True, entries=_list_histories,
            find=_find_history, doc="sessions by agent name"),
        Link(name="data", public=True, ready=_make_ready,
            target=lambda base, uid: str(base.runtime.places.tree / tree_of_home(uid)),
            doc="the user's own tree, in the runtime directory of ctxd"),
    ),
    find=lambda base, index, row: index,
    path=lambda base, uid: f"home/{uid}",
)  # fmt: skip


def _homes(base: Base) -> set[int]:
    made = {int(name) for name in os.listdir(base.runtime.places.trees / "home")}
    return made | set(base.agents.sessions.owners())


def entries(base: Base, _: Base, call: Call) -> Iterator[str]:
    return map(str, sorted(_homes(base)))


def find(base: Base, _: Base, call: Call, name: str) -> Node | None:
    if not _UID.fullmatch(name) or int(name) >= 2**32 - 1:
        return None
    uid = int(name)
    return node_of(base, LAYOUT, uid, uid) if uid == call.uid or uid in _homes(base) else None
