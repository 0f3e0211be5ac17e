"""The run of an agent, as a record with a table of moves: (status, cue) -> (status, effects).

An agent has one run at a time. Between two runs it has ``BETWEEN_RUNS``, so that nobody has to ask
whether there is one before asking something of it. A task is a run as well, whose table is that of
tasks (``runtime.records.items``).

A run and its moves are the agent's; what is true of this machine alone stands in records of its
own: where the programs are (``Cell``), and how far the words of the run were heard (``Said``). All
three are values: a change replaces them as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from runtime.ids import NO_BOOT, NO_RUN, BootId, RunId
from runtime.records.items import BY_ABORT
from runtime.records.lifecycle import Effect, Status
from runtime.records.moves import Move, Moves
from runtime.records.stored import Value, names_of


class RunStatus(StrEnum):
    NONE = "none"
    #: it is recorded, and this daemon or the next starts its program
    BEGUN = "begun"
    RUNNING = "running"
    #: its program was told to end the message at hand, and goes on if it does
    CANCELLING = "cancelling"
    #: it, and only it, is being ended
    ENDING = "ending"


class RunCue(StrEnum):
    BEGIN = "begin"
    #: its program is seen to run
    SEEN = "seen"
    CANCEL = "cancel"
    #: the message that was being cancelled is over
    SPARE = "spare"
    END = "end"
    #: its end is recorded, or that of its agent
    OVER = "over"


_S, _C = RunStatus, RunCue
_GOES_ON: Final = (_S.BEGUN, _S.RUNNING, _S.CANCELLING)

RUN_MOVES: Final = Moves[RunStatus, RunCue](
    "run",
    {
        (_S.NONE, _C.BEGIN): _S.BEGUN,
        (_S.BEGUN, _C.SEEN): _S.RUNNING,
        # who wanted its end was faster
        **{(s, _C.SEEN): s for s in (_S.RUNNING, _S.CANCELLING, _S.ENDING)},
        **{(s, _C.CANCEL): _S.CANCELLING for s in _GOES_ON},
        (_S.CANCELLING, _C.SPARE): _S.RUNNING,
        # the first cause wins
        **{(s, _C.END): Move(_S.ENDING, (Effect.FOLLOW,)) for s in _GOES_ON},
        **{(s, _C.OVER): _S.NONE for s in _S},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Value):
    """The run at hand."""

    id: RunId = NO_RUN
    status: RunStatus = RunStatus.NONE
    #: by both clocks (``kernel.clock``)
    started: float = 0.0
    started_up: float = 0.0
    #: its program, once that is seen to run
    pid: int = 0
    #: why it, or its message, is being ended, and who wanted that, as in ``by`` of events
    cause: str = ""
    caused_by: str = ""

    @property
    def ending(self) -> bool:
        return self.status is RunStatus.ENDING

    @property
    def cancelling(self) -> bool:
        """Whether its program was told to end its message, and may go on."""
        return self.status is RunStatus.CANCELLING

    @property
    def aborting(self) -> bool:
        """Whether it ends, too, if its program does not end its message."""
        return self.cancelling and self.cause == BY_ABORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Said(Value):
    """The words of the run at hand, or of the last one, and what became of them."""

    #: where in ``out`` it begins, and whether the result was taken from there
    output_start: int = 0
    result_from_output: bool = False
    #: where in ``reply`` it begins, and how much of it was read as replies
    reply_start: int = 0
    reply_offset: int = 0
    #: up to where what was no reply went to ``out``
    kept_offset: int = 0
    #: whether it said that its program takes cancels
    takes_cancel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Value):
    """Where an agent, and all that it owns, is on this machine."""

    #: names the record of its monitor; in mode once it is the id of the first run
    id: RunId = NO_RUN
    #: the boot of the machine in which the agent was started last
    boot: BootId = NO_BOOT
    #: a path below that of the daemon
    cgroup: str = ""

    def gone(self) -> Cell:
        """Nothing is left of it."""
        return Cell(boot=self.boot)


BETWEEN_RUNS: Final = Run()
NOTHING: Final = Said()
NOWHERE: Final = Cell()


def gathered(row: dict[str, Any]) -> dict[str, Any]:
    """The row of an agent as version 7 has it: before, all of this stood in the row itself."""
    pid, started = row.pop("pid", 0), row.pop("run_started", 0.0)
    run = Run(id=row.pop("run", NO_RUN), pid=pid, started=started)
    ending, by = row.pop("run_cause", None), row.pop("run_caused_by", "")
    cancelling, cancelled_by = row.pop("cancelling", ""), row.pop("cancelled_by", "")
    if not run.id:
        run = BETWEEN_RUNS
    elif ending is not None:
        run = replace(run, status=_S.ENDING, cause=ending[1], caused_by=by)
    elif cancelling:
        run = replace(run, status=_S.CANCELLING, cause=cancelling, caused_by=cancelled_by)
    else:
        run = replace(run, status=_S.RUNNING if pid else _S.BEGUN)
    # version 1 did not hold cells
    id, boot = row.pop("cell", run.id), row.pop("boot", NO_BOOT)
    cell = Cell(id=id, boot=boot, cgroup=row.pop("cgroup", ""))
    said = Said(**{name: row.pop(name) for name in names_of(Said) if name in row})
    paused = row["status"] == Status.PAUSED
    # nor did the first versions say since when it has its status: not before these times
    times = (row.get("created", 0.0), row.get("started", 0.0), started, row.get("ended", 0.0))
    return {
        "frozen": paused,
        "since": max(times),
        **row,
        **{"run": run.row(), "said": said.row(), "cell": cell.row()},
    }
