"""What agents may, never more than their parents (ctxfs-policy(5)).

An agent's effective policy is its own within what its parent may use or
delegate, all the way up. It is looked at when it is asked for, so that what an
ancestor loses is lost below at the next check.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from runtime.errors import DeniedError, ExceedingError, QuotaError, WrongStateError
from runtime.ids import AgentIndex, Incarnation
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


#: spaces that are mounted, each with a permission that this needs
_Spaces = frozenset[tuple[str, str]]
_NO_SPACES: Final[_Spaces] = frozenset()


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

    def __init__(
        self, registry: Registry, settings: Settings, roots: tuple[str, ...] = ("/ctx",)
    ) -> None:
        """``roots`` are the paths at which views have the filesystem."""
        self._registry = registry
        self._roots = roots
        self._settings = settings
        self._boot = linux.boot_id()
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._weight = 0
        #: of agents that were live when somebody asked
        self._spaces: dict[AgentIndex, tuple[Incarnation, _Spaces]] = {}

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
        self._spaces.pop(agent.index, None)
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

    def check_taking(self, agent: Agent, rules: Rules) -> None:
        """``WrongStateError`` if these rules took from something that runs what no check can
        take: a network namespace, a durable tree that is mounted. That is not pretended.
        """
        own = self.own_policy(agent)
        lost = [
            (cls, perm)
            for cls, perm in _HELD
            for kind in ("allow", "delegate")
            if not set(own.objects(kind, cls, perm).all) <= set(rules.objects(kind, cls, perm).all)
        ]
        if not lost:
            return
        then = {agent.index: policy.effective(rules, self.bound(agent))}
        for member, spaces in self._holding(agent, lost, self._spaces_above(agent)):
            held = [("network", "default", "connect"), *(("shared", *each) for each in spaces)]
            for cls, name, perm in held if member.live else ():
                # whoever is further down loses nothing that this agent may still hand on
                if member is not agent and rules.joined(cls, perm).covers(name):
                    continue
                if self.allows(member, cls, name, perm) and not policy.allows(
                    self._effective_then(member, then), cls, name, perm
                ):
                    what = "the network" if cls == "network" else f"shared:{name} mounted"
                    raise WrongStateError(
                        f"{quote(member.name)} is running with {what}, which ctxd cannot take "
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

    def _holding(
        self, agent: Agent, perms: Collection[tuple[str, str]], spaces: _Spaces
    ) -> Iterator[tuple[Agent, _Spaces]]:
        """The agents that one of these permissions may reach, this one and all below, with the
        spaces that are mounted there; ``spaces`` are those of its parent. If an agent neither
        has a permission nor passes it on, no agent below it has it."""
        own = self.own_policy(agent)
        if not any(own.joined(cls, perm).all for cls, perm in perms):
            return
        spaces = spaces | self._own_spaces(agent)
        yield agent, spaces
        for child in self._registry.children(agent):
            if child.owned:
                yield from self._holding(child, perms, spaces)

    def _own_spaces(self, agent: Agent) -> _Spaces:
        """What its lines of spaces need of its policy. A table changes only while its agent is
        new: so what a live agent's says is kept."""
        incarnation, found = self._spaces.get(agent.index, (None, _NO_SPACES))
        if incarnation != agent.incarnation:
            lines = [mount for mount in mounts.parse(agent.mount) if mount.tree]
            if agent.bound_mount is not None:
                lines += [mount for mount in mounts.parse(agent.bound_mount) if mount.tree]
            found = frozenset(
                (space, perm)
                for mount in lines
                if (space := mounts.space_of(mount.source))
                for perm in _TREE_PERMS[mount.mode]
            )
            if agent.live:
                self._spaces[agent.index] = agent.incarnation, found
        return found

    def _spaces_above(self, agent: Agent) -> _Spaces:
        if agent.bound_mount is not None:
            return _NO_SPACES
        above = (self._own_spaces(each) for each in self._registry.ancestors(agent))
        return _NO_SPACES.union(*above)

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
        inherited = tuple(now for _, now in self.inherited_mounts(agent))
        return mounts.effective(inherited, own, lambda source: self._shown(agent, source))

    def inherited_mounts(self, agent: Agent) -> list[tuple[mounts.Mount, mounts.Mount]]:
        """The lines of its parent, as that has them and as far as the agent's policy lets it."""
        parent = self._registry.parent_of(agent)
        if agent.bound_mount is not None:
            above: Iterable[mounts.Mount] = mounts.parse(agent.bound_mount)
        else:
            above = () if parent is None else self.effective_mounts(parent)
        return [(mount, self._by_policy(agent, mount)) for mount in above]

    def _by_policy(self, agent: Agent, mount: mounts.Mount) -> mounts.Mount:
        """A parent's line of a durable tree, as far as this agent's policy lets it."""
        space = mounts.space_of(mount.source) if mount.tree else ""
        if not space:
            return mount
        if not self.allows(agent, "shared", space, "read"):
            return replace(mount, mode="hide")
        if mount.mode == "rw" and not self.allows(agent, "shared", space, "write"):
            return replace(mount, mode="ro")
        return mount

    def narrowed_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """Its own lines as they are in force."""
        own = len(self.own_mounts(agent))
        return self.effective_mounts(agent)[-own:] if own else ()

    def _shown(self, agent: Agent, source: str) -> list[str]:
        """Where views have a durable tree as part of the filesystem."""
        space = mounts.space_of(source)
        below = f"shared/{space}" if space else f"home/{agent.owner}/data"
        return [f"{root}/{below}" for root in self._roots]

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
        self._check_trees(agent, [mount for mount in table if mount.tree])
        parent = self._registry.parent_of(agent)
        if parent is None:
            return
        above = mounts.Index(self.effective_mounts(parent))
        mounts.check_count(len(table), len(above.table))
        bare = parent.root or parent.iso == "shared"
        base = () if bare else self._settings.config.base_view
        for mount in table:
            if mount.tree:
                shown = self._shown(agent, mount.source)
                why = mounts.TreeBound(above, mount.source, shown).excess(mount)
            else:
                why = mounts.excess(mount, above, base)
            if why:
                raise ExceedingError(
                    f"{quote(mount.source)} {mount.mode} exceeds the view of "
                    f"{self._bound_name(agent)}: {why}"
                )

    def _check_trees(self, agent: Agent, table: Collection[mounts.Mount]) -> None:
        """``DeniedError`` if its policy lacks a durable tree: the daemon hands that in, so what
        its parent can reach is no bound."""
        if len(table) > mounts.TREES_MAX:
            raise QuotaError(
                f"a mount table has at most {mounts.TREES_MAX} lines of shared: and home:; "
                f"this would make {len(table)}"
            )
        for mount in table:
            space = mounts.space_of(mount.source)
            for perm in _TREE_PERMS[mount.mode] if space else ():
                if not self.allows(agent, "shared", space, perm):
                    raise DeniedError(
                        f"{mount.source} {mount.mode}: shared:{space} {perm} is not in the "
                        f"effective policy of {quote(agent.name)}: write its policy first"
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


#: what is not taken from an agent that runs: class and permission
_HELD: Final = (("network", "connect"), ("shared", "read"), ("shared", "write"))
#: what a durable tree needs, by the mode of its line; who may write it there can read it
_TREE_PERMS: Final = {"ro": ("read",), "rw": ("read", "write")}
