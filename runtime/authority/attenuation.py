"""The rights of agents, never more than their parents have (ctxfs-policy(5)).

An agent's effective policy is its own within what its parent may use or
delegate, all the way up. It is looked at when it is asked for, so that what an
ancestor loses is lost below at the next check.

What is computed is valid while its text and the policies above are the same objects; so there is
no copy below to update or to forget. What a child is given is checked when it is written and again
at the start. It cannot exceed its parent's view, because its sandbox is made inside the parent's.
Durable trees do not come from that view (``runtime.cell.trees``): what the lines of the family
hide or narrow of them is compared here, as paths are written. What a parent's table hides behind a
link of that view, this does not know; the policy is the bound that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from operator import is_
from typing import Final

from runtime.errors import DeniedError, ExceedingError, QuotaError, WrongStateError
from runtime.ids import NO_AGENT, AgentIndex
from runtime.kernel import linux
from runtime.kernel.recent import Recent
from runtime.records.model import Agent, Space, SpaceState
from runtime.records.registry import Registry
from runtime.records.settings import Settings
from runtime.records.spaces import tree_of, tree_of_worktree
from runtime.texts import mounts, policy
from runtime.texts.names import quote
from runtime.texts.policy import Rule, Rules

#: rules that are kept parsed, of all agents together; each takes about 100 bytes
_KEPT_MAX: Final = 1 << 18
#: what an entry without a rule counts as
_ENTRY: Final = 16


#: rules that were made of an agent's texts, and what they were made of, by what they are
_Known = dict[str, tuple[tuple[object, ...], Rules]]


class Authority:
    """Policies and mount tables of agents in relation to their ancestors'.

    What was computed is good for as long as it would be computed of the same: the agent's
    text and what its parent has now. So nothing has to be forgotten when a policy changes,
    and a change costs those that it is about.
    """

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        spaces: Iterable[Space],
        places: mounts.TreePlaces,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._spaces = spaces
        #: where views have durable trees
        self.places = places
        self._boot = linux.boot_id()
        self._known = Recent[AgentIndex, _Known](_KEPT_MAX)

    # what was computed

    def _made(self, agent: Agent, what: str, make: Callable[[], Rules], *of: object) -> Rules:
        """Rules that were made of the same objects before, or are made now."""
        kept = self._known.entries.get(agent.index)
        known = kept[0] if kept is not None else {}
        found = known.get(what)
        if found is None or not all(map(is_, found[0], of)):
            found = known[what] = of, make()
            if agent.index != NO_AGENT:
                rules = {id(rules): len(rules) for _, rules in known.values()}
                self._known.put(agent.index, known, _ENTRY + sum(rules.values()))
        return found[1]

    def forget(self, agent: Agent) -> None:
        """It was removed."""
        self._known.drop(agent.index)

    # policy

    def own_policy(self, agent: Agent) -> Rules:
        """The rules of its own text."""
        text, label = agent.policy, agent.label
        return self._made(agent, "own", lambda: policy.parse(text, label), text, label)

    def effective_policy(self, agent: Agent) -> Rules:
        """The rules of what the agent may, and of what it may hand on (``delegate``)."""
        own, above = self.own_policy(agent), self.bound(agent)
        return self._made(agent, "effective", lambda: policy.effective(own, above), own, above)

    def bound(self, agent: Agent) -> Rules | None:
        """The most that its policy can say, delegations included; None for a root agent."""
        text, label = agent.bound_policy, agent.label
        if text is not None:
            # what its parent had when it was detached
            return self._made(agent, "bound", lambda: policy.parse(text, label), text, label)
        parent = self._registry.parent_of(agent)
        if parent is None:
            return None if agent.parent is None else policy.EMPTY
        return self.effective_policy(parent)

    def allows(self, agent: Agent, cls: str, name: str, perm: str) -> bool:
        """Whether the effective policy allows ``perm`` on ``cls:name``."""
        return policy.allows(self.effective_policy(agent), cls, name, perm)

    def reaches(
        self, agent: Agent, other: Agent, cls: str, perm: str, rules: Rules | None = None
    ) -> bool:
        """``allows`` for another agent or its sessions: only the same owner's, unless
        uid 0 wrote the line. ``rules`` are its effective policy, from who asks several times."""
        if rules is None:
            rules = self.effective_policy(agent)
        if not policy.allows(rules, cls, other.name, perm):
            return False
        placed = self._registry.placed(agent)
        if placed is not None and self._registry.placed(other) is not placed:
            return False  # what its lead let it reach is at the lead
        if agent.owner == other.owner:
            return True
        return policy.allows(self._of_root(agent), cls, other.name, perm)

    def _of_root(self, agent: Agent) -> Rules:
        """The rules of its own that uid 0 wrote."""
        own, keys = self.own_policy(agent), agent.policy_of_root

        def written() -> Rules:
            return Rules.of(rule for rule in own if rule.key in keys)

        return self._made(agent, "of_root", written, own, keys)

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
        for member in self._reached(agent, lost):
            for cls, name, perm in self._held(member) if member.live else ():
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

    def _reached(
        self, agent: Agent, perms: Collection[tuple[str, str]]
    ) -> Iterator[Agent]:
        """The agents that one of these permissions may reach, this one and all below. If an agent
        neither has a permission nor passes it on, no agent below it has it."""
        own = self.own_policy(agent)
        if not any(own.joined(cls, perm).all for cls, perm in perms):
            return
        yield agent
        for child in self._registry.children(agent):
            if child.owned:
                yield from self._reached(child, perms)

    def _held(self, agent: Agent) -> Iterator[tuple[str, str, str]]:
        """The rights that no check can take from it while it runs: class, name and permission."""
        yield "network", "default", "connect"
        for source, mode in self._trees_of(agent).items():
            space = mounts.space_of(source)
            if space:
                read = mode == "ro" and self.allows(agent, "shared", space, "read")
                yield "shared", space, "read" if read else "write"

    def _trees_of(self, agent: Agent) -> dict[str, str]:
        """The durable trees that its cell has at any place, with their modes."""
        held = dict(agent.trees)
        if agent.mount or agent.parent is not None:
            for mount in self.effective_mounts(agent):
                if mount.mode != "hide" and mount.of:
                    held[mount.of] = mounts.most((mount.mode, held.get(mount.of, "hide")))
        return held

    def written_trees(self, agent: Agent) -> set[str]:
        """The durable trees that it may write, from the directory of all of them."""
        held = {tree for tree, mode in self._trees_of(agent).items() if mode == "rw"}
        for name in ("root", "workspace"):
            held |= set(map(self.places.tree, self._sources(agent, name).paths()))
        written = {tree_of(tree) for tree in held if tree}
        if agent.homedir == "durable":
            written.add(f"agent/{agent.owner}/{agent.name}")
        if agent.is_guest and agent.workspace == "worktree":
            written.add(tree_of_worktree(agent.owner, agent.name, agent.incarnation))
        return written

    def _bound_name(self, agent: Agent) -> str:
        parent = self._registry.parent_of(agent)
        return f"the parent {quote(parent.name)}" if parent is not None else "its parent"

    def families(self, agent: Agent) -> tuple[str, ...]:
        """The tool families that are on."""
        if agent.is_guest:
            return tuple(agent.guest["bound"]["families"])
        if agent.private and self.own_policy(agent).objects("allow", "agent", "create").all:
            return (*agent.families, "agent_creation")
        return agent.families

    # mounts

    def effective_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """The mounts in force: the parent's, then its own with what those leave of them."""
        above = mounts.Index(now for _, now in self.inherited_mounts(agent))
        own = self.own_mounts(agent)
        return (*above.table, *(self._within(agent, line, above) for line in own))

    def _within(self, agent: Agent, line: mounts.Mount, above: mounts.Index) -> mounts.Mount:
        tree = self.places.named(line, agent.owner)
        return mounts.within(line, above.covering(line.source), tree)

    def inherited_mounts(self, agent: Agent) -> list[tuple[mounts.Mount, mounts.Mount]]:
        """The lines of its parent, as that has them and as far as the agent's policy lets it."""
        return [(mount, self._by_policy(agent, mount)) for mount in self._above(agent)]

    def _above(self, agent: Agent) -> Iterable[mounts.Mount]:
        if agent.placement:
            return ()  # its view is of another machine
        if agent.bound_mount is not None:
            return self.places.annotated(mounts.parse_bound(agent.bound_mount), agent.owner)
        parent = self._registry.parent_of(agent)
        return () if parent is None else self.effective_mounts(parent)

    def _by_policy(self, agent: Agent, mount: mounts.Mount) -> mounts.Mount:
        """A parent's line of a durable tree, as far as this agent's policy lets it."""
        space = mounts.space_of(mount.of)
        if not space or mount.mode == "hide":
            return mount
        mode = mounts.least((mount.mode, self.space_mode(agent, space)))
        return mount if mode == mount.mode else replace(mount, mode=mode)

    def narrowed_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """Its own lines as they are in force."""
        own = len(self.own_mounts(agent))
        return self.effective_mounts(agent)[-own:] if own else ()

    def own_mounts(self, agent: Agent) -> tuple[mounts.Mount, ...]:
        """Its own table, with sources as they were found when they were written."""
        sources = self._sources(agent, "mount")
        found = (sources.resolve(line, self._boot) for line in mounts.parse(agent.mount))
        return tuple(replace(line, target=self.places.plain(line.target)) for line in found)

    def covered(self, agent: Agent) -> list[str]:
        """The paths at which its own table hides what its parent has there, or shows something
        else."""
        return [
            mount.target
            for mount in self.own_mounts(agent)
            if mount.mode == "hide" or mount.source != mount.target
        ]

    @staticmethod
    def _sources(agent: Agent, name: str) -> mounts.Sources:
        """The objects that the paths of a control led to when it was written."""
        return mounts.Sources.load(agent.sources.get(name))

    def check_own_mounts(self, agent: Agent) -> None:
        """Checks again the mounts that were written: the parent may have less now."""
        self.check_mounts(agent, self.own_mounts(agent))
        for name in ("root", "workspace"):
            for path in self._sources(agent, name).paths():
                self.path_mode(agent, path)

    def check_mounts(self, agent: Agent, table: Collection[mounts.Mount]) -> None:
        """``ExceedingError`` if a line gives more than the parent has, ``DeniedError`` if it gives
        more of a durable tree than the policy; ``QuotaError`` if there are too many lines."""
        if sum(mount.tree for mount in table) > mounts.TREES_MAX:
            raise QuotaError(
                f"a mount table has at most {mounts.TREES_MAX} lines of shared: and home:; "
                f"this would make {sum(mount.tree for mount in table)}"
            )
        parent = self._registry.parent_of(agent)
        above = mounts.Index(() if parent is None else self.effective_mounts(parent))
        if parent is not None:
            mounts.check_count(len(table), len(above.table))
        bare = parent is None or parent.root or parent.iso == "shared"
        base = () if bare else self._settings.config.base_view
        for mount in table:
            self._check_tree(agent, mount, above)
            if parent is None:
                continue
            if mount.tree:
                why = self._excess_of_tree(agent, mount, above)
            else:
                why = mounts.excess(mount, above, base)
            if why:
                raise ExceedingError(
                    f"{quote(mount.source)} {mount.mode} exceeds the view of "
                    f"{self._bound_name(agent)}: {why}"
                )

    # durable trees

    def trees(self, agent: Agent) -> tuple[dict[str, str], list[str]]:
        """The durable trees that a cell made now has at their own places, with their modes, and
        the spaces that are too many: of those that the policy names first, then by name."""
        index = mounts.Index(self.effective_mounts(agent))
        lines = (line.mode for line in self.own_mounts(agent) if line.source == mounts.HOME_TREE)
        wanted = {f"{mounts.HOME_TREE}{agent.owner}": mounts.most(lines)}
        rules = self.effective_policy(agent)
        perms = [rules.objects("allow", "shared", perm) for perm in policy.PERMS["shared"]]
        named = frozenset().union(*(objects.names for objects in perms))
        spaces = self._spaces if any(objects.all for objects in perms) else ()
        for unnamed, name, there in sorted(
            (each.name not in named, each.name, each.state is SpaceState.THERE) for each in spaces
        ):
            # nobody who only takes what there is waits for one that is just being made
            if there or not unnamed:
                wanted[f"{mounts.SHARED_TREE}{name}"] = self.space_mode(agent, name)
        found = {
            tree: mode
            for tree, wants in wanted.items()
            if wants != "hide"
            and (mode := mounts.least((wants, self.places.left(index, tree)))) != "hide"
        }
        too_many = [tree for tree in found if mounts.space_of(tree)][mounts.SPACES_MAX :]
        for tree in too_many:
            del found[tree]
        return found, [mounts.space_of(tree) for tree in too_many]

    def space_mode(self, agent: Agent, space: str) -> str:
        """The mode in which an agent may have a space: who may write it where it is mounted can
        read it."""
        if self.allows(agent, "shared", space, "write"):
            return "rw"
        return "ro" if self.allows(agent, "shared", space, "read") else "hide"

    def path_mode(self, agent: Agent, path: str) -> str:
        """How an agent may have a path of its creator's view: ``rw``, or ``ro`` of a durable tree
        that it may read. ``DeniedError``."""
        above = mounts.Index(self._above(agent))
        line = self._within(agent, mounts.Mount(path, path, "ro"), above)
        self._check_tree(agent, line, above)
        space = mounts.space_of(line.of)
        if space:
            return self.space_mode(agent, space)
        if line.of and not any(each.source == mounts.HOME_TREE for each in self.own_mounts(agent)):
            raise DeniedError(
                f"{quote(path)}: home: is not in the mount table of {quote(agent.name)}: write "
                "that line first"
            )
        return "rw"

    def _check_tree(self, agent: Agent, mount: mounts.Mount, above: mounts.Index) -> None:
        """``DeniedError`` if the policy lacks what a line shows of a space: the parent, who may
        have it, is no bound. ``ExceedingError`` for the tree of another user."""
        tree = self._within(agent, mount, above).of
        space = mounts.space_of(tree)
        mode = self.space_mode(agent, space) if space else "rw"
        if mounts.least((mode, mount.mode)) != mount.mode:
            perm = "read" if mount.mode == "ro" else "write"
            raise DeniedError(
                f"{mount.source} {mount.mode}: shared:{space} {perm} is not in the "
                f"effective policy of {quote(agent.name)}: write its policy first"
            )
        if tree and not space and tree != f"{mounts.HOME_TREE}{agent.owner}":
            raise ExceedingError(
                f"{quote(mount.source)}: the files of another user cannot be given to an agent of "
                f"uid {agent.owner}"
            )

    def _excess_of_tree(self, agent: Agent, mount: mounts.Mount, above: mounts.Index) -> str:
        """A sentence on what a child's line of a tree wants more than its parent has; empty if
        nothing. The tree is handed in, not taken out of the parent's view: what that keeps from
        the parent is compared here."""
        tree = self.places.named(mount, agent.owner)
        mode = self.places.left(above, tree)
        if not mounts.space_of(tree):
            has = (line.mode for line in above.table if line.of == tree)
            mode = mounts.least((mode, mounts.most(has)))
        if mode == "hide":
            return "it is hidden there"
        if mode == "ro" and mount.mode == "rw":
            return "it is read-only there"
        for name in self.places.names(tree):
            for less in ("hide", "ro") if mount.mode == "rw" else ("hide",):
                found = above.below(name, less)
                if found:
                    said = "hidden" if less == "hide" else "read-only"
                    return f"{quote(found)} in it is {said} there: mount a path of that view"
        return ""

    def check_start(self, agent: Agent) -> None:
        """Checks again what was written: the parent may have less now."""
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
