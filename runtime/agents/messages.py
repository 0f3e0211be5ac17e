"""Messages to an agent: the queue, and what becomes of each (ctxfs-programs(7), Messages)."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final, TypedDict, Unpack

from runtime import crashpoints
from runtime.agents.reports import Reports, check_report
from runtime.authority.facts import Facts, Part
from runtime.authority.guard import ANY_STATUS, Act, Guard, unless
from runtime.caller import CONTROLLERS, NOBODY, Caller, Role
from runtime.errors import (
    CtxError,
    MalformedError,
    QuotaError,
    TakenError,
    TooLongError,
    UnsupportedError,
    WrongStateError,
)
from runtime.ids import MessageId, RunId
from runtime.records.change import Change
from runtime.records.items import (
    BY_ABORT,
    BY_CANCEL,
    DELEGATION,
    NOTICES,
    PRIORITIES,
    REPORTED,
    Message,
    MessageStatus,
    Report,
    Task,
    Wait,
    check_priority,
)
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent
from runtime.records.run import RunCue
from runtime.texts.names import dump_json, head, quote, timestamp

#: ended messages that are remembered of an agent, and characters of their replies
_REMEMBERED: Final = 1024
_REMEMBERED_SIZE: Final = 8 << 20
_ID: Final = re.compile(r"[!-~]{1,128}")
#: what a message is, by what its sender is to the agent
_PROVENANCES: Final = (
    (Role.OPERATOR | Role.ROOT, "operator"),
    (Role.CREATOR, "supervisor"),
    (Role.WRITER, "agent"),
)
#: of a handoff, in what is shown of the message at hand, in bytes
_HANDOFF_SHOWN: Final = 64 << 10
#: of what an agent said itself, in its history; no message has it
OWN: Final = "self"


@unless("its mode is once", WrongStateError)
def _once(facts: Facts, caller: Caller, agent: Agent) -> str:
    if agent.how.takes_messages:
        return ""
    return (
        f"{quote(agent.name)} is a once agent, which takes no messages; "
        "write handoff.md before its start, or make a turn or resident agent"
    )


def _unheard(name: str) -> str:
    return (
        f"the supervisor {quote(name)} is a once agent, which takes no messages: "
        "write result.md, which it reads after your end"
    )


@unless("its mode is once and a supervised child writes", UnsupportedError)
def _unheard_child(facts: Facts, caller: Caller, agent: Agent) -> str:
    actor = facts.registry.calling(caller)
    if actor is None or facts.registry.supervisor_of(actor) is not agent:
        return ""
    return "" if agent.how.takes_messages else _unheard(agent.name)


@unless("its supervisor's mode is once", UnsupportedError)
def _unheard_reporter(facts: Facts, caller: Caller, agent: Agent) -> str:
    kind, _, name = agent.guest.get("supervisor", "").partition(":")
    if kind == "agent" and not agent.guest["takes"]:
        return _unheard(name)
    supervisor = facts.registry.supervisor_of(agent)
    return "" if supervisor is None or supervisor.how.takes_messages else _unheard(supervisor.name)


@unless("its supervisor is stopping or dead", WrongStateError)
def _ending(facts: Facts, caller: Caller, agent: Agent) -> str:
    supervisor = facts.registry.supervisor_of(agent)
    if agent.guest.get("orphaned"):
        name = agent.guest["supervisor"].removeprefix("agent:")
        return f"the supervisor {quote(name)} is ending: nobody would read it"
    if supervisor is None or supervisor.status in _TAKING:
        return ""
    return f"the supervisor {quote(supervisor.name)} is {supervisor.status}: nobody would read it"


_TAKING: Final = ANY_STATUS - {Status.STOPPING, Status.DEAD}
#: who sends an agent messages; those of its supervised children are reports
SENDING: Final = Guard(
    who=CONTROLLERS | Role.WRITER | Role.CHILD,
    when=_TAKING,
    unless=(_unheard_child, _once),
    delegated=True,
)
#: who reports to an agent's supervisor
REPORTING: Final = Guard(
    who=Role.SELF, when=ANY_STATUS - {Status.DEAD}, unless=(_unheard_reporter, _ending)
)


def provenance_of_handoff(agent: Agent) -> str:
    """The provenance of an agent's first message."""
    if agent.parent is None:
        return "operator"
    return DELEGATION if agent.owned else "bootstrap"


def sender_of_handoff(agent: Agent) -> str:
    """The maker of the agent, as the sender of its first message."""
    return agent.lineage.split(" ")[0] if agent.parent is not None else agent.lineage


def check_id(text: str) -> MessageId:
    """A message's id as its sender gives it; ``MalformedError``."""
    if not _ID.fullmatch(text):
        raise MalformedError(
            f"{quote(text)} is not an id; use 1 to 128 printable ASCII characters without blanks"
        )
    return MessageId(text)


def notice_of(ended: Task | Wait) -> str:
    """Whom a notice of its end is from."""
    return f"{'task' if isinstance(ended, Task) else 'wait'}:{ended.name}"


class Terms(TypedDict, total=False):
    """The terms of a message: how soon it is wanted, and who ``asked`` for it and may say its id
    again."""

    priority: str
    asked: str


class Words(Terms):
    """A message as it is queued."""

    text: str
    sender: str
    provenance: str


class Messages(Part):
    """The queues of all agents. Everything is added to a change that the caller commits."""

    def __init__(self, facts: Facts, reports: Reports) -> None:
        super().__init__(facts)
        self._reports = reports
        #: each is called in a change that queues, or ends, a message; its end it knows by ``peek``
        self.when_queued: list[Callable[[Change, Agent, Message], None]] = []
        self.when_ended: list[Callable[[Change, Agent, Message], None]] = []

    # looking

    def pending(self, agent: Agent) -> list[Message]:
        """Those that wait, in the order in which they will be delivered."""
        found = [m for m in self._of(agent) if m.status is MessageStatus.QUEUED]
        return sorted(found, key=lambda m: (not m.first, PRIORITIES.index(m.priority)))

    def count_pending(self, agent: Agent) -> int:
        return sum(m.status is MessageStatus.QUEUED for m in self._of(agent))

    def current(self, agent: Agent) -> Message | None:
        """The one that is being worked on."""
        return next((m for m in self._of(agent) if m.status is MessageStatus.RUNNING), None)

    def find(self, agent: Agent, name: MessageId, reporter: str = "") -> Message | None:
        """A message of the agent's current session, or the report of this id that a reporter
        (``Caller.key``) asked for."""
        key = Message.key_of(agent.session, name, reporter)
        return self._items.named(agent.index, Message, key)

    def meant(self, caller: Caller, agent: Agent, name: MessageId) -> Message | None:
        """The message that a caller means by an id: its own report, else a message of the
        session."""
        return self.find(agent, name, caller.key) or self.find(agent, name)

    def is_parents(self, agent: Agent, message: Message) -> bool:
        """Whether the agent's parent sent it, or made the agent with it as its task."""
        parent = self._registry.parent_of(agent)
        return parent is not None and message.sender == f"agent:{parent.name}"

    def _is_remembered(self, agent: Agent, message: Message) -> bool:
        """Whether somebody may ask for it when it has ended: its sender again, or the parent,
        which can wait for it."""
        return bool(message.asked) or self.is_parents(agent, message)

    def _of(self, agent: Agent) -> list[Message]:
        return self._items.of(agent.index, Message)

    def reports(self, agent: Agent) -> list[Report]:
        """The last that its children reported to an agent, oldest first."""
        return self._reports.of(agent)

    def lines(self, agent: Agent) -> Iterator[str]:
        """The lines of ``queue`` one by one, of the messages that wait now."""
        for m in self.pending(agent):
            if m.status is not MessageStatus.QUEUED:
                continue  # delivered, or dropped, since the first line was read
            yield dump_json(_shown(m)) + "\n"

    def render_current(self, agent: Agent, handoff: str) -> str:
        """The line of ``message``: the one that is being worked on, empty between two. Of a
        long handoff it has the beginning, and the path ``handoff`` of all of it."""
        m = self.current(agent)
        if m is None:
            return ""
        facts = _shown(m, run=m.run)
        if m.first:
            facts["text"] = head(m.text, _HANDOFF_SHOWN)
            if facts["text"] != m.text:
                facts["path"] = handoff
        return dump_json(facts) + "\n"

    # changing

    def check_accepts(self, agent: Agent) -> None:
        """``WrongStateError`` for an agent that takes no messages, by mode or by status."""
        SENDING.check_object(self._facts, NOBODY, agent)
        SENDING.check_when(Act.SEND, f"a message to {quote(agent.name)}", agent)

    def send(
        self, caller: Caller, agent: Agent, text: str, *, name: str = "", **how: Unpack[Terms]
    ) -> Message:
        """A message from somebody to an agent, as its ``ingress`` allows; from a child that it
        supervises, a report.

        ``DeniedError``, and whatever ``queue`` or ``report`` raises.
        """
        with self._journal.acting(caller), self._journal.changing() as change:
            message = self.send_in(change, caller, agent, text, name=name, **how)
        crashpoints.reach("message.queued")
        return message

    def send_in(
        self,
        change: Change,
        caller: Caller,
        agent: Agent,
        text: str,
        *,
        name: str = "",
        **how: Unpack[Terms],
    ) -> Message:
        """Sends a message, as ``send`` does, in a change that the caller commits."""
        roles, what = self._identity.roles(caller, agent), f"a message to {quote(agent.name)}"
        SENDING.check_who(Act.SEND, what, self._facts, roles, agent)
        roles &= SENDING.wanted(self._facts, agent)
        actor = self._registry.calling(caller)
        if roles & Role.CHILD and actor is not None:
            check_priority(how.get("priority", "normal"))
            asked = how.get("asked", "")
            return self._report(change, caller, actor, agent, text, name=name, asked=asked)
        provenance = next(word for role, word in _PROVENANCES if roles & role)
        sender = f"agent:{actor.name}" if actor is not None else f"operator uid:{caller.uid}"
        return self.queue(
            change, agent, name=name, text=text, sender=sender, provenance=provenance, **how
        )

    def report(
        self, caller: Caller, agent: Agent, text: str, *, name: str = "", again: bool = True
    ) -> MessageId:
        """Tells an agent's supervisor, in the agent's name; an id that may be said ``again`` is not
        reported again. What nobody receives is an event all the same.

        ``DeniedError``, ``UnsupportedError`` for a supervisor of mode ``once``,
        ``TooLongError``, ``QuotaError``, ``TakenError`` or ``WrongStateError``.
        """
        REPORTING.check(Act.SEND, "a report", self._facts, caller, agent, agent)
        supervisor = self._registry.supervisor_of(agent)
        wanted = check_id(name) if name else None
        repeated = wanted if again else None
        if repeated is not None:
            if supervisor is not None:
                known = self.find(supervisor, repeated, caller.key) is not None
            else:
                known = self._reports.knows(agent, repeated)
            if known:
                return repeated
        with self._journal.acting(caller), self._journal.changing() as change:
            if supervisor is not None:
                asked = caller.key if repeated is not None else ""
                given = self._report(
                    change, caller, agent, supervisor, text, name=name, asked=asked
                ).name
            else:
                check_report(text)
                given, kept = wanted or MessageId(secrets.token_hex(8)), repeated is not None
                self._reports.add(change, agent, text, name=given, keep_id=kept)
        crashpoints.reach("report.queued")
        return given

    def told(self, change: Change, agent: Agent, text: str, *, name: str) -> None:
        """Adds a report that the host of an agent that is away has taken. It cannot be refused any
        more: what its supervisor does not receive is an event alone.

        ``TooLongError`` or ``MalformedError`` if no host takes it.
        """
        check_report(text)
        given, supervisor = check_id(name), self._registry.supervisor_of(agent)
        caller = Caller(agent.uid, agent.gid, 0, agent.index, agent.incarnation)
        if supervisor is not None:
            with contextlib.suppress(CtxError):
                key = caller.key
                self._report(change, caller, agent, supervisor, text, name=given, asked=key)
                return
        self._reports.add(change, agent, text, name=given)

    def _report(
        self,
        change: Change,
        caller: Caller,
        agent: Agent,
        supervisor: Agent,
        text: str,
        *,
        name: str,
        asked: str,
    ) -> Message:
        """One that a supervisor receives, whatever its priority was to be."""
        SENDING.check_object(self._facts, caller, supervisor)
        check_report(text)
        message = self.queue(
            change,
            supervisor,
            name=name,
            text=text,
            sender=f"agent:{agent.name}",
            provenance=REPORTED,
            asked=asked,
        )
        self._reports.add(change, agent, text, name=message.name)
        return message

    def queue(
        self, change: Change, agent: Agent, *, name: str = "", **words: Unpack[Words]
    ) -> Message:
        """One more message.

        ``TooLongError``, ``QuotaError``, ``TakenError`` or ``WrongStateError``.
        """
        check_priority(words.get("priority", "normal"))
        self.check_accepts(agent)
        config = self._settings.config
        if len(words["text"].encode()) > config.frame_max:
            raise TooLongError(f"a message may have at most {config.frame_max} bytes")
        # what children report takes no room from the others, nor they from that
        reported = words["provenance"] == REPORTED
        there = [*self.pending(agent), *change.newly_made(agent.index, Message)]
        if sum((m.provenance == REPORTED) is reported for m in there) >= config.messages:
            what = "reports" if reported else "messages"
            raise QuotaError(
                f"{config.messages} {what} wait for {quote(agent.name)}, "
                "the configured maximum: send again when it has read some (AgentGet tells how many "
                "wait), or end it and remove it with rmdir or AgentRemove"
            )
        wanted = check_id(name) if name else None
        reporter = words.get("asked", "") if reported else ""
        if wanted is not None and self.find(agent, wanted, reporter) is not None:
            raise TakenError(f"{quote(name)} is the id of another message of this session")
        return self._add(change, agent, name=wanted, **words)

    def check_room(self, agent: Agent) -> None:
        """``QuotaError`` if so many notices of ended tasks and waits are unread that nothing
        more may begin that would end in another."""
        if not agent.how.takes_messages:
            return  # it gets none
        config = self._settings.config
        notices = [m for m in self.pending(agent) if m.provenance in NOTICES]
        if len(notices) >= config.messages:
            raise QuotaError(
                f"{len(notices)} notices of tasks and waits are in the queue of "
                f"{quote(agent.name)}: read them first; each comes when what was before it is "
                "answered, so end the run at hand, or remove what has ended, with AgentRemove, "
                "TaskRemove, WaitCancel or rmdir"
            )

    @staticmethod
    def takes_notices(change: Change, agent: Agent) -> bool:
        """Whether ``notify`` tells it anything."""
        ending = change.peek_agent(agent, "status") in (Status.STOPPING, Status.DEAD)
        return agent.how.takes_messages and agent.accepts_children and not ending

    def notify(
        self, change: Change, agent: Agent, *, text: str, provenance: str, sender: str = "runtime"
    ) -> None:
        """A notice of the runtime's own; once agents, and those that are ending, get none.

        Each is owed to a task, a wait or a child; ``check_room`` bounds the number of those.
        """
        if self.takes_notices(change, agent):
            self._add(change, agent, text=text, sender=sender, provenance=provenance)

    def discard_notices(
        self, change: Change, agent: Agent, ended: Task | Wait, reason: str = "removed"
    ) -> None:
        """Something that ended is removed, or was waited for: if the agent does that itself, its
        unread notices of it go.

        It need not be told any more, as no SIGCHLD stays pending for a child that wait(2) has
        returned. What anybody else removes, the agent is still told of.
        """
        caller = self._journal.cause.caller
        if caller is None or caller.agent != agent.index:
            return
        self.drop(change, agent, self.unread(agent, ended), reason)

    def unread(self, agent: Agent, ended: Task | Wait) -> list[Message]:
        """The notices of a task or wait that the agent has not been given yet."""
        sender = notice_of(ended)
        return [
            m
            for m in self._of(agent)
            # an earlier one of the same name may have left some
            if m.provenance in NOTICES and m.sender == sender and m.index > ended.index
            if m.status is MessageStatus.QUEUED
        ]

    def _add(
        self,
        change: Change,
        agent: Agent,
        *,
        name: MessageId | None = None,
        first: bool = False,
        **words: Unpack[Words],
    ) -> Message:
        message = Message(
            agent=agent.index,
            session=agent.session,
            name=name or MessageId(secrets.token_hex(8)),
            first=first,
            **words,
        )
        change.make(message)
        change.tell(
            agent,
            "message.queued",
            message=message.name,
            **{"from": message.sender},
            provenance=message.provenance,
            priority=message.priority,
        )
        for told in self.when_queued:
            told(change, agent, message)
        return message

    def queue_first(
        self, change: Change, agent: Agent, *, name: str = "", **words: Unpack[Words]
    ) -> None:
        """The delegated task, before all others; it may be as long as a document."""
        words["priority"] = "interject"
        self._add(change, agent, name=check_id(name) if name else None, first=True, **words)

    def deliver(self, change: Change, agent: Agent, message: Message, run: RunId) -> None:
        """It is being worked on, in ``run``."""
        change.put(message, run=run)
        change.step(message, MessageStatus.RUNNING)

    def end(
        self,
        change: Change,
        agent: Agent,
        message: Message,
        status: MessageStatus,
        *,
        reply: str = "",
        reason: str = "",
    ) -> None:
        """Records what became of a message; only some are remembered (``_is_remembered``)."""
        self._end(change, agent, message, status, reply, reason)
        if self._is_remembered(agent, message):
            self._forget_old(change, agent, len(reply))

    def _end(
        self,
        change: Change,
        agent: Agent,
        message: Message,
        status: MessageStatus,
        reply: str,
        reason: str,
    ) -> None:
        change.step(message, status)
        if message.run and change.peek_agent(agent, "run").cancelling:
            change.run(agent, RunCue.SPARE, cause="", caused_by="")
        fields = {"reason": reason} if reason else {}
        change.event(
            message.session,
            "message.end",
            agent.name,
            message=message.name,
            outcome=status.value,
            **({"run": message.run} if message.run else {}),
            **fields,
        )
        change.put(message, reply=reply, reason=reason, text="")
        for told in self.when_ended:
            told(change, agent, message)
        if not self._is_remembered(agent, message):
            change.drop(message)

    def _forget_old(self, change: Change, agent: Agent, size: int, kept: int = 1) -> None:
        """Forgets messages that ended before, if they are too many with those that end now, of so
        much text."""
        ended = [m for m in self._of(agent) if m.over]
        ended.sort(key=lambda m: m.updated, reverse=True)  # what waited long has ended just now
        for old in ended:
            kept, size = kept + 1, size + old.length("reply")
            if kept > _REMEMBERED or size > _REMEMBERED_SIZE:
                change.drop(old)

    def cancel(self, agent: Agent, message: Message) -> None:
        """Ends one message: it is dropped if it waits, its run ended if it has one.

        A resident program is not ended. One that takes cancels ends the message itself; said again,
        and of others, the message is over. The host of one that is away does that.
        """
        run, cause = agent.run, {"cause": BY_CANCEL, "caused_by": self._journal.actor}
        with self._journal.changing() as change:
            if agent.away:
                change.post(agent.peer, "cancel", agent.incarnation, id=message.name)
            elif message.status is MessageStatus.QUEUED:
                self.end(change, agent, message, MessageStatus.DROPPED, reason=BY_CANCEL)
            elif run.cause == BY_ABORT and agent.said.takes_cancel:
                pass  # it is being ended, and its run with it if the program does not end it
            elif agent.how.converses and self.takes_cancel(agent) and not run.cancelling:
                change.run(agent, RunCue.CANCEL, **cause)
            elif agent.how.converses:
                self.end(change, agent, message, MessageStatus.ABORTED, reason=BY_CANCEL)
                self.add_ready(change, agent)
            elif not run.ending:
                change.run(agent, RunCue.END, **cause)

    def takes_cancel(self, agent: Agent) -> bool:
        """Whether its program ends the message at hand when it is told to: what is frozen, or
        ending, does not."""
        there = agent.said.takes_cancel and not agent.frozen and not agent.run.ending
        return there and self.current(agent) is not None

    @staticmethod
    def add_ready(change: Change, agent: Agent) -> None:
        """Its resident program is done with a message."""
        if agent.status is Status.BUSY:
            change.move(agent, Cue.READYING)
        elif agent.status is Status.PAUSED:
            change.set(agent, paused_from=Status.READY.value)

    def add_ends(self, change: Change, agent: Agent, reason: str) -> None:
        """The agent is dead: nobody will read what is left."""
        messages = (*self._of(agent), *change.newly_made(agent.index, Message))
        for message in messages:
            if change.peek(message, "status") is MessageStatus.RUNNING:
                self.end(change, agent, message, MessageStatus.FAILED, reason=reason)
        queued = [m for m in messages if change.peek(m, "status") is MessageStatus.QUEUED]
        self.drop(change, agent, queued, reason)

    def drop(self, change: Change, agent: Agent, queued: list[Message], reason: str) -> None:
        """Nobody will read these."""
        for message in queued:
            self._end(change, agent, message, MessageStatus.DROPPED, "", reason)
        if kept := sum(self._is_remembered(agent, message) for message in queued):
            self._forget_old(change, agent, 0, kept)


def _shown(message: Message, **more: str) -> dict[str, Any]:
    """A message that waits, or is at hand, as its line shows it."""
    return {
        "id": message.name,
        "ts": timestamp(message.created),
        "from": message.sender,
        "provenance": message.provenance,
        "priority": message.priority,
        **more,
        "text": message.text,
    }
