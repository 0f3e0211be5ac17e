"""How an agent's program is run: one row for each mode, and nothing else decides by mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from runtime.records.lifecycle import Cue, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The differences between agents that are run once, at each message, or for good."""

    name: str
    #: its runs enter a cell that stays; otherwise its only run makes the cell
    holds_cell: bool
    #: a message is a run of its own; otherwise the program is the agent, and ends with it
    run_per_message: bool
    #: its program reads messages and writes replies as lines of JSON
    converses: bool
    #: what it is between two runs
    between: Status
    #: what it is told when its program has begun
    begun: Cue

    @property
    def takes_messages(self) -> bool:
        """Whether it is spoken to while it lives."""
        return self.holds_cell


MODES: Final[Mapping[str, Mode]] = {
    mode.name: mode
    for mode in (
        Mode(
            name="once",
            holds_cell=False,
            run_per_message=False,
            converses=False,
            between=Status.STARTING,
            begun=Cue.RUNNING,
        ),
        Mode(
            name="turn",
            holds_cell=True,
            run_per_message=True,
            converses=False,
            between=Status.IDLE,
            begun=Cue.RUNNING,
        ),
        Mode(
            name="resident",
            holds_cell=True,
            run_per_message=False,
            converses=True,
            between=Status.STARTING,
            begun=Cue.READYING,
        ),
    )
}
