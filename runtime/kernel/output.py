"""The kept output of an incarnation: segments named by the offset of their first byte.

Older segments are removed by the monitor when ``log_max`` is reached; what is
shown then begins with a line that says how much was dropped. What follows it begins
with a mark: it may be in the midst of a line, and must not pass for one of the runtime's.

The output of a program that runs on another machine is kept in the same way (``Copy``). What was
dropped there before it came is a gap between two segments, and shown by such a line, too.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    start: int
    size: int
    #: what it holds, if that is in no file
    data: bytes | None = None
    #: of a gap, which it tells of: how many bytes are missing
    missing: int = 0

    @property
    def end(self) -> int:
        """The number of the byte after it."""
        return self.start + (self.missing or self.size)

    def read(self, offset: int, length: int) -> bytes:
        """``FileNotFoundError`` if it was removed meanwhile."""
        if self.data is not None:
            return self.data[offset : offset + length]
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)


class Segments:
    """A view of ``out`` or ``log`` as it is at one moment; ``last`` is a line of the runtime's own
    that follows what is in files."""

    def __init__(self, directory: Path, *, last: str = "") -> None:
        self.segments: list[Segment] = []
        try:
            entries = sorted(
                (e for e in os.scandir(directory) if e.name.isdigit()), key=lambda e: e.name
            )
            for entry in entries:
                size, start = entry.stat().st_size, int(entry.name)
                if self.segments and start > self.end:
                    self._add_gap(directory, start - self.end)
                self.segments.append(Segment(Path(entry.path), start, size))
        except FileNotFoundError:
            pass
        if last:
            self._add_line(directory, last)
        dropped = self.segments[0].start if self.segments else 0
        self.header = _dropped(dropped, "older output") if dropped else b""

    def _add_gap(self, directory: Path, missing: int) -> None:
        before = b"\n" if self.ends_within_line() else b""
        data = before + _dropped(missing, "output")
        self.segments.append(Segment(directory, self.end, len(data), data, missing))

    def _add_line(self, directory: Path, text: str) -> None:
        data = b"\n" + _line(text) if self.ends_within_line() else _line(text)
        self.segments.append(Segment(directory, self.end, len(data), data))

    def ends_within_line(self) -> bool:
        with suppress(FileNotFoundError):
            for segment in reversed(self.segments):
                if segment.size:
                    return segment.read(segment.size - 1, 1) != b"\n"
        return False

    @property
    def size(self) -> int:
        return len(self.header) + sum(segment.size for segment in self.segments)

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; a segment removed meanwhile reads as nothing."""
        parts = [self.header[offset : offset + length]]
        offset = max(0, offset - len(self.header))
        left = length - len(parts[0])
        for segment in self.segments:
            if left <= 0:
                break
            if offset >= segment.size:
                offset -= segment.size
                continue
            try:
                part = segment.read(offset, min(left, segment.size - offset))
            except FileNotFoundError:
                return b""
            parts.append(part)
            left -= len(part)
            offset = 0
        return b"".join(parts)

    @property
    def end(self) -> int:
        """How many bytes were ever written, dropped ones included."""
        return self.segments[-1].end if self.segments else 0

    def since(self, position: int, length: int) -> tuple[bytes, int]:
        """Up to ``length`` bytes from the one with the number ``position`` on, and the number
        after the last of them; dropped ones are skipped."""
        found: list[bytes] = []
        for segment in self.segments:
            if segment.end <= position or not segment.size:
                continue
            if length <= 0:
                break
            if segment.missing:  # told once, as a whole
                data = segment.read(0, segment.size) if position <= segment.start else b""
                position = segment.end
            else:
                position = max(position, segment.start)
                try:
                    data = segment.read(position - segment.start, length)
                except FileNotFoundError:
                    break
                position += len(data)
            found.append(data)
            length -= len(data)
        return b"".join(found), position

    def tail(self, length: int, *, since: int = 0) -> bytes:
        """The last bytes, none of them before the one with the number ``since``."""
        length = min(length, max(0, self.end - since)) if since else length
        start = max(0, self.size - length)
        return self.read(start, self.size - start)


def append_line(directory: Path, text: str, log_max: int) -> None:
    """One line of the runtime's own at the end of a ``log``, whose last may have no newline."""
    append(directory, _line(text), log_max, whole_lines=True)


def _line(text: str) -> bytes:
    return f"ctxfs: {text}\n".encode()


def append(directory: Path, data: bytes, log_max: int, *, whole_lines: bool = False) -> None:
    """Bytes at the end of what a monitor keeps, in segments as it keeps them itself: neither
    may pile up what the other would have dropped."""
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of its monitor, which holds it for a write
        step = segment_max(log_max)
        if whole_lines and Segments(directory).ends_within_line():
            data = b"\n" + data
        for begin in range(0, len(data), step):
            _append(lock, data[begin : begin + step], step)
    finally:
        os.close(lock)


def _append(directory: int, data: bytes, limit: int) -> None:
    kept = sorted(name for name in os.listdir(directory) if name.isdigit())
    last = kept[-1] if kept else f"{0:020d}"
    size = os.stat(last, dir_fd=directory).st_size if kept else 0
    if size >= limit:
        for name in kept[:-1]:
            os.unlink(name, dir_fd=directory)
        last = f"{int(last) + size:020d}"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(last, flags, 0o600, dir_fd=directory)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _dropped(size: int, what: str) -> bytes:
    return f"ctxfs: {size} bytes of {what} dropped (log_max)\n…".encode()


class Copy:
    """A copy of an output that another machine keeps, in segments as a monitor keeps them: bytes
    have the same numbers. Nobody else writes there."""

    #: segments, of which small ones begin after gaps
    _MOST: Final = 16

    def __init__(self, directory: Path, log_max: int) -> None:
        self._directory = str(directory)
        #: segments that are no part of it any more, which may be large: others take them away
        self.dropped: list[Path] = []
        self._limit = segment_max(log_max)
        #: start and size of each segment
        self._kept = [[each.start, each.size] for each in Segments(directory).segments
                      if not each.missing]  # fmt: skip

    @property
    def end(self) -> int:
        """How many bytes there were, dropped ones included."""
        return sum(self._kept[-1]) if self._kept else 0

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(size for _, size in self._kept)

    def add(self, offset: int, data: bytes) -> None:
        """Bytes at the end, or after a gap; of those that are there already nothing changes.
        ``OSError``: what was written before is kept."""
        data = data[max(0, self.end - offset) :]
        offset = max(offset, self.end)
        while data:
            if not self._kept or offset > self.end or self._kept[-1][1] >= self._limit:
                self._begin(offset)
            last = self._kept[-1]
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(f"{self._directory}/{last[0]:020d}", flags, 0o600)
            try:
                written = os.write(fd, data[: self._limit - last[1]])
            finally:
                os.close(fd)
            last[1] += written
            offset += written
            data = data[written:]

    def _begin(self, start: int) -> None:
        """The next segment; older ones are removed as long as two halves are left."""
        if not self._kept:
            Path(self._directory).mkdir(parents=True, mode=0o700, exist_ok=True)
        elif not self._kept[-1][1]:
            self._remove(-1)
        while (self.size > self._limit and len(self._kept) > 1) or len(self._kept) >= self._MOST:
            self._remove(0)
        self._kept.append([start, 0])

    def _remove(self, which: int) -> None:
        start, _ = self._kept.pop(which)
        self.dropped.append(Path(f"{self._directory}/{start:020d}"))


def segment_max(log_max: int) -> int:
    """Bytes after which the next segment is begun; two are kept (monitor.c)."""
    return max(log_max // 2, 4096)
