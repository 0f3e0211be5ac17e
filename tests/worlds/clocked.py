"""Daemons whose machines have clocks of their own: one that somebody sets, and those of a machine
that sleeps, where CLOCK_MONOTONIC stands still and CLOCK_BOOTTIME goes on.

All that is of the machine stops while it sleeps, its agents and monitors too; static programs,
such as monitors, have the clocks of this machine.
"""

from __future__ import annotations

import functools
import json
import mmap
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.worlds.daemon import MARK, Daemon, running, wait_until
from tests.worlds.nodes import Lead, node, peer
from tests.worlds.three import SETTINGS, Three
from tests.worlds.wires import wire

_SOURCE: Final = Path(__file__).with_name("clocks.c")
_NANO: Final = 10**9


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """A directory with the library."""
    made = tempfile.TemporaryDirectory(prefix=f"{MARK}-clocks-", dir="/tmp")
    command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", f"{made.name}/clocks.so"]
    subprocess.run([*command, str(_SOURCE)], check=True)
    return made


class Clocked(Daemon):
    executed = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        file = self.base / "clocks"
        file.write_bytes(bytes(16))
        with open(file, "r+b") as opened:
            self._ahead = memoryview(mmap.mmap(opened.fileno(), 16)).cast("q")
        self.env |= {"LD_PRELOAD": f"{_compiled().name}/clocks.so", "CTXTEST_CLOCKS": str(file)}

    def set_by(self, seconds: float) -> None:
        """Sets the wall clock so much ahead of this machine's."""
        self._ahead[0] = int(seconds * _NANO)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Its machine is."""
        cgroups = (self.cgroup, self.own)
        for each in cgroups:
            each.freeze(True)
        for each in cgroups:
            wait_until(lambda e=each: _is_frozen(e.path), "it sleeps")  # type: ignore[misc]
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self._ahead[1] -= time.monotonic_ns() - began
            for each in cgroups:
                each.freeze(False)


def _is_frozen(path: Path) -> bool:
    return "frozen 1" in (path / "cgroup.events").read_text()


@contextmanager
def clocked_three(lease: float) -> Iterator[Three]:
    """One host, called n2, and a wire."""
    with ExitStack() as stack:
        host = Clocked(config=f"node_name: at-n2\n{SETTINGS}")
        stack.enter_context(running(host))
        made = stack.enter_context(wire(f"{host.base}/wire", peer(host)))
        nodes = json.dumps({"n2": node(made.command, lease=f"{lease:g}s")})
        daemon = Clocked(config=f"node_name: one\nnodes: {nodes}\n{SETTINGS}")
        stack.enter_context(running(daemon))
        yield Three(Lead(daemon), {"n2": host}, {"n2": made})
