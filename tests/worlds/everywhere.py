"""What must hold of a lead and its hosts together, whichever of them died or was cut off.

``Sights`` looks at the cgroups of all of them, whatever their daemons say. ``Everywhere`` compares
what it saw with what each node says: of its own agents, and of those that others have there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from runtime.peers.lease import bound
from runtime.records.settings import PLACED_GRACE
from tests.worlds.daemon import Daemon, read, wait_until
from tests.worlds.histories import kept_histories
from tests.worlds.invariants import (
    COUNTED,
    SETTLE_SECONDS,
    AllFacts,
    Invariants,
    Operator,
    is_below,
    is_frozen,
)
from tests.worlds.three import Three

#: seconds between two looks at cgroups
_EVERY: Final = 0.1
#: for which what a lead calls lost may execute
_LATE: Final = 1.0
_LOST: Final = ("runtime_lost", "unconfirmed")
#: what a lead says that is stopped, and does not wait for leases
_STOPPED: Final = "shutdown,unconfirmed"


def _agents_below(base: Path) -> Iterator[Path]:
    """The cgroups of agents, each before its children."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(base):
            if entry.name.startswith("agent-"):
                yield Path(entry.path)
                yield from _agents_below(Path(entry.path, "child"))


class Sights:
    """When processes of agents were seen that execute, by node, name and cgroup: seconds since the
    epoch, first and last."""

    def __init__(self, daemons: Mapping[str, Daemon]) -> None:
        self._daemons = daemons
        self.spans: dict[tuple[str, str, int], list[float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_EVERY):
            for node, daemon in self._daemons.items():
                for user in daemon.cgroup.path.glob("user-*"):
                    for path in _agents_below(user):
                        with contextlib.suppress(OSError):  # it is gone
                            self._see(node, path)

    def _see(self, node: str, path: Path) -> None:
        before = time.time()
        events = (path / "cgroup.events").read_text()
        if "populated 1" in events and "frozen 1" not in events:
            name = path.name.removeprefix("agent-")
            key = node, name, path.stat().st_ino
            self.spans.setdefault(key, [time.time(), before])[1] = before

    def of(self, name: str, *nodes: str) -> list[tuple[str, float, float]]:
        """What was seen of an agent at nodes, in the order of its lives."""
        found = [
            (node, span[0], span[1]) for (node, each, _), span in tuple(self.spans.items())
            if each == name and node in nodes
        ]  # fmt: skip
        return sorted(found, key=lambda sight: sight[1])


class Everywhere:
    """A lead, named "", and its hosts by their nodes."""

    def __init__(self, three: Three, lease: float) -> None:
        self._three = three
        self._bound = bound(lease, PLACED_GRACE)
        self._daemons = {"": three.daemon, **three.hosts}
        self._each = {node: Invariants(daemon) for node, daemon in self._daemons.items()}
        for node in three.hosts:
            self._each[node].is_held_from_there = self._is_held
        self.sights = Sights(self._daemons)
        #: lives that were over before
        self._earlier = set(kept_histories(three.daemon.state))
        #: the longest that a child has executed after its parent, in seconds
        self.orphaned = 0.0

    @property
    def lead(self) -> Invariants:
        return self._each[""]

    @property
    def placed(self) -> int:
        """Lives at nodes that were seen."""
        return sum("@" in name for _, name, _ in tuple(self.sights.spans))

    def close(self) -> None:
        self.sights.close()
        for each in self._each.values():
            each.close()

    def observe(self) -> None:
        for each in self._each.values():
            each.observe()

    def _is_held(self, name: str) -> bool:
        own, _, alias = name.partition("@")
        return bool(alias) and is_below(self._three.daemon.agent_dir(own), is_frozen)

    def check(self, operator: Operator) -> None:
        """Once all daemons have started and every wire passes all on."""
        self.lead.check(operator)
        for node in self._three.hosts:
            self._each[node].check(Operator(self._daemons[node]))
        self.agree()
        self.look_back(operator)

    def dismantle(self, operator: Operator) -> None:
        """All is removed at the lead, and nothing is left anywhere."""
        self.lead.dismantle(operator)
        for node, host in self._three.hosts.items():
            left = host.root / "agent"
            wait_until(lambda d=left: not [name for name in os.listdir(d) if "@" in name],  # type: ignore[misc]
                       f"no copy is left at {node}", SETTLE_SECONDS)  # fmt: skip
            self._each[node].dismantle(Operator(host))

    def agree(self) -> None:
        """Each node says what is so, and what the others say."""
        said: list[str] = []

        def agrees() -> bool:
            said[:] = self._contradictions()
            return not said

        try:
            wait_until(agrees, "all nodes agree", SETTLE_SECONDS)
        except AssertionError:
            raise AssertionError("\n".join(["nodes do not agree:", *said])) from None

    def _contradictions(self) -> Iterator[str]:
        for node, invariants in self._each.items():
            facts: AllFacts = {}
            for wrong in invariants._contradictions(facts):
                yield f"{node or 'the lead'}: {wrong}"
        with contextlib.suppress(FileNotFoundError):
            yield from self._disagreements()

    def _disagreements(self) -> Iterator[str]:
        led = {}
        for directory in (self._three.daemon.root / "agent").glob("*.d"):
            name, status = directory.name.removesuffix(".d"), read(directory, "status").strip()
            if not (node := read(directory, "node")) or status == "dead":
                continue
            where = node.split()[0].removeprefix("name=")
            led[where, read(directory, "incarnation")] = name
            there = self._three.there(directory, where)
            if not there.exists():
                yield f"{name} is {status}, and is not at {where}"
            elif (found := read(there, "status").strip()) != status:
                yield f"{name} is {status}, at {where} it is {found}"
            elif read(there, "incarnation") != read(directory, "incarnation"):
                yield f"{name} is another one at {where}"
        for node, host in self._three.hosts.items():
            for there in (host.root / "agent").glob("*@*.d"):
                known = (node, read(there, "incarnation")) in led
                if (status := read(there, "status").strip()) != "dead" and not known:
                    yield f"{there.name} is {status} at {node}, its lead does not know of it"

    # over all the time that has passed

    def look_back(self, operator: Operator) -> None:
        wrong = [*self._after_loss(), *self._after_parents(operator)]
        assert not wrong, "\n".join(wrong)

    def _lives(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for path, text in kept_histories(self._three.daemon.state).items():
            if path.name == "events.jsonl" and path not in self._earlier:
                yield path.parts[-3], [json.loads(line) for line in text.splitlines()]

    def _after_loss(self) -> Iterator[str]:
        """I1: nothing executes after its lead said that it is lost. I3: each fact is told once."""
        for name, events in self._lives():
            origins = [event["origin"] for event in events if "origin" in event]
            if not all(one < other for one, other in pairwise(origins)):
                yield f"{name} was told of {origins}"
            lost = [event for event in events if str(event.get("reason", "")).endswith(_LOST)
                    and event["reason"] != _STOPPED]  # fmt: skip
            for node, first, last in self.sights.of(f"{name}@one", *self._three.hosts):
                if lost and first < (at := _seconds(lost[0]["ts"])) and last > at + _LATE:
                    yield f"{name} executed {last - at:.1f} s after it was lost, at {node}"
        for directory in (self._three.daemon.root / "agent").glob("*.d"):
            with contextlib.suppress(FileNotFoundError):
                yield from self._miscounted(directory)

    def _miscounted(self, directory: Path) -> Iterator[str]:
        """I3: what a program says comes once, in order; each run of it begins anew."""
        name, lines = directory.name.removesuffix(".d"), read(directory, "out").split("\n")[:-1]
        counts = [line.removeprefix(COUNTED) for line in lines if line.startswith(COUNTED)]
        for one, other in pairwise(["0", *counts]):
            if other not in (str(int(one) + 1), "1"):
                yield f"{name} said {other} after {one}"
        if counts:
            runs = [e["run"] for e in self._three.daemon.events(name) if e["type"] == "run.start"]
            if counts.count("1") > len(runs):
                yield f"{name} began {counts.count('1')} times to say something, in {runs}"

    def _after_parents(self, operator: Operator) -> Iterator[str]:
        """I2: no child executes longer than the bound after its parent's end."""
        names = {name for node, name, _ in tuple(self.sights.spans) if "@" in name}
        for name in names:
            own = name.partition("@")[0]
            entry = operator.entries.get(own)
            parent = entry.parent if entry else own.rpartition(".k")[0]
            above = operator.entries.get(parent)
            # whose processes come and go, or who was begun again, is not over with them
            if above is None or above.files.keys() & {"restart", "mode"} or any(
                said.startswith("reset") for said in operator.said[parent]
            ):  # fmt: skip
                continue
            ends = [last for _, _, last in self.sights.of(parent, "")]
            for node, _, last in self.sights.of(name, *self._three.hosts) if ends else ():
                self.orphaned = max(self.orphaned, last - max(ends))
                if last > max(ends) + self._bound + _LATE:
                    yield (f"{own} executed {last - max(ends):.1f} s after the end of {parent}, "
                           f"at {node}")  # fmt: skip


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
