"""Long bodies are read by a process beside the meter: while it does that, it can do nothing else.

It has the file of the body in common with the meter, none of its other descriptors, and bounds of
its own: so there may be as many fields as these allow.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
from typing import Final

import msgspec
import trio

from runtime.metering import reading
from runtime.metering.reading import Asked, Form, UncountableError

#: bytes beside the body, seconds of the processor, and how much sooner all others are
_BYTES: Final = 256 << 20
_SECONDS: Final = 10
_NICE: Final = 10
#: what a request asks for, or why it does not go out
_ANSWER: Final = msgspec.json.Decoder(Asked | tuple[int, str])


def asked(form: Form, came: bytes | mmap.mmap, file: int) -> Asked:
    """As ``reading.asked``. The file that it came from has what is sent on."""
    found, body = reading.asked(form, came)
    if body is not came:
        os.ftruncate(file, os.pwrite(file, body, 0))
    return found


async def asked_apart(form: Form, file: int) -> Asked:
    """Reads it by a process of its own."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        try:
            _answer(form, file, theirs.fileno())
        finally:
            os._exit(0)
    theirs.close()
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        said = await stream.receive_some()
    if not said:
        raise UncountableError(413, "the body takes too much memory, or time, to be read")
    answer: Asked | tuple[int, str] = _ANSWER.decode(said)
    if isinstance(answer, tuple):
        raise UncountableError(*answer)
    return answer


def _answer(form: Form, file: int, answer: int) -> None:
    """Answers nothing if the body takes too much to read."""
    os.dup2(answer, 0)
    os.dup2(file, 1)
    os.closerange(3, 1 << 20)  # what is closed there is so at once
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    os.nice(_NICE)
    for number, most in (resource.RLIMIT_DATA, _BYTES), (resource.RLIMIT_CPU, _SECONDS):
        resource.setrlimit(number, (most, most))
    try:
        found: object = asked(form, mmap.mmap(1, 0), 1)
    except UncountableError as error:
        found = error.args
    os.write(0, msgspec.json.encode(found))
