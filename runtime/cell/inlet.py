"""The way to the monitor of a run, for bytes for standard input, a window and viewers (inlet.h).

The monitor alone writes them into the pipe, which is an agent's too. What is handed over stays
in the kernel's queue, whatever becomes of the daemon, and the next one begins with the first byte
of what this one may have told in part: the monitor takes every line once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path
from typing import Final

import trio

from runtime.cell.viewers import Viewer
from runtime.kernel import unixsockets

#: INLET_VERSION and INLET_MAX of inlet.h
_VERSION: Final = 1
_PART: Final = 7168
_HEAD: Final = struct.Struct("=cB6xQQ")
_HELLO: Final = bytes([ord("v"), _VERSION])
#: of what viewers are told; less than TEXT_MAX of terminal.h
_TEXT_MAX: Final = 500
#: while earlier daemons left too many
_AGAIN_SECONDS: Final = 0.1
#: with what the pipe holds, no more than an owner pays for (``INPUT_SIZE``)
_QUEUE: Final = 64 << 10
#: struct handed of inlet.h
_HANDED: Final = struct.Struct("=c7xQ")
#: a monitor answers at once, unless somebody stopped it
_ANSWER_SECONDS: Final = 1.0


class Inlet:
    """The way to the monitor of one run; opened when it is used first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def listen(self) -> int:
        """The socket for the monitor of a run that begins."""
        return unixsockets.listen(self._path, unixsockets.PACKETS).detach()

    def put(self, data: bytes, *, message: int = 0, line: int = 0, offset: int = 0) -> int:
        """How many of these bytes there was room for. Those of a message are at an offset of one
        of its lines. ``OSError``: the program reads no more."""
        if self._socket is None:
            self._socket = self._connect()
            if self._socket is None:
                return 0
        taken = 0
        while taken < len(data):
            head = _HEAD.pack(b"i", line, message, offset + taken)
            part = data[taken : taken + _PART]
            try:
                self._socket.send(head + part)
            except BlockingIOError:
                break
            taken += len(part)
        return taken

    def give(self, window: socket.socket, grace: float) -> None:
        """Has the monitor that will listen find a window there, and end the agent with it, in so
        many seconds."""
        made = self._connect()
        assert made is not None
        with made:
            socket.send_fds(made, [_HANDED.pack(b"w", round(1000 * grace))], [window.fileno()])

    def show(self, viewer: Viewer, grace: float) -> None:
        """Hands a viewer to the monitor, or to the one that will listen; a hang-up may take so many
        seconds. ``OSError``: the run is over, or too much waits for its monitor."""
        with unixsockets.connect(self._path) as made:
            made.send(_HELLO)
            socket.send_fds(made, [viewer.order(grace)], [viewer.end.fileno()])

    def tell(self, kind: bytes, text: str) -> None:
        """Tells all viewers a notice (``n``), or how the program will have ended (``x``)."""
        with contextlib.suppress(OSError), unixsockets.connect(self._path) as made:
            made.send(_HELLO)
            made.send(kind + text.encode()[:_TEXT_MAX])

    async def ask_window(self) -> socket.socket | None:
        """The window that the monitor has, None if it has none, or is gone."""
        with contextlib.suppress(OSError), trio.move_on_after(_ANSWER_SECONDS):
            made = self._connect()
            if made is None:
                return None
            with made:
                made.send(b"w")
                while True:
                    await trio.lowlevel.wait_readable(made)
                    data, fds, _, _ = socket.recv_fds(made, _HANDED.size, 1)
                    if not data or data == b"w":
                        return socket.socket(fileno=fds[0]) if fds else None
        return None

    def _connect(self) -> socket.socket | None:
        """None if too many wait, which earlier daemons left."""
        try:
            made = unixsockets.connect(self._path)
        except BlockingIOError:
            return None
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE)
        made.send(_HELLO)
        return made

    async def wait_room(self) -> None:
        """Until it may take more; ``OSError``: the run is over."""
        if self._socket is None:
            await trio.sleep(_AGAIN_SECONDS)
            return
        try:
            await trio.lowlevel.wait_writable(self._socket)
        except trio.ClosedResourceError:
            raise BrokenPipeError("the run is over") from None

    def remove(self) -> None:
        """The run is over."""
        if self._socket is not None:
            trio.lowlevel.notify_closing(self._socket)
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
