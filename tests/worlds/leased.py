"""A daemon that starts agents under leases, as it starts those of other machines.

The test grants, puts off and stops the lease itself. Without the test all is as ever: leases are
enforced by monitors, which need no daemon.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import ctxfs.daemon
from runtime.cell.leases import Leases
from runtime.cell.port import LiveCell
from runtime.cell.starting import Starter
from runtime.kernel import clock
from tests.worlds.daemon import Daemon, running

#: a directory that has the number of an agent's lease in a file of its name
_GIVEN: Final = "CTXTEST_LEASES"
#: by which a lease is put off, and how often, in seconds
AHEAD: Final = 2.0
_EVERY: Final = 0.1


class Leased(Daemon):
    module = __name__

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given = self.base / "leases"
        self.given.mkdir()
        self.env[_GIVEN] = str(self.given)

    def give(self, name: str, number: int) -> None:
        """An agent that is not started yet is to run under a lease."""
        (self.given / name).write_text(str(number))


@contextmanager
def leased(**options: Any) -> Iterator[Leased]:
    daemon = Leased(**options)
    with running(daemon):
        yield daemon


class Lease:
    """One that is put off until it is let go."""

    def __init__(self, daemon: Daemon) -> None:
        self._leases = Leases(daemon.runtime / "lease")
        self.end = clock.up() + AHEAD
        self.number = self._leases.grant(self.end)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._put_off)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _put_off(self) -> None:
        while not self._over.wait(_EVERY):
            self.end = clock.up() + AHEAD
            self._leases.extend(self.number, self.end)

    def let_go(self) -> float:
        """Its end."""
        self._over.set()
        self._thread.join()
        return self.end


def _lease_of(name: str) -> int | None:
    with suppress(FileNotFoundError):
        return int(Path(os.environ[_GIVEN], name).read_text())
    return None


_launch: Final = Starter.launch


async def _launch_leased(
    self: Starter, live_cell: LiveCell, terminal: tuple[int, int] | None = None
) -> None:
    live_cell.lease = _lease_of(live_cell.agent.name)
    await _launch(self, live_cell, terminal)


def main() -> int:
    """The daemon itself."""
    Starter.launch = _launch_leased  # type: ignore[method-assign]
    return ctxfs.daemon.main()


if __name__ == "__main__":
    sys.exit(main())
