"""The files that monitors write, followed as they grow, and replies on their way to who asked."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from runtime.authority.accounts import Payer, TimeAccounts
from runtime.authority.loop import Gentle, Turns
from runtime.ids import ItemIndex
from runtime.kernel.inotify import Wakeup
from runtime.kernel.output import Segments
from runtime.records.change import Subscriber
from runtime.records.items import Item, Message
from runtime.records.model import Agent

#: what a reply may hold of the daemon's memory; more is told at its end only
_TEXT_MAX: Final = 512 << 10
#: bytes of what a monitor writes that are read at a time
_BLOCK: Final = 64 << 10


class Tail:
    """The bytes of a kept stream after a position, each once."""

    def __init__(self, directory: Path, position: int) -> None:
        self._directory = directory
        self.position = position
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, length: int = _BLOCK) -> bytes:
        """The bytes that were added, at most so many."""
        data, self.position = Segments(self._directory).since(self.position, length)
        return data

    def text(self) -> str:
        """The text that was added; a character that is not complete yet comes later."""
        return self._decoder.decode(self.read())


class Stream:
    """The reply to one message, so far."""

    def __init__(self) -> None:
        self.text = ""
        #: told when a run begins with the message, of each piece, and when the end is recorded
        self.changed = Wakeup()

    @property
    def full(self) -> bool:
        """Whether nothing more is taken."""
        return len(self.text) >= _TEXT_MAX

    def add(self, text: str) -> None:
        """A piece of the reply."""
        self.text += text[: max(0, _TEXT_MAX - len(self.text))]
        self.changed.notify()


class Streams(Subscriber):
    """The streams of messages that somebody may listen to, by the message's index."""

    def __init__(self, gentle: Gentle) -> None:
        #: by which programs are heard that may talk without pause
        self.gentle = gentle
        #: whether what becomes of an agent is heard by who is told of it; if not, its next message
        #: waits
        self.are_heard: Callable[[Agent], bool] = lambda agent: True
        #: by which they are heard to the end once they are over
        self.turns = Turns()
        self._streams: dict[ItemIndex, Stream] = {}

    def of(self, message: ItemIndex) -> Stream:
        """The stream of a message, made with the first question for it."""
        return self._streams.setdefault(message, Stream())

    async def hear_rest(self, who: Payer, account: TimeAccounts, hear: Callable[[], bool]) -> None:
        """Call ``hear`` for each block that a program said before its end, until it returns False.

        The program is over, so there is no need to be gentle, but each block waits for its turn.
        """
        heard = True
        while heard:
            await self.turns.take(who)
            begun = time.thread_time()
            heard = hear()
            account.pay(who, time.thread_time() - begun)

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if not isinstance(item, Message) or item.index not in self._streams:
            return
        if item.over:
            self._streams.pop(item.index).changed.notify()
