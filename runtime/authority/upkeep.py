"""Charges for what agents and their records hold of the daemon's, on their owners' accounts.

It follows from their fields alone, so that what is adopted after a crash counts like
what was started, and nothing is left of what was removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from runtime.authority.accounts import Payer, Reserve, Resource
from runtime.authority.disk import INCARNATION_SIZE
from runtime.authority.facts import Facts, Part
from runtime.ids import NO_ITEM, AgentIndex, ItemIndex
from runtime.records.change import Change, Subscriber
from runtime.records.items import KINDS, LONG_ABOVE, AskStatus, Item, Task, TaskStatus, Work
from runtime.records.lifecycle import ENDING_VERBS
from runtime.records.model import Agent, Session
from runtime.texts.names import shown_json

#: of an agent: its socket, the pidfds of its monitors, and one while something starts
_DESCRIPTORS_OF_AGENT: Final = 4
#: of a command: the pidfd of its monitor, and one while it starts
_DESCRIPTORS_OF_TASK: Final = 2
#: of files in memory that each cell has from the start, such as its passwd(5), in bytes
TMP_OF_AGENT: Final = 16 << 10
#: of what waits to be read by a resident program or a command, in bytes of memory
INPUT_SIZE: Final = 256 << 10
#: of a record, beside its texts, in bytes of memory
_RECORD: Final = 1024
_AGENT_TEXTS: Final = (
    *("policy", "policy_of_root", "bound_policy", "mount", "bound_mount", "env", "exec"),
    *("path", "meta", "root", "cwd"),
    # what others say in it: where paths lead, and where a parent's git has its objects
    *("sources", "worktree", "discards"),
)
#: what a caller may do again and again, so that there has to be room for the event
_BEGINNINGS: Final = {
    *("agent.control", "agent.report", "agent.start", "message.queued", "task.start"),
    *("terminal.attach", "wait.armed", "work.status", "ask.open", "ask.to"),
}
#: messages that tell of an end
_NOTICES: Final = {"task_result", "wait"}
#: of an event, beside what its maker says in it: id, time, and by whom
_EVENT: Final = 128
#: in the history of the session, and in the log of the owner
_TOLD: Final = 2
#: a field of a record that has texts in it
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
_RUNNING: Final = frozenset({TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.CANCELLING})


#: amounts of resources
Held = dict[Resource, int]


class Upkeep(Part, Subscriber):
    """Charges for each agent and record, until it is over or removed."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        #: for each agent and each of its records, and on which account; of the agent itself without
        #: a number
        self._held: dict[AgentIndex, dict[ItemIndex, tuple[Payer, Held]]] = {}
        for agent in self._registry:
            self._note_agent(agent)
        for item in self._items.all(Item):
            self._note_item(item)
        self._journal.subscribe(self)

    # Subscriber

    def agent_changed(self, index: AgentIndex, names: Iterable[str]) -> None:
        agent = self._registry.get(index)
        if agent is None or _NOTED.isdisjoint(names):
            return
        self._note_agent(agent)
        if "owner" in names:
            for cls in KINDS.values():
                for item in self._items.of(index, cls):
                    self._note_item(item)

    def agent_listed(self, agent: Agent) -> None:
        if self._registry.get(agent.index) is not agent:
            for held in self._held.pop(agent.index, {}).values():
                self._pay(*held, sign=-1)
        else:
            self._note_agent(agent)
            self._disk.note(agent.owner, INCARNATION_SIZE)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        self._note_item(item)

    def item_listed(self, item: Item) -> None:
        self._note_item(item)

    # before something changes

    def admit(self, change: Change) -> None:
        """``QuotaError`` if a change makes more and longer texts than there is room for, or if a
        caller does something that a history tells of for which there is no room."""
        growth: dict[int, int] = defaultdict(int)
        kept: dict[int, int] = defaultdict(int)
        for agent, values in change.agents.values():
            if values.get("removed"):
                growth[agent.owner] -= _size(agent)
            else:
                growth[agent.owner] += _growth(agent, values)
        owners = {agent.index: agent.owner for agent in change.made}
        for agent in change.made:
            growth[agent.owner] += _size(agent)
        for item in change.made_items:
            memory, disk = _sizes_of(item)
            owner = self._owner(item, owners)
            growth[owner] += _RECORD + memory
            kept[owner] += disk
        for item, values in change.items.values():
            before, after = _sizes_of(item), _sizes_of(item, values)
            owner = self._owner(item, owners)
            growth[owner] += after[0] - before[0]
            kept[owner] += after[1] - before[1]
        if self._journal.cause.caller is not None:
            for event in _begun(self._journal.told(change)):
                whose = self._registry.named(event["agent"])
                if whose is not None:
                    kept[whose.owner] += _TOLD * (len(shown_json(event).encode()) + _EVENT)
        for owner, amount in growth.items():
            if amount > 0:
                self._accounts.check(
                    owner, Resource.MEMORY, amount, reserve=self._reserve(owner)
                )
        for owner, amount in kept.items():
            if amount > 0:
                self._disk.check(owner, amount, reserve=self._reserve(owner))
        for agent in change.made:
            self._disk.check(
                agent.owner, INCARNATION_SIZE, reserve=self._reserve(agent.owner)
            )

    def _owner(self, item: Item, made: Mapping[AgentIndex, int]) -> int:
        agent = self._registry.get(item.agent)
        return agent.owner if agent is not None else made.get(item.agent, 0)

    def check_agent(self, agent: Agent) -> None:
        """``QuotaError`` if the owner's accounts have no room for one more live agent."""
        self._check(agent, _of_agent(agent))

    def check_task(self, agent: Agent, task: Task) -> None:
        """``QuotaError`` if they have none for one more running command."""
        self._check(agent, _of_task(task))

    def _check(self, agent: Agent, wanted: Held) -> None:
        reserve = Reserve.START if self._reserve(agent.owner) else Reserve.NONE
        for resource, amount in wanted.items():
            self._accounts.check(agent.owner, resource, amount, reserve=reserve)
        self._disk.check(agent.owner, 1, reserve=reserve)

    def _reserve(self, owner: int) -> Reserve:
        """The reserve of an owner's accounts that the acting caller may use."""
        caller = self._journal.cause.caller
        if caller is None:
            return Reserve.NONE
        found = self._identity.payer(caller)
        is_own = found.owner == owner or found.reserve is Reserve.MASTER
        return found.reserve if is_own else Reserve.NONE

    # what is

    def history_grew(self, session: Session, size: int) -> None:
        self._disk.note(session.owner, size)

    def _note_agent(self, agent: Agent) -> None:
        held = _of_agent(agent) if agent.live else {}
        held[Resource.MEMORY] = held.get(Resource.MEMORY, 0) + _size(agent)
        self._hold(agent, NO_ITEM, held)

    def _note_item(self, item: Item) -> None:
        agent = self._registry.get(item.agent)
        if agent is None:
            return
        held: Held = {}
        if self._items.get(item.index) is item:
            memory, disk = _sizes_of(item)
            if isinstance(item, Task) and not item.child and item.status in _RUNNING:
                held = _of_task(item)
            elif item.status is AskStatus.OPEN:
                held = {Resource.ASKS: 1}
            held[Resource.MEMORY] = held.get(Resource.MEMORY, 0) + _RECORD + memory
            held[Resource.DISK] = disk
        self._hold(agent, item.index, held)

    def _hold(self, agent: Agent, index: ItemIndex, wanted: Held) -> None:
        """So much is held for an agent, or for one of its records, from now on."""
        of_agent = self._held.setdefault(agent.index, {})
        before = of_agent.pop(index, None)
        now = of_agent[index] = Payer(agent.owner, agent.name), wanted
        if not wanted:
            del of_agent[index]
        if before != now:
            self._pay(*now)
            if before is not None:
                self._pay(*before, sign=-1)

    def _pay(self, who: Payer, held: Held, sign: int = 1) -> None:
        for resource, amount in held.items():
            self._accounts.pay_anyway(who, resource, sign * amount)


def _begun(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Those of something that is begun or changed. What ends something is always obeyed, with
    what follows from it: so many ends are needed as there were beginnings."""
    cancelled = any(event["type"] == "wait.cancelled" for event in events)
    for event in events:
        ends = (
            event.get("verb") in ENDING_VERBS
            or event.get("provenance") in _NOTICES
            or (event["type"] == "work.status" and cancelled)
        )
        if event["type"] in _BEGINNINGS and not ends:
            yield event


def _of_agent(agent: Agent) -> Held:
    if agent.placement:  # its processes are on another machine
        return {Resource.DESCRIPTORS: _DESCRIPTORS_OF_AGENT}
    # one monitor of its cell, and one of a run in it
    monitors = 2 if agent.how.holds_cell else 1
    held = {
        Resource.DESCRIPTORS: _DESCRIPTORS_OF_AGENT,
        Resource.MONITORS: monitors,
        Resource.TMP: TMP_OF_AGENT,
    }
    return _fed(held) if agent.how.converses else held


def _of_task(task: Task) -> Held:
    held = {Resource.DESCRIPTORS: _DESCRIPTORS_OF_TASK, Resource.TASKS: 1, Resource.MONITORS: 1}
    return _fed(held) if task.accepts_input else held


def _fed(held: Held) -> Held:
    """With the socket of a monitor that takes input."""
    descriptors = held[Resource.DESCRIPTORS] + 1
    return {**held, Resource.DESCRIPTORS: descriptors, Resource.MEMORY: INPUT_SIZE}


_agent_texts: Final = attrgetter(*_AGENT_TEXTS)
#: whatever of an agent changes what is held for it
_NOTED: Final = frozenset((*_AGENT_TEXTS, "owner", "status"))


def _length(value: Json) -> int:
    """The length of a text, or of all that are in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 0


def _size(agent: Agent) -> int:
    return sum(map(_length, filter(None, _agent_texts(agent))))


def _growth(agent: Agent, values: Mapping[str, Any]) -> int:
    """By how much its texts get longer; less than 0 if they get shorter."""
    return sum(
        _length(values[name]) - _length(getattr(agent, name))
        for name in _AGENT_TEXTS
        if name in values
    )


def _sizes_of(item: Item, values: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """The bytes that the texts of a record take in memory and on the disk, with these values."""
    memory = disk = 0
    for name in item.long:
        length = len(values[name]) if values and name in values else item.length(name)
        if length > LONG_ABOVE:
            disk += length
        else:
            memory += length
    if isinstance(item, Work):
        memory += _length((values or {}).get("blocked_by", item.blocked_by))
    return memory, disk
