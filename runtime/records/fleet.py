"""The events of all agents once more, in one order: a log of bounded size for each owner.

A line is that of the session's history with ``seq``, ``owner`` and ``session`` in front. The store
gives the numbers (``Store.number``), which grow over all owners, and has the lines until they are
here (``runtime.records.outbox``). What agents and sessions are removed later stays told.

A log has two files, ``events/OWNER/FIRST``, and when the second is half of ``events_max`` the first
of them goes. FIRST is the number after that of the last line before, 0 if there was none. So
whoever knows the last line that he has seen, knows by the names where to go on, and whether
something in between is gone. Nothing is kept of readers.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from runtime.records.history import PIECE, History, find_line, read_lines
from runtime.records.model import Session
from runtime.records.settings import Settings

#: of all logs, below the state
DIRECTORY: Final = "events"
#: of each of many logs, what is read at once, in bytes
_LEAST: Final = 4 << 10
#: of a log that is read from its end, the same
_BACKWARDS: Final = 16 << 10
#: a look at what is new takes about a quarter of that
_REST_SECONDS: Final = 0.0003
#: what is before the rest of a line
_FRONT: Final = re.compile(r'^\{"seq":([0-9]+),"owner":([0-9]+),"session":"[^"]*",', re.M)
_SEQ: Final = re.compile(rb'\{"seq":([0-9]{1,19}),')
#: of lines, and 0
NUMBERS: Final = range(1 << 63)


def path_of(owner: int) -> str:
    """The directory of a log, relative to the state."""
    return f"{DIRECTORY}/{owner}"


def numbered(session: Session, lines: str, last: int) -> str:
    """Lines of a session's history as the log of its owner has them; the last has this number."""
    front = f',"owner":{session.owner},"session":"{session.name}",'
    each = lines.split("\n")
    first = last - len(each) + 1
    return "\n".join(f'{{"seq":{seq}{front}{line[1:]}' for seq, line in enumerate(each, first))


def plain(text: str) -> str:
    """Lines as the history of their session has them."""
    return _FRONT.sub("{", text)


def logged(texts: Iterable[str]) -> dict[str, list[str]]:
    """By log, the lines in texts of the store that are to be there."""
    found: dict[str, list[str]] = {}
    for line in (line for text in texts for line in text.split("\n")):
        if front := _FRONT.match(line):
            found.setdefault(path_of(int(front[2])), []).append(line)
    return found


def held_since(number: int, held: Iterable[str]) -> Iterator[str]:
    """Texts that are held for sessions and have got lines after this number."""
    for text in held:
        if _number_in(text.removesuffix("\n").rpartition("\n")[2]) > number:
            yield text


def number_of(line: bytes) -> int:
    """The number of a line of a log, 0 if it has none."""
    match = _SEQ.match(line)
    return int(match[1]) if match else 0


def _number_in(line: str) -> int:
    front = _FRONT.match(line)
    return int(front[1]) if front else 0


@dataclass(slots=True, eq=False)
class Segment:
    """A file of a log, relative to the state: its lines have this number, or larger ones."""

    path: str
    first: int
    size: int = 0


#: lines, each with its number
Numbered = list[tuple[int, bytes]]


@dataclass(slots=True, eq=False)
class Log:
    """The events of one owner's agents."""

    owner: int
    segments: list[Segment] = field(default_factory=list)
    #: the number of its last line
    last: int = 0
    #: and of the first one for which the disk has no room yet, 0 if there is none
    late: int = 0

    def segment(self, number: int) -> Segment | None:
        """The one that a line of this number is in; None if it is gone."""
        return next((each for each in reversed(self.segments) if each.first <= number), None)


class Fleet:
    """The logs of all owners."""

    def __init__(self, state: Path, history: History, settings: Settings) -> None:
        self._state = state
        self._history = history
        self._settings = settings
        self._logs: dict[int, Log] = {}
        #: how many read the logs now
        self.readers = 0
        #: what was read last: the file, from where, how much there was, how much was wanted
        self._piece: tuple[tuple[str, int, int, int], Numbered] = ("", 0, 0, 0), []
        #: the file that was written to last
        self._open: tuple[Segment | None, int] = (None, -1)
        with suppress(FileNotFoundError):
            for name in os.listdir(state / DIRECTORY):
                if name.isdecimal():
                    self._load(int(name))

    def _load(self, owner: int) -> None:
        log = self._logs[owner] = Log(owner)
        for entry in os.scandir(self._state / DIRECTORY / str(owner)):
            if entry.name.isdecimal():
                path = f"{DIRECTORY}/{owner}/{entry.name}"
                log.segments.append(Segment(path, int(entry.name), entry.stat().st_size))
        log.segments.sort(key=lambda each: each.first)
        self._find_last(log)

    def _find_last(self, log: Log) -> None:
        log.last = max(map(self._last, log.segments), default=0)

    def _last(self, segment: Segment) -> int:
        """The number of its last line, 0 if there is none."""
        return next(self._backwards(segment), (0, b""))[0]

    # writing, of lines whose numbers grow

    def append(self, path: str, lines: list[str]) -> None:
        """Lines to the log of an owner, which ``path`` names."""
        log = self._log(path)
        size = sum(map(len, lines)) + len(lines)
        most = self._settings.config.events_max // 2
        try:
            if not log.segments or (log.segments[-1].size and log.segments[-1].size + size > most):
                self._turn(log)
            segment = log.segments[-1]
            if segment is not self._open[0]:
                self._keep_open(segment)
            segment.size += self._history.write(self._open[1], segment.path, lines)
        except OSError:
            log.late = log.late or _number_in(lines[0])
            raise
        log.last = _number_in(lines[-1].rpartition("\n")[2])

    def _keep_open(self, segment: Segment) -> None:
        """The file that is written to now will be the next one, too."""
        fd = self._history.writable(segment.path)
        self.close()
        self._open = segment, fd

    def close(self) -> None:
        """Closes the file that is open for the next lines."""
        (segment, fd), self._open = self._open, (None, -1)
        if segment is not None:
            os.close(fd)

    def _log(self, path: str) -> Log:
        owner = int(path.rpartition("/")[2])
        return self._logs.get(owner) or self._logs.setdefault(owner, Log(owner))

    def _turn(self, log: Log) -> None:
        """Begins another file, and removes what is before the last one."""
        if not log.segments:
            os.makedirs(self._state / DIRECTORY / str(log.owner), 0o700, exist_ok=True)
        for old in log.segments[:-1]:
            (self._state / old.path).unlink(missing_ok=True)
        first = log.last + 1 if log.segments else 0
        new = Segment(f"{DIRECTORY}/{log.owner}/{first}", first)
        log.segments = [*log.segments[-1:], new]

    def complete(self, path: str, lines: Iterable[str]) -> None:
        """Like ``append``, of lines of which an earlier daemon may have written some or all."""
        log = self._log(path)
        if not log.segments:
            self._turn(log)
        wanted: dict[Segment, list[str]] = {}
        for line in sorted((line for some in lines for line in some.split("\n")), key=_number_in):
            segment = log.segment(_number_in(line))
            if segment is not None:
                wanted.setdefault(segment, []).append(line)
        for segment, some in wanted.items():
            self._history.complete(segment.path, ())
            segment.size = os.stat(self._state / segment.path).st_size
            last = self._last(segment)
            if missing := [line for line in some if _number_in(line) > last]:
                segment.size += self._history.append(segment.path, missing)
        self._find_last(log)
        log.late = 0

    # reading, by owner, or all if that is None

    def logs(self, owner: int | None) -> list[Log]:
        if owner is None:
            return list(self._logs.values())
        log = self._logs.get(owner)
        return [log] if log is not None else []

    def last(self, owner: int | None) -> int:
        """The number of the last line that readers see."""
        logs = self.logs(owner)
        return min(max((log.last for log in logs), default=0), self.until(logs))

    def until(self, logs: Iterable[Log]) -> int:
        """The largest number before which no line of these logs is on its way."""
        return min((log.late for log in logs if log.late), default=NUMBERS.stop) - 1

    @contextmanager
    def reading(self, owner: int | None, after: int) -> Iterator[Reader]:
        """A reader after a number."""
        self.readers += 1
        try:
            yield Reader(self, owner, after)
        finally:
            self.readers -= 1

    def readable(self, segment: Segment) -> int:
        return os.open(f"{self._state}/{segment.path}", os.O_RDONLY | os.O_CLOEXEC)

    def piece(self, segment: Segment, offset: int, size: int) -> Numbered:
        """About so many bytes of lines from an offset on; many who follow ask for the same ones."""
        wanted = (segment.path, offset, segment.size, size)
        if self._piece[0] != wanted:
            fd = self.readable(segment)
            try:
                lines = read_lines(fd, offset, size).splitlines(keepends=True)
            finally:
                os.close(fd)
            self._piece = wanted, [(number_of(line), line) for line in lines]
        return self._piece[1]

    def tail(self, owner: int | None, most: int) -> bytes:
        """The last lines, of at most so many bytes."""
        logs = self.logs(owner)
        until, left, lines = self.until(logs), most, list[bytes]()
        lines_of = [
            itertools.chain.from_iterable(map(self._backwards, reversed(log.segments)))
            for log in logs
        ]
        for number, line in heapq.merge(*lines_of, reverse=True):
            if number > until:
                continue
            left -= len(line)
            if left < 0:
                break
            lines.append(line)
        return b"".join(reversed(lines))

    def _backwards(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        """The lines of a file with their numbers, the last one first."""
        end, size = segment.size, _BACKWARDS
        while end > 0:
            fd = self.readable(segment)
            try:
                begin = max(0, end - size)
                data = os.pread(fd, end - begin, begin)
            finally:
                os.close(fd)
            # what is before the first newline may be a part of a line
            cut = data.find(b"\n") + 1 if begin else 0
            if begin and not data[cut:]:
                size *= 2
                continue
            for line in reversed(data[cut:].splitlines(keepends=True)):
                if line.endswith(b"\n") and (number := number_of(line)):
                    yield number, line
            end = begin + cut


class Reader:
    """Somebody's place in the logs: the number of a line, and where lines were found."""

    def __init__(self, fleet: Fleet, owner: int | None, after: int) -> None:
        self._fleet = fleet
        self.owner = owner
        self.after = after
        #: by owner, the first line that is not read: the number of its file, and the offset
        self._places: dict[int, tuple[int, int]] = {}
        self._told = 0

    @property
    def rest(self) -> float:
        """Seconds between two looks of a reader: together they take a part of the time,
        however many read, and however much happens."""
        return _REST_SECONDS * self._fleet.readers

    def lost(self) -> int:
        """The number from which on all lines are there, if some after the place are not; else 0,
        also when it was told before."""
        oldest = max((log.segments[0].first for log in self._logs()), default=0)
        if oldest - 1 <= max(self.after, self._told):
            return 0
        self._told = oldest
        return oldest

    def _logs(self) -> list[Log]:
        return [log for log in self._fleet.logs(self.owner) if log.segments]

    def read(self) -> list[bytes]:
        """Some of the next lines, in the order of their numbers; none if there are no more."""
        logs = self._logs()
        until = self._fleet.until(logs)
        logs = [log for log in logs if log.last > self.after]
        size = max(_LEAST, PIECE // max(1, len(logs)))
        pieces: dict[int, Numbered] = {}
        for log in logs:
            pieces[log.owner], is_all = self._next(log, size)
            if not is_all:
                until = min(until, pieces[log.owner][-1][0])
        found: Numbered = []
        for owner, piece in pieces.items():
            some = [each for each in piece if each[0] <= until]
            first, offset = self._places[owner]
            self._places[owner] = first, offset + sum(len(line) for _, line in some)
            found += some
        if len(pieces) > 1:
            found.sort()
        if found:
            self.after = found[-1][0]
        return [line for _, line in found]

    def _next(self, log: Log, size: int) -> tuple[Numbered, bool]:
        """About so many bytes of the next lines of a log, and whether these are all."""
        first, offset = self._places.get(log.owner, (-1, 0))
        place = next((n for n, each in enumerate(log.segments) if each.first == first), -1)
        if place < 0:
            segment = log.segment(self.after + 1) or log.segments[0]
            place, offset = log.segments.index(segment), self._find(segment)
        if offset >= log.segments[place].size and place + 1 < len(log.segments):
            place, offset = place + 1, 0
        segment = log.segments[place]
        self._places[log.owner] = segment.first, offset
        if offset >= segment.size:
            return [], True
        lines = self._fleet.piece(segment, offset, size)
        end = offset + sum(len(line) for _, line in lines)
        return lines, not lines or (end >= segment.size and segment is log.segments[-1])

    def _find(self, segment: Segment) -> int:
        """Where the first line is that is not read, or would be."""
        if not segment.size:
            return 0
        fd = self._fleet.readable(segment)
        try:
            offset = find_line(fd, self.after, number_of)
            while lines := read_lines(fd, offset):
                for line in lines.splitlines(keepends=True):
                    if number_of(line) > self.after:
                        return offset
                    offset += len(line)
            return offset
        finally:
            os.close(fd)
