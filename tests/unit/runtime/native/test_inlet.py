"""Standard input by the monitor, and what an agent can hold up by holding one of its pipes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from runtime.cell.cell import native
from runtime.cell.inlet import Inlet
from runtime.cell.oldinputs import _noted
from runtime.kernel import orders, unixsockets
from tests.unit.runtime.native.test_keeper_monitor import DOZE, WHY_NOT, Run, cell
from tests.worlds.daemon import TIMEOUT, wait_until
from tests.worlds.readiness import readable

__all__ = ["cell"]
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: writes to a pipe from a page that nobody fills, and so holds its mutex until it is killed
HOLD: Final = """
import ctypes, os, struct, sys, fcntl
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
faults = libc.syscall(323, os.O_CLOEXEC)
assert faults >= 0, os.strerror(ctypes.get_errno())
fcntl.ioctl(faults, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
page = libc.mmap(None, 4096, 3, 0x22, -1, 0)
fcntl.ioctl(faults, 0xC020AA00, bytearray(struct.pack("QQQQ", page, 4096, 1, 0)))
pipe = os.open(sys.argv[1], os.O_WRONLY)
print(flush=True)
libc.write(pipe, page, 4096)
"""


class FedRun(Run):
    """A run whose standard input is fed."""

    def __init__(self, base: Path, cell: Run) -> None:
        super().__init__(base)
        self.cell = cell
        self.path = base / "socket"
        self.inlet = Inlet(self.path)

    def feed(self, script: str) -> None:
        """In a cell that is held, which ends with it when no daemon is alive."""
        self.cell.hold()
        self.enter(self.cell, script=script, inlet=self.inlet, leads=True)

    def close(self) -> None:
        super().close()
        self.inlet.close()

    def another_daemon(self) -> None:
        """What was handed over stays, and nobody knows what it was."""
        self.inlet.close()
        self.inlet = Inlet(self.path)

    def wait_kept(self, text: bytes) -> None:
        wait_until(lambda: self.output() == text, f"{text!r} is kept")


@pytest.fixture
def run(tmp_path: Path, cell: Run) -> Iterator[FedRun]:
    with closing(FedRun(tmp_path, cell)) as made:
        yield made


def tell(inlet: Inlet, data: bytes, **message: int) -> None:
    """All of it, as it is read."""
    begun, told = time.monotonic(), 0
    while told < len(data):
        told += inlet.put(data[told:], **{**message, "offset": message.get("offset", 0) + told})
        assert time.monotonic() - begun < TIMEOUT, "it is not read"


def test_bytes_are_read_in_order_and_see_no_end(run: FedRun) -> None:
    run.feed("read a; echo $a; read b; echo $b; exec cat")
    assert run.inlet.put(b"one\ntw") == 6
    run.wait_kept(b"one\n")
    assert run.inlet.put(b"o\n") == 2
    run.wait_kept(b"one\ntwo\n")
    run.another_daemon()
    assert run.inlet.put(b"three\n") == 6
    run.wait_kept(b"one\ntwo\nthree\n")
    assert run.record.exit_code is None


def test_standard_input_can_be_opened_anew(run: FedRun) -> None:
    run.feed("read a < /dev/stdin; echo $a")
    run.inlet.put(b"again\n")
    run.wait_kept(b"again\n")


def test_what_is_not_read_is_not_taken_and_all_of_it_is_read_later(run: FedRun) -> None:
    go = run.directory / "go"
    os.mkfifo(go)
    run.feed(f"read _ < {go}; exec head -c 4000000 | cksum")
    data = os.urandom(4_000_000)
    taken, before = 0, -1
    begun = time.monotonic()
    while taken != before or time.monotonic() - begun < 1:
        before = taken
        taken += run.inlet.put(data[taken:])
    assert taken < 256 << 10
    with open(go, "w") as file:
        file.write("\n")
    tell(run.inlet, data[taken:])
    summed = subprocess.run(["cksum"], input=data, capture_output=True, check=True).stdout
    run.wait_kept(summed)


def test_what_a_dead_daemon_told_comes_before_what_the_next_tells(run: FedRun) -> None:
    go = run.directory / "go"
    os.mkfifo(go)
    run.feed(f"read _ < {go}; exec cat")
    lines = [b"%d %s\n" % (number, b"x" * 60_000) for number in range(4)]
    told = 0
    for number, line in enumerate(lines[:3], 1):
        # the next one goes on with what this one may have told
        for before in range(max(1, number - 1), number):
            told = run.inlet.put(lines[before - 1], message=before)
        told = run.inlet.put(line, message=number)
        run.another_daemon()
    with open(go, "w") as file:
        file.write("\n")
    tell(run.inlet, lines[2], message=3)
    tell(run.inlet, lines[3], message=4)
    wait_until(lambda: run.output().endswith(lines[3]), "the last one is read")
    whole = [line for line in run.output().split(b"\n") if len(line) > 60_000]
    assert [line[:1] for line in whole].count(b"3") == 1, "told once"
    assert whole[-2:] == [line[:-1] for line in lines[2:]]
    assert told <= len(lines[2])


def test_a_line_of_a_message_is_told_once(run: FedRun) -> None:
    run.feed("exec cat")
    assert run.inlet.put(b'{"id":7', message=7) == 7
    run.another_daemon()
    assert run.inlet.put(b'{"id":7}\n', message=7) == 9
    assert run.inlet.put(b'{"id":7}\n', message=7) == 9
    assert run.inlet.put(b"cancel\n", message=7, line=1) == 7
    run.another_daemon()
    assert run.inlet.put(b'{"id":7,"worded":"otherwise"}\n', message=7) == 30
    assert run.inlet.put(b"cancel\n", message=7, line=1) == 7
    assert run.inlet.put(b"next\n", message=3) == 5
    run.wait_kept(b'{"id":7}\ncancel\nnext\n')


def test_a_message_after_a_part_of_another_has_a_line_of_its_own(run: FedRun) -> None:
    run.feed("exec cat")
    run.inlet.put(b"par", message=7)
    run.inlet.put(b"next\n", message=8)
    run.wait_kept(b"par\nnext\n")


def test_a_program_that_closes_its_input_takes_no_more(run: FedRun) -> None:
    run.feed("exec < /dev/null; echo closed; exec sleep 600")
    run.wait_kept(b"closed\n")
    wait_until(lambda: refuses(run.inlet), "it is refused")
    with pytest.raises(OSError, match="refused"):
        Inlet(run.path).put(b"x")


def test_versions_come_first_and_kinds_that_are_unknown_are_answered(run: FedRun) -> None:
    run.feed("exec cat")

    def answer(peer: socket.socket) -> bytes:
        assert readable([peer.fileno()], TIMEOUT)
        return peer.recv(100)

    with unixsockets.connect(run.path) as peer:
        peer.send(b"v\1")
        assert answer(peer) == b"v\1"
        peer.send(b"z 80 24")
        assert answer(peer) == b"?z"
        peer.send(b"i" + bytes(23) + b"it goes on\n")
        run.wait_kept(b"it goes on\n")
    with unixsockets.connect(run.path) as peer:
        peer.send(b"v\2")
        assert (answer(peer), answer(peer)) == (b"v\1", b"")


@contextmanager
def held(pipe: Path) -> Iterator[None]:
    """While somebody else holds the mutex of a pipe."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, pipe], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        stat = Path(f"/proc/{holder.pid}/stat")
        wait_until(lambda: Path(f"/proc/{holder.pid}/syscall").read_text().startswith("1 "),
                   f"it is in write(2): {stat.read_text()}")
        yield
    finally:
        holder.kill()
        holder.communicate()


@contextmanager
def passed_on(run: FedRun, number: int, script: str) -> Iterator[int]:
    """A run that passed one of its pipes on to somebody who holds it, and for whom the monitor
    waits. The program itself has none any more: what has one cannot end. Its pid."""
    go = run.directory / "go"
    os.mkfifo(go)
    run.feed(f"read _ < {go}; exec < /dev/null > /dev/null 2>&1; {script}")
    program = run.wait_record(lambda record: record.program).program
    pipe = os.open(f"/proc/{program}/fd/{number}", os.O_RDWR)
    try:
        with open(go, "w") as file:
            file.write("\n")
        null = Path(f"/proc/{program}/fd/2")
        wait_until(lambda: os.readlink(null) == os.devnull, "it has no pipe any more")
        assert run.monitor is not None
        os.kill(run.monitor, signal.SIGSTOP)
        if number:
            os.write(pipe, b"there")
        run.inlet.put(b"x")
        with held(Path(f"/proc/{os.getpid()}/fd/{pipe}")):
            os.kill(run.monitor, signal.SIGCONT)
            yield program
    finally:
        os.close(pipe)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_end_is_recorded_though_a_pipe_is_held(run: FedRun, number: int) -> None:
    with passed_on(run, number, f"trap 'exit 3' TERM; {DOZE}") as program:
        os.kill(program, signal.SIGTERM)
        record = run.wait_record(lambda record: record.finished)
        assert record.exit_code == 3
        run.record_path.unlink()  # as a daemon does that has acted on the end
    assert run.wait_monitor() == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_death_of_the_daemon_is_obeyed_though_a_pipe_is_held(run: FedRun, number: int) -> None:
    """The program is the agent: when it has ended, the monitor ends the cell."""
    with passed_on(run, number, DOZE) as program:
        run.daemon_dies()
        os.kill(program, signal.SIGKILL)
        assert run.cell.wait_end().finished
    assert run.wait_end().finished


# what version 0.2 left


@pytest.mark.parametrize(
    ("note", "found"),
    [
        ("7 all\n", b"there\n"),
        ("7 cancelled\n", b"there\n"),
        ("7 whole\n", b"seven\n"),
        ("7 part\n", b"\nseven\n"),
        ("6 all\n", b"seven\n"),
        (None, b"seven\n"),
    ],
)
def test_a_fifo_is_taken_over_with_what_is_known_of_it(
    tmp_path: Path, note: str | None, found: bytes
) -> None:
    path, inlet = tmp_path / "fifo", Inlet(tmp_path / "socket")
    os.mkfifo(path)
    noted = tmp_path / "fifo~"
    if note is not None:
        noted.write_text(note)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    listening = inlet.listen()
    words = orders.words(native("feed"), listening, path, *_noted(noted))
    assert subprocess.run(words, pass_fds=[listening], check=False).returncode == 0
    os.close(listening)
    inlet.put(b"seven\n", message=7)
    if b"there" in found:
        inlet.put(b"there\n")
    assert readable([reader], TIMEOUT)
    read = b""
    while not read.endswith(found[-6:]):
        read += os.read(reader, 100)
    assert read == found
    assert not path.exists()
    assert not noted.exists()
    os.close(reader)
    wait_until(lambda: refuses(inlet), "it ends with the last reader")
    inlet.close()


def refuses(inlet: Inlet) -> bool:
    try:
        inlet.put(b"x")
    except OSError:
        return True
    return False
