"""Values that an agent cannot have if it is to run at a node: each is refused, whichever file is
written second.

They are those that mean something on this machine alone, and what is not done for placed agents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from runtime.authority.facts import Facts
from runtime.errors import CtxError, MalformedError, UnsupportedError
from runtime.records.model import Agent
from runtime.texts import mounts
from runtime.texts.names import quote

#: why a value of a file cannot be had, and the error of it; None if it can
_Why = Callable[[Facts, Agent, Any], tuple[type[CtxError], str] | None]


def default_ids(facts: Facts, agent: Agent) -> tuple[int, int, tuple[int, ...]]:
    """The uid, gid and groups that an agent has if nobody sets them."""
    parent, privilege = facts.registry.parent_of(agent), facts.privilege
    if parent is not None:
        return parent.uid, parent.gid, parent.groups
    if privilege.rootless:
        return privilege.uid, privilege.gid, privilege.groups
    if agent.creator_uid == 0:
        return (*facts.settings.config.agent_ids(), ())
    return agent.creator_uid, agent.creator_gid, agent.creator_groups


def _unless(usual: object, error: type[CtxError], why: str) -> _Why:
    """It can have the usual value alone."""
    return lambda facts, agent, value: None if value == usual else (error, why)


def _own_id(number: int) -> _Why:
    why = "it has the ids that its owner has at the node"

    def judge(facts: Facts, agent: Agent, value: Any) -> tuple[type[CtxError], str] | None:
        return None if value == default_ids(facts, agent)[number] else (MalformedError, why)

    return judge


def _life(facts: Facts, agent: Agent, value: str) -> tuple[type[CtxError], str] | None:
    if value != "detached" or agent.parent is None:
        return None
    return UnsupportedError, "a detached child would have nobody who vouches for it there"


def _workspace(facts: Facts, agent: Agent, value: str) -> tuple[type[CtxError], str] | None:
    if value.startswith(mounts.EXPLICIT_ROOT):
        return UnsupportedError, "no path of the node can be named; use inherit"
    return None


def _mount(facts: Facts, agent: Agent, value: str) -> tuple[type[CtxError], str] | None:
    for line in mounts.parse(value):
        if line.mode != "hide" and line.source == mounts.HOME_TREE:
            return MalformedError, "home: is the owner's own tree on this machine"
        if line.path:
            return UnsupportedError, (
                f"{quote(line.source)} is a path of this machine; of the node, directories that it "
                f"offers can be named: {mounts.AT_NODE}recipes /recipes ro"
            )
    return None


_FILES: Final[dict[str, _Why]] = {
    "life": _life,
    "restart": _unless("no", UnsupportedError, "an agent at a node is not started again"),
    "uid": _own_id(0),
    "gid": _own_id(1),
    "groups": _own_id(2),
    "root": _unless("", MalformedError, "its view is the base view of the node"),
    "iso": _unless("sandbox", MalformedError, "the tree of another machine is not given away"),
    "tty": _unless("", UnsupportedError, "nobody can look at a terminal at a node"),
    "workspace": _workspace,
    "mount": _mount,
}
#: that are judged beside ``placement``
FILES: Final = tuple(_FILES)


def check(facts: Facts, agent: Agent, *files: str, **values: Any) -> None:
    """Raises for the first file, as it is or with another of these values, that an agent cannot
    have with its ``placement``, or with that which is among the values."""
    placement = values.pop("placement", agent.placement)
    if not placement:
        _check_here(values.get("mount", agent.mount))
        return
    for file, value in {**{name: getattr(agent, name) for name in files}, **values}.items():
        found = _FILES[file](facts, agent, value)
        if found is not None:
            error, why = found
            said = "" if file == "mount" else f" {_said(value)}"
            raise error(f"{file}{said} and placement {placement.strip()} exclude each other: {why}")


def _check_here(mount: str) -> None:
    """``MalformedError`` for a line that means something at a node only."""
    for line in mounts.parse(mount):
        if line.at_node:
            raise MalformedError(
                f"mount: {quote(line.source)} is a directory of a node, and placement is empty: "
                "write that first, and leave it as long as the line is there"
            )


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_hop(facts: Facts, agent: Agent) -> None:
    """``UnsupportedError`` for one whose family has come from another machine."""
    placed = facts.registry.placed(agent)
    if placed is not None:
        raise UnsupportedError(
            f"placement: {placed.guest['alias']} has placed {quote(placed.name)} here: what that "
            "makes runs here, too"
        )


def why_away(agent: Agent, what: str) -> str:
    """Why something can only be done, or seen, where an agent runs; empty if that is here."""
    if not agent.node:
        return ""
    return (
        f"{quote(agent.name)} runs at the node {agent.node}, and {what} there alone: use its "
        "directory in /ctx/agent of that machine"
    )


def check_here(agent: Agent, what: str) -> None:
    """``UnsupportedError`` with that."""
    if why := why_away(agent, what):
        raise UnsupportedError(why)
