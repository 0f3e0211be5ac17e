"""Tells leads what becomes of their agents here.

A fact is added to the change that it comes from, in its transaction. The end of a guest that gives
back more than is on the disk by then is told by a change of its own, once all of that is; a daemon
that dies between the two leaves that to the next (``Guests.go_on``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime.cell.port import Host, Part, about, guarded
from runtime.errors import CtxError, QuotaError, TooLongError
from runtime.ids import AgentIndex
from runtime.life.metering import Meter
from runtime.peers.admission import RECIPES
from runtime.peers.peering import BrokenLinkError, Message
from runtime.peers.post import Post, check_late
from runtime.peers.speaking import OWN
from runtime.peers.streams import MESSAGE_MAX, STREAM_BYTES, UNDONE_MAX
from runtime.peers.supplies import Supplies
from runtime.peers.words import say
from runtime.records import items
from runtime.records.change import EVENTS, RUNTIME, Change, Subscriber
from runtime.records.items import MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.names import dump_json, head, quote, timestamp

log = logging.getLogger("ctxd.peers")

#: the events that a lead does not make itself
_EVENTS: Final = frozenset(("run.start", "run.end", "agent.limit", "agent.control"))
#: what an end says by itself
_ENDING: Final = (Status.STOPPING, Status.DEAD)
_REASON_MAX: Final = 1024
#: facts of one registration, beyond which they have no sentences
_KEPT_MAX: Final = 2048
#: facts that a lead has not heard, for each of its guests, and as many more
_UNHEARD_MAX: Final = 2 * UNDONE_MAX
#: facts of a guest that its lead has not heard, in as many as there may be: then it is ended
_TIMES_MAX: Final = 4
#: for which a lead is told what a guest uses, and how often
_LOOK_SECONDS: Final = 60.0
_USAGE_SECONDS: Final = 5.0
#: bytes of a reply if there is no room for news
_SHORT_MAX: Final = 4 << 10
#: bytes that a message has beside the text of a report
_AROUND: Final = 1024


class Telling(Part, Subscriber):
    """Tells the leads of all guests."""

    def __init__(self, host: Host, post: Post, supplies: Supplies, meter: Meter) -> None:
        super().__init__(host)
        self._post = post
        self._supplies = supplies
        self._meter = meter
        #: ends a guest of which its lead hears nothing
        self.end_unheard: Callable[[Agent], object] = lambda agent: None
        #: the directory of recipes, which leads know by another name
        self.recipes: Callable[[], Path]
        #: by registration, guests whose next message waits until more is heard
        self._waiting: dict[str, set[AgentIndex]] = {}
        #: until when leads are told what guests use
        self._looked_at: dict[AgentIndex, float] = {}
        host.agents.journal.subscribe(self)

    def admit(self, change: Change) -> None:
        for item in change.made_items:
            reported = isinstance(item, items.Message) and item.provenance == items.REPORTED
            if reported and (agent := self._guest(item)) is not None:
                self._check_room(agent)
        for each in change.posts:
            if each.op == "report":
                if (agent := self._agents.registry.incarnation(each.agent)) is not None:
                    self._check_room(agent)
                if len(dump_json(each.said["text"]).encode()) > MESSAGE_MAX - _AROUND:
                    raise TooLongError("the report has too many control characters: say less")

    def _check_room(self, agent: Agent) -> None:
        stream = self._post.stream(agent.peer)
        if stream.is_full(agent.incarnation):
            raise QuotaError(
                f"{stream.undone[agent.incarnation]} reports and other news of {quote(agent.name)} "
                f"have not come to {quote(agent.guest['alias'])} yet: report again later"
            )

    def is_heard(self, agent: Agent) -> bool:
        """Whether a guest may be given its next message; if not, ``heard`` has it look again."""
        if not agent.is_guest or not self._post.data(agent.peer):
            return True
        if is_full := self._post.stream(agent.peer).is_full(agent.incarnation):
            self._waiting.setdefault(agent.peer, set()).add(agent.index)
        return not is_full

    def heard(self, key: str) -> None:
        """A lead has heard something."""
        for index in self._waiting.pop(key, ()):
            if (live_cell := self._live_cells.get(index)) is not None:
                live_cell.changed.notify()

    def check_heard(self, key: str) -> None:
        """Nothing more is done for a lead that does not hear what became of it: that is kept.
        ``BrokenLinkError``."""
        check_late(self._agents.journal, key)
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
            id=str(message.said.get("id", ""))[:128],
            code=code,
            sentence=head(sentence, _REASON_MAX),
        )

    def storing(self, change: Change, when: float) -> None:
        if any(fields.get("type") in _EVENTS for _, _, fields in change.lines):
            self._add_events(change, when)
        begun = self._add_messages(change)
        for agent, values in list(change.agents.values()):
            if agent.is_guest and "session" in values:
                name = self._agents.sessions.load(values["session"]).name
                self._tell(change, agent, "session", name=name)
            has_run = "run" in values and values["run"].id != agent.run.id
            is_there = change.peek_agent(agent, "status") not in _ENDING
            if agent.is_guest and is_there and ("status" in values or has_run):
                self._add_state(change, agent, when)
        for agent, message in begun:
            self._tell(change, agent, "message", id=message.name, status=MessageStatus.RUNNING)

    def _tell(self, change: Change, agent: Agent, op: str, **said: Any) -> None:
        """Nobody is told whose registration is over, or who has forgotten the agent."""
        if not self._post.data(agent.peer) or agent.guest.get("forgotten"):
            return
        change.post(agent.peer, op, agent.incarnation, **said)
        is_over = agent.status in _ENDING
        if not is_over and self._post.stream(agent.peer).is_full(agent.incarnation, _TIMES_MAX):
            self._nursery.start_soon(self._end_unheard, agent)

    async def _end_unheard(self, agent: Agent) -> None:
        """Whatever it does is news that are kept, and not everything waits until it is heard."""
        if agent.status not in _ENDING:
            log.warning("%s: its lead hears nothing of it: it is ended", agent.name,
                        extra=about(agent))  # fmt: skip
            self.end_unheard(agent)

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

    def _add_messages(self, change: Change) -> list[tuple[Agent, items.Message]]:
        """Those that its host has queued, and the ends of all; which ones are begun, of which
        nothing is told before the run is."""
        begun = []
        for item in change.made_items:
            if not isinstance(item, items.Message) or item.provenance not in OWN:
                continue
            if (agent := self._guest(item)) is not None:
                said = {"id": item.name, "status": MessageStatus.QUEUED, "from": item.sender,
                        "provenance": item.provenance, "priority": item.priority}  # fmt: skip
                text = self._heard_text(agent, item.text)
                say(partial(self._tell, change, agent), "message", text, **said)
        for item, values in tuple(change.items.values()):
            if not isinstance(item, items.Message) or (agent := self._guest(item)) is None:
                continue
            if values.get("status") is MessageStatus.RUNNING:
                begun.append((agent, item))
            elif "status" in values:
                reason = head(values.get("reason", ""), _REASON_MAX)
                said = {"id": item.name, "status": values["status"], "reason": reason}
                reply = self._heard_text(agent, values.get("reply", ""))
                say(partial(self._tell, change, agent), "message", reply, **said)
        return begun

    def _guest(self, message: items.Item) -> Agent | None:
        agent = self._agents.registry.get(message.agent)
        there = agent is not None and agent.is_guest and bool(self._post.data(agent.peer))
        return agent if there else None

    def _heard_text(self, agent: Agent, text: str) -> str:
        """Its beginning, if the lead does not hear of what was said before."""
        stream = self._post.stream(agent.peer)
        room = STREAM_BYTES - stream.size > 2 * len(text)
        if room and not stream.is_full(agent.incarnation):
            return text
        short = head(text, _SHORT_MAX)
        return short if short == text else f"{short}\n[more is in the history of its host]"

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

    def look(self, agent: Agent) -> None:
        """Somebody looks at what a guest uses: that is told for a while."""
        if agent.index not in self._looked_at:
            self._nursery.start_soon(self._tell_usage, agent)
        self._looked_at[agent.index] = trio.current_time() + _LOOK_SECONDS

    async def _tell_usage(self, agent: Agent) -> None:
        with guarded(agent):
            while agent.live and trio.current_time() < self._looked_at[agent.index]:
                with suppress(CtxError, OSError):  # one that holds it up is looked at later
                    usage = await self._meter.usage(agent, agent.owner)
                    if agent.live and agent.status is not Status.STOPPING:
                        self._use(agent, usage)
                await trio.sleep(_USAGE_SECONDS)
        del self._looked_at[agent.index]

    def _use(self, agent: Agent, usage: Mapping[str, Any]) -> None:
        """As far as there is room for news."""
        stream, own = self._post.stream(agent.peer), agent.incarnation
        if stream.undone[own] < UNDONE_MAX // 2 and not stream.is_full(own):
            change = Change(by=RUNTIME)
            self._tell(change, agent, "usage", usage=usage)
            self._agents.journal.note(change)

    def end(self, agent: Agent, files: Mapping[str, Any]) -> None:
        """Tells the end of a guest of which nothing is left, with what it gives back."""
        change = Change(by=RUNTIME)
        self._add_end(change, agent, files)
        self._agents.journal.note(change)

    def conclude(self, change: Change, agent: Agent) -> None:
        """Adds that to the change that records its end, unless something that it gives back is
        still to be written, or may be much."""
        is_due = agent.is_guest and bool(self._post.data(agent.peer))
        is_due = is_due and not agent.guest.get("forgotten")
        is_written = all(file == EVENTS for _, file, _ in change.lines)
        if is_due and is_written and not self._agents.journal.behind:
            with suppress(OSError):
                if (files := self._supplies.few_files_of(agent)) is not None:
                    self._add_end(change, agent, files)

    def _add_end(self, change: Change, agent: Agent, files: Mapping[str, Any]) -> None:
        change.set(agent, guest={**agent.guest, "told": True})
        left = {"worktree": agent.guest["left"]} if agent.guest.get("packed") else {}
        reason = change.peek_agent(agent, "reason")
        self._tell(
            change,
            agent,
            "ended",
            outcome=change.peek_agent(agent, "outcome"),
            reason=head(reason.replace(str(self.recipes()), RECIPES), _REASON_MAX),
            by=agent.caused_by,
            usage=change.peek_agent(agent, "usage"),
            started=agent.started,
            files=files,
            **left,
            **self._supplies.lengths(agent),
        )
        self._tell(change, agent, "dead")
