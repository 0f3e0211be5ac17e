"""Messages to agents at nodes, and what these answer, at their lead.

A message is queued here as any, and its host is told of it in the same transaction; it has its
place among others, is worked on and ends when the host says so. Of what comes into the queue of an
agent at its host, notices and reports, its lead has a copy. Pieces of a reply pass by those who
listen.

A host can say something of the messages of its own agents alone, and of each message once: whatever
else it says is of none that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from runtime.agents.messages import check_id
from runtime.agents.parts import Agents
from runtime.cell.port import Host, Part
from runtime.errors import AgainError, CtxError, MalformedError
from runtime.ids import MessageId
from runtime.life.conclusions import as_content, end_message
from runtime.life.streams import Streams
from runtime.peers.peering import Delta
from runtime.peers.post import Post
from runtime.peers.streams import UNDONE_BYTES, UNDONE_MAX
from runtime.peers.words import Words, say
from runtime.records.change import Change, Subscriber
from runtime.records.items import NOTICES, PRIORITIES, REPORTED, Item, Message, MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import escape, head, quote
from runtime.texts.said import Said

#: of what its host, and nobody here, has queued
OWN: Final = (*NOTICES, REPORTED)
#: characters of who sent it, and of why it ended
_SHORT_MAX: Final = 1024
_ENDS: Final = {each.value: each for each in (
    MessageStatus.PROCESSED, MessageStatus.FAILED, MessageStatus.ABORTED, MessageStatus.DROPPED,
)}  # fmt: skip


def _sender(message: Message) -> str:
    """No uid of this machine means anything at another."""
    who = message.sender.partition(" ")[0]
    return who if who.startswith("agent:") else "operator"


def unended(agents: Agents, agent: Agent, name: object) -> Message | None:
    """The oldest message of this id that has not ended."""
    there = agents.items.of(agent.index, Message)
    return next((each for each in there if each.name == name and not each.over), None)


class Speaking(Part, Subscriber):
    """The messages of all agents that are away."""

    def __init__(self, host: Host, post: Post, streams: Streams) -> None:
        super().__init__(host)
        self._post = post
        self._streams = streams
        self._words = Words(host.agents)
        host.agents.journal.subscribe(self)

    # what hosts are told

    def check(self, agent: Agent) -> None:
        """``AgainError`` if its host was told so much of an agent that it has not done."""
        stream = self._post.stream(agent.peer)
        if stream.is_full(agent.incarnation):
            raise AgainError(
                f"{agent.node} has not done {stream.undone[agent.incarnation]} things that it was "
                f"told of {quote(agent.name)}: try again when its link is up (see node)"
            )

    def tell(self, change: Change, agent: Agent, op: str, **said: Any) -> None:
        """Adds an operation, unless nobody is there any more who would do it."""
        key = change.peek_agent(agent, "peer")
        if not self._post.data(key).get("parted"):
            change.post(key, op, agent.incarnation, **said)

    def switch(self, agent: Agent, name: str) -> None:
        """Says that it is to switch to a session; ``DeniedError``, ``AgainError``."""
        if self._agents.births.check_session(agent, name) == agent.session:
            return
        self.check(agent)
        change = Change()
        change.set(agent, heard={**agent.heard, "session": name})
        self.tell(change, agent, "session", name=name)
        self._agents.journal.commit(change)

    def admit(self, change: Change) -> None:
        for each in change.posts:
            agent = self._agents.registry.incarnation(each.agent)
            if each.op == "cancel" and agent is not None and agent.away:
                self.check(agent)
                message = self._agents.messages.current(agent)
                if message is not None and message.name == each.said["id"]:
                    run = replace(agent.run, caused_by=self._agents.journal.actor)
                    change.set(agent, run=run)

    def storing(self, change: Change, when: float) -> None:
        for item in change.made_items:
            if not isinstance(item, Message) or item.provenance in OWN:
                continue
            agent = self._agents.registry.get(item.agent)
            if agent is not None and agent.away and agent.live:
                self.check(agent)
                self._say(item, partial(self.tell, change, agent))
            elif agent is not None and agent.placement:
                pending = self._agents.messages.pending(agent)
                self._check_waiting(agent, [*pending, *change.newly_made(agent.index, Message)])

    def first(self, change: Change, agent: Agent) -> dict[str, str] | None:
        """The field ``first`` of ``put``, if there is a first message: its text are documents."""
        there = self._agents.messages.pending(agent)
        made = change.newly_made(agent.index, Message)
        for message in (*there, *made):
            if message.first:
                return self._about(message)
        return None

    def waiting(self, agent: Agent, tell: Callable[..., None]) -> None:
        """Says all others that have waited for its host to be there, in their order."""
        waiting = sorted(self._agents.messages.pending(agent), key=lambda each: each.index)
        self._check_waiting(agent, waiting)
        for message in waiting:
            if not message.first:
                self._say(message, tell)

    @staticmethod
    def _check_waiting(agent: Agent, there: list[Message]) -> None:
        """``AgainError`` if, beside the last of them, so much waits for an agent to be put at its
        node as a node may have to do of one: all of it is said at once then."""
        sizes = [each.length("text") for each in there if not each.first]
        if len(sizes) > UNDONE_MAX or sum(sizes[:-1]) >= UNDONE_BYTES:
            raise AgainError(
                f"{len(sizes)} messages of {sum(sizes)} characters wait until {quote(agent.name)} "
                "is at its node, more than are told at once: send some of them then"
            )

    def _say(self, message: Message, tell: Callable[..., None]) -> None:
        more = {"asks": True} if message.asked else {}
        say(tell, "message", message.text, priority=message.priority, **self._about(message),
            **more)  # fmt: skip

    @staticmethod
    def _about(message: Message) -> dict[str, str]:
        return {"id": message.name, "from": _sender(message), "provenance": message.provenance}

    def item_changed(self, item: Item, names: Iterable[str]) -> None:
        """Tells those who listen that a run begins with it."""
        if isinstance(item, Message) and item.asked and item.status is MessageStatus.RUNNING:
            agent = self._agents.registry.get(item.agent)
            if agent is not None and agent.away:
                self._streams.of(item.index).changed.notify()

    # what they say: each raises ``CtxError`` for what no host says

    def hear_part(self, agent: Agent, said: Said) -> None:
        """A part of a text."""
        self._words.take_part(agent, said)

    def said(self, agent: Agent, said: Said) -> None:
        """A message is done, and its text is needed no more."""
        self._words.said(agent, said)

    def hear(self, change: Change, agent: Agent, said: Said) -> None:
        """Something became of a message."""
        word, name = said.get("status", str), check_id(said.get("id", str))
        if word == MessageStatus.QUEUED:
            self._mirror(change, agent, name, said)
            return
        message = unended(self._agents, agent, name)
        if message is None:
            return
        if word == MessageStatus.RUNNING:
            if self._agents.messages.current(agent) is not None:
                raise MalformedError("two messages at once")
            self._agents.messages.deliver(change, agent, message, agent.run.id)
        elif word in _ENDS:
            self._end(change, agent, message, _ENDS[word], said)
        else:
            raise MalformedError(f"a status of a message {word!r:.32} is none")

    def _end(
        self, change: Change, agent: Agent, message: Message, status: MessageStatus, said: Said
    ) -> None:
        reason = escape(head(said.get("reason", str, ""), _SHORT_MAX))
        if status is MessageStatus.DROPPED:
            self._agents.messages.end(change, agent, message, status, reason=reason)
            return
        reply = as_content(self._words.take(agent, said).encode())
        if message.asked and agent.how.run_per_message:  # who listens is shown all that it printed
            stream = self._streams.of(message.index)
            if reply.startswith(stream.text):
                stream.add(reply[len(stream.text) :])
        end_message(change, self._agents, agent, message, status, reply=reply, reason=reason)
        run = change.peek_agent(agent, "run")
        if run.caused_by:
            change.set(agent, run=replace(run, cause="", caused_by=""))

    def refused(self, change: Change, agent: Agent, name: object, why: str) -> None:
        """A host has not taken a message."""
        message = unended(self._agents, agent, name)
        if message is not None and message.status is MessageStatus.QUEUED:
            dropped = MessageStatus.DROPPED
            self._agents.messages.end(change, agent, message, dropped, reason=why)

    def _mirror(self, change: Change, agent: Agent, name: MessageId, said: Said) -> None:
        """A message that the host has queued: left out if there is no room for it here."""
        provenance, priority = said.get("provenance", str), said.get("priority", str)
        if provenance not in OWN or priority not in PRIORITIES:
            raise MalformedError("a message of no right provenance or priority is queued")
        text = self._words.take(agent, said)
        if agent.status is Status.STOPPING or unended(self._agents, agent, name):
            return
        try:
            self._agents.disk.check(agent.owner, len(text.encode()))
            self._agents.messages.queue(
                change,
                agent,
                name=name,
                text=text,
                sender=f"{escape(head(said.get('from', str), _SHORT_MAX))}@{agent.node}",
                provenance=provenance,
                priority=priority,
            )
        except CtxError:
            return

    def hear_delta(self, key: str, delta: Delta) -> None:
        """A piece of a reply: nothing is left out within a text, and nothing is there twice."""
        agent = self._agents.registry.incarnation(delta.agent)
        if agent is None or agent.peer != key or not agent.live:
            return
        message = self._agents.messages.current(agent)
        if message is None or message.name != delta.message or not message.asked:
            return
        stream = self._streams.of(message.index)
        known = len(stream.text) - delta.at
        if 0 <= known < len(delta.text):
            stream.add(delta.text[known:])
