"""How many messages wait in the queues of all agents, counted as they come and go."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.ids import ItemIndex
from runtime.records.change import Subscriber
from runtime.records.items import Item, Items, Message, MessageStatus
from runtime.records.journal import Journal


class Queued(Subscriber):
    """To look at each message would hold up the loop, for there may be a million."""

    def __init__(self, items: Items, journal: Journal) -> None:
        self._items = items
        self._waiting: set[ItemIndex] = set()
        for message in items.all(Message):
            self._note(message)
        journal.subscribe(self)

    @property
    def count(self) -> int:
        return len(self._waiting)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        self._note(item)

    def item_listed(self, item: Item) -> None:
        self._note(item)

    def _note(self, item: Item) -> None:
        if not isinstance(item, Message):
            return
        if item.status is MessageStatus.QUEUED and self._items.get(item.index) is item:
            self._waiting.add(item.index)
        else:
            self._waiting.discard(item.index)
