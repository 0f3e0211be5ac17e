"""The program ctxfs-meter: signals, other meters, and the files that it opens."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runtime.metering.test_passing import GREETING, Counters
from tests.worlds.models import RATES, Metered, metered
from tests.worlds.readiness import readable

BODY = b'{"model":"m-10-5"}'
REQUEST = b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Metered]:
    with metered(tmp_path) as made:
        yield made


class Relay:
    """A connection to a meter, with the descriptor of one agent's counters."""

    def __init__(self, meter: Metered, counters: Counters) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(meter.socket))
        with counters.path.open("r+b") as file:
            socket.send_fds(self.socket, [GREETING], [file.fileno()])

    def status(self) -> int:
        """The answer's, all of which is read."""
        came = b""
        while b"}" not in came:
            data = self.socket.recv(65536)
            assert data, came
            came += data
        return int(came.split()[1])

    def ask(self) -> int:
        self.socket.sendall(REQUEST)
        return self.status()

    def close(self) -> None:
        self.socket.close()


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trying:
        return trying.connect_ex(str(path)) == 0


def test_one_meter_at_a_time_writes_a_file(meter: Metered, tmp_path: Path) -> None:
    """The next one may once the first is gone, although relays have its files."""
    counters = Counters(tmp_path / "kid", "kid")
    (tmp_path / "other").mkdir()
    first = Relay(meter, counters)
    assert first.ask() == 200
    with metered(tmp_path / "other") as other:
        refused = Relay(other, counters)
        assert refused.status() == 503
        assert first.ask() == 200
        held = counters.path.open("r+b")
        meter.end(signal.SIGKILL)
        again = Relay(other, counters)
        assert again.ask() == 200
        for each in (first, refused, again, held):
            each.close()
    assert counters.tokens == (30, 15)


def test_signals(meter: Metered, tmp_path: Path) -> None:
    """SIGHUP reads again, of which a mistake changes nothing; SIGTERM waits for who is asking."""
    counters = Counters(tmp_path / "kid", "kid")
    process = meter.process
    assert process is not None and process.stderr is not None
    good = meter.config.read_text()
    meter.config.write_text(f"{good}rates2: 5\n")
    process.send_signal(signal.SIGHUP)
    assert readable([process.stderr.fileno()], 30)
    told = process.stderr.readline().decode()
    assert f"{meter.config}:4: rates2: unknown setting" in told and "of before hold" in told
    idle = Relay(meter, counters)
    assert idle.ask() == 200
    old, meter.socket = meter.socket, tmp_path / "moved.sock"
    meter.configure(RATES)
    process.send_signal(signal.SIGHUP)
    while can_connect(old):
        os.sched_yield()
    moved = Relay(meter, counters)
    assert moved.ask() == 200
    meter.upstream.may_answer.clear()
    busy = Relay(meter, counters)
    busy.socket.sendall(REQUEST)
    while len(meter.upstream.asked) < 3:
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    assert moved.socket.recv(1) == b"", "nobody waits for the idle ones"
    meter.upstream.may_answer.set()
    assert busy.status() == 200
    assert process.wait(30) == 0
    for each in (idle, busy, moved):
        each.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
def test_nothing_is_opened_after_the_start(meter: Metered, tmp_path: Path) -> None:
    """Whatever is asked, answered, refused or broken."""
    counters = Counters(tmp_path / "kid", "kid")
    assert meter.process is not None
    trace = tmp_path / "trace"
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-e", "trace=%file,%process", "-o", trace,
                               "-p", str(meter.process.pid)], stderr=subprocess.PIPE)  # fmt: skip
    status = Path(f"/proc/{meter.process.pid}/status")
    while "TracerPid:\t0" in status.read_text():
        assert tracer.poll() is None
    for request in (
        REQUEST, REQUEST.replace(b"POST", b"GET"), REQUEST.replace(b"model", b"\xffodel"),
        b"\0\r\n\r\n", REQUEST.replace(b"Host: h", b"Content-Length: 3"),
        REQUEST.replace(b"m-10-5", b"wrong1"),
    ):  # fmt: skip
        relay = Relay(meter, counters)
        relay.socket.sendall(request)
        assert relay.status() in (200, 400, 403, 502)
        relay.close()
    assert can_connect(meter.socket)
    tracer.send_signal(signal.SIGINT)
    tracer.communicate(timeout=30)
    # a descriptor is looked at by an empty path
    named = [line for line in trace.read_text().splitlines() if
             not re.search(r'\(\d+, "", .*AT_EMPTY_PATH', line)]
    assert not named, named
