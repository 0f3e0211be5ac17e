"""A lead and a host whose way to each other fails: what is seen at the lead, and when the last
process is gone at the host, beside the bounds of that (``took`` of tests/nodes)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.peers.lease import bound
from tests.worlds.daemon import read, wait_dead, wait_status
from tests.worlds.everywhere import Everywhere
from tests.worlds.invariants import Operator
from tests.worlds.three import Three

#: of agents, in seconds, and what the lead reckons with (runtime.peers.leading.GRACE)
GRACE: Final = 0.3
_MOST_GRACE: Final = 10.0
#: beyond lease and grace, on a machine that is busy; and beyond what is promised to nobody
LATE: Final = 2.0
_LATER: Final = 20.0
STUBBORN: Final = "trap : TERM; while :; do sleep 1; done"
Took = Callable[[str, float, float], None]


@dataclass(kw_only=True)
class Pair(Three):
    lease: float
    everywhere: Everywhere
    took: Took

    @property
    def lost(self) -> float:
        """Seconds until the lead says that all is lost."""
        return bound(self.lease, _MOST_GRACE)

    @property
    def patience(self) -> float:
        return self.lost + 30

    def cut(self, how: str = "stop") -> None:
        made = self.wires["n2"]
        made.stop() if how == "stop" else made.say(how)

    def heal(self) -> None:
        self.wires["n2"].go_on()
        self.wires["n2"].say("go")

    def busy(self, program: str = "sleep 1000", **files: str) -> Path:
        """A placed agent that runs."""
        directory = self.place(program, **files)
        wait_status(directory, "busy")
        return directory

    def gone_in_time(self, began: float, *directories: Path) -> None:
        """No process is left when the lease and the grace are over."""
        for each in directories:
            self.gone(each)
        seconds, most = time.monotonic() - began, self.lease + GRACE
        self.took("last process gone", seconds, most)
        assert seconds < most + LATE

    def lost_in_time(self, began: float, *directories: Path) -> None:
        """The lead says so, and not before it can be sure."""
        for each in directories:
            wait_dead(each, timeout=self.patience)
            assert end_of(each) == ("interrupted", "runtime_lost")
        seconds = time.monotonic() - began
        self.took("known to be lost", seconds, self.lost)
        assert bound(self.lease, GRACE) < seconds < self.lost + _LATER

    def works(self) -> None:
        """The node is in use, and each says what is so, of itself and of the other."""
        self.lead.wait_reached()
        again = self.place("echo again")
        wait_dead(again)
        assert read(again, "out") == "again\n"
        alive = [each.name for each in self.hosts["n2"].cgroup.path.glob("user-*/agent-*")
                 if "populated 1" in (each / "cgroup.events").read_text()]  # fmt: skip
        assert not alive, alive
        self.everywhere.agree()
        self.everywhere.look_back(Operator(self.daemon))


def end_of(directory: Path) -> tuple[str, str]:
    """What has become of an agent."""
    assert read(directory, "status") == "dead\n"
    return read(directory, "outcome").strip(), read(directory, "reason").strip()


@contextmanager
def pair_of(three: AbstractContextManager[Three], lease: float, took: Took) -> Iterator[Pair]:
    with three as made, closing(Everywhere(made, lease)) as everywhere:
        yield Pair(made.lead, made.hosts, made.wires, lease=lease, everywhere=everywhere, took=took)
