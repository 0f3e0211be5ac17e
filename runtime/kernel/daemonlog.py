"""The daemon's log on standard error: bounded, and never waited for.

A line names the caller that caused it (``because_of``); of a caller that causes many lines in
one second, the rest is counted instead of shown. All other lines are bounded for each place in
the program that writes them. A thread writes: a daemon whose standard error nobody reads goes
on, drops lines and says how many.

Where standard error is the journal, an entry also has fields:
``journalctl -u ctxd CTX_AGENT=coder``.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from runtime.kernel.systemd import FIELD_MAX, Journal
from runtime.texts.names import escape

#: lines a second: of one caller or agent, and from one place in the program
CALLER_RATE: Final = 10
_PLACE_RATE: Final = 20
#: the same, if it is followed by where the error was raised
_TRACE_RATE: Final = 2
#: bytes of one line, and of all that wait to be written
_LINE_MAX: Final = 1000
_TRACE_MAX: Final = 16 << 10
_WAITING_MAX: Final = 1 << 20
_WINDOW: Final = 1.0
#: how long the last lines are waited for
_FAREWELL: Final = 1.0
_KEYS_MAX: Final = 4096
_IDENTIFIER: Final = "ctxd"
#: severities of syslog(3) by level
_SEVERITIES: Final = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG: Final = 7


def because_of(
    owner: int, caller: str = "", *, agents: Iterable[str] = (), run: str = "", reason: str = ""
) -> dict[str, Any]:
    """``extra`` of a line that agents of an owner, or one caller among them, caused.

    ``agents`` are the names of those that the line is about, the first of them counts as the
    caller if there is none. ``run`` and ``reason`` are as in the agents' files.
    """
    named = [name for name in dict.fromkeys(agents) if name]
    pairs = [*(("CTX_AGENT", name) for name in named), ("CTX_RUN", run), ("CTX_REASON", reason)]
    fields = [(name, value) for name, value in pairs if value]
    return {"owner": owner, "caller": caller or "".join(named[:1]), "fields": fields}


def _severity(level: int) -> int:
    return next((number for least, number in _SEVERITIES if level >= least), _DEBUG)


class _Entry(NamedTuple):
    """A line as it is written to a descriptor; and what the journal gets of it."""

    line: bytes
    message: bytes
    severity: int
    logger: str = ""
    fields: Sequence[tuple[str, str]] = ()

    @classmethod
    def plain(cls, line: str, level: int = logging.INFO) -> _Entry:
        data = line.encode(errors="replace")
        return cls(data + b"\n", data, _severity(level))

    def for_journal(self) -> list[tuple[str, bytes]]:
        pairs = [
            ("SYSLOG_IDENTIFIER", _IDENTIFIER),
            ("PRIORITY", str(self.severity)),
            *([("LOGGER", self.logger)] if self.logger else ()),
            *self.fields,
        ]
        return [
            ("MESSAGE", self.message),
            *((name, value.encode(errors="replace")[:FIELD_MAX]) for name, value in pairs),
        ]


class Rates:
    """How many there were of each key in the present ``window``, and how many too many."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, window: float = _WINDOW
    ) -> None:
        self._clock = clock
        self._window = window
        self._windows: dict[str, tuple[float, int, int]] = {}

    def admit(self, key: str, rate: int) -> tuple[bool, int]:
        """Whether one more is within the rate, and how many of the window before were not."""
        now = self._clock()
        begun, count, more = self._windows.get(key, (now, 0, 0))
        before = 0
        if now - begun >= self._window:
            begun, count, more, before = now, 0, 0, more
        admitted = count < rate
        if key not in self._windows and len(self._windows) >= _KEYS_MAX:
            self._forget(now)
        self._windows[key] = begun, count + 1, more + (not admitted)
        return admitted, before

    def over(self) -> dict[str, int]:
        """Keys whose window is over, with how many were too many."""
        now = self._clock()
        found = {k: w[2] for k, w in self._windows.items() if w[2] and now - w[0] >= self._window}
        for key in found:
            del self._windows[key]
        return found

    @property
    def counting(self) -> bool:
        """Whether some are counted that nobody was told of."""
        return any(window[2] for window in self._windows.values())

    def _forget(self, now: float) -> None:
        kept = {k: w for k, w in self._windows.items() if w[2] or now - w[0] < self._window}
        self._windows = kept if len(kept) < _KEYS_MAX else {}


class DaemonLog(logging.Handler):
    """Writes to a descriptor, or to the journal behind it, by a thread of its own.

    ``owner_rate`` is lines a second.
    """

    def __init__(
        self,
        fd: int,
        *,
        owner_rate: int,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._fd = fd
        self._journal = journal
        self.owner_rate = owner_rate
        self._rates = Rates(clock)
        self._waiting: deque[_Entry] = deque()
        self._size = 0
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="ctxd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            entries = self._entries(record)
        except Exception:  # a line that cannot be formatted ends nothing
            entries = [_Entry.plain(f"E {record.name}: a line of the log could not be written")]
        for entry in entries:
            self._put(entry)

    def say(self, line: str, level: int = logging.INFO) -> None:
        """A line that is not counted, in its place among the others."""
        self._put(_Entry.plain(line, level))

    @property
    def waiting(self) -> int:
        """Bytes that nobody has read yet."""
        return self._size

    def _entries(self, record: logging.LogRecord) -> list[_Entry]:
        shown = []
        with self._changed:
            for key, rate in self._keys(record):
                admitted, before = self._rates.admit(key, rate)
                if before:
                    shown.append(_Entry.plain(_more(key, before)))
                if not admitted:
                    return shown
        text = escape(record.getMessage()).encode(errors="replace")[:_LINE_MAX]
        lines = [(f"{record.levelname:.1} {record.name}: ", text.decode(errors="ignore"))]
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
            # so that none of it passes for a line of its own
            lines += [("  ", escape(line)[:_LINE_MAX]) for line in trace[-_TRACE_MAX:].splitlines()]
        severity = _severity(record.levelno)
        fields = getattr(record, "fields", ())
        for begin, line in lines:
            whole, message = f"{begin}{line}\n".encode(errors="replace"), f"{record.name}: {line}"
            data = message.encode(errors="replace")
            shown.append(_Entry(whole, data, severity, record.name, fields))
        return shown

    def _keys(self, record: logging.LogRecord) -> list[tuple[str, int]]:
        owner, caller = getattr(record, "owner", None), getattr(record, "caller", "")
        if owner is None:
            rate = _TRACE_RATE if record.exc_info else _PLACE_RATE
            return [(f"{record.name} {record.lineno}", rate)]
        # a caller that is counted counts no more for its owner
        keys = [(f"{record.name} {caller}", CALLER_RATE)] if caller else []
        return [*keys, (f"{record.name} of all agents of uid:{owner}", self.owner_rate)]

    def _put(self, entry: _Entry) -> None:
        with self._changed:
            if self._size + len(entry.line) > _WAITING_MAX:
                self._dropped += 1
                return
            if self._dropped:
                note = f"W ctxd.journal: {self._dropped} lines dropped: nobody read them"
                self._waiting.append(_Entry.plain(note))
                self._size += len(note)
                self._dropped = 0
            self._waiting.append(entry)
            self._size += len(entry.line)
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._closed:
                    # only while something is counted is there anything to tell later
                    self._changed.wait(_WINDOW if self._rates.counting else None)
                entries = list(self._waiting)
                self._waiting.clear()
                entries += [_Entry.plain(_more(k, n)) for k, n in self._rates.over().items()]
                closed = self._closed
            left = [entry.line for entry in entries if not self._enter(entry)]
            # a journal that was started anew may take the next line
            if not self._write(b"".join(left)) and self._journal is None:
                return
            with self._changed:
                # only now is there room again: what is being written waits too
                self._size = sum(len(entry.line) for entry in self._waiting)
                self._changed.notify_all()
                if closed and not self._waiting:
                    return

    def _enter(self, entry: _Entry) -> bool:
        """Whether the journal has it, with its fields."""
        return self._journal is not None and self._journal.send(entry.for_journal())

    def _write(self, data: bytes) -> bool:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whose descriptor it is too has made it so
                select.select([], [self._fd], [])
            except InterruptedError:
                continue
            except OSError:
                return False  # nobody can read it any more
        return True

    def close(self) -> None:
        """Writes what was said, unless nobody reads it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_FAREWELL)
        super().close()


def _more(key: str, count: int) -> str:
    return f"I ctxd.journal: … {count} more: {escape(key)}"
