"""The spaces that operators make and remove, ``shared/SPACE``, as rows (ctxfs(5), Durable trees).

All may see which spaces there are, whose, and what they have. The tree itself is the kernel's, and
so is what its modes and a cell's mounts let anybody do.
"""

from __future__ import annotations

from typing import Final

from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import found, node_of
from ctxfs.tree.rows import Directory, Link, Making, Removing, Shown, Target
from runtime.authority.accounts import Resource
from runtime.authority.facts import Facts
from runtime.authority.guard import Guard, unless
from runtime.caller import OPERATORS, Caller, Role
from runtime.errors import (
    MissingError,
    NotEmptyError,
    QuotaError,
    TakenError,
    UnansweredError,
    WrongStateError,
)
from runtime.ids import SpaceIndex
from runtime.kernel import clock
from runtime.records.model import Space
from runtime.records.spaces import FRESH_SECONDS
from runtime.texts import mounts
from runtime.texts.names import check_name, quote, timestamp

# what there is


def _usage(base: Base, space: Space, caller: Caller) -> str:
    if caller.uid in (0, space.owner):
        base.agents.disk.look(space.owner)  # for who reads again
    measured = timestamp(space.measured) if space.measured else "-"
    return f"bytes={space.bytes}\nentries={space.entries}\nmeasured={measured}\n"


async def _make_ready(base: Base, space: Space, call: Call) -> None:
    await base.runtime.trees.ready(space)


LAYOUT: Final[Layout[Space]] = Layout(
    number=12,
    name="space",
    rows=(
        # to all: who makes something here is told where instead, which the kernel does not
        Directory(name="", top=True, mode=0o777, public=True, instead="data"),
        Shown(name="owner", public=True, doc="the uid that made it, on whose account it is",
            render=lambda base, space, caller: f"{space.owner}\n"),
        Shown(name="usage", public=True, generated=True, render=_usage,
            doc="key=value of its last measure: bytes on the disk, entries, and when that was "
            "measured, - if it never was; its owner, and uid 0, begin a new one by reading it"),
        Shown(name="max", public=True, generated=True,
            render=lambda base, space, caller: f"{base.runtime.accounts.limit(Resource.DISK)}\n",
            doc="bytes that the disk account of its owner allows, for all that is on it"),
        Link(name="data", public=True, ready=_make_ready,
            target=lambda base, space: str(base.runtime.places.tree / "shared" / space.name),
            doc="the tree itself, in the runtime directory of ctxd"),
    ),
    find=lambda base, index, row: base.agents.spaces.get(SpaceIndex(index)),
    path=lambda base, space: f"shared/{space.name}",
    created=lambda space: space.made,
    owner=lambda space: (space.owner, space.gid),
    removable=True,
)  # fmt: skip


def find(base: Base, _: Base, call: Call, name: str) -> Node | None:
    return found(base, LAYOUT, base.agents.spaces.named(name))


# making and removing


def _make_space(base: Base, _: Base, call: Call, name: str, mode: int) -> Node:
    spaces, limit = base.agents.spaces, base.runtime.config.spaces
    check_name(name)
    if spaces.named(name) is not None:
        raise TakenError(f"the space {quote(name)} already exists")
    if spaces.has(name):
        raise UnansweredError(f"the space {quote(name)} is just being removed: try again")
    # limits are against the others
    if not base.agents.identity.is_master(call.caller) and spaces.of(call.uid) >= limit:
        raise QuotaError(
            f"uid {call.uid} has {limit} spaces, the configured maximum: remove one first (rmdir)"
        )
    space = spaces.add(name, owner=call.uid, gid=call.gid, mode=mode & 0o3777)
    return node_of(base, LAYOUT, space.index, space)


def _space_target(base: Base, _: Base, caller: Caller, name: str) -> Target[Space]:
    space = base.agents.spaces.named(name)
    if space is None:
        raise MissingError(f"there is no space {quote(name)}")
    own = base.agents.identity.is_master(caller) or caller.uid == space.owner
    if own and (_unknown.why(base.agents, caller, space) or space.entries):
        base.agents.disk.look(space.owner)  # for who asks again
    roles = base.agents.identity.root_roles(caller) & OPERATORS
    return Target(obj=space, roles=roles if own else Role.NONE)


@unless("a running agent has it", WrongStateError)
def _used(facts: Facts, caller: Caller, space: Space) -> str:
    """As whatever a running agent has: nothing is taken from it."""
    tree = f"{mounts.SHARED_TREE}{space.name}"
    for agent in facts.registry:
        if agent.live and tree in agent.trees:
            shown = quote(agent.name) if caller.uid in (0, agent.owner) else "another user's agent"
            return f"the cell of {shown} has the space {quote(space.name)}: stop that first"
    return ""


@unless("its last measure is older than 30 s", UnansweredError)
def _unknown(facts: Facts, caller: Caller, space: Space) -> str:
    if space.measured_up and clock.since(space.measured, space.measured_up) <= FRESH_SECONDS:
        return ""
    return f"what the space {quote(space.name)} has is just being measured: try again"


@unless("it had files then", NotEmptyError)
def _full(facts: Facts, caller: Caller, space: Space) -> str:
    if not space.entries:
        return ""
    return (
        f"data of the space {quote(space.name)} had {space.entries} entries at "
        f"{timestamp(space.measured)}: remove them, and try again in some seconds"
    )


def _remove_space(base: Base, _: Base, caller: Caller, space: Space) -> None:
    base.agents.spaces.remove(space)
    base.cache.forget_attributes_of(LAYOUT.inodes(space.index))


MAKING: Final = Making(guard=Guard(who=OPERATORS), act=_make_space)
REMOVING: Final = Removing(
    guard=Guard(who=OPERATORS, unless=(_used, _unknown, _full)),
    find=_space_target,
    act=_remove_space,
)
