"""Very many agents, most of which somebody waits for: nobody is woken twice, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)


class Fleet:
    """Captains have leads, and leads have workers; who has somebody waits for each of them.

    Captains and leads say what they are told. Workers end when the gate is opened, leads
    when they are stopped. Captains wait for each lead twice.
    """

    def __init__(self, daemon: Daemon, captains: int, leads: int, workers: int) -> None:
        self.daemon = daemon
        self.gate = daemon.base / "gate"
        self.gate.mkdir()
        os.mkfifo(self.gate / "fifo")
        (self.gate / "fifo").chmod(0o644)
        self.captains = [self._start(f"captain{c}", mount=f"{self.gate} /gate ro")
                         for c in range(captains)]
        self.leads = [self._start(f"{self.name(above)}-lead{n}", above)
                      for above in self.captains for n in range(leads)]
        self.workers = [self._start(f"{self.name(above)}-worker{n}", above, "cat /gate/fifo")
                        for above in self.leads for n in range(workers)]
        for agent in self.leads + self.captains:
            wait_status(agent, "idle")
        #: what each waits for, by the name of the wait
        self.waits: dict[Path, dict[str, str]] = {}
        for above, below, names in (
            (self.leads, self.workers, ("for-{}",)),
            (self.captains, self.leads, ("for-{}", "again-for-{}")),
        ):
            for agent in above:
                mine = [self.name(b) for b in below if b.name.startswith(f"{self.name(agent)}-")]
                self.waits[agent] = {name.format(child): child for child in mine for name in names}
                for name, child in self.waits[agent].items():
                    (agent / "waiting" / name).mkdir()
                    write(agent / "waiting" / name / "on", f"child {child}")
        for agent in self.workers:
            wait_status(agent, "busy")

    def _start(self, name: str, above: Path | None = None, program: str = "", **files: str) -> Path:
        if above is not None:
            files["parent"] = f"agent:{self.name(above)}"
        if not program:
            files["mode"] = "turn"
        return self.daemon.run(name, program or "cat", **files)

    @staticmethod
    def name(directory: Path) -> str:
        return directory.name.removesuffix(".d")

    def open_gate(self) -> None:
        """Lets all through who stand before it now."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.gate / "fifo", os.O_WRONLY | os.O_NONBLOCK))

    def end_workers(self) -> None:
        for worker in self.workers:
            # a program that has been started may not have come to the gate yet
            wait_until(lambda w=worker: self._has_ended(w), f"{worker.name} has ended")  # type: ignore[misc]

    def _has_ended(self, worker: Path) -> bool:
        self.open_gate()
        return read(worker, "status") == "dead\n"

    def end_leads(self) -> None:
        for lead in self.leads:
            write(lead / "ctl", "stop")
        for lead in self.leads:
            wait_dead(lead)

    def fired(self, agents: list[Path]) -> int:
        """How many of their waits."""
        return sum(
            read(agent / "waiting" / name, "status") == "fired\n"
            for agent in agents for name in self.waits[agent]
        )

    def check_woken(self, agents: list[Path]) -> None:
        """Once for each wait, and once for each child that has ended."""
        for agent in agents:
            wait_until(
                lambda a=agent: (read(a, "queue"), read(a, "status")) == ("", "idle\n"),  # type: ignore[misc]
                f"{agent.name} has been told all",
                timeout=4 * TIMEOUT,  # hundreds of runs
            )
            waits = self.waits[agent]
            children = set(waits.values())
            told = [json.loads(line) for line in read(agent, "out").splitlines()]
            assert Counter(t["wait"] for t in told if "wait" in t) == Counter(list(waits))
            assert Counter(t["task"] for t in told if "task" in t) == Counter(children)
            for t in told:
                if "wait" in t:
                    assert t["payload"]["agent"] == waits[t["wait"]]
            events = self.daemon.events(self.name(agent))
            fired = [e["wait"] for e in events if e["type"] == "wait.fired"]
            assert Counter(fired) == Counter(list(waits))
            number = len(waits) + len(children)
            counts = Counter(e["type"] for e in events)
            for kind in ("message.queued", "message.end", "run.start", "run.end"):
                assert counts[kind] == number, (agent.name, kind)
            ends = [e for e in events if e["type"] == "message.end"]
            assert {e["outcome"] for e in ends} == {"processed"}
            assert {e["run"] for e in ends} == {f"r{n}" for n in range(1, number + 1)}


@pytest.mark.parametrize(
    ("number", "captains", "leads", "workers", "killed"),
    [
        pytest.param(63, 3, 4, 4, True, id="killed"),
        pytest.param(63, 3, 4, 4, False, id="lives", marks=pytest.mark.long),
        pytest.param(200, 4, 7, 6, True, id="many-killed", marks=pytest.mark.long),
    ],
)
def test_everybody_is_woken_once(
    daemon: Daemon, number: int, captains: int, leads: int, workers: int, killed: bool
) -> None:
    fleet = Fleet(daemon, captains, leads, workers)
    assert len(list(daemon.path("agent").glob("*.d"))) == number
    fleet.open_gate()
    if killed:
        half = len(fleet.workers) // 2
        wait_until(lambda: fleet.fired(fleet.leads) > half, "half of the workers have ended")
        daemon.restart()
    fleet.end_workers()
    fleet.check_woken(fleet.leads)
    fleet.end_leads()
    fleet.check_woken(fleet.captains)
