"""Speaking with a resident program: a JSON line in for each message, JSON lines out.

A resident program gets its message through its monitor, which takes each line of a message once:
so a daemon tells the message at hand from its first byte, whatever an earlier one has told. The
output is read from what the monitor keeps, from the last recorded byte on. So neither direction
needs the same daemon to stay. Partial replies (``streams``) are only in memory; complete replies
are in the store.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.agents.parts import Agents
from runtime.authority.accounts import Payer
from runtime.cell.inlet import Inlet
from runtime.cell.port import Host, LiveCell, Part, about
from runtime.errors import CtxError, NoSpaceError
from runtime.kernel import output
from runtime.kernel.inotify import Wakeup
from runtime.life.conclusions import as_content, end_message
from runtime.life.streams import Streams, Tail
from runtime.records.change import Change
from runtime.records.items import Message, MessageStatus
from runtime.records.lifecycle import Cue, Status
from runtime.records.model import Agent
from runtime.records.run import RunCue
from runtime.texts.names import dump_json, escape, parse_json_object

log = logging.getLogger("ctxd.residents")

_RETRY_SECONDS: Final = 1.0
#: a longer line is not a reply
_LINE_MAX: Final = 2 << 20
#: heard at a time: others wait meanwhile
_BLOCK: Final = 16 << 10
#: heard at the end of a run of what was said and not heard yet
_REST_MAX: Final = 256 << 10
#: of what it says went wrong, in events and frames; all of it is the reply
_REASON_MAX: Final = 1000
#: the lines of a message, for its monitor, and the instants after they are told
_MESSAGE, _CANCEL = 0, 1
_TOLD: Final = ("message.written", "abort.told")


class Listener:
    """The words of a resident program during one run, line by line."""

    def __init__(self, agents: Agents, streams: Streams, agent: Agent) -> None:
        self._agents = agents
        self._streams = streams
        self._agent = agent
        self.directory = agents.documents.directory(agent) / "reply"
        # not after what was kept: pieces of a reply that is not complete are read again
        self._tail = Tail(self.directory, agent.said.reply_offset)
        self._rest = b""
        self._kept = agent.said.kept_offset
        self._others = bytearray()
        #: the message at hand, while a block is heard, and pieces of the reply to it
        self._message: Message | None = None
        self._pieces: list[str] = []

    async def hear_all(self) -> None:
        """Hears the rest of the output, or the last part of a long one."""
        behind = output.Segments(self.directory).end - self._tail.position
        if behind > _REST_MAX:
            self._tail.position += behind - _REST_MAX
            self._rest = b""
        who = Payer(self._agent.owner, self._agent.name)
        await self._streams.hear_rest(who, self._agents.accounts.time, self.hear)

    def hear(self) -> bool:
        """A block of what was said; False if there is none."""
        data = self._tail.read(_BLOCK)
        if not data:
            return False
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        left = len(self._rest) + len(whole) + len(newline)
        if b'"type"' not in whole:
            # lines may be very short, and very many: none of these is a reply
            left -= len(whole) + len(newline)
            self._keep(whole + newline, self._tail.position - left)
        else:
            # asked for once: lines may be very many, and so may messages
            self._message = self._agents.messages.current(self._agent)
            for line in whole.split(b"\n"):
                left -= len(line) + 1
                end = self._tail.position - left
                begin = end - len(line) - 1
                takes = _parse_hello(line) if begin == self._agent.said.reply_start else None
                if takes is not None:
                    self._greet(takes, end)
                else:
                    self._take(line, end)
            self._add_pieces()
        if len(self._rest) > _LINE_MAX:
            self._keep(self._rest, self._tail.position)
            self._rest = b""
        self._append()
        if self._kept > self._agent.said.kept_offset:
            # a crash before this is noted repeats a block of it, which is not a reply
            change = Change()
            change.hear(self._agent, kept_offset=self._kept)
            self._agents.journal.note(change)
        return True

    def _greet(self, takes: frozenset[str], position: int) -> None:
        """The first line of JSON says what the program takes beside messages. Lines that do not
        begin with a brace are in ``out`` already (monitor.c)."""
        change = Change()
        change.hear(
            self._agent,
            takes_cancel="cancel" in takes,
            reply_offset=position,
            kept_offset=max(self._kept, position),
        )
        self._kept = max(self._kept, position)
        self._agents.journal.note(change)
        crashpoints.reach("resident.greeted")

    def _take(self, line: bytes, position: int) -> None:
        """One line, which ends at ``position`` of what it said."""
        message = self._message
        spoken = _parse(line) if message is not None else None
        if spoken is None or message is None or spoken["id"] not in (None, message.name):
            self._keep(line + b"\n", position)
            return
        if spoken["type"] == "delta":
            self._pieces.append(spoken["text"])
            return
        self._add_pieces()
        self._message = None
        self._append()
        failed = spoken["type"] == "error"
        agent = self._agent
        was_cancelled = bool(agent.run.cause) and agent.said.takes_cancel
        change = Change(by=agent.run.caused_by if was_cancelled else "")
        change.hear(agent, reply_offset=position, kept_offset=max(self._kept, position))
        if was_cancelled:
            add_aborted(change, self._agents, agent, message)
        else:
            end_message(
                change,
                self._agents,
                agent,
                message,
                MessageStatus.FAILED if failed else MessageStatus.PROCESSED,
                reply=as_content((spoken["text"] or self._streams.of(message.index).text).encode()),
                reason=escape(spoken["text"][:_REASON_MAX]) if failed else "",
            )
            self._agents.messages.add_ready(change, agent)
        self._agents.journal.note(change)
        crashpoints.reach("message.ended")

    def _add_pieces(self) -> None:
        """All that were heard of the reply at once: each makes a text that is long longer."""
        if self._message is not None and self._pieces:
            self._streams.of(self._message.index).add("".join(self._pieces))
        self._pieces.clear()

    def _keep(self, data: bytes, position: int) -> None:
        """Keeps what does not reply to the current message as ordinary output; once."""
        new = position - self._kept
        if new > 0:
            self._kept = position
            self._others += data[-new:]

    def _append(self) -> None:
        """Once a block: lines may be very short, and very many."""
        others, self._others = bytes(self._others), bytearray()
        if others:
            directory = self._agents.documents.directory(self._agent) / "out"
            with contextlib.suppress(OSError):
                output.append(directory, others, self._agents.settings.log_max(self._agent))


class Resident(Part):
    """One run of a resident program."""

    def __init__(self, host: Host, streams: Streams, live_cell: LiveCell, inlet: Inlet) -> None:
        super().__init__(host)
        self._streams = streams
        self._agent = live_cell.agent
        self._live_cell = live_cell
        self._inlet = inlet
        #: what was told in full, until the program is told to end it
        self._told: Message | None = None
        self._listener = Listener(self._agents, streams, self._agent)
        live_cell.hear_rest = self._listener.hear_all

    async def serve(self) -> None:
        """Until cancelled, at the end of the run."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._speak)
            nursery.start_soon(self._limit)

    # speaking

    async def _speak(self) -> None:
        """One message after the other, each once the one before is done with."""
        agent = self._agent
        message = self._agents.messages.current(agent)
        if message is not None:  # of an earlier daemon: it may be told in part
            await self._tell(message, _MESSAGE, _line(message))
        while True:
            await self._live_cell.until(self._has_to_say)
            if (message := self._to_cancel()) is not None:
                self._told = None
                await self._tell(message, _CANCEL, _cancel_line(message))
                continue
            message = self._agents.messages.pending(agent)[0]
            try:
                self._deliver(message)
            except NoSpaceError as error:
                why = about(agent)
                log.error("%s: the next message waits: %s", agent.name, error, extra=why)
                await trio.sleep(_RETRY_SECONDS)
                continue
            await self._tell(message, _MESSAGE, _line(message))

    def _has_to_say(self) -> bool:
        agent = self._agent
        if self._to_cancel() is not None:
            return True
        if agent.status is not Status.READY or not self._agents.messages.pending(agent):
            return False
        return self._streams.are_heard(agent)

    def _to_cancel(self) -> Message | None:
        """The message that the program has been told, and not yet that it is to end it: also if it
        was cancelled twice meanwhile, so that nobody waits for the program any more."""
        message = self._told
        if message is not None and message is self._agents.messages.current(self._agent):
            return message if self._agent.run.cancelling else None
        over = message is not None and message.status is MessageStatus.ABORTED
        return message if over and self._agent.said.takes_cancel else None

    def _deliver(self, message: Message) -> None:
        agent = self._agent
        change = Change()
        self._agents.messages.deliver(change, agent, message, agent.run.id)
        change.move(agent, Cue.RUNNING)
        self._agents.journal.commit(change)
        self._streams.of(message.index).changed.notify()
        crashpoints.reach("message.delivered")

    async def _tell(self, message: Message, line: int, data: bytes) -> None:
        """One line of a message, to the monitor; what is not taken waits. An earlier daemon may
        have told it, or a part of it, which the monitor knows."""
        told = 0
        try:
            while told < len(data):
                taken = self._inlet.put(data[told:], message=message.index, line=line, offset=told)
                told += taken
                if not taken:
                    await self._inlet.wait_room()
        except OSError:
            return  # the run is over, or the program has closed its input
        crashpoints.reach(_TOLD[line])
        if line == _MESSAGE:
            self._told = message

    # cancelling

    async def _limit(self) -> None:
        """A program has the grace to end a message that it was told to end."""
        agent, live_cell = self._agent, self._live_cell
        while True:
            await live_cell.until(lambda: agent.run.cancelling)
            why = agent.run.cause

            def is_done(why: str = why) -> bool:
                return not agent.run.cancelling or agent.run.cause != why

            with trio.move_on_after(self._agents.settings.grace(agent)):
                await live_cell.until(is_done)
            if not is_done():
                give_up(self._agents, agent)
                await live_cell.until(is_done)

    # listening

    async def _listen(self) -> None:
        """Listens to the program, from what has been recorded on."""
        directory = self._listener.directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        wakeup = Wakeup()
        who = Payer(self._agent.owner, self._agent.name)
        with self._port.watcher.watching(directory, wakeup):
            while True:
                # a program that talks without pause must not have the loop alone
                if not await self._streams.gentle.do(who, self._listener.hear):
                    await wakeup.wait_changed()


def give_up(agents: Agents, agent: Agent) -> None:
    """The program has not ended the message that it was told to end. Of an abort its run ends
    now; a message that was cancelled is over, and the program is asked no more about it."""
    message = agents.messages.current(agent)
    if message is None or not agent.run.cancelling:
        return
    change = Change(by=agent.run.caused_by)
    if agent.run.aborting:
        change.run(agent, RunCue.END)
    else:
        add_aborted(change, agents, agent, message)
    agents.journal.note(change)
    crashpoints.reach("abort.late")


def add_aborted(change: Change, agents: Agents, agent: Agent, message: Message) -> None:
    """A message that was being cancelled is over, and the run goes on."""
    end_message(change, agents, agent, message, MessageStatus.ABORTED, reason=agent.run.cause)
    agents.messages.add_ready(change, agent)


def _cancel_line(message: Message) -> bytes:
    return (dump_json({"type": "cancel", "id": message.name}) + "\n").encode()


def _line(message: Message) -> bytes:
    fields = {
        "type": "message",
        "id": message.name,
        "from": message.sender,
        "provenance": message.provenance,
        "text": message.text,
    }
    return (dump_json(fields) + "\n").encode()


def _object(line: bytes) -> dict[str, Any]:
    """The object of JSON on a line, which has nothing on any other line."""
    try:
        return parse_json_object(line.decode())
    except (CtxError, UnicodeDecodeError):
        return {}


def _parse_hello(line: bytes) -> frozenset[str] | None:
    """The kinds of lines that a program says it takes; None for any other line."""
    found = _object(line)
    if found.get("type") != "hello":
        return None
    takes = found.get("takes")
    words = takes if isinstance(takes, list) else ()
    return frozenset(word for word in words if isinstance(word, str))


def _parse(line: bytes) -> dict[str, Any] | None:
    """``{"type", "id", "text"}`` of a reply; None for any other line."""
    found = _object(line) if b'"type"' in line else {}
    text = found.get("text", "")
    if found.get("type") not in ("delta", "message", "error") or not isinstance(text, str):
        return None
    return {"type": found["type"], "id": found.get("id"), "text": text}
