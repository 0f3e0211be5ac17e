"""Long texts between two daemons: messages to agents, and replies.

A numbered message has little room, so whatever of a text does not fit is said in parts before it,
``text {at, text}``, in the same transaction. What has come of a text is in a file until that
message: a part that comes again, after a crash, is written again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from runtime.agents.parts import Agents
from runtime.errors import MalformedError, NoSpaceError, TooLongError
from runtime.peers.streams import MESSAGE_MAX
from runtime.records.model import Agent
from runtime.texts.names import dump_json
from runtime.texts.said import Said

#: bytes of a text, and of a part of it in a message, beside what else that says
TEXT_MAX: Final = 2 << 20
_PART_MAX: Final = MESSAGE_MAX - (16 << 10)


def say(tell: Callable[..., None], op: str, text: str, **said: Any) -> None:
    """Says something with a text, by ``tell(op, **said)``; ``TooLongError``."""
    if len(text.encode()) > TEXT_MAX:
        raise TooLongError(f"what is said to another machine may have at most {TEXT_MAX} bytes")
    at, (first, *rest) = 0, _parts(text)
    for part in rest:
        tell("text", at=at, text=first)
        at, first = at + len(first.encode()), part
    tell(op, **said, **({"at": at} if at else {}), text=first)


def _parts(text: str) -> Iterator[str]:
    """At least one, each of which has room in a message."""
    begin = 0
    while True:
        size = _PART_MAX
        while len(dump_json(text[begin : begin + size]).encode()) > _PART_MAX:
            size //= 2
        yield text[begin : begin + size]
        begin += size
        if begin >= len(text):
            return


class Words:
    """The long texts that are being said, one for each agent."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    def take_part(self, agent: Agent, said: Said) -> None:
        """A part of a text; ``MalformedError``, ``TooLongError``, ``NoSpaceError``."""
        at, data = _read(said)
        if at + len(data) > TEXT_MAX:
            raise TooLongError(f"a text has more than {TEXT_MAX} bytes")
        path = self._path(agent)
        try:
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size < at:
                    raise MalformedError("a part of a text is without those before it")
                self._agents.disk.note(agent.owner, at + len(data) - size)
                file.truncate(at)
                file.seek(at)
                file.write(data)
        except OSError as error:
            raise NoSpaceError(f"a text cannot be kept: {error.strerror}") from None

    def take(self, agent: Agent, said: Said) -> str:
        """The whole text of a message; ``MalformedError``."""
        at, data = _read(said)
        before = b""
        if at:
            try:
                with open(self._path(agent), "rb") as file:
                    before = file.read(at) if at <= TEXT_MAX else b""
            except FileNotFoundError:
                pass
            if len(before) != at:
                raise MalformedError("the end of a text is without what was before it")
        return (before + data).decode(errors="replace")

    def said(self, agent: Agent, said: Said) -> None:
        """Lets go of the text of a message that is done, and need not come again: it was of that
        one, so that whoever says much has to send as much."""
        if said.get("at", int, 0):
            with suppress(OSError):
                size = self._path(agent).stat().st_size
                self._path(agent).unlink()
                self._agents.disk.note(agent.owner, -size)

    def _path(self, agent: Agent) -> Path:
        return self._agents.documents.directory(agent) / "parcel" / "text"


def _read(said: Said) -> tuple[int, bytes]:
    return said.get("at", int, 0), said.get("text", str, "").encode()
