"""Speaking with a resident program: a JSON line in for each message, JSON lines out."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Final

import trio

from runtime import cell, crashpoints, output
from runtime.agents import Agents
from runtime.cell import Places
from runtime.change import Change
from runtime.conclusions import as_content, end_message
from runtime.errors import CtxError, NoSpaceError
from runtime.following import Following
from runtime.inotify import Changes, Watcher
from runtime.lifecycle import Event, Status, move
from runtime.model import Agent
from runtime.names import dump_json, escape, parse_json_object
from runtime.planes import Message, MessageStatus
from runtime.streams import Streams
from runtime.tails import Tail

log = logging.getLogger("ctxd.residents")

_RETRY_SECONDS: Final = 1.0
#: a line that is longer is no reply
_LINE_MAX: Final = 2 << 20
#: of what it says went wrong, in events and frames; all of it is the reply
_REASON_MAX: Final = 1000


class Resident:
    """One run of a resident program."""

    def __init__(
        self,
        *,
        agents: Agents,
        watcher: Watcher,
        places: Places,
        streams: Streams,
        agent: Agent,
        following: Following,
    ) -> None:
        self._agents = agents
        self._watcher = watcher
        self._places = places
        self._streams = streams
        self._agent = agent
        self._following = following
        self._directory = agents.directory(agent)

    async def serve(self) -> None:
        """Until cancelled, at the end of the run."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._speak)

    # speaking

    async def _speak(self) -> None:
        """One message after the other, each once the one before is done with."""
        agent = self._agent
        message = self._agents.messages.current(agent)
        if message is not None:  # of an earlier daemon: it may be told in part
            await self._write(message)
        while True:
            message = next(iter(self._agents.messages.pending(agent)), None)
            if message is None or agent.status is not Status.READY:
                await self._wait()
                continue
            try:
                self._deliver(message)
            except NoSpaceError as error:
                log.error("%s: its next message waits: %s", agent.name, error)
                await trio.sleep(_RETRY_SECONDS)
                continue
            await self._write(message)

    async def _wait(self) -> None:
        # whoever waits beside us for the same must not miss it
        await self._following.speak.wait_changed()

    def _deliver(self, message: Message) -> None:
        agent = self._agent
        to = move(agent.status, Event.RUNNING)
        change = Change()
        change.set(agent, status=to.status)
        self._agents.messages.deliver(change, agent, message, agent.run)
        change.event(agent.session, "agent.status", agent.name, status=to.status)
        self._agents.commit(change)
        self._streams.of(message.index).begin()
        crashpoints.reach("message.delivered")

    async def _write(self, message: Message) -> None:
        """Its line to the FIFO, from where an earlier daemon was; what is not read waits."""
        path = cell.input_path(self._places, self._agent, self._agent.run)
        progress = cell.progress_path(path)
        data = _line(message)
        written = _written(progress, message.index)
        if written >= len(data):
            return
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # nobody reads any more: the run is over
        try:
            while written < len(data):
                try:
                    written += os.write(fd, data[written:])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(fd)
                    continue
                progress.write_text(f"{message.index} {written}\n")
        except BrokenPipeError:
            return
        finally:
            os.close(fd)

    # listening

    async def _listen(self) -> None:
        """What the program says, line by line, from what has been recorded on."""
        agent = self._agent
        directory = self._directory / "reply"
        directory.mkdir(mode=0o700, exist_ok=True)
        tail = Tail(directory, agent.reply_offset)
        rest = b""
        changes = Changes()
        with self._watcher.watching(directory, changes):
            while True:
                data = tail.read()
                if not data:
                    await changes.wait_changed()
                    continue
                *lines, rest = (rest + data).split(b"\n")
                left = len(rest) + sum(len(line) + 1 for line in lines)
                others = bytearray()
                with trio.CancelScope(shield=True):  # what has been read is heard to its end
                    for line in lines:
                        left -= len(line) + 1
                        if not self._take(line, tail.position - left):
                            others += line + b"\n"
                        # a program that says much must not keep others from being heard
                        await trio.lowlevel.checkpoint()
                if len(rest) > _LINE_MAX:
                    others += rest
                    rest = b""
                self._keep(bytes(others))
                await trio.lowlevel.checkpoint()

    def _take(self, line: bytes, position: int) -> bool:
        """One line, which ends at ``position`` of what it said; False if it is no reply."""
        spoken = _parse(line)
        message = self._agents.messages.current(self._agent) if spoken is not None else None
        if spoken is None or message is None or spoken["id"] not in (None, message.name):
            return False
        stream = self._streams.of(message.index)
        if spoken["type"] == "delta":
            stream.add(spoken["text"])
            return True
        failed = spoken["type"] == "error"
        agent = self._agent
        change = Change()
        change.set(agent, reply_offset=position)
        end_message(
            change,
            self._agents,
            agent,
            message,
            MessageStatus.FAILED if failed else MessageStatus.PROCESSED,
            reply=as_content((spoken["text"] or stream.text).encode()),
            reason=escape(spoken["text"][:_REASON_MAX]) if failed else "",
        )
        if agent.status is Status.BUSY:
            to = move(agent.status, Event.READYING)
            change.set(agent, status=to.status)
            change.event(agent.session, "agent.status", agent.name, status=to.status)
        elif agent.status is Status.PAUSED:
            change.set(agent, paused_from=Status.READY.value)
        self._agents.note(change)
        crashpoints.reach("message.ended")
        self._following.speak.notify()
        return True

    def _keep(self, data: bytes) -> None:
        """What is no reply to the message at hand is output like any other."""
        if data:
            with contextlib.suppress(OSError):
                output.append(self._directory / "out", data, self._agents.log_max(self._agent))


def _line(message: Message) -> bytes:
    fields = {
        "type": "message",
        "id": message.name,
        "from": message.sender,
        "provenance": message.provenance,
        "text": message.text,
    }
    return (dump_json(fields) + "\n").encode()


def _written(progress: Any, index: int) -> int:
    """How much of a message's line is in the FIFO already."""
    try:
        words = progress.read_text().split()
    except OSError:
        return 0
    return int(words[1]) if len(words) == 2 and words[0] == str(index) else 0


def _parse(line: bytes) -> dict[str, Any] | None:
    """``{"type", "id", "text"}`` of a reply; None for any other line."""
    try:
        found = parse_json_object(line.decode())
    except (CtxError, UnicodeDecodeError):
        return None
    text = found.get("text", "")
    if found.get("type") not in ("delta", "message", "error") or not isinstance(text, str):
        return None
    return {"type": found["type"], "id": found.get("id"), "text": text}
