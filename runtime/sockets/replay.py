"""Replaying the events of a session, then telling of new ones until its agent ends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Final

import trio

from runtime.authority.loop import Turns
from runtime.errors import MalformedError, MissingError
from runtime.ids import SessionIndex
from runtime.kernel.inotify import Wakeup
from runtime.records.change import Subscriber
from runtime.records.model import Session
from runtime.records.sessions import Sessions
from runtime.sockets.connection import REST_SECONDS, Connection
from runtime.texts.names import quote

_EVENT_ID: Final = re.compile(r"e[0-9]{1,15}")
#: of a history that is sent in one piece, in bytes
_REPLAY: Final = 128 << 10
#: followers of sessions that are told of more at once
_WOKEN_AT_ONCE: Final = 8


class Replays(Subscriber):
    """Sends events to connections that follow sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        #: followers by session, and those that are about to be told that there is more
        self._appended: dict[SessionIndex, set[trio.Event]] = {}
        self._following: list[trio.Event] = []
        self._woken = Wakeup()
        self._turns = Turns()

    def session_changed(self, index: SessionIndex, names: Iterable[str]) -> None:
        waiting = self._appended.pop(index, None)
        if waiting is not None:
            self._following += waiting
            self._woken.notify()

    async def run(self) -> None:
        """Tells those who follow sessions, a few at a time: others are served in between."""
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
            appended = trio.Event()
            followers = self._appended.setdefault(session.index, set())
            followers.add(appended)
            ended = until.is_set()
            try:
                file = self._sessions.open_events(session)
            except FileNotFoundError:
                raise MissingError("the session was removed") from None
            with file:
                if offset is None:
                    offset = find_event(file.fileno(), last)
                while lines := _read_lines(file.fileno(), offset):
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
                        await connection.send(lines)
            if ended:
                return
            try:
                await self._turns.rest(connection.who, REST_SECONDS)
                async with trio.open_nursery() as nursery:
                    for event in (appended, until):
                        nursery.start_soon(_cancel_after, event, nursery.cancel_scope)
            finally:
                followers.discard(appended)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def check_event_id(text: object) -> str | None:
    """The id of an event, or None; ``MalformedError``."""
    if text is None or (isinstance(text, str) and _EVENT_ID.fullmatch(text)):
        return text
    raise MalformedError(f"after: {quote(str(text))} is not an event id such as e17")


def _read_lines(fd: int, offset: int) -> bytes:
    """Complete lines of a history from an offset on, one at least if there is one."""
    size = _REPLAY
    while True:
        data = os.pread(fd, size, offset)
        lines = data[: data.rfind(b"\n") + 1]
        if lines or len(data) < size:
            return lines
        size *= 2


def find_event(fd: int, last: int) -> int:
    """An offset in a history, of a line's beginning, before which all ids are at most ``last``.

    Ids grow, so that few places of a long one are looked at.
    """
    low, high = 0, os.fstat(fd).st_size
    while high - low > _REPLAY:
        middle = (low + high) // 2
        block = os.pread(fd, _REPLAY, middle)
        begin = block.find(b"\n") + 1
        number = _event_number(block[begin:]) if begin else 0
        if not number:
            break  # a line longer than that: from here on all is looked at
        if number > last:
            high = middle
        else:
            low = middle + begin
    return low


def _event_number(line: bytes) -> int:
    match = re.match(rb'\{"id":"e([0-9]+)"', line)
    return int(match[1]) if match else 0
