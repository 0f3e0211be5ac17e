"""Replies on their way to those who asked for them, as they grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import trio

from runtime.authority.loop import Gentle, Turns
from runtime.ids import ItemIndex
from runtime.records.change import Subscriber
from runtime.records.items import Item, Message

#: what a reply may hold of the daemon's memory; more is told at its end only
_TEXT_MAX: Final = 512 << 10


class Stream:
    """The reply to one message, so far."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = trio.Event()

    @property
    def full(self) -> bool:
        """Whether nothing more is taken."""
        return len(self.text) >= _TEXT_MAX

    def begin(self) -> None:
        """A run works on the message now."""
        self._tell()

    def add(self, text: str) -> None:
        """A piece of the reply."""
        self.text += text[: max(0, _TEXT_MAX - len(self.text))]
        self._tell()

    def end(self) -> None:
        """What became of the message is recorded."""
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def wait_changed(self) -> None:
        await self._changed.wait()


class Streams(Subscriber):
    """The streams of messages that somebody may listen to, by the message's index."""

    def __init__(self, gentle: Gentle) -> None:
        #: by which programs are heard that may talk without pause
        self.gentle = gentle
        #: by which they are heard to the end once they are over
        self.turns = Turns()
        self._streams: dict[ItemIndex, Stream] = {}

    def of(self, message: ItemIndex) -> Stream:
        """The stream of a message, made with the first question for it."""
        return self._streams.setdefault(message, Stream())

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if not isinstance(item, Message) or item.index not in self._streams:
            return
        if item.over:
            self._streams.pop(item.index).end()
