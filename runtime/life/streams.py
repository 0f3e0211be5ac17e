"""Replies on their way to those who asked for them, as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from runtime.authority.accounts import Payer, TimeAccounts
from runtime.authority.loop import Gentle, Turns
from runtime.ids import ItemIndex
from runtime.kernel.inotify import Wakeup
from runtime.records.change import Subscriber
from runtime.records.items import Item, Message

#: what a reply may hold of the daemon's memory; more is told at its end only
_TEXT_MAX: Final = 512 << 10


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
        #: by which they are heard to the end once they are over
        self.turns = Turns()
        self._streams: dict[ItemIndex, Stream] = {}

    def of(self, message: ItemIndex) -> Stream:
        """The stream of a message, made with the first question for it."""
        return self._streams.setdefault(message, Stream())

    async def hear_rest(
        self, who: Payer, account: TimeAccounts, hear: Callable[[], bool]
    ) -> None:
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
