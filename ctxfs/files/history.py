"""The histories that a user's agents of one name have left, ``home/UID/agent/NAME``, as rows."""

from __future__ import annotations

from typing import Final

from ctxfs.files import session
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout, only_top
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import found
from ctxfs.tree.rows import Directory, Removing, Row, Target
from runtime.agents.removals import REMOVING_SESSIONS
from runtime.caller import OPERATORS, Caller, Role
from runtime.errors import MissingError
from runtime.ids import SessionIndex
from runtime.records.model import Session
from runtime.texts.names import quote

#: a user's uid, and the name of an agent that it had
_Key = tuple[int, str]


def _named_session(base: Base, key: _Key, name: str) -> Session | None:
    index = base.agents.sessions.named(*key, name)
    return base.agents.sessions.get(SessionIndex(index)) if index is not None else None


def _find_session(base: Base, key: _Key, call: Call, name: str) -> Node | None:
    return found(base, session.LAYOUT, _named_session(base, key, name))


def _session_target(base: Base, key: _Key, caller: Caller, name: str) -> Target[Session]:
    there = _named_session(base, key, name)
    if there is None:
        raise MissingError(f"there is no session {quote(name)}")
    own = caller.uid in (0, key[0])
    roles = base.agents.identity.root_roles(caller) & OPERATORS
    return Target(obj=there, roles=roles if own else Role.NONE)


def _key(base: Base, index: int, row: Row[_Key]) -> _Key | None:
    first = base.agents.sessions.get(SessionIndex(index))
    return (first.owner, first.agent) if first is not None else None


_REMOVING: Final = Removing(
    guard=REMOVING_SESSIONS,
    find=_session_target,
    act=lambda base, key, caller, session: base.agents.removals.remove_session(session),
)
#: names that users' agents had, by the first session of each
LAYOUT: Final[Layout[_Key]] = Layout(
    number=6,
    name="history",
    rows=(
        Directory(name="", top=True, public=True),
        Directory(name="session", mode=0o777, public=True, find=_find_session, remove=_REMOVING,
            entries=lambda base, key, call: (name for name, _ in base.agents.sessions.of(*key)),
            doc="sessions; operators may rmdir those of removed agents"),
    ),
    find=_key,
    path=lambda base, key: f"home/{key[0]}/agent/{key[1]}",
    asked=only_top,
)  # fmt: skip
