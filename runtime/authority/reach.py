"""Agents of one group that a line of uid 0 lets tell agents of another what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.authority.attenuation import Authority
from runtime.caller import Role
from runtime.ids import AgentIndex
from runtime.records.change import Subscriber
from runtime.records.model import Agent
from runtime.records.registry import Registry

#: by the role that it gives
_PERMS: Final = {Role.STARTER: "start", Role.STOPPER: "stop", Role.WRITER: "write"}


class Reach(Subscriber):
    """Modes shut out who has no rights before anything is locked. They know users and groups only:
    what is to be written by agents of another group is open to all, and this says what that is.
    """

    def __init__(self, registry: Registry, authority: Authority) -> None:
        self._registry = registry
        self._authority = authority
        self._groups: dict[AgentIndex, int] = {}
        #: by their group, which mostly is that of all
        self._actors: dict[int, dict[AgentIndex, Agent]] = {}
        for agent in registry:
            self.agent_listed(agent)

    def opens(self, agent: Agent, roles: Role) -> bool:
        """Whether an agent of another group has one of these roles with this one."""
        return any(
            roles & role and self._authority.reaches(actor, agent, "agent", perm)
            for gid, actors in self._actors.items()
            if gid != agent.gid
            for actor in actors.values()
            for role, perm in _PERMS.items()
        )

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._registry.get(index)
        if agent is not None and not {"policy", "policy_of_root", "gid"}.isdisjoint(names):
            self.agent_listed(agent)

    def agent_listed(self, agent: Agent) -> None:
        index, gid = agent.index, self._groups.pop(agent.index, None)
        if gid is not None:
            del self._actors[gid][index]
            if not self._actors[gid]:
                del self._actors[gid]
        if self._registry.get(index) is None:
            return
        # as in the keys of rules, which to parse takes longer than this may
        if any(rule.startswith("allow agent:") for rule in agent.policy_of_root):
            self._groups[index] = agent.gid
            self._actors.setdefault(agent.gid, {})[index] = agent
