"""What passes to the next program: sealed, with its descriptors, and to no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runtime.caller import Caller
from runtime.errors import StartupError
from runtime.ids import AgentIndex, Incarnation
from runtime.kernel import handover, orders
from runtime.kernel.handover import FORMAT, Descriptors


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_values_and_descriptors_come_as_they_were(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = Descriptors()
    bytes_in_it = [b"", bytes(range(256)), b"\n{}", b"x" * 100_000]
    of_others = {"a": [1, None, "ä", {}, {"word": [0, 1]}, {"": [0, 1]}]}
    values = {**of_others, "b": bytes_in_it, "fd": descriptors.keep(pipe[1])}
    file = handover.seal(values, descriptors)
    assert os.get_inheritable(pipe[1]) and os.get_inheritable(file)
    with pytest.raises(PermissionError):
        os.write(file, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    monkeypatch.setenv(handover.VARIABLE, str(file))
    assert handover.inherited() == values
    assert handover.VARIABLE not in os.environ
    assert not os.get_inheritable(pipe[1])
    with pytest.raises(OSError):
        os.fstat(file)
    assert handover.inherited() is None


def test_the_next_program_has_them(pipe: tuple[int, int]) -> None:
    descriptors = Descriptors()
    file = handover.seal({"fd": descriptors.keep(pipe[1])}, descriptors)
    program = (
        "from runtime.kernel import handover; import os;"
        "os.write(handover.inherited()['fd'], b'here')"
    )
    environment = {**os.environ, handover.VARIABLE: str(file)}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environment, close_fds=False, check=True, timeout=30)
    os.close(file)
    assert os.read(pipe[0], 10) == b"here"
    os.set_inheritable(pipe[1], False)


@pytest.mark.parametrize("text", [
    b"", b"\n", b"w\n{", b"w\n{\n", b"w\n[]\n", b'w\n{"w": 1}\n',
    b'w\n{"format": %d}\n' % FORMAT,
    b'w\n{"format": %d, "descriptors": [], "values": {}}\n' % (FORMAT + 1),
    b'w\n{"format": %d, "descriptors": [9999], "values": {}}\n' % FORMAT,
])  # fmt: skip
def test_what_cannot_be_taken_over_is_refused(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = orders.sealed_file("x", text)
    monkeypatch.setenv(handover.VARIABLE, str(file))
    with pytest.raises(StartupError, match="cannot take over"):
        handover.inherited()


def test_a_file_that_anybody_may_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(file, b'w\n{"format": %d, "descriptors": [], "values": {}}\n' % FORMAT)
    monkeypatch.setenv(handover.VARIABLE, str(file))
    with pytest.raises(StartupError, match="not sealed"):
        handover.inherited()


@pytest.mark.parametrize("number", ["x", "-1", "9999"])
def test_a_number_of_no_file_is_refused(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.VARIABLE, number)
    with pytest.raises(StartupError, match="cannot take over"):
        handover.inherited()


def test_what_is_neither_json_nor_bytes_cannot_pass() -> None:
    with pytest.raises(TypeError, match="set cannot pass"):
        handover.seal({"a": set()}, Descriptors())


@pytest.mark.parametrize("caller", [
    Caller(0, 0, 1),
    Caller(1000, 1001, 2, AgentIndex(3), Incarnation("i"), True, (1, 2)),
    Caller(5, 6, 7, known=False, groups=()),
])  # fmt: skip
def test_a_caller_is_the_same(caller: Caller) -> None:
    assert handover.unpack_caller(handover.pack_caller(caller)) == caller


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_what_another_user_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In root's shell there may be the environment of another user, and what that one had open."""
    os.seteuid(61000)
    try:
        file = handover.seal({"x": 1}, Descriptors())
    finally:
        os.seteuid(0)
    monkeypatch.setenv(handover.VARIABLE, str(file))
    with pytest.raises(StartupError, match="it belongs to uid 61000"):
        handover.inherited()
    os.close(file)
