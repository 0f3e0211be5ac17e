"""What agents may, never more than their parents (ABI section 7).

An agent's effective policy is its own within what its parent may use or
delegate, all the way up. It is computed when it is asked for, so that what an
ancestor loses is lost below at the next check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from runtime.authority import mounts, policy
from runtime.authority.policy import Rule
from runtime.errors import ExceedingError, WrongStateError
from runtime.model import Agent
from runtime.names import quote

if TYPE_CHECKING:
    from runtime.agents import Agents

#: fields that effective policies are made of
POLICY_FIELDS = frozenset({"policy", "label", "bound_policy", "parent", "life", "policy_of_root"})


class Authority:
    """Policies and mount tables of agents in relation to their ancestors'."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._effective: dict[int, tuple[Rule, ...]] = {}

    def forget(self) -> None:
        """Some policy changed, and with it that of all below."""
        self._effective.clear()

    # policy

    def effective_policy(self, agent: Agent) -> tuple[Rule, ...]:
        """What the agent may, and what it may hand on (``delegate`` rules)."""
        found = self._effective.get(agent.index)
        if found is None:
            own = policy.parse(agent.policy, agent.label)
            found = policy.effective(own, self.bound(agent))
            if self._agents.get(agent.index) is agent:
                self._effective[agent.index] = found
        return found

    def bound(self, agent: Agent) -> tuple[Rule, ...] | None:
        """What its policy can say at most; None for a root agent."""
        if agent.bound_policy is not None:
            return policy.parse(agent.bound_policy, agent.label)
        parent = self._agents.parent_of(agent)
        if parent is None:
            return None if agent.parent is None else ()
        return policy.as_bound(self.effective_policy(parent))

    def allows(self, agent: Agent, cls: str, name: str, perm: str) -> bool:
        """Whether the effective policy allows ``perm`` on ``cls:name``."""
        return policy.allows(self.effective_policy(agent), cls, name, perm)

    def reaches(self, agent: Agent, other: Agent, cls: str, perm: str) -> bool:
        """``allows`` for another agent or its sessions: only the same owner's, unless
        uid 0 wrote the line."""
        if not self.allows(agent, cls, other.name, perm):
            return False
        if agent.owner == other.owner:
            return True
        own = policy.parse(agent.policy, agent.label)
        return any(
            r.kind == "allow" and r.cls == cls and r.perm == perm and r.matches(other.name)
            for r in own
            if r.key in agent.policy_of_root
        )

    def check_policy(self, agent: Agent, rules: Iterable[Rule]) -> None:
        """``ExceedingError`` naming what exceeds what."""
        bound = self.bound(agent)
        if bound is None:
            return
        exceeding = policy.uncovered(rules, bound)
        if exceeding is not None:
            raise ExceedingError(
                f"{exceeding.cls}:{exceeding.object} {exceeding.perm} exceeds what "
                f"{self._bound_name(agent)} may use or delegate"
            )

    def check_network(self, agent: Agent, rules: tuple[Rule, ...]) -> None:
        """``WrongStateError`` if these rules took the network from something that runs.

        A network namespace cannot be taken from a process; that is not pretended.
        """
        before = agent.policy
        changed = policy.render(rules, agent.label)
        running = [a for a in (agent, *self._agents.descendants(agent)) if a.live]
        having = [a for a in running if self.allows(a, "network", "default", "connect")]
        if not having:
            return
        try:
            agent.policy = changed
            self.forget()
            for member in having:
                if not self.allows(member, "network", "default", "connect"):
                    raise WrongStateError(
                        f"{quote(member.name)} runs with the network, which cannot be taken "
                        "from it: stop it first"
                    )
        finally:
            agent.policy = before
            self.forget()

    def _bound_name(self, agent: Agent) -> str:
        parent = self._agents.parent_of(agent)
        return f"the parent {quote(parent.name)}" if parent is not None else "its parent"

    def families(self, agent: Agent) -> tuple[str, ...]:
        """The tool families that are on."""
        explicit = agent.private and any(
            r.kind == "allow" and r.cls == "agent" and r.perm == "create"
            for r in policy.parse(agent.policy, agent.label)
        )
        return (*agent.families, "agent_creation") if explicit else agent.families

    # mounts

    def effective_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """The mounts in force: the parent's, then its own with what those leave of them."""
        own = mounts.parse(agent.mount)
        if agent.bound_mount is not None:
            return mounts.effective(mounts.parse(agent.bound_mount), own)
        parent = self._agents.parent_of(agent)
        if parent is None:
            return own
        return mounts.effective(self.effective_mounts(parent), own)

    def check_mounts(self, agent: Agent, table: Iterable[mounts.Mount]) -> None:
        """``ExceedingError`` if a line gives more than the parent has."""
        parent = self._agents.parent_of(agent)
        if parent is None:
            return
        above = self.effective_mounts(parent)
        bare = parent.root or parent.iso == "shared"
        base = () if bare else self._agents.config.base_view
        for mount in table:
            why = mounts.excess(mount, above, base)
            if why:
                raise ExceedingError(
                    f"{quote(mount.source)} {mount.mode} exceeds the view of "
                    f"{self._bound_name(agent)}: {why}"
                )

    def check_start(self, agent: Agent) -> None:
        """What was written is checked again: the parent may have less now."""
        if agent.parent is not None:
            self.check_policy(agent, policy.parse(agent.policy, agent.label))
            self.check_mounts(agent, mounts.parse(agent.mount))

    # telling

    def explain(self, agent: Agent, cls: str, name: str, perm: str) -> tuple[bool, list[str]]:
        """Whether the agent may, and which line of whose policy says so or is missing."""
        allowed = self.allows(agent, cls, name, perm)
        lines = list(self._explain(agent, cls, name, perm))
        other = self._agents.named(name)
        if allowed and cls in ("agent", "session") and other is not None:
            allowed = self.reaches(agent, other, cls, perm)
            if not allowed:
                lines.append(
                    f"{agent.name}: {quote(name)} belongs to uid {other.owner}, "
                    f"this agent to uid {agent.owner}, and uid 0 did not write the line"
                )
        return allowed, lines

    def _explain(self, agent: Agent, cls: str, name: str, perm: str) -> Iterator[str]:
        node: Agent | None = agent
        kinds: tuple[str, ...] = ("allow",)
        while node is not None:
            found = policy.find_line(node.policy, node.label, kinds, cls, name, perm)
            if found is None:
                yield f"{node.name}: no line to {' or '.join(kinds)} {cls}:{name} {perm}"
            else:
                yield f"{node.name}: line {found[0]}: {found[1]}"
            if node.bound_policy is not None:
                rules = policy.parse(node.bound_policy, node.label)
                had = any(r.cls == cls and r.perm == perm and r.matches(name) for r in rules)
                what = "had" if had else "had no line for"
                yield f"{node.name}: its parent {what} {cls}:{name} {perm} when it was detached"
                return
            if node.parent is not None and self._agents.parent_of(node) is None:
                yield f"{node.name}: its parent is gone, and with it what it could hand on"
                return
            node = self._agents.parent_of(node)
            kinds = ("allow", "delegate")
