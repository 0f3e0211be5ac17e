"""A lead with many links on which nothing happens, beside the same lead without.

At their other ends is one process, to which each command hands its link:

    python -m bench.links SOCKET
"""

from __future__ import annotations

import heapq
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from bench.agents import agent, fresh_name
from bench.measure import Episode, Pair, Part, Ratio, Side, Unit, compare, compare_episodes
from bench.setting import Setting, another_daemon, serving
from bench.sizes import pss
from bench.trees import cpu_clock
from runtime.peers.lease import Lease
from runtime.peers.peering import Hello, Host
from runtime.peers.streams import Stream

LINKS: Final = 1000
#: opened before anything is measured
_WARMING: Final = 10
#: seconds in which each host asks so often
_IDLE_SECONDS: Final = 30.0
_ASKS: Final = 3
#: a command: the socket and the name of its node are its words
_HAND_OVER: Final = """\
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [sys.argv[2].encode()], [0])
os.execv("/bin/sleep", ["sleep", "infinity"])
"""


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _serve(path: str) -> None:
    """Hosts that run nothing, and ask for their leases."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(LINKS)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    hosts: dict[int, tuple[str, Host]] = {}
    due: list[tuple[float, int]] = []
    while True:
        for key, _ in ready.select(max(0.0, due[0][0] - _now()) if due else None):
            if (fd := key.fd) == listener.fileno():
                with listener.accept()[0] as connection:
                    name, ends, *_ = socket.recv_fds(connection, 256, 1)
                for fd in ends:  # none, if it was looked whether this listens
                    os.set_blocking(fd, True)
                    ready.register(fd, selectors.EVENT_READ)
                    hosts[fd] = name.hex(), Host()
                    os.write(fd, hosts[fd][1].outgoing())
                continue
            known, host = hosts[fd]
            if not (data := os.read(fd, 1 << 16)):
                raise EOFError(f"a link has ended: {bytes.fromhex(known)!r}")
            for event in host.feed(data, _now()):
                if isinstance(event, Hello):
                    host.go_on({"as": known}, Stream(), Lease(event.said["ttl"], 0), event)
                    heapq.heappush(due, (0.0, fd))
            os.write(fd, host.outgoing())
        while due and due[0][0] <= _now():
            _, fd = heapq.heappop(due)
            heapq.heappush(due, (hosts[fd][1].tick(_now()), fd))
            os.write(fd, hosts[fd][1].outgoing())


def _want(lead: Setting, name: str) -> None:
    """The link is open, and is for another minute."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(lead.ctx / "ctxd.sock"))
        connection.sendall(b'{"id": "1", "op": "nodes", "check": "%s"}\n' % name.encode())
        (row,) = json.loads(connection.makefile("rb").readline())["nodes"]
    if row["state"] != "up":
        raise RuntimeError(f"no link to {name}: {row['error']}")


def measure_links(row: str, setting: Setting, rounds: int) -> list[Ratio]:
    with ExitStack() as stack:
        hosts = setting.base / "hosts"
        words = ["-m", "bench.links", str(hosts)]
        log = setting.base / "hosts.log"
        nodes = {}
        for name in map(str, range(LINKS)):
            command = [sys.executable, "-ISc", _HAND_OVER, str(hosts), f"n{name}"]
            nodes[f"n{name}"] = {"command": command, "as": "owner", "users": {"root": "root"}}
        config = f"links: {LINKS}\nnodes: {json.dumps(nodes)}\n"
        lead, alone = (stack.enter_context(another_daemon(setting, config)) for _ in range(2))
        # ends before the leads do
        stack.enter_context(serving([sys.executable, *words], log, hosts))
        names = list(nodes)
        pool = stack.enter_context(ThreadPoolExecutor(16))

        def want(names: list[str]) -> None:
            list(pool.map(lambda name: _want(lead, name), names))

        want(names[:_WARMING])
        before = pss(lead.daemon)
        want(names)
        taken = (pss(lead.daemon) - before) / (LINKS - _WARMING)

        def idle() -> Mapping[str, float]:
            want(names)
            begin, used = time.perf_counter_ns(), [cpu_clock(each.daemon) for each in (lead, alone)]
            time.sleep(_IDLE_SECONDS)
            both = zip((lead, alone), used, strict=True)
            more, less = (cpu_clock(each.daemon) - since for each, since in both)
            return {
                "cpu": more - less,
                "wall": time.perf_counter_ns() - begin,
                "an ask": (more - less) / LINKS / _ASKS,
                "200 us": 200e3,
                "a link": taken,
                "64 KiB": 64 << 10,
            }

        episode = Episode(name=f"{LINKS} links", run=idle)

        def pair(suffix: str, subject: str, reference: str, unit: Unit = "ns") -> Pair:
            parts = (subject, reference)
            ours, its = (Part(name=each, episode=episode, time=each) for each in parts)
            return Pair(row=f"{row}-{suffix}", subject=ours, reference=its, unit=unit)

        pairs = [pair("cpu", "cpu", "wall"), pair("ask", "an ask", "200 us")]
        found = compare_episodes([*pairs, pair("memory", "a link", "64 KiB", "bytes")], rounds)
        sides = []
        want(names)
        for each, what in ((lead, "a bystander"), (alone, "without links")):
            path = f"{stack.enter_context(agent(each, fresh_name()))}/status"
            sides.append(Side(name=what, call=lambda path=path: os.stat(path)))  # type: ignore[misc]
        return found + compare(f"{row}-stat", sides[0], sides[1:], max(rounds, 9))


if __name__ == "__main__":
    _serve(sys.argv[1])
