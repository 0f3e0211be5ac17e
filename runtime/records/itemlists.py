"""The items of all agents, in memory: by their numbers, agents and names, and tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from runtime.ids import AgentIndex, ItemIndex, TriggerToken
from runtime.records.items import KINDS, Ask, Item, Task, Wait, WaitStatus

_I = TypeVar("_I", bound=Item)


class Items:
    """The records of all agents that have not been removed, in memory."""

    def __init__(self) -> None:
        self._by_index: dict[ItemIndex, Item] = {}
        self._of: dict[tuple[AgentIndex, str], dict[str, Item]] = {}
        self._by_token: dict[TriggerToken, Wait] = {}
        #: armed waits by agent, field and what that holds; and the keys of each
        self._armed: dict[tuple[AgentIndex, str, str], dict[ItemIndex, Wait]] = {}
        self._armed_by: dict[ItemIndex, list[tuple[AgentIndex, str, str]]] = {}
        #: by kind, those in the status ``pending``: there may be a million messages
        self._pending: dict[str, dict[ItemIndex, Any]] = {kind: {} for kind in KINDS}

    def add(self, item: Item) -> Item | None:
        """The one whose name it takes, if there is any."""
        self._by_index[item.index] = item
        if isinstance(item, Wait):
            self._by_token[item.token] = item
        self.note(item)
        known = self._of.setdefault((item.agent, item.kind), {})
        # one that takes the name of another is younger than all
        replaced = known.pop(item.key, None)
        known[item.key] = item
        return replaced

    def drop(self, item: Item) -> None:
        self._forget(item)
        known = self._of.get((item.agent, item.kind), {})
        if known.get(item.key) is item:
            del known[item.key]

    def drop_all(self, agent: AgentIndex) -> None:
        """Forgets all items of one agent."""
        for kind in KINDS:
            for item in self._of.pop((agent, kind), {}).values():
                self._forget(item)

    def _forget(self, item: Item) -> None:
        self._by_index.pop(item.index, None)
        self._pending[item.kind].pop(item.index, None)
        if isinstance(item, Wait):
            self._by_token.pop(item.token, None)
            self._disarm(item)

    def note(self, item: Item) -> None:
        """One has changed."""
        if self._by_index.get(item.index) is not item:
            return
        if item.status is item.pending:
            self._pending[item.kind][item.index] = item
        else:
            self._pending[item.kind].pop(item.index, None)
        if isinstance(item, Wait):
            self._note_wait(item)

    def _note_wait(self, wait: Wait) -> None:
        self._disarm(wait)
        if wait.status is not WaitStatus.ARMED:
            return
        keys = [(wait.agent, "on", wait.on)]
        if wait.work:
            keys.append((wait.agent, "work", wait.work))
        self._armed_by[wait.index] = keys
        for key in keys:
            self._armed.setdefault(key, {})[wait.index] = wait

    def _disarm(self, wait: Wait) -> None:
        for key in self._armed_by.pop(wait.index, ()):
            waits = self._armed[key]
            del waits[wait.index]
            if not waits:
                del self._armed[key]

    def armed(self, agent: AgentIndex, field: str, value: str) -> Iterator[Wait]:
        """The armed waits of an agent for a thing (``on``), or a work item, the newest first."""
        return reversed(self._armed.get((agent, field, value), {}).values())

    def pending(self, cls: type[_I]) -> Collection[_I]:
        """Queued messages, armed waits, open asks: of all agents, as they came to be so."""
        return self._pending[cls.kind].values()

    def with_token(self, token: TriggerToken) -> Wait | None:
        return self._by_token.get(token)

    def get(self, index: ItemIndex) -> Item | None:
        return self._by_index.get(index)

    def of(self, agent: AgentIndex, cls: type[_I]) -> list[_I]:
        """The items of one kind and agent, oldest first."""
        return list(self._of.get((agent, cls.kind), {}).values())  # type: ignore[arg-type]

    def awaited(self, agent: AgentIndex) -> list[Task | Ask]:
        """Those of an agent that have a file which blocks its readers until their end."""
        return [*self.of(agent, Task), *self.of(agent, Ask)]

    def named(self, agent: AgentIndex, cls: type[_I], key: str) -> _I | None:
        return self._of.get((agent, cls.kind), {}).get(key)  # type: ignore[return-value]

    def all(self, cls: type[_I]) -> list[_I]:
        return [item for item in self._by_index.values() if isinstance(item, cls)]
