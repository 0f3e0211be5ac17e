"""What a meter costs: requests and streams through it, the files of agents, and their starts."""

from __future__ import annotations

import ctypes
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from bench.agents import directory_of, running_agent, whole_life
from bench.measure import Episode, Pair, Part, Ratio, Side, Sides, compare_episodes, undisturbed
from bench.reference.models import proxy
from bench.setting import Setting, another_daemon, installed, serving
from bench.trees import cpu_clock

#: requests of a round, of which the median counts
_REQUESTS: Final = 30
_LONG_REQUESTS: Final = 8
_LONG: Final = 1 << 20
#: events of a stream, and how many come in a second
_EVENTS: Final = 150
_SECOND: Final = 50
_STREAMS: Final = 50
_SECONDS: Final = 60.0
_CLONE_NEWNET: Final = 0x40000000
_SENT: Final = re.compile(rb"<(\d+)>")
_END: Final = b"0\r\n\r\n"


def _networks(*lines: str) -> str:
    names = [line.partition(":")[0] for line in lines]
    allowed = ", ".join(f'"network:{name} connect"' for name in names)
    return "".join(["networks:\n", *(f"  {line}\n" for line in lines), f"policy: [{allowed}]\n"])


@dataclass(frozen=True, slots=True)
class _Way:
    """From a cell to the API: a port of its loopback, and who is on the way."""

    cell: int
    port: int
    nginx: int
    meter: int

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection from within the cell's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        cells = os.open(f"/proc/{self.cell}/ns/net", os.O_RDONLY)
        connection = socket.socket()
        try:
            if libc.setns(cells, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            try:
                connection.close()
                connection = socket.create_connection(("127.0.0.1", self.port), _SECONDS)
            finally:
                libc.setns(own, _CLONE_NEWNET)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        finally:
            connection.close()
            os.close(cells)
            os.close(own)


def _post(**asked: object) -> bytes:
    body = json.dumps({"model": "m", **asked}).encode()
    head = b"POST /v1/messages HTTP/1.1\r\nHost: api\r\nContent-Type: application/json\r\n"
    return b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)


def _ask(connection: socket.socket, request: bytes) -> tuple[int, int]:
    """Nanoseconds until the first byte of a whole answer, and until its last one."""
    begin = time.perf_counter_ns()
    connection.sendall(request)
    said = connection.recv(1 << 16)
    first = time.perf_counter_ns() - begin
    while not said.endswith(b"}}"):
        more = connection.recv(1 << 16)
        if not more:
            raise RuntimeError(f"a request of the bench was not answered: {said!r}")
        said += more
    last = time.perf_counter_ns() - begin
    if not said.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a request of the bench was refused: {said!r}")
    return first, last


def _ask_now_and_then(
    connection: socket.socket, request: bytes, count: int
) -> Iterator[tuple[int, int]]:
    """Times of so many answers. Nobody asks without a pause, in which others would use up what a
    busy machine grants a process at once."""
    for _ in range(count):
        time.sleep(1 / _SECOND)
        yield _ask(connection, request)


def _follow(
    connections: Sequence[socket.socket], begin: Callable[[], object] = lambda: None
) -> list[int]:
    """Nanoseconds that each event of their streams was on its way; `begin` is called at the first
    one."""
    request = _post(stream=True, events=_EVENTS, second=_SECOND)
    delays: list[int] = []
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(request)
        left = len(connections)
        while left:
            for key, _ in selector.select(_SECONDS):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                now = time.monotonic_ns()
                sent = _SENT.findall(data)
                if sent and not delays:
                    begin()
                delays += [now - int(each) for each in sent]
                if not data or data.endswith(_END):
                    selector.unregister(key.fileobj)
                    left -= 1
    if len(delays) != len(connections) * _EVENTS:
        raise RuntimeError(f"{len(delays)} events came of {len(connections)} streams")
    return delays


def _travel(way: _Way) -> dict[str, float]:
    """All times of one way."""
    found: dict[str, float] = {}
    with undisturbed(), ExitStack() as stack:
        one = stack.enter_context(way.connected())
        short = _post()
        _ask(one, short)
        found["first"] = median(first for first, _ in _ask_now_and_then(one, short, _REQUESTS))
        long = _post(messages="x" * (_LONG - len(short)))
        found["long"] = median(last for _, last in _ask_now_and_then(one, long, _LONG_REQUESTS))
        used = {}

        def begin() -> None:
            used.update({pid: cpu_clock(pid) for pid in (way.nginx, way.meter)})

        delays = _follow([one], begin)
        found["nginx"], found["meter"] = (
            (cpu_clock(pid) - used[pid]) / _EVENTS for pid in (way.nginx, way.meter)
        )
        found["delay"], found["late"] = median(delays), _late(delays)
        many = [stack.enter_context(way.connected()) for _ in range(_STREAMS)]
        found["late of many"] = _late(_follow(many))
    return found


def _late(delays: Sequence[int]) -> float:
    """99 of a hundred are earlier."""
    return quantiles(delays, n=100)[-1]


def measure_meter(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    base = setting.base / row
    base.mkdir()
    api, behind, before = (base / f"{name}.sock" for name in ("api", "nginx", "meter"))
    command = proxy(base, api, behind)
    if command is None:
        return []
    config = base / "meter.yaml"
    config.write_text(
        f"networks: {{models: {{api: anthropic, socket: {before}, upstream: {behind}}}}}\n"
        "rates: {m: {in: 5, out: 25}}\n"
    )
    stub = [installed("python"), "-m", "bench.reference.models", str(api)]
    meter = [installed("ctxfs-meter"), "--config", str(config)]
    networks = _networks(
        f"plain: {{socket: {behind}, port: 8081}}",
        f"metered: {{socket: {before}, port: 8082, header: counters}}",
    )
    with ExitStack() as stack:
        stack.enter_context(serving(stub, base / "api.log"))
        nginx = stack.enter_context(serving(command, base / "nginx.log", behind)).pid
        counting = stack.enter_context(serving(meter, base / "meter.log")).pid
        own = stack.enter_context(another_daemon(setting, networks))
        _, pid = stack.enter_context(running_agent(own))
        plain, metered = (_Way(pid, port, nginx, counting) for port in (8081, 8082))
        ours = Episode(name="relay, meter, nginx", run=lambda: _travel(metered))
        theirs = Episode(name="relay, nginx", run=lambda: _travel(plain))

        def pair(name: str, *parts: tuple[str, Episode, str]) -> Pair:
            subject, reference = (
                Part(name=said, episode=episode, time=time) for said, episode, time in parts
            )
            return Pair(row=f"{row}-{name}", subject=subject, reference=reference)

        def beside(name: str, time: str) -> Pair:
            return pair(name, ("with a meter", ours, time), ("without", theirs, time))

        def many(said: str, way: Episode) -> Pair:
            of_one = ("1 stream", way, "late")
            return pair("late", (f"{_STREAMS}, {said}", way, "late of many"), of_one)

        return compare_episodes(
            [
                beside("first", "first"),
                beside("delay", "delay"),
                many("a meter", ours),
                many("none", theirs),
                beside("body", "long"),
                pair("cpu", ("meter", ours, "meter"), ("nginx", ours, "nginx")),
            ],
            rounds,
        )


# files and starts


@contextmanager
def _each(setting: Setting) -> Iterator[tuple[Setting, Setting]]:
    """Two daemons: with a network that is metered, and with one that is not. Nobody listens
    there."""
    place = f"socket: {setting.base}/nobody.sock, port: 8081"
    with (
        another_daemon(setting, _networks(f"models: {{{place}, header: counters}}")) as metered,
        another_daemon(setting, _networks(f"models: {{{place}}}")) as plain,
    ):
        yield metered, plain


def usage_sides(setting: Setting, stack: ExitStack) -> Sides:
    def reader(own: Setting) -> Callable[[], object]:
        name, _ = stack.enter_context(running_agent(own))
        return Path(directory_of(own, name), "usage").read_bytes

    metered, plain = map(reader, stack.enter_context(_each(setting)))
    return Side(name="metered", call=metered), [Side(name="plain", call=plain)]


def start_sides(setting: Setting, stack: ExitStack) -> Sides:
    metered, plain = stack.enter_context(_each(setting))
    reference = Side(name="plain", call=lambda: whole_life(plain))
    return Side(name="metered", call=lambda: whole_life(metered)), [reference]
