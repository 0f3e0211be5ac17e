"""Standard input of runs that version 0.2 began.

These have FIFOs in the runtime directory, each beside a note of what was written to it. A program
of ours (feed.c) takes each of them over, and is spoken to as a monitor is. All of this can go with
the last version that takes over what 0.2 left.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from runtime.cell.port import Host, LiveCell
from runtime.kernel import orders, unixsockets


async def take_over(host: Host, adopted: Iterable[LiveCell]) -> None:
    """The FIFOs of runs that live in cells that were adopted."""
    places, most = host.places, host.agents.settings.config.owner_monitors
    if not places.inputs.exists():
        return
    entered = {
        execution.facts.path: (live_cell.agent.owner, execution)
        for live_cell in adopted
        for execution in live_cell.entered()
    }
    for path in sorted(places.inputs.iterdir()):
        record = places.records / path.name.removesuffix("~")
        if record not in entered:
            path.unlink(missing_ok=True)
        elif path.name == record.name and not _is_served(places.monitors / record.name):
            owner, execution = entered[record]
            inlet = execution.facts.inlet.listen()
            try:
                note = path.with_name(f"{path.name}~")
                words = orders.words(places.program("feed"), 3, path, *_noted(note))
                monitors = host.port.hierarchy.monitors(owner, most)
                fds = [None, None, None, inlet]
                process = await host.port.spawner.start(monitors, words, owner=owner, fds=fds)
                await process.wait()
            finally:
                os.close(inlet)


def _is_served(path: Path) -> bool:
    """Whether a daemon that died has started its program."""
    try:
        unixsockets.connect(path).close()
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def _noted(path: Path) -> tuple[int, int, int]:
    """MESSAGE, LINE and OPEN of feed.c. A line that was noted as ``whole`` may be there or not;
    it is written again, as that version did."""
    try:
        index, how = path.read_text().split()
    except (OSError, ValueError):
        return 0, 0, 0
    told = {"all": (int(index), 0, 0), "cancelled": (int(index), 1, 0), "whole": (0, 0, 0)}
    return told.get(how, (0, 0, 1))
