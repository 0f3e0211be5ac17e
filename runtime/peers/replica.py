"""Hosts tell of the agents that are placed at them: that becomes changes of their records here.

Facts that come together are one change, with which they are noted as done. A host is a stranger:
what it says is checked as if an agent had said it, and may touch no agent but those that are put
there. Whatever is wrong ends the link. What a fact leads to is done by the task that leads the
agent, which finds what was heard in its record.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from runtime.agents.bundles import Left
from runtime.cell.port import Host, Part, about
from runtime.errors import QuotaError
from runtime.kernel import clock
from runtime.kernel.daemonlog import Rates
from runtime.life.ending import Ender
from runtime.peers.complaints import COMPLAINT_SECONDS
from runtime.peers.peering import APART, BrokenLinkError, Event, Message, breaking
from runtime.peers.post import Post, check_late
from runtime.peers.speaking import Speaking
from runtime.records.change import Change
from runtime.records.lifecycle import Status
from runtime.records.model import Agent, Outcome
from runtime.records.run import RunCue
from runtime.texts.names import escape, head
from runtime.texts.said import Said

log = logging.getLogger("ctxd.peers")

#: characters of a text that a host says
_TEXT_MAX: Final = 1024
#: of ``usage``
_KEYS_MAX: Final = 128
#: bytes that hosts tell of an owner's agents although there is no room; beyond that a line in the
#: log is enough for so long
_BEYOND_MAX: Final = 1 << 20
_FAILED: Final = "start_failed: "
#: that a host may say; an end is said otherwise
_STATUSES: Final = frozenset(
    (Status.STARTING, Status.READY, Status.IDLE, Status.BUSY, Status.PAUSED)
)
#: the facts that are only told
_TOLD: Final = frozenset(("event", "report"))
#: the events of a host that are told here, with their fields; others are told by what causes them
_EVENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "run.start": ("run", "pid"),
    "run.end": ("run", "outcome", "reason", "started", "ended", "usage"),
    "agent.limit": ("limit", "of", "max", "used"),
    "agent.control": ("file", "verb"),
}


class Replica(Part):
    """The agents of this lead, as their hosts tell of them."""

    def __init__(self, host: Host, post: Post, ender: Ender, speaking: Speaking) -> None:
        super().__init__(host)
        self._post = post
        self.ender = ender
        self._complaints = Rates(window=COMPLAINT_SECONDS)
        #: by owner, bytes that were told since there was room
        self._beyond: Counter[int] = Counter()
        self._speaking = speaking
        #: facts that hold in memory, by registration: as long as the disk is full they are not
        #: acknowledged, and come again on another connection
        self._taken: dict[str, int] = {}

    def take(self, key: str, messages: Iterable[Event]) -> None:
        """Has facts in the records of their agents; ``BrokenLinkError``, with those before it."""
        check_late(self._agents.journal, key)
        whole = Change()
        try:
            for message in messages:
                if isinstance(message, Message) and message.number > self._taken.get(key, 0):
                    if message.op in APART:
                        self._note(key, whole)
                        whole = Change()
                    self._add(whole, key, message)
                    if message.op == "message":
                        self._note(key, whole)
                        whole = Change()
                        self._let_go_of_text(message)
        finally:
            self._note(key, whole)

    def _let_go_of_text(self, message: Message) -> None:
        """As soon as the message is done, which comes again after a crash on a full disk."""
        agent = self._agents.registry.incarnation(message.agent)
        if agent is not None and not self._agents.journal.is_late:
            self._speaking.said(agent, message.fields)

    def _note(self, key: str, whole: Change) -> None:
        if whole.done:
            self._agents.journal.note(whole)
            if self._agents.journal.is_late:
                self._taken[key] = whole.done[-1][1]

    def _add(self, whole: Change, key: str, message: Message) -> None:
        agent = self._agents.registry.incarnation(message.agent)
        if agent is not None and agent.peer != key:
            raise BrokenLinkError(f"{message.op} of an agent that is not there")
        change = Change(whole)
        if agent is not None and self._is_taken(agent, message):
            with breaking(f"{message.op}: "):
                getattr(self, f"_{message.op}")(change, agent, message)
        change.done.append((key, message.number, message.line))
        whole.add(change)

    def _is_taken(self, agent: Agent, message: Message) -> bool:
        """Nothing is taken of what has ended, or was lost; nor very much of what there is no room
        for."""
        if not agent.live or "lost" in agent.heard:
            return False
        return message.op not in _TOLD or self._has_room(agent, message)

    def _has_room(self, agent: Agent, message: Message) -> bool:
        try:
            self._agents.disk.check(agent.owner, len(message.line))
        except QuotaError as error:
            self._beyond[agent.owner] += len(message.line)
            if self._beyond[agent.owner] <= _BEYOND_MAX:
                return True
            admitted, more = self._complaints.admit(str(agent.owner), 1)
            if admitted:
                log.info("%s: its %s is not told, as %d more before: %s", agent.name, message.op,
                         more, error, extra=about(agent))  # fmt: skip
            return False
        self._beyond.pop(agent.owner, None)
        return True

    # facts

    def _hear(self, change: Change, agent: Agent, **more: Any) -> None:
        change.set(agent, heard={**change.peek_agent(agent, "heard"), **more})

    def _unhear(self, change: Change, agent: Agent, name: str) -> None:
        heard = change.peek_agent(agent, "heard")
        change.set(agent, heard={key: value for key, value in heard.items() if key != name})

    def _end(self, change: Change, agent: Agent, outcome: str, reason: str, **more: Any) -> None:
        """It has ended there: its end begins here, if it has not."""
        self._hear(change, agent, ended=[outcome, reason], **more)
        if change.peek_agent(agent, "status") is not Status.STOPPING:
            self.ender.add(change, agent, Outcome(outcome), reason)

    def _state(self, change: Change, agent: Agent, message: Message) -> None:
        said = message.fields
        word = said.shown("status")
        if word not in _STATUSES:
            raise BrokenLinkError(f"a status {word!r:.32} is none that is said")
        self._see_run(change, agent, said)
        status = Status(word)
        if change.peek_agent(agent, "status") is Status.STOPPING:
            return
        reason = said.shown("reason")
        why = {"reason": reason} if reason else {}
        told = self._has_room(agent, message)
        change.show(agent, status, told=told, **why, **self._who(agent, said))
        change.set(agent, reason=reason)
        if status is Status.STARTING and agent.worktree_made:
            self._hear(change, agent, left=asdict(Left.read(message.said.get("worktree"))))
        if lost := said.get("lost", list, []):
            names = head(escape(" ".join(map(str, lost))), _TEXT_MAX)
            why_not = f"{agent.node}: not offered there: {names}"
            self._hear(change, agent, refused=[clock.wall(), why_not])

    def _see_run(self, change: Change, agent: Agent, said: Said) -> None:
        """The run at hand, which goes on, or is over; or the one after it, which begins."""
        at_hand = change.peek_agent(agent, "run").id
        run = said.shown("run") if "run" in said else at_hand
        if run == "":
            change.run(agent, RunCue.OVER)
            return
        if run != at_hand:
            change.run(agent, RunCue.OVER)
            if (following := self._agents.registry.next_run(change, agent)) != run:
                raise BrokenLinkError(f"a state of run {run!r:.32}, which is not at hand")
            now = {"started": clock.wall(), "started_up": clock.up()}
            change.run(agent, RunCue.BEGIN, id=following, **now)
        if said.get("status", str) in (Status.BUSY, Status.READY):
            change.run(agent, RunCue.SEEN)

    def _event(self, change: Change, agent: Agent, message: Message) -> None:
        said = message.fields
        kind = said.shown("type")
        if kind not in _EVENTS:
            return
        fields: dict[str, Any] = {}
        for name in _EVENTS[kind]:
            value = message.said.get(name)
            if isinstance(value, dict):
                fields[name] = said.amounts(name, _KEYS_MAX)
            elif value.__class__ in (int, float):
                fields[name] = said.amount(name)
            elif value is not None:
                fields[name] = said.shown(name)
        if kind == "run.end":
            self._hear(change, agent, over=fields.get("run", ""))
        change.tell(agent, kind, **fields, **self._who(agent, said))

    def _who(self, agent: Agent, said: Said) -> dict[str, Any]:
        """Where an event happened, its number there, when, and who caused it."""
        told: dict[str, Any] = {"node": agent.node}
        if "origin" in said:
            told["origin"] = said.get("origin", int)
        if at := said.shown("at", 64):
            told["at"] = at
        if by := self._actor(agent, said):
            told["by"] = by
        return told

    def _actor(self, agent: Agent, said: Said) -> str:
        """As in ``by`` of events here, who did something there; empty for the runtime. A host may
        call it the wish of those alone who have asked for something."""
        by = said.shown("by")
        alias = self._post.data(agent.peer).get("alias", "")
        who, _, rest = by.partition(" ")
        if who == f"agent:{agent.name}@{alias}":
            return f"agent:{agent.name} {rest}".rstrip()
        wish = by.removesuffix(f"@{alias}")
        if wish != by and wish in (agent.caused_by, *agent.heard.get("asked", ())):
            return wish
        return f"{by}@{agent.node}" if who == "operator" or who.startswith("agent:") else ""

    def _report(self, change: Change, agent: Agent, message: Message) -> None:
        text, name = message.fields.get("text", str), message.fields.shown("id", 128)
        change.by = f"agent:{agent.name} run:{agent.run.id}" if agent.run.id else change.by
        self._agents.messages.told(change, agent, text, name=name)

    def _text(self, change: Change, agent: Agent, message: Message) -> None:
        self._speaking.hear_part(agent, message.fields)

    def _message(self, change: Change, agent: Agent, message: Message) -> None:
        self._speaking.hear(change, agent, message.fields)

    def _session(self, change: Change, agent: Agent, message: Message) -> None:
        """It has another session, as it was told."""
        name = agent.heard.get("session")
        if name and name == message.said.get("name"):
            self._unhear(change, agent, "session")
            self._agents.births.add_session(change, agent, name)

    def _refused(self, change: Change, agent: Agent, message: Message) -> None:
        said = message.fields
        what = said.shown("verb") or said.shown("of")
        sentence = head(said.shown("sentence", 4096), _TEXT_MAX)
        heard = change.peek_agent(agent, "heard")
        if what in ("stop", "kill", "cancel", "text") or (what == "start" and "ended" in heard):
            return  # it has ended meanwhile, or was not put there, and why is known or follows
        if what in ("put", "start"):
            reason = f"{_FAILED}{agent.node}: {sentence}"
            self._end(change, agent, Outcome.ERROR.value, reason, dead=True)
            return
        if what == "message":
            name = said.get("id", str, "")
            self._speaking.refused(change, agent, name, f"{agent.node}: {sentence}")
        elif what == "abort":
            run = change.peek_agent(agent, "run")
            change.set(agent, run=replace(run, cause="", caused_by=""))
        elif what == "session":
            self._unhear(change, agent, "session")
        self._hear(change, agent, refused=[clock.wall(), f"{agent.node}: {what}: {sentence}"])

    def _usage(self, change: Change, agent: Agent, message: Message) -> None:
        change.set(agent, usage=message.fields.amounts("usage", _KEYS_MAX))

    def _ended(self, change: Change, agent: Agent, message: Message) -> None:
        said = message.fields
        outcome, reason = (said.shown(name) for name in ("outcome", "reason"))
        if reason.startswith(_FAILED):
            reason = f"{_FAILED}{agent.node}: {reason.removeprefix(_FAILED)}"
        if outcome not in list(Outcome):
            raise BrokenLinkError(f"an outcome {outcome!r:.32} is none")
        gives: dict[str, Any] = {name: said.get(name, int, 0) for name in ("out", "log")}
        gives["files"] = said.get("files", dict, {})  # judged when they come (``returns``)
        if agent.worktree_made and "worktree" in said:
            self._hear(change, agent, left=asdict(Left.read(message.said["worktree"])))
        if usage := said.amounts("usage", _KEYS_MAX):
            change.set(agent, usage=usage)
        change.by = self._actor(agent, said) or change.by
        self._end(change, agent, outcome, reason, gives=gives)
        change.set(agent, cause=(outcome, reason))

    def _dead(self, change: Change, agent: Agent, message: Message) -> None:
        if "ended" not in change.peek_agent(agent, "heard"):
            self._end(change, agent, Outcome.INTERRUPTED.value, "runtime_lost")
        self._hear(change, agent, dead=True)
