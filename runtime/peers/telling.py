"""Tells leads what becomes of their agents here.

A fact is added to the change that it comes from, in its transaction. The end of a guest is told by
a change of its own, once all that it gives back is on the disk; a daemon that dies between the two
leaves that to the next (``Guests.go_on``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from runtime.agents.parts import Agents
from runtime.errors import QuotaError, TooLongError
from runtime.peers.peering import BrokenLinkError, Message
from runtime.peers.post import Post
from runtime.peers.streams import MESSAGE_MAX, STREAM_BYTES, UNDONE_MAX
from runtime.peers.supplies import Supplies
from runtime.records.change import EVENTS, RUNTIME, Change, Subscriber
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import dump_json, head, quote, timestamp

#: the events that a lead does not make itself
_EVENTS: Final = frozenset(("run.start", "run.end", "agent.limit", "agent.control"))
#: what an end says by itself
_ENDING: Final = (Status.STOPPING, Status.DEAD)
_REASON_MAX: Final = 1024
#: facts of one registration, beyond which they have no sentences
_KEPT_MAX: Final = 2048
#: facts that a lead has not heard, for each of its guests, and as many more
_UNHEARD_MAX: Final = 2 * UNDONE_MAX
#: bytes that a message has beside the text of a report
_AROUND: Final = 1024


class Telling(Subscriber):
    """Tells the leads of all guests."""

    def __init__(self, agents: Agents, post: Post, supplies: Supplies) -> None:
        self._agents = agents
        self._post = post
        self._supplies = supplies
        agents.journal.subscribe(self)

    def admit(self, change: Change) -> None:
        for each in change.posts:
            if each.op == "report":
                agent = self._agents.registry.incarnation(each.agent)
                name = quote(agent.guest["alias"]) if agent else "its lead"
                stream = self._post.stream(each.key)
                if stream.is_full(each.agent):
                    raise QuotaError(
                        f"{stream.undone[each.agent]} reports and other news have not come to "
                        f"{name} yet: report again later"
                    )
                if len(dump_json(each.said["text"]).encode()) > MESSAGE_MAX - _AROUND:
                    raise TooLongError("the report has too many control characters: say less")

    def check_heard(self, key: str) -> None:
        """Nothing more is done for a lead that does not hear what became of it: that is kept.
        ``BrokenLinkError``."""
        stream = self._post.stream(key)
        kept = len(stream.kept)
        if kept > _UNHEARD_MAX or stream.size > STREAM_BYTES:
            there = 1 + len(self._agents.registry.guests(key))
            if kept > _UNHEARD_MAX * there or stream.size > STREAM_BYTES + MESSAGE_MAX * there:
                raise BrokenLinkError(f"{kept} facts are not heard")

    def refuse(self, change: Change, key: str, message: Message, code: str, sentence: str) -> None:
        """Adds that an operation of a lead was not done, and why."""
        if len(self._post.stream(key).kept) > _KEPT_MAX:
            sentence = ""  # who does not say what it has heard is told less
        change.post(
            key,
            "refused",
            message.agent,
            of=message.op,
            number=message.number,
            verb=str(message.said.get("verb", ""))[:16],
            code=code,
            sentence=head(sentence, _REASON_MAX),
        )

    def storing(self, change: Change, when: float) -> None:
        for agent, values in list(change.agents.values()):
            if agent.is_guest and "status" in values and values["status"] not in _ENDING:
                self._add_state(change, agent, when)
        if any(fields.get("type") in _EVENTS for _, _, fields in change.lines):
            self._add_events(change, when)

    def _tell(self, change: Change, agent: Agent, op: str, **said: Any) -> None:
        """Nobody is told whose registration is over, or who has forgotten the agent."""
        if self._post.data(agent.peer) and not agent.guest.get("forgotten"):
            change.post(agent.peer, op, agent.incarnation, **said)

    def _add_state(self, change: Change, agent: Agent, when: float) -> None:
        said = {"lost": agent.guest["lost"]} if agent.guest.get("lost") else {}
        said |= {"worktree": agent.guest["left"]} if "left" in agent.guest else {}
        status, reason = (change.peek_agent(agent, name) for name in ("status", "reason"))
        if status is Status.STARTING and not (said or reason):
            return  # its lead has started it
        self._tell(
            change,
            agent,
            "state",
            status=status.value,
            reason=head(reason, _REASON_MAX),
            run=change.peek_agent(agent, "run").id,
            started=change.peek_agent(agent, "started"),
            at=timestamp(when),
            by=change.by,
            **(said if status is Status.STARTING else {}),
        )

    def _add_events(self, change: Change, when: float) -> None:
        """Events in the sessions of guests, with the numbers that they have there."""
        left = Counter(index for index, file, _ in change.lines if file == EVENTS)
        for index, file, fields in change.lines:
            if file != EVENTS:
                continue
            session = self._agents.sessions.load(index)
            left[index] -= 1
            number = session.events - left[index]
            agent = self._agents.registry.get(session.agent_index)
            if fields["type"] not in _EVENTS:
                continue
            if agent is None or not agent.is_guest or not self._post.data(agent.peer):
                continue
            if self._post.stream(agent.peer).is_full(agent.incarnation):
                continue  # it is in the history here
            said = {key: value for key, value in fields.items() if key not in ("agent", "id", "ts")}
            self._tell(change, agent, "event", **said, origin=number, at=timestamp(when))

    def use(self, agent: Agent, usage: Mapping[str, Any]) -> None:
        """Tells what a guest uses, as far as there is room for news."""
        stream, own = self._post.stream(agent.peer), agent.incarnation
        if stream.undone[own] < UNDONE_MAX // 2 and not stream.is_full(own):
            change = Change(by=RUNTIME)
            self._tell(change, agent, "usage", usage=usage)
            self._agents.journal.note(change)

    def end(self, agent: Agent, files: Mapping[str, Any]) -> None:
        """Nothing of a guest is left: how it ended, and what it gives back."""
        change = Change(by=RUNTIME)
        change.set(agent, guest={**agent.guest, "told": True})
        left = {"worktree": agent.guest["left"]} if agent.guest.get("packed") else {}
        self._tell(
            change,
            agent,
            "ended",
            outcome=agent.outcome,
            reason=head(agent.reason, _REASON_MAX),
            by=agent.caused_by,
            usage=agent.usage,
            started=agent.started,
            files=files,
            **left,
            **self._supplies.lengths(agent),
        )
        self._tell(change, agent, "dead")
        self._agents.journal.note(change)
