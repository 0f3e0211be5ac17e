"""A lead and hosts at its nodes, with a wire to each (``wires.py``), and agents placed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from tests.worlds.daemon import Daemon, daemon_of, end_process, wait_until, write
from tests.worlds.nodes import Lead, lead_of, node, peer
from tests.worlds.wires import wire

SETTINGS: Final = "grace: 300ms\n"


class Way(Protocol):
    """A wire, or what is cut as one is (``wires.py``)."""

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def say(self, word: str) -> Any: ...
    def ends(self) -> list[int]: ...


@dataclass
class Three:
    lead: Lead
    hosts: dict[str, Daemon]
    wires: Mapping[str, Way]
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def daemon(self) -> Daemon:
        return self.lead.daemon

    def place(self, program: str, where: str = "n2", **files: str) -> Path:
        """A placed agent that has been started."""
        name = f"x{next(self.numbers)}"
        directory = self.daemon.make(name)
        write(directory / "placement", f"node={where}")
        for file, text in {"exec": f"sh -c '{program}'", **files}.items():
            write(directory / file, text)
        write(directory / "ctl", "start")
        return directory

    def there(self, directory: Path, where: str = "n2") -> Path:
        """The directory of a placed agent at its host."""
        return self.hosts[where].agent_dir(f"{directory.name.removesuffix('.d')}@one")

    def runs(self, directory: Path, where: str = "n2") -> bool:
        """Whether a process of it is left."""
        name = self.there(directory, where).name.removesuffix(".d")
        return bool(self.hosts[where].processes_of(name))

    def go(self, directory: Path, where: str = "n2") -> None:
        """Has the program go on that waits for a sleep(1) to end."""
        wake(self.hosts[where], self.there(directory, where).name.removesuffix(".d"))

    def gone(self, directory: Path, where: str = "n2") -> None:
        wait_until(lambda: not self.runs(directory, where), "nothing of it runs")


def wake(daemon: Daemon, name: str) -> None:
    """Ends the sleep(1) for which an agent's program waits."""
    wait_until(lambda: daemon.processes_of(name, "sleep"), "it sleeps")
    for pid in daemon.processes_of(name, "sleep"):
        end_process(pid)


@contextmanager
def three_of(settings: str = SETTINGS, **leases: str) -> Iterator[Three]:
    """Nodes by these names, each with its lease."""
    with ExitStack() as stack:
        hosts, wires = {}, {}
        for name in leases:
            config = f"node_name: at-{name}\n{settings}"
            hosts[name] = stack.enter_context(daemon_of(config=config))
            path = f"{hosts[name].base}/wire"
            wires[name] = stack.enter_context(wire(path, peer(hosts[name])))
        nodes = {name: node(wires[name].command, lease=lease) for name, lease in leases.items()}
        lead = stack.enter_context(lead_of(nodes, f"node_name: one\n{settings}"))
        yield Three(lead, hosts, wires)
