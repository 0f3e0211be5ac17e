"""What agents may, never more than their parents (ctxfs-policy(5)).

An agent's effective policy is its own within what its parent may use or
delegate, all the way up. It is looked at when it is asked for, so that what an
ancestor loses is lost below at the next check.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from runtime.errors import ExceedingError, WrongStateError
from runtime.ids import AgentIndex
from runtime.kernel import linux
from runtime.records.model import Agent
from runtime.records.registry import Registry
from runtime.records.settings import Settings
from runtime.texts import mounts, policy
from runtime.texts.names import quote
from runtime.texts.policy import Rule, Rules

#: rules that are kept parsed, of all agents together; each takes about 100 bytes
_KEPT_MAX: Final = 1 << 18
#: what an entry without a rule counts as
_ENTRY: Final = 16


@dataclass(slots=True, kw_only=True)
class _Known:
    """What was made of an agent's texts, and of what."""

    text: str
    label: str
    own: Rules
    #: the bound as it was, and what is left within it
    above: Rules | None = None
    effective: Rules | None = None
    #: the rules of its text that uid 0 wrote, and of which keys they were found
    of_root: tuple[str, ...] = ()
    roots: Rules = field(default_factory=lambda: policy.EMPTY)
    #: what its parent had when it was detached
    bound_text: str = ""
    bound: Rules = field(default_factory=lambda: policy.EMPTY)
    weight: int = 0


class Authority:
    """Policies and mount tables of agents in relation to their ancestors'.

    What was computed is good for as long as it would be computed of the same: the agent's
    text and what its parent has now. So nothing has to be forgotten when a policy changes,
    and a change costs those that it is about.
    """

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        self._boot = linux.boot_id()
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._weight = 0

    # what was computed

    def _look(self, agent: Agent) -> _Known:
        known = self._known.get(agent.index)
        if known is not None and known.label == agent.label and known.text == agent.policy:
            return known
        own = policy.parse(agent.policy, agent.label)
        known = _Known(text=agent.policy, label=agent.label, own=own)
        self._keep(agent, known)
        return known

    def _keep(self, agent: Agent, known: _Known) -> None:
        """Those used last, while there is room."""
        if agent.index == 0:
            return
        before = self._known.pop(agent.index, None)
        if before is not None:
            self._weight -= before.weight
        effective = known.effective
        more = len(effective) if effective is not None and effective is not known.own else 0
        known.weight = _ENTRY + len(known.own) + more + len(known.roots) + len(known.bound)
        self._known[agent.index] = known
        self._weight += known.weight
        while self._weight > _KEPT_MAX and len(self._known) > 1:
            self._weight -= self._known.popitem(last=False)[1].weight

    def forget(self, agent: Agent) -> None:
        """It was removed."""
        known = self._known.pop(agent.index, None)
        if known is not None:
            self._weight -= known.weight

    # policy

    def own_policy(self, agent: Agent) -> Rules:
        """The rules of its own text."""
        return self._look(agent).own

    def effective_policy(self, agent: Agent) -> Rules:
        """What the agent may, and what it may hand on (``delegate`` rules)."""
        known = self._look(agent)
        above = self.bound(agent)
        if known.effective is None or known.above is not above:
            known.effective = policy.effective(known.own, above)
            known.above = above
            self._keep(agent, known)
        return known.effective

    def bound(self, agent: Agent) -> Rules | None:
        """What its policy can say at most, delegations included; None for a root agent."""
        if agent.bound_policy is not None:
            known = self._look(agent)
            if known.bound_text != agent.bound_policy:
                known.bound = policy.parse(agent.bound_policy, agent.label)
                known.bound_text = agent.bound_policy
                self._keep(agent, known)
            return known.bound
        parent = self._registry.parent_of(agent)
        if parent is None:
            return None if agent.parent is None else policy.EMPTY
        return self.effective_policy(parent)

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
        return policy.allows(self._of_root(agent), cls, other.name, perm)

    def _of_root(self, agent: Agent) -> Rules:
        """The rules of its own that uid 0 wrote."""
        known = self._look(agent)
        if known.of_root != agent.policy_of_root:
            keys = set(agent.policy_of_root)
            known.roots = Rules.of(rule for rule in known.own if rule.key in keys)
            known.of_root = agent.policy_of_root
            self._keep(agent, known)
        return known.roots

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

    def check_network(self, agent: Agent, rules: Rules) -> None:
        """``WrongStateError`` if these rules took the network from something that runs.

        A network namespace cannot be taken from a process; that is not pretended.
        """
        own = self.own_policy(agent)
        if all(
            _has_network(rules, kind) or not _has_network(own, kind)
            for kind in ("allow", "delegate")
        ):
            return
        having = [a for a in self._with_network(agent) if a.live]
        if not having:
            return
        then = {agent.index: policy.effective(rules, self.bound(agent))}
        for member in having:
            left = self._effective_then(member, then)
            if not policy.allows(left, "network", "default", "connect"):
                raise WrongStateError(
                    f"{quote(member.name)} is running with the network, which ctxd cannot take "
                    "from it: stop it first"
                )

    def _effective_then(self, agent: Agent, then: dict[AgentIndex, Rules]) -> Rules:
        """The policy of an agent, if ``then`` has the policies of others; adds its own there."""
        found = then.get(agent.index)
        if found is None:
            parent = self._registry.parent_of(agent)
            if parent is None or agent.bound_policy is not None:
                return self.effective_policy(agent)
            above = self._effective_then(parent, then)
            found = then[agent.index] = policy.effective(self.own_policy(agent), above)
        return found

    def _with_network(self, agent: Agent) -> Iterator[Agent]:
        """The agents that have it: this one and all below. If an agent neither has it nor passes
        it on, no agent below it has it."""
        own = self.own_policy(agent)
        if not own.joined("network", "connect").all:
            return
        if self.allows(agent, "network", "default", "connect"):
            yield agent
        for child in self._registry.children(agent):
            if child.owned:
                yield from self._with_network(child)

    def _bound_name(self, agent: Agent) -> str:
        parent = self._registry.parent_of(agent)
        return f"the parent {quote(parent.name)}" if parent is not None else "its parent"

    def families(self, agent: Agent) -> tuple[str, ...]:
        """The tool families that are on."""
        if agent.private and self.own_policy(agent).objects("allow", "agent", "create").all:
            return (*agent.families, "agent_creation")
        return agent.families

    # mounts

    def effective_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """The mounts in force: the parent's, then its own with what those leave of them."""
        own = self.own_mounts(agent)
        if agent.bound_mount is not None:
            return mounts.effective(mounts.parse(agent.bound_mount), own)
        parent = self._registry.parent_of(agent)
        if parent is None:
            return own
        return mounts.effective(self.effective_mounts(parent), own)

    def own_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """Its own table, with sources as they were found when they were written."""
        sources = mounts.Sources.load(agent.sources.get("mount"))
        return tuple(sources.resolve(line, self._boot) for line in mounts.parse(agent.mount))

    def check_own_mounts(self, agent: Agent) -> None:
        """The same for what was written: the parent may have less now."""
        self.check_mounts(agent, self.own_mounts(agent))

    def check_mounts(self, agent: Agent, table: Collection[mounts.Mount]) -> None:
        """``ExceedingError`` if a line gives more than the parent has; ``QuotaError`` if there
        are too many with the parent's."""
        parent = self._registry.parent_of(agent)
        if parent is None:
            return
        above = mounts.Index(self.effective_mounts(parent))
        mounts.check_count(len(table), len(above.table))
        bare = parent.root or parent.iso == "shared"
        base = () if bare else self._settings.config.base_view
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
            self.check_policy(agent, self.own_policy(agent))
            self.check_own_mounts(agent)

    # telling

    def explain(self, agent: Agent, cls: str, name: str, perm: str) -> tuple[bool, list[str]]:
        """Whether the agent may, and which line of whose policy says so or is missing."""
        allowed = self.allows(agent, cls, name, perm)
        lines = list(self._explain(agent, cls, name, perm))
        other = self._registry.named(name)
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
            found = policy.find_line(node.policy, kinds, cls, name, perm)
            if found is None:
                yield f"{node.name}: no line to {' or '.join(kinds)} {cls}:{name} {perm}"
            else:
                yield f"{node.name}: line {found[0]}: {found[1]}"
            if node.bound_policy is not None:
                bound = self.bound(node)
                had = bound is not None and bound.joined(cls, perm).covers(name)
                what = "had" if had else "had no line for"
                yield f"{node.name}: its parent {what} {cls}:{name} {perm} when it was detached"
                return
            if node.parent is not None and self._registry.parent_of(node) is None:
                yield f"{node.name}: its parent was removed, and its policy with it"
                return
            node = self._registry.parent_of(node)
            kinds = ("allow", "delegate")


def _has_network(rules: Rules, kind: str) -> bool:
    return rules.objects(kind, "network", "connect").covers("default")
