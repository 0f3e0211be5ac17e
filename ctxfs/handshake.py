"""FUSE_INIT: what the kernel and libfuse agree upon, once for each connection.

The kernel asks once, when the filesystem is mounted. A daemon that executes itself again has a
new libfuse on the same connection, which waits to be asked. So what was asked and answered is
kept, and the new libfuse is asked the same: by one end of a pair of sockets at the number of the
device's descriptor, which the device then takes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from typing import Any, Final

import trio

from runtime.errors import StartupError
from runtime.kernel.handover import Descriptors, Handed

log = logging.getLogger("ctxd.mount")

#: more than the kernel asks for to let anybody read, and than the message has
_MESSAGE_MAX: Final = 1 << 17
#: fuse_in_header and fuse_out_header (linux/fuse.h)
_ASKED: Final = struct.Struct("=IIQQIIIHH")
_ANSWERED: Final = struct.Struct("=IiQ")
#: offsets of the flags in what follows them: fuse_init_in, fuse_init_out
_FLAGS_IN: Final = (12, 16)
_FLAGS_OUT: Final = (12, 32)
_OPCODE_INIT: Final = 26


class Handshake(Handed):
    """Between the kernel, or what is known of it, and libfuse."""

    HANDED = ("_device", "_asked", "_answered", "made_point")

    def __init__(self, taken: dict[str, Any] | None = None) -> None:
        #: the connection to the kernel while a socket has its place
        self._device: int | None = None
        self._asked = self._answered = b""
        #: whether the mount point was made for the mount
        self.made_point = False
        self.taken = taken is not None
        self.restore(taken or {})
        self.agreed = trio.Event()
        self._socket: socket.socket | None = None
        self._given = False
        self._number = -1

    @property
    def done(self) -> bool:
        """Whether libfuse reads from the kernel."""
        return self._given and self._socket is None

    async def go_on(self, number: int) -> None:
        """Before libfuse reads from this number for the first time, and for the second."""
        if self._given:
            self._finish()
            return
        if not self.taken:
            await trio.lowlevel.wait_readable(number)
            self._ask(number)
        self._given = True

    def take_over(self) -> str:
        """For a connection that is there: what libfuse is to mount."""
        theirs = self._connect()
        self._number = theirs
        return f"/dev/fd/{theirs}"

    def _connect(self) -> int:
        """The number of the end that libfuse gets, with what it is asked in it."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.send(self._asked if not self.taken else _agreed(self._asked, self._answered))
        return theirs.detach()

    def _ask(self, number: int) -> None:
        """The kernel has asked at the device with this number: libfuse finds it there."""
        self._asked = os.read(number, _MESSAGE_MAX)
        self._device = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
        theirs = self._connect()
        os.dup2(theirs, number, inheritable=False)
        os.close(theirs)
        self._number = number

    def _finish(self) -> None:
        """libfuse has answered: it gets the device. ``StartupError`` if it has refused."""
        assert self._socket is not None and self._device is not None
        with self._socket:
            try:
                answered = self._socket.recv(_MESSAGE_MAX)
            except BlockingIOError:
                raise StartupError("libfuse does not answer the kernel") from None
        self._socket = None
        if not self.taken:
            os.write(self._device, answered)
            self._answered = answered
        elif answered[_ANSWERED.size :] != self._answered[_ANSWERED.size :]:
            log.warning("libfuse agrees to something else than before: restart ctxd soon")
        os.dup2(self._device, self._number, inheritable=False)
        os.close(self._device)
        self._device = None
        if error := _ANSWERED.unpack_from(answered)[1]:
            raise StartupError(f"libfuse refuses this kernel: {os.strerror(-error)}")
        self.agreed.set()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """For the daemon that takes the connection over."""
        return {**super().save(descriptors), "device": descriptors.keep(self._number)}


def _agreed(asked: bytes, answered: bytes) -> bytes:
    """The kernel's question, with no more offered than what was agreed upon: another libfuse may
    know more."""
    message = bytearray(asked)
    if _ASKED.unpack_from(asked)[1] != _OPCODE_INIT:
        raise StartupError("what the kernel asked first is unknown")
    for offer, answer in zip(_FLAGS_IN, _FLAGS_OUT, strict=True):
        at, said = _ASKED.size + offer, _ANSWERED.size + answer
        if at + 4 <= len(asked) and said + 4 <= len(answered):
            offered = int.from_bytes(asked[at : at + 4], "little")
            agreed = int.from_bytes(answered[said : said + 4], "little")
            message[at : at + 4] = (offered & agreed).to_bytes(4, "little")
    return bytes(message)
