"""Messages that leads send to their agents here, as these get any.

The first message of a guest is made of what it is given, so it is queued once all of that has come.
The pieces of a reply go to the lead as the program makes them, as long as that reads them: a
connection that is new has them from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from runtime.agents.births import SWITCHING
from runtime.agents.messages import check_id
from runtime.authority.guard import Act
from runtime.caller import NOBODY
from runtime.cell.port import Host as Machine
from runtime.cell.port import Part, guarded
from runtime.errors import MissingError
from runtime.life.beginning import first_text
from runtime.life.streams import Streams
from runtime.peers.admission import OF_MESSAGES, at_lead, provenance_of
from runtime.peers.peering import DELTA_MAX, Host
from runtime.peers.post import Post
from runtime.peers.speaking import unended
from runtime.peers.words import Words
from runtime.records.change import Subscriber
from runtime.records.items import Item, Message, MessageStatus
from runtime.records.model import Agent
from runtime.texts.names import check_name, quote
from runtime.texts.said import Said

#: until it is looked again whether a lead reads
_PAUSE: Final = 0.1


class Hearing(Part, Subscriber):
    """The messages of all guests."""

    def __init__(
        self, host: Machine, post: Post, streams: Streams, connection: Callable[[str], Host | None]
    ) -> None:
        """``connection``: that of a registration, if there is one."""
        super().__init__(host)
        self._post = post
        self._streams = streams
        self._connection = connection
        self._words = Words(host.agents)
        host.agents.journal.subscribe(self)

    # what a lead says: each raises ``CtxError`` if it is refused

    def do(self, op: str, agent: Agent, said: Said) -> None:
        """One of its operations."""
        getattr(self, f"_{op}")(agent, said)

    def _text(self, agent: Agent, said: Said) -> None:
        self._agents.disk.check(agent.owner, len(said.get("text", str)))
        self._words.take_part(agent, said)

    def _message(self, agent: Agent, said: Said) -> None:
        said.only(("id", "from", "provenance", "priority", "asks", "text", "at", *OF_MESSAGES))
        sender = at_lead(said.word("from"), agent.guest["alias"])
        try:
            with self._agents.journal.changing() as change:
                self._agents.messages.queue(
                    change,
                    agent,
                    name=check_id(said.word("id")),
                    text=self._words.take(agent, said),
                    sender=sender,
                    provenance=provenance_of(said),
                    priority=said.word("priority"),
                    asked=agent.peer if said.get("asks", bool, False) else "",
                )
        finally:
            self._words.said(agent, said)

    def _cancel(self, agent: Agent, said: Said) -> None:
        name = said.word("id")
        message = unended(self._agents, agent, name)
        if message is None:
            raise MissingError(f"no message {quote(name)} is left to be cancelled")
        self._agents.messages.cancel(agent, message)

    def _session(self, agent: Agent, said: Said) -> None:
        name = check_name(said.word("name"))
        SWITCHING.check_when(Act.SAY, "session", agent)
        SWITCHING.check_object(self._agents, NOBODY, agent)
        self._agents.births.switch_session(agent, name)

    # the first message

    def begin(self, agent: Agent) -> None:
        """All has come that a guest is given: its first message is of that; ``CtxError``."""
        if not (first := agent.guest.get("first")):
            return
        with self._agents.journal.changing() as change:
            change.set(agent, guest={**agent.guest, "first": {}})
            text = first_text(self._agents, agent)
            self._agents.messages.queue_first(change, agent, text=text, **first)

    # pieces of replies

    def go_on(self, agent: Agent) -> None:
        """A daemon that starts has taken a guest over."""
        if (message := self._agents.messages.current(agent)) is not None:
            self.item_changed(message, ("status",))

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        if "status" not in names or not isinstance(item, Message) or not item.asked:
            return
        agent = self._agents.registry.get(item.agent)
        if agent is not None and agent.is_guest and item.status is MessageStatus.RUNNING:
            self._nursery.start_soon(self._tell_pieces, agent, item)

    async def _tell_pieces(self, agent: Agent, message: Message) -> None:
        """As the reply grows, until it is whole, which is told otherwise."""
        stream, told, before = self._streams.of(message.index), 0, None
        with guarded(agent):
            while message.status is MessageStatus.RUNNING:
                count, peering = stream.changed.count, self._connection(agent.peer)
                if peering is not before:
                    before, told = peering, 0
                text = stream.text[told : told + DELTA_MAX]
                if peering is None or not text:
                    await stream.changed.after(count)
                elif peering.delta(agent.incarnation, message.name, told, text):
                    told += len(text)
                    self._post.wakeup(agent.peer).notify()
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.sleep(_PAUSE)
