"""Which agents there are, by index and by name, and who is whose child."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.caller import Caller
from runtime.ids import AgentIndex, Incarnation, RunId
from runtime.records.change import Change
from runtime.records.model import Agent
from runtime.records.store import Store
from runtime.texts.names import quote


class Registry:
    """The agents that have not been removed, in memory; the others are found in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._agents: dict[AgentIndex, Agent] = {}
        self._by_name: dict[str, Agent] = {}
        self._children: dict[AgentIndex, list[AgentIndex]] = {}
        self._of_owner: Counter[int] = Counter()
        self._by_incarnation: dict[str, Agent] = {}
        #: for how many live agents an incarnation pays, itself too
        self._paid: Counter[str] = Counter()
        for agent in store.load_agents():
            self.add(agent)

    # keeping

    def add(self, agent: Agent) -> None:
        """One that was made, or was there before this daemon."""
        self._agents[agent.index] = agent
        self._by_name[agent.name] = agent
        self._of_owner[agent.owner] += 1
        self._by_incarnation[agent.incarnation] = agent
        self.join(agent)
        self._count_paid(agent, 1)

    def change(self, agent: Agent, values: Mapping[str, Any]) -> None:
        """Sets fields of an agent, whether it is among these or not."""
        there = self._agents.get(agent.index) is agent
        if "owner" in values and there:
            self._of_owner[agent.owner] -= 1
            self._of_owner[values["owner"]] += 1
        pays = there and not values.keys().isdisjoint(("status", "payers"))
        if pays:
            self._count_paid(agent, -1)
        for name, value in values.items():
            setattr(agent, name, value)
        if pays:
            self._count_paid(agent, 1)

    def _count_paid(self, agent: Agent, more: int) -> None:
        for incarnation in (agent.incarnation, *agent.payers[1:]) if agent.live else ():
            self._paid[incarnation] += more
            if not self._paid[incarnation]:
                del self._paid[incarnation]

    def join(self, agent: Agent) -> None:
        """It is among its parent's children from now on."""
        if agent.parent is not None:
            bisect.insort(self._children.setdefault(agent.parent, []), agent.index)

    def part(self, agent: Agent, parent: AgentIndex | None) -> None:
        """It is not among this parent's children any more."""
        if parent is not None and parent in self._children:
            self._children[parent].remove(agent.index)

    def drop(self, agent: Agent) -> None:
        """One that was removed."""
        self._count_paid(agent, -1)
        del self._agents[agent.index]
        del self._by_name[agent.name]
        del self._by_incarnation[agent.incarnation]
        self._of_owner[agent.owner] -= 1
        self._children.pop(agent.index, None)
        self.part(agent, agent.parent)

    # looking up

    def __iter__(self) -> Iterator[Agent]:
        return iter(list(self._agents.values()))

    def get(self, index: AgentIndex) -> Agent | None:
        """An agent that has not been removed."""
        return self._agents.get(index)

    def calling(self, caller: Caller) -> Agent | None:
        """The agent that a caller is in; None for an operator, and if it was removed."""
        return self._agents.get(caller.agent) if caller.agent is not None else None

    def recall(self, index: AgentIndex) -> Agent | None:
        """An agent, removed ones included (their channels outlive them)."""
        return self._agents.get(index) or self._store.find_agent(index)

    def named(self, name: str) -> Agent | None:
        return self._by_name.get(name)

    def incarnation(self, incarnation: str) -> Agent | None:
        return self._by_incarnation.get(incarnation)

    def count(self, owner: int) -> int:
        """How many of these an owner has."""
        return self._of_owner[owner]

    def holder(self, name: str) -> int | None:
        """The uid that a name and its history belong to, of agents that were removed too."""
        return self._store.name_owner(name)

    def by_cgroup(self, path: str) -> Agent | None:
        """The agent whose cgroup a path below the daemon's root is in, however deep."""
        agent: Agent | None = None
        parts = path.split("/")[1:]
        while parts and parts[0].startswith("agent-"):
            found = self._by_name.get(parts[0].removeprefix("agent-"))
            if found is None or (agent is not None and found.parent != agent.index):
                break  # below a known agent: of that agent's own making
            agent = found
            parts = parts[2:] if parts[1:2] == ["child"] else []
        if agent is None or not agent.cell.cgroup:
            return None
        return agent

    # family

    def children(self, agent: Agent) -> list[Agent]:
        """Children that have not been removed, oldest first."""
        return [self._agents[i] for i in self._children.get(agent.index, ()) if i in self._agents]

    def descendants(self, agent: Agent) -> list[Agent]:
        """Owned descendants, parents before children."""
        return list(self.each_descendant(agent))

    def each_descendant(self, agent: Agent) -> Iterator[Agent]:
        """Owned descendants one by one, for who may need only the first ones; nothing may change
        meanwhile."""
        for index in self._children.get(agent.index, ()):
            child = self._agents.get(index)
            if child is not None and child.owned:
                yield child
                yield from self.each_descendant(child)

    def parent_of(self, agent: Agent) -> Agent | None:
        return self._agents.get(agent.parent) if agent.parent is not None else None

    def supervisor_of(self, agent: Agent) -> Agent | None:
        """The parent that owns an agent; None of a root agent, and of a detached child."""
        return self.parent_of(agent) if agent.owned else None

    def supervisor(self, agent: Agent) -> str:
        """``agent:NAME``; ``operator`` of a root agent, ``none`` of a detached child."""
        if agent.is_guest:
            return str(agent.guest["supervisor"])
        supervisor = self.supervisor_of(agent)
        if supervisor is not None:
            return f"agent:{supervisor.name}"
        return "operator" if agent.parent is None else "none"

    def why_orphaned(self, agent: Agent) -> str:
        """Why nothing begins below an agent's parent; empty if it may, or if it has none."""
        parent = self.parent_of(agent)
        if parent is not None:
            return why_no_children(parent)
        return f"the parent of {quote(agent.name)} was removed" if agent.parent is not None else ""

    def ancestors(self, agent: Agent) -> list[Agent]:
        """Owners, the oldest first."""
        found: list[Agent] = []
        parent = self.parent_of(agent) if agent.owned else None
        while parent is not None:
            found.insert(0, parent)
            parent = self.parent_of(parent) if parent.owned else None
        return found

    def placed(self, agent: Agent) -> Agent | None:
        """The agent that another machine's daemon has placed here, of itself and those that it
        makes."""
        if agent.is_guest:
            return agent
        parent = self.parent_of(agent)
        return self.placed(parent) if parent is not None else None

    def guests(self, key: str) -> list[Agent]:
        """The agents that a lead has placed here."""
        return [agent for agent in self if agent.is_guest and agent.peer == key]

    def family(self, agent: Agent) -> AgentIndex:
        """The index of its root agent: all who descend from one have the same, detached or not."""
        parent = self.parent_of(agent)
        return agent.index if parent is None else self.family(parent)

    def depth(self, agent: Agent) -> int:
        """1 for a root agent, and one more for each parent above it."""
        parent = self.parent_of(agent)
        return 1 + (self.depth(parent) if parent is not None else 0)

    def payers(self, agent: Agent) -> tuple[Incarnation, ...]:
        """The incarnations that pay for what an agent uses of models: its own, and those above it
        when it was made, also above those that are detached. Some may be removed."""
        if agent.payers:
            return agent.payers
        parent = self.parent_of(agent)
        return agent.incarnation, *(self.payers(parent) if parent is not None else ())

    def is_paying(self, incarnation: str) -> bool:
        """Whether an incarnation lives, or pays for one that does."""
        return incarnation in self._paid

    def node_path(self, agent: Agent) -> str:
        """The agent's cgroup below the daemon's root."""
        parent = self.parent_of(agent)
        if parent is not None and agent.owned:
            return f"{self.node_path(parent)}/child/agent-{agent.name}"
        return f"user-{agent.owner}/agent-{agent.name}"

    def next_run(self, change: Change, agent: Agent) -> RunId:
        """An id that no run of this name has had. It is taken if ``change``, which has to be
        committed before anything else, is."""
        number = self._store.runs(agent.name) + 1
        change.runs.append((agent.name, number))
        return RunId(f"r{number}")


def why_no_children(parent: Agent) -> str:
    """Why nothing may be made or started below an agent; empty if it may."""
    if parent.accepts_children:
        return ""
    return (
        f"the parent {quote(parent.name)} is {parent.status}: agents below it cannot "
        "be created or started"
    )
