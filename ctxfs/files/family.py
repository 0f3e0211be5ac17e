"""An agent's creator, lifetime and profile, as rows (ctxfs(5), Files of an agent)."""

from __future__ import annotations

from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import NEW, Control, Row, Shown, one_line
from runtime.agents import placing
from runtime.authority.guard import Guard
from runtime.caller import OPERATORS, Caller
from runtime.errors import DeniedError, MalformedError, UnsupportedError
from runtime.records.model import FAMILIES, LIVES, PROFILES, Agent, Profile
from runtime.texts import names
from runtime.texts.names import quote


def _set_parent(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    value = one_line(text)
    parent = _parse_parent(base, agent, caller, value)
    if parent is not None or not value.startswith("agent:"):
        base.agents.births.adopt(agent, parent)


def _parse_parent(base: Base, agent: Agent, caller: Caller, line: str) -> Agent | None:
    word = line.split(" ")[0]
    if word == "operator":
        return None
    if not word.startswith("agent:"):
        raise MalformedError(f"unknown parent {quote(line)}; use operator or agent:NAME")
    parent = base.agents.registry.named(names.check_name(word.removeprefix("agent:")))
    if parent is None or not base.agents.identity.roles(caller, parent) & OPERATORS:
        raise DeniedError(f"{quote(word)}: no such agent, or the caller is not its operator")
    return parent


def _parse_life(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    life = names.check_choice(line, LIVES)
    if agent.parent is None and life != "detached":
        raise MalformedError(f"{quote(life)}: only a child can have this life; use detached")
    agents = base.agents
    placed = agents.registry.placed(agent)
    if life == "detached" and placed is not None:
        raise UnsupportedError(
            f"detached: {placed.guest['alias']} has placed {quote(placed.name)} here: nothing that "
            "it makes outlives it"
        )
    if life == "detached" and agent.parent is not None and caller.agent is not None:
        maker = agents.registry.get(caller.agent)
        if maker is None or not agents.authority.allows(maker, "agent", agent.name, "detach"):
            raise DeniedError(f"agent:{agent.name} detach is not in the caller's effective policy")
        if "authority_expansion" not in agents.authority.families(maker):
            raise DeniedError(
                f"{quote(maker.name)} is a {maker.profile}, which lacks authority_expansion"
            )
    placing.check(base.agents, agent, life=life)
    return life


def _set_life(base: Base, agent: Agent, life: str) -> None:
    profile = Profile.PUBLIC_NAMED if life == "detached" else Profile.PRIVATE_CHILD
    base.agents.births.set_life(agent, life, profile.value)


def _parse_profile(base: Base, agent: Agent, caller: Caller, line: str) -> str:
    profile = names.check_choice(line, PROFILES)
    _parse_life(base, agent, caller, _life_of(agent, profile))
    return profile


def _life_of(agent: Agent, profile: str) -> str:
    if profile == Profile.PUBLIC_NAMED:
        return "detached"
    return agent.life if agent.life != "detached" else "owned"


def _set_profile(base: Base, agent: Agent, profile: str) -> None:
    _set_life(base, agent, _life_of(agent, profile))


def _families(base: Base, agent: Agent, caller: Caller) -> str:
    on = base.agents.authority.families(agent)
    return "".join(f"{family}\n" for family in FAMILIES if family in on)


ROWS: Final[tuple[Row[Agent], ...]] = (
    Control(name="parent", default="creator", shape=shapes.PARENT, public=True,
        guard=Guard(who=OPERATORS, when=NEW),
        doc="its creator: operator uid:N, or agent:NAME session:NAME run:ID. An "
        "operator of both agents may write agent:NAME; a child's defaults are then "
        "applied. The operator who made the agent may write what only the creator may, until "
        "its start",
        render=fields.value("lineage"), check=_parse_parent,
        commit=_set_parent, single=True, depends=("lineage",)),
    Shown(name="supervisor", default="creator",
        doc="its supervisor: agent:NAME; operator, for a root agent; none, "
        "for a detached child",
        render=lambda base, agent, caller: base.agents.registry.supervisor(agent) + "\n",
        depends=("parent", "life")),
    fields.single("life", "owned; temp: ctxd removes the agent, but not the parent's channel, when "
                  "it has recorded the end; detached: the agent lives on when its parent ends. A "
                  "root agent can only be detached", _parse_life, shape=shapes.choice(LIVES),
                  default="owned (child), detached (root)", public=True, update=_set_life),
    fields.single("profile", "private_child for owned and temp, public_named for detached",
                  _parse_profile, shape=shapes.choice(PROFILES), public=True,
                  default="private_child (child), public_named (root)", update=_set_profile),
    Shown(name="visibility", default="from profile", public=True,
        render=fields.value("visibility"), depends=("profile",), doc="private or public"),
    Shown(name="ownership", default="from profile", render=fields.value("ownership"),
        depends=("profile",), doc="parent_supervised or self_owned"),
    Shown(name="families", default="from profile", render=_families, generated=True,
        doc="enabled tool families, one per line"),
    Shown(name="ingress", default="from profile", render=fields.value("ingress"),
        depends=("profile",), doc="supervisor_only or operators_and_policy"),
)
