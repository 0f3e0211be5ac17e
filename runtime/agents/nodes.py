"""The machines at which agents may run: who may use which, and what is known of them.

Links to them are of ``runtime.peers``; what those know comes from ``Nodes.ways``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from runtime.agents import placing
from runtime.authority.facts import Part
from runtime.caller import Caller
from runtime.errors import DeniedError, MissingError
from runtime.kernel.users import find_user
from runtime.records.model import Agent
from runtime.texts import placement
from runtime.texts.names import quote

_CLASS, _PERM = "node", "place"
#: of a node of which nothing is known yet, in the order in which it is told. ``agents`` live
#: there, of all owners, and at most ``max``; times are seconds since the epoch, 0 for never
_UNHEARD: Final[Mapping[str, Any]] = {
    "state": "idle", "since": 0.0, "seen": 0.0, "agents": 0, "max": 0, "directories": (),
    "networks": (), "shared": (), "version": "", "error": "",
}  # fmt: skip


class Ways:
    """Tells of the links to nodes: nothing, where there are none."""

    def heard(self, node: str, owner: int) -> Mapping[str, Any]:
        """The facts about the link to one node, for one owner."""
        return {}

    def owners(self) -> Iterable[int]:
        """Those who have used nodes."""
        return ()

    def of_agent(self, agent: Agent) -> Mapping[str, Any]:
        """The state of a placed agent: seconds of its ``lease`` that are left, ``pending`` verbs,
        and bytes that are still to be fetched (``fetch``)."""
        return {}


class Nodes(Part):
    """The configured nodes."""

    ways = Ways()
    #: called when what ``facts_of`` says has changed
    changed: Callable[[], object] = staticmethod(lambda: None)

    def told(self) -> None:
        """A link has changed."""
        self.changed()

    def usable(self, owner: int) -> list[str]:
        """The nodes at which an owner may have agents, as far as the configuration says."""
        nodes = self._settings.config.nodes
        return [name for name in sorted(nodes) if nodes[name].login(owner) is not None]

    def usable_by(self, caller: Caller, owner: int) -> list[str]:
        """Those at which a caller may place agents of an owner."""
        maker = self._registry.calling(caller)
        if caller.agent is not None and maker is None:
            return []
        return [name for name in self.usable(owner) if maker is None or self.covers(maker, name)]

    def covers(self, maker: Agent, name: str) -> bool:
        """Whether the policy of an agent lets it place its children at a node."""
        return self._authority.allows(maker, _CLASS, name, _PERM)

    def may_place(self, caller: Caller) -> bool:
        """Whether a caller may place some agent at all."""
        maker = self._registry.calling(caller)
        if maker is None:
            return caller.agent is None and bool(self._settings.config.nodes)
        rules = self._authority.effective_policy(maker).objects("allow", _CLASS, _PERM)
        return bool(rules.all)

    def candidates(self, agent: Agent) -> list[str]:
        """The nodes of which one is chosen for a placed agent that starts. ``MissingError`` if the
        configuration has none that it means any more; ``DeniedError`` if the policy has none. What
        was written is checked again."""
        placing.check(self._facts, agent, *placing.FILES)
        pattern = placement.parse(agent.placement)
        meant = [name for name in self.usable(agent.owner) if placement.matches(pattern, name)]
        if not meant:
            listed = placement.listed(self.usable(agent.owner))
            raise MissingError(f"placement: {quote(pattern)}: no such node is configured; {listed}")
        parent = self._registry.parent_of(agent)
        if parent is None or agent.placed_freely:
            return meant
        return self.covered(parent, pattern, meant)

    def covered(self, maker: Agent, pattern: str, meant: Iterable[str]) -> list[str]:
        """Those of some nodes that the policy of an agent covers; ``DeniedError`` for none."""
        found = [name for name in meant if self.covers(maker, name)]
        if not found:
            raise DeniedError(
                f"{_CLASS}:{pattern} {_PERM} is not in the effective policy of "
                f"{quote(maker.name)}: an operator can add the line "
                f'"allow {maker.label} {_CLASS}:{pattern} {_PERM}" there'
            )
        return found

    # telling

    def facts_of(self, caller: Caller) -> Iterator[dict[str, Any]]:
        """Each node that a caller may use, for each owner; an operator with all rights sees those
        of all owners."""
        whose = self._identity.whose(caller)
        maker = self._registry.calling(caller)
        if maker is not None:
            whose = maker.owner
        owners = self._owners() if whose is None else (whose,)
        counts = Counter(agent.node for agent in self._registry if agent.node and agent.live)
        for owner in owners:
            for name in self.usable_by(caller, owner):
                node = self._settings.config.nodes.get(name)
                if node is not None:  # it may go while lines are read
                    known = {**_UNHEARD, **self.ways.heard(name, owner)}
                    live = {"agents": counts[name], "max": node.max}
                    yield {"name": name, "owner": owner, **known, **live}

    def _owners(self) -> list[int]:
        """Those who may use nodes and are known: they are named, have agents, or used some."""
        found = {0, *self.ways.owners(), *(agent.owner for agent in self._registry)}
        for node in self._settings.config.nodes.values():
            for name in node.users or ():
                entry = None if name.isdecimal() else find_user(name)
                found |= {int(name)} if name.isdecimal() else {entry.pw_uid} if entry else set()
        return sorted(found)
