"""The histories that a user's agents of one name have left, ``home/UID/agent/NAME``, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ctxfs.files import session
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Removing, Row, Target
from runtime.agents.removals import REMOVING_SESSIONS
from runtime.caller import OPERATORS, Caller, Role
from runtime.errors import MissingError
from runtime.ids import SessionIndex
from runtime.records.model import Session
from runtime.texts.names import quote

#: a user's uid, and the name of an agent that it had
_Key = tuple[int, str]


def _sessions(base: Base, key: _Key, call: Call) -> Iterator[str]:
    for name, _ in base.runtime.agents.sessions.of(*key):
        yield name


def _named_session(base: Base, key: _Key, name: str) -> Session | None:
    index = base.runtime.agents.sessions.named(*key, name)
    return base.runtime.agents.sessions.get(SessionIndex(index)) if index is not None else None


def _find_session(base: Base, key: _Key, call: Call, name: str) -> Node | None:
    found = _named_session(base, key, name)
    return RowNode(base, session.LAYOUT, found.index, found) if found is not None else None


def _session_target(
    base: Base, key: _Key, caller: Caller, name: str
) -> Target[Session]:
    found = _named_session(base, key, name)
    if found is None:
        raise MissingError(f"there is no session {quote(name)}")
    own = caller.uid in (0, key[0])
    return Target(obj=found, roles=base.root_roles(caller) & OPERATORS if own else Role.NONE)


def _remove_session(base: Base, key: _Key, caller: Caller, found: Session) -> None:
    base.runtime.agents.removals.remove_session(found)


_REMOVING: Final = Removing(
    guard=REMOVING_SESSIONS,
    find=_session_target,
    act=_remove_session,
)


class _Histories(Layout[_Key]):
    """Names that users' agents had, by the first session of each."""

    def find(self, base: Base, index: int, row: Row[_Key]) -> _Key | None:
        first = base.runtime.agents.sessions.get(SessionIndex(index))
        return (first.owner, first.agent) if first is not None else None

    def path(self, base: Base, key: _Key) -> str:
        return f"home/{key[0]}/agent/{key[1]}"


LAYOUT: Final = _Histories(
    number=6,
    name="history",
    hidden=True,
    rows=(
        Directory(name="", top=True, public=True),
        Directory(name="session", mode=0o777, public=True, entries=_sessions,
            find=_find_session, remove=_REMOVING,
            doc="sessions; operators may rmdir those of removed agents"),
    ),
)  # fmt: skip
