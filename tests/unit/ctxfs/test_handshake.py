"""FUSE_INIT between the kernel and libfuse, without either."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from ctxfs.handshake import Handshake
from runtime.errors import StartupError
from runtime.kernel.handover import Descriptors

#: what the kernel offers, and what libfuse takes of it
OFFERED, TAKEN = 0x73FFFFFB, 0x0000F079
OFFERED_2, TAKEN_2 = 0x0000001F, 0x00000002


def asked(flags: int = OFFERED, more: int = OFFERED_2) -> bytes:
    body = struct.pack("=IIIII44x", 7, 45, 1 << 17, flags, more)
    return struct.pack("=IIQQIIIHH", 40 + len(body), 26, 2, 0, 0, 0, 0, 0, 0) + body


def answered(flags: int = TAKEN, more: int = TAKEN_2, error: int = 0) -> bytes:
    body = struct.pack("=IIIIHHIIHHI28x", 7, 38, 1 << 17, flags, 12, 9, 1 << 20, 1, 256, 0, more)
    return struct.pack("=IiQ", 16 + len(body), error, 2) + body


class Device:
    """Stands for /dev/fuse, with the kernel at its other end."""

    def __init__(self) -> None:
        self.kernel, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.number = own.detach()

    def libfuse(self, handshake: Handshake, number: int, answer: bytes) -> bytes:
        """What libfuse is asked at this number; it answers."""

        async def meet() -> bytes:
            await handshake.go_on(number)
            assert not handshake.done
            question = os.read(number, 1 << 17)
            os.write(number, answer)
            await handshake.go_on(number)
            assert handshake.done
            return question

        return trio.run(meet)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.kernel.close()
    os.close(made.number)


def begun(device: Device) -> dict[str, Any]:
    device.kernel.send(asked())
    handshake = Handshake()
    assert device.libfuse(handshake, device.number, answered()) == asked()
    assert device.kernel.recv(1000) == answered()
    return handshake.save(Descriptors())


def test_both_talk_to_each_other_afterwards(device: Device) -> None:
    begun(device)
    device.kernel.send(b"a request")
    assert os.read(device.number, 100) == b"a request"
    os.write(device.number, b"a reply")
    assert device.kernel.recv(100) == b"a reply"


def test_another_libfuse_is_asked_the_same_and_offered_what_was_agreed(device: Device) -> None:
    saved = begun(device)
    for _ in range(2):
        handshake = Handshake({**saved, "device": os.dup(device.number)})
        number = int(handshake.take_over().removeprefix("/dev/fd/"))
        question = device.libfuse(handshake, number, answered())
        assert question == asked(OFFERED & TAKEN, OFFERED_2 & TAKEN_2)
        # the kernel hears nothing of it, and is spoken to at the same number
        device.kernel.setblocking(False)
        with pytest.raises(BlockingIOError):
            device.kernel.recv(100)
        device.kernel.send(b"a request")
        assert os.read(number, 100) == b"a request"
        again = handshake.save(Descriptors())
        assert (again["asked"], again["answered"]) == (saved["asked"], saved["answered"])
        os.close(number)


def test_a_libfuse_that_agrees_to_less_is_told_of(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    handshake = Handshake({**begun(device), "device": os.dup(device.number)})
    number = int(handshake.take_over().removeprefix("/dev/fd/"))
    device.libfuse(handshake, number, answered(flags=0))
    assert "agrees to something else" in caplog.text
    os.close(number)


def test_a_refusal_reaches_the_kernel_and_the_user(device: Device) -> None:
    device.kernel.send(asked())
    refusing = answered(error=-71)
    with pytest.raises(StartupError, match="refuses this kernel: Protocol error"):
        device.libfuse(Handshake(), device.number, refusing)
    assert device.kernel.recv(1000) == refusing


def test_no_answer_is_an_error(device: Device) -> None:
    device.kernel.send(asked())
    handshake = Handshake()

    async def meet() -> None:
        await handshake.go_on(device.number)
        await handshake.go_on(device.number)

    with pytest.raises(StartupError, match="does not answer"):
        trio.run(meet)
