"""Sending the events of a session until its agent ends, or those of the agents of an owner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio

from runtime.authority.loop import Turns
from runtime.errors import MalformedError, MissingError
from runtime.ids import SessionIndex
from runtime.kernel.inotify import Wakeup
from runtime.records.change import EVENT_TYPES, Subscriber
from runtime.records.fleet import NUMBERS, Reader
from runtime.records.history import find_line, read_lines
from runtime.records.model import Session
from runtime.records.sessions import Sessions
from runtime.sockets.connection import REST_SECONDS, Connection
from runtime.texts.names import check_agent, quote

_EVENT_ID: Final = re.compile(r"e[0-9]{1,15}")
#: followers that are told of more at once
_WOKEN_AT_ONCE: Final = 8
#: types, or agents, whose events are asked for
_WORDS_MAX: Final = 64
#: what a line of an owner's log has before what its event says
_TOLD: Final = re.compile(
    rb'\{"seq":[0-9]+,"owner":[0-9]+,"session":"[^"]*","id":"e[0-9]+","ts":"[^"]*",'
    rb'"type":"([^"]*)","agent":"([^"]*)"'
)


class Wanted:
    """The events that somebody asks for: of some types or agents, or of all if there are none."""

    def __init__(self, types: Iterable[str], agents: Iterable[str]) -> None:
        self._types = {kind.encode() for kind in types}
        self._agents = {name.encode() for name in agents}

    def has(self, line: bytes) -> bool:
        if not (self._types or self._agents):
            return True
        told = _TOLD.match(line)
        return (
            told is not None
            and (not self._types or told[1] in self._types)
            and (not self._agents or told[2] in self._agents)
        )


#: the owner of a log, and no number of a session; None for all owners
Log = tuple[int | None]


class Replays(Subscriber):
    """Sends events to connections that follow sessions, or logs."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        #: followers by session, or by the owner of a log, and those that are about to be told that
        #: there is more
        self._appended: dict[SessionIndex | Log, set[trio.Event]] = {}
        self._following: list[trio.Event] = []
        self._woken = Wakeup()
        self._turns = Turns()

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        self._grew(index)

    def history_grew(self, session: Session, size: int) -> None:
        self._grew((session.owner,))
        self._grew((None,))

    def caught_up(self) -> None:
        for what in list(self._appended):
            self._grew(what)

    def _grew(self, what: SessionIndex | Log) -> None:
        waiting = self._appended.pop(what, None)
        if waiting is not None:
            self._following += waiting
            self._woken.notify()

    @contextmanager
    def _awaiting(self, what: SessionIndex | Log) -> Iterator[trio.Event]:
        """While somebody reads, and then waits for more: the event that tells of more."""
        appended = trio.Event()
        followers = self._appended.setdefault(what, set())
        followers.add(appended)
        try:
            yield appended
        finally:
            followers.discard(appended)
            if not followers and self._appended.get(what) is followers:
                del self._appended[what]

    async def run(self) -> None:
        """Tells those who follow, a few at a time: others are served in between."""
        while True:
            await self._woken.wait_changed()
            waiting, self._following = self._following, []
            for begin in range(0, len(waiting), _WOKEN_AT_ONCE):
                for event in waiting[begin : begin + _WOKEN_AT_ONCE]:
                    event.set()
                await trio.lowlevel.checkpoint()

    async def send(
        self,
        connection: Connection,
        session: Session,
        after: str | None,
        until: trio.Event,
        progress: dict[str, Any],
    ) -> None:
        """Sends the events after an id, all of them without one, then new ones until the end.

        ``progress`` gets ``after``, the id of the last one, before it is sent.
        """
        last = int(after[1:]) if after else 0
        offset: int | None = None
        while True:
            # very many may follow, and each looks at the file
            await self._turns.take(connection.who)
            with self._awaiting(session.index) as appended:
                ended = until.is_set()
                try:
                    file = self._sessions.open_events(session)
                except FileNotFoundError:
                    raise MissingError("the session was removed") from None
                with file:
                    if offset is None:
                        offset = find_line(file.fileno(), last, _event_number)
                    while lines := read_lines(file.fileno(), offset):
                        offset += len(lines)
                        if _event_number(lines) <= last:
                            lines = b"".join(
                                line
                                for line in lines.splitlines(keepends=True)
                                if _event_number(line) > last
                            )
                        if lines:
                            begin = lines.rfind(b"\n", 0, -1) + 1
                            progress["after"] = f"e{_event_number(lines[begin:])}"
                            unsent, lines = bytearray(lines), b""  # kept once
                            await connection.send(unsent)
                if ended:
                    return
                await self._turns.rest(connection.who, REST_SECONDS)
                async with trio.open_nursery() as nursery:
                    for event in (appended, until):
                        nursery.start_soon(_cancel_after, event, nursery.cancel_scope)

    async def follow(
        self,
        connection: Connection,
        reader: Reader,
        wanted: Wanted,
        progress: dict[str, Any],
        *,
        forever: bool,
    ) -> None:
        """Sends the wanted events that a reader of logs comes to, then new ones if ``forever``.

        ``progress`` gets ``after``, as with ``send``.
        """
        while True:
            with self._awaiting((reader.owner,)) as appended:
                await self._send_all(connection, reader, wanted, progress)
                if not forever:
                    return
                await trio.sleep(reader.rest)
                await appended.wait()

    async def _send_all(
        self, connection: Connection, reader: Reader, wanted: Wanted, progress: dict[str, Any]
    ) -> None:
        """Sends what there is now."""
        while True:
            await self._turns.take(connection.who)
            if oldest := reader.lost():
                frame = {"type": "lost", "after": reader.after, "oldest": oldest}
                await connection.send(frame)
            lines = reader.read()
            if not lines:
                return
            progress["after"] = reader.after
            unsent = bytearray().join(line for line in lines if wanted.has(line))
            lines.clear()
            if unsent:
                await connection.send(unsent)
            else:
                await trio.lowlevel.checkpoint()


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def check_following(fields: dict[str, Any]) -> tuple[int | None, Wanted, bool]:
    """After which event somebody wants which ones, and whether new ones, too.

    Raises ``MalformedError``.
    """
    after, follow = fields.get("after"), fields.get("follow", False)
    if after is not None and (type(after) is not int or after not in NUMBERS):
        raise MalformedError("after: write the number of an event, as seq has it, or 0")
    if not isinstance(follow, bool):
        raise MalformedError("follow: write true or false")
    types, agents = _words(fields, "types"), _words(fields, "agents")
    return after, Wanted(_types_of(types), map(check_agent, agents)), follow


def _types_of(words: Iterable[str]) -> Iterator[str]:
    """The types that words stand for; one that ends with ``*``, for all that begin so."""
    for word in words:
        begun = (word[:-1],) if word.endswith("*") else ()
        found = [kind for kind in EVENT_TYPES if kind == word or kind.startswith(begun)]
        if not found:
            known = ", ".join(EVENT_TYPES)
            raise MalformedError(f"types: {quote(word)} is no type of events; use {known}")
        yield from found


def _words(fields: dict[str, Any], field: str) -> list[str]:
    words = fields.get(field, [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise MalformedError(f"{field}: write a list of strings")
    if len(words) > _WORDS_MAX:
        raise MalformedError(f"{field}: write at most {_WORDS_MAX} strings")
    return words


def check_event_id(text: object) -> str | None:
    """The id of an event, or None; ``MalformedError``."""
    if text is None or (isinstance(text, str) and _EVENT_ID.fullmatch(text)):
        return text
    raise MalformedError(f"after: {quote(str(text))} is not an event id such as e17")


def _event_number(line: bytes) -> int:
    match = re.match(rb'\{"id":"e([0-9]+)"', line)
    return int(match[1]) if match else 0
