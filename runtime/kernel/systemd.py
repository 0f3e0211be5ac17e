"""Messages of the daemon to the service manager, and entries of the journal.

Both are one datagram to a Unix socket, so the library of systemd is not needed. Without a service
manager, or without a journal behind standard error, nothing is said.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("ctxd.systemd")

_JOURNAL: Final = Path("/run/systemd/journal/socket")
#: bytes of the value of a field, except the message, which its writer bounds
FIELD_MAX: Final = 512


def notify(*assignments: str) -> bool:
    """sd_notify(3): one datagram to the socket in ``$NOTIFY_SOCKET``, if there is one.

    False if the service manager does not take it now: it is busy with itself, and has been told as
    much as its queue holds, or has no socket at the moment. A newline would begin another
    assignment, such as ``MAINPID=``.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)
        try:
            said = "\n".join(each.replace("\n", " ") for each in assignments)
            connection.sendto(said.encode(errors="replace"), address.replace("@", "\0", 1))
        except OSError as error:
            log.debug("NOTIFY_SOCKET: %s", error)
            return False
    return True


def reloading() -> tuple[str, str]:
    """That the settings are being read again; ``READY=1`` says that they were.

    The time is for ``Type=notify-reload``; systemd before 253 ignores it.
    """
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return "RELOADING=1", f"MONOTONIC_USEC={now}"


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How long this process may say nothing (sd_watchdog_enabled(3)); None for ever."""
    try:
        limit = int(environment["WATCHDOG_USEC"])
        meant = int(environment.get("WATCHDOG_PID") or os.getpid())
    except (KeyError, ValueError):
        return None
    return limit / 1e6 if limit > 0 and meant == os.getpid() else None


class Journal:
    """The native protocol of systemd-journald, by which an entry has fields of its own."""

    def __init__(self, path: Path = _JOURNAL) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @classmethod
    def behind(cls, fd: int, environment: Mapping[str, str]) -> Journal | None:
        """The journal, if this descriptor leads to it (``$JOURNAL_STREAM``, systemd.exec(5)).

        Somebody may have led standard error elsewhere since the variable was set.
        """
        device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
        with suppress(OSError, ValueError):
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == (int(device), int(inode)):
                return cls()
        return None

    def send(self, fields: Iterable[tuple[str, bytes]]) -> bool:
        """One entry; False if the journal does not take it. Waits while its queue is full."""
        # by address: a journal that was started anew has another socket there
        try:
            self._socket.sendto(b"".join(encode_field(*each) for each in fields), self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def encode_field(name: str, value: bytes) -> bytes:
    """A field of an entry: with its length where the value would end the line."""
    if b"\n" not in value:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), len(value).to_bytes(8, "little"), value)
