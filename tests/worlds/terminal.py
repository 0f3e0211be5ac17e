"""A terminal with the client in it, as a person has one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.worlds.daemon import TIMEOUT
from tests.worlds.emulator import Emulator
from tests.worlds.readiness import readable


class Terminal:
    """A process in a session of its own, whose terminal is a pair of descriptors; it answers if it
    is an emulator."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        size: tuple[int, int] = (80, 24),
        emulator: Emulator | None = None,
    ) -> None:
        self.emulator = emulator
        self._ours, theirs = pty.openpty()
        columns, lines = size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env),
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def _read(self, seconds: float) -> bool:
        """Whether there is more to come; waits at most so long for some."""
        if not readable([self._ours], seconds):
            return True
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self.shown += data.decode("utf-8", "surrogateescape")
        if self.emulator is not None:
            self.type(self.emulator.feed(data).decode())
        return bool(data)

    def wait_for(self, text: str, after: int = 0) -> None:
        """Until that is on the screen, from that character on."""
        deadline = time.monotonic() + TIMEOUT
        more = True
        while text not in self.shown[after:]:
            assert more and time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            more = self._read(0.1)

    def type(self, text: str) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody reads any more
            os.write(self._ours, text.encode())

    def end(self, typing: str = "") -> int:
        """Until the process has ended, while somebody types the same again; its exit status."""
        deadline = time.monotonic() + TIMEOUT
        while self._read(0.1):
            assert time.monotonic() < deadline, f"it does not end: {self.shown!r}"
            if typing:
                self.type(typing)
        return self.process.wait(TIMEOUT)

    def hang_up(self) -> None:
        """As whoever closes a window."""
        os.close(self._ours)
        self._ours = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self._ours >= 0:
            self.hang_up()


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(
    root: Path, *arguments: str, size: tuple[int, int] = (80, 24), by: Sequence[str] = (),
    **env: str,
) -> Iterator[Terminal]:
    """The client of a mount, at work in a terminal; or on another machine, by ``ssh``."""
    command = [sys.executable, "-IS", str(root / "bin" / "ctx"), *arguments]
    if by:
        command = [*by, "-tt", shlex.join(["env", f"CTX_ROOT={root}", *command])]
    given = {"CTX_ROOT": str(root), "PATH": os.environ["PATH"], "TERM": "xterm", "LANG": "C.UTF-8"}
    made = Terminal(command, {**given, **env}, size)
    try:
        yield made
    finally:
        made.close()
