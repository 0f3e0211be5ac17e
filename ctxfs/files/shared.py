"""The spaces that operators make and remove, in ``shared``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ctxfs.files import spaces
from ctxfs.tree.base import Base
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rows import Making, Removing, Target
from runtime.authority.guard import Facts, Guard, Unless
from runtime.caller import OPERATORS, Caller, Role
from runtime.errors import MissingError, NotEmptyError, QuotaError, TakenError
from runtime.texts.names import check_name, quote


def _spaces(base: Base) -> list[str]:
    return [space.name for space in base.runtime.agents.spaces]


def entries(base: Base, _: Base, call: Call) -> Iterator[str]:
    yield from _spaces(base)


def find(base: Base, _: Base, call: Call, name: str) -> Node | None:
    return base.root_of(spaces.SHARED, name) if name in _spaces(base) else None


def _check_spaces(base: Base, caller: Caller) -> None:
    limit = base.runtime.config.spaces
    if base.runtime.agents.identity.is_master(caller):
        return  # limits are against the others
    if base.runtime.agents.spaces.of(caller.uid) >= limit:
        raise QuotaError(
            f"uid {caller.uid} has {limit} spaces, the configured maximum: remove one first (rmdir)"
        )


def _make_space(base: Base, _: Base, call: Call, name: str, mode: int) -> Node:
    path = spaces.shared_root(base.runtime, check_name(name))
    _check_spaces(base, call.caller)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise TakenError(f"the space {quote(name)} already exists") from None
    os.chown(path, call.uid, call.gid)
    os.chmod(path, mode & 0o3777)
    base.runtime.agents.spaces.add(name, call.uid)
    return base.root_of(spaces.SHARED, name)


def _space_target(base: Base, _: Base, caller: Caller, name: str) -> Target[Path]:
    if name not in _spaces(base):
        raise MissingError(f"there is no space {quote(name)}")
    owner = spaces.shared_owner(base.runtime, name)
    own = base.runtime.agents.identity.is_master(caller) or caller.uid == owner
    return Target(
        obj=spaces.shared_root(base.runtime, name),
        roles=base.root_roles(caller) & OPERATORS if own else Role.NONE,
    )


def _why_full(facts: Facts, caller: Caller, path: Path) -> str:
    return f"the space {quote(path.name)} is not empty" if any(path.iterdir()) else ""


def _remove_space(base: Base, _: Base, caller: Caller, path: Path) -> None:
    node = base.root_of(spaces.SHARED, path.name)
    path.rmdir()
    space = base.runtime.agents.spaces.named(path.name)
    if space is not None:
        base.runtime.agents.spaces.remove(space)
    base.durable.remove(node)
    base.durable.forget(node.inode, 0)
    base.spaces.remove(node.space)


MAKING: Final = Making(guard=Guard(who=OPERATORS), act=_make_space)
REMOVING: Final = Removing(
    guard=Guard(who=OPERATORS, unless=(Unless("it has files", NotEmptyError, _why_full),)),
    find=_space_target,
    act=_remove_space,
)
