"""The owner of an agent, and the uid, gid and groups of its processes, as rows."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import NEW, Control, Row
from runtime.agents import placing
from runtime.authority.guard import Guard
from runtime.caller import Caller, Role
from runtime.errors import DeniedError, MalformedError
from runtime.records.model import Agent
from runtime.texts import names
from runtime.texts.names import quote

_BY_ROOT: Final[Guard[Agent]] = Guard(who=Role.ROOT, when=NEW)


def _parse_owner(base: Base, agent: Agent, caller: Caller, line: str) -> int:
    owner = _parse_id(line)
    base.agents.privilege.check_ids(f"owner {owner}", (owner,), (agent.owner,))
    return owner


def _parse_id(line: str) -> int:
    value = names.parse_number(line)
    if value >= 2**32 - 1:
        raise MalformedError(f"{quote(line)} is not an id: use a number up to {2**32 - 2}")
    return value


def _check_root(base: Base, *ids: int) -> None:
    if 0 in ids and not base.runtime.config.allow_root_agents:
        raise DeniedError("0: agents do not run as root (allow_root_agents is not set)")


def _set_owner(base: Base, agent: Agent, owner: int) -> None:
    if owner != agent.owner:
        base.agents.births.change_owner(agent, owner)


def _own_id(kind: str) -> fields.Parse[Agent]:
    """The uid or the gid of its processes."""

    def parse(base: Base, agent: Agent, caller: Caller, line: str) -> int:
        value = _parse_id(line)
        if agent.parent is not None:
            raise DeniedError("a child has the uid and gid of its parent: do not set them")
        _check_root(base, value)
        placing.check(base.agents, agent, **{kind: value})
        before = getattr(agent, kind)
        base.agents.privilege.check_ids(f"{kind} {value}", (value,), (before,))
        return value

    return parse


def _parse_groups(base: Base, agent: Agent, caller: Caller, line: str) -> tuple[int, ...]:
    groups = tuple(_parse_id(word) for word in names.words(line))
    if len(groups) > 1024:
        raise MalformedError(f"{len(groups)} groups are too many; use at most 1024")
    others = sorted(set(groups) - set(agent.groups))
    base.agents.privilege.check_ids(f"groups {others}", others, ())
    placing.check(base.agents, agent, groups=groups)
    parent = base.agents.registry.parent_of(agent)
    if parent is not None:
        extra = sorted(set(groups) - set(parent.groups))
        if extra:
            raise DeniedError(f"groups {extra} exceed those of the parent {quote(parent.name)}")
    elif not base.agents.identity.is_master(caller):
        raise DeniedError("only operators with uid 0 may set the groups of a root agent")
    else:
        _check_root(base, *groups)
    return groups


def _set_groups(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    groups = _parse_groups(base, agent, caller, " ".join(fields.lines(text)))
    base.agents.privilege.check_ids(f"groups {sorted(groups)}", groups, agent.groups)
    base.agents.journal.update(agent, groups=groups)


def _groups(base: Base, agent: Agent, caller: Caller) -> str:
    return "".join(f"{group}\n" for group in agent.groups)


ROWS: Final[tuple[Row[Agent], ...]] = (
    fields.single("owner", "uid of the user that owns the agent", _parse_owner,
                  shape=shapes.USER, default="creator's", render=fields.number("owner"),
                  guard=_BY_ROOT, update=_set_owner),
    fields.single("uid", "uid of its processes; a child's is its parent's", _own_id("uid"),
                  shape=shapes.USER, default="creator's", render=fields.number("uid"),
                  guard=_BY_ROOT),
    fields.single("gid", "gid of its processes; a child's is its parent's", _own_id("gid"),
                  shape=shapes.GROUP, default="creator's", render=fields.number("gid"),
                  guard=_BY_ROOT),
    Control(name="groups", default="creator's", shape=shapes.GROUPS, guard=fields.WHILE_NEW,
        render=_groups,
        check=_parse_groups, commit=_set_groups,
        doc="supplementary gids, one per line"),
)
