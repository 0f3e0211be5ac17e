"""The spaces of real files, as rows: a user's own files, and what is shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from ctxfs.tree.spaces import SpaceRow
from runtime.authority.guard import Facts, Guard, Unless
from runtime.caller import Caller, Role
from runtime.errors import DeniedError, MissingError
from runtime.records.spaces import tree_of_home, tree_of_space
from runtime.runtime import Runtime
from runtime.texts.names import quote

# who may


def _unless_allowed(perm: str) -> Unless[str]:
    def why(facts: Facts, caller: Caller, name: str) -> str:
        agent = facts.registry.get(caller.agent) if caller.agent is not None else None
        if agent is None or facts.authority.allows(agent, "shared", name, perm):
            return ""
        return f"shared:{name} {perm} is not in the agent's effective policy"

    return Unless(f"the caller is an agent that lacks policy {perm}", DeniedError, why)


# where and whose


def _data_root(runtime: Runtime, uid: int) -> Path:
    """Made when somebody looks at it first."""
    path = runtime.places.trees / tree_of_home(uid)
    if not path.is_dir():
        path.mkdir(parents=True, mode=0o700)
        os.chown(path, uid, -1)
    return path


def shared_root(runtime: Runtime, name: str) -> Path:
    return runtime.places.trees / tree_of_space(name)


def shared_owner(runtime: Runtime, name: str) -> int:
    """The uid of its maker; ``MissingError``."""
    space = runtime.agents.spaces.named(name)
    if space is None:
        raise MissingError(f"there is no space {quote(name)}")
    return space.owner


DATA: Final[SpaceRow[int]] = SpaceRow(
    name="data",
    key=str,
    find=lambda runtime, key: int(key),
    path=lambda uid: f"home/{uid}/data",
    root=_data_root,
    owner=lambda runtime, uid: None,
    share=lambda runtime, uid: runtime.agents.disk.share_of(uid),
    agent=lambda runtime, uid: None,
    read=Guard(who=Role.ANYONE),
    write=Guard(who=Role.ANYONE),
    links=True,
    bounded=False,
)
SHARED: Final[SpaceRow[str]] = SpaceRow(
    name="shared",
    key=str,
    find=lambda runtime, name: name if runtime.agents.spaces.named(name) is not None else None,
    path=lambda name: f"shared/{name}",
    root=shared_root,
    owner=lambda runtime, name: None,
    share=lambda runtime, name: runtime.agents.disk.share_of(shared_owner(runtime, name)),
    agent=lambda runtime, name: None,
    read=Guard(who=Role.ANYONE, unless=(_unless_allowed("read"),)),
    write=Guard(who=Role.ANYONE, unless=(_unless_allowed("write"),)),
    links=True,
    bounded=False,
)


#: by name
ROWS: Final[dict[str, SpaceRow[Any]]] = {
    row.name: row for row in (DATA, SHARED)
}
