"""The life of an agent as one table: (status, event) -> (status, effects).

Pure: it decides, the supervisor performs. Whatever is not in the table is
refused, with the error that the ABI gives for that verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from runtime.errors import CtxError, NotRunningError, WrongStateError


class Status(StrEnum):
    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    IDLE = "idle"
    PAUSED = "paused"
    STOPPING = "stopping"
    DEAD = "dead"


LIVE: Final = frozenset(Status) - {Status.NEW, Status.DEAD}


class Event(StrEnum):
    """Verbs of ``ctl``, then what the runtime itself observes."""

    START = "start"
    STOP = "stop"
    KILL = "kill"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"
    RESET = "reset"
    #: its cell, or its program, is there and waits for a message
    IDLING = "idling"
    READYING = "readying"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
    RESTARTING = "restarting"


VERBS: Final = frozenset(
    {Event.START, Event.STOP, Event.KILL, Event.PAUSE, Event.RESUME, Event.ABORT, Event.RESET}
)


class Effect(StrEnum):
    LAUNCH = "launch"
    CANCEL_NEW = "cancel_new"
    END = "end"
    SKIP_GRACE = "skip_grace"
    FREEZE = "freeze"
    THAW = "thaw"
    ABORT_RUN = "abort_run"
    RENEW = "renew"
    RECORD_END = "record_end"
    BACK_OFF = "back_off"


@dataclass(frozen=True, slots=True)
class Move:
    """``status`` None means: what it was before it was paused."""

    status: Status | None
    effects: tuple[Effect, ...] = ()


_S, _E = Status, Event
_END = Move(_S.STOPPING, (Effect.END,))
_RUNNING_MOVES: Final = {
    _E.STOP: _END,
    _E.KILL: Move(_S.STOPPING, (Effect.END, Effect.SKIP_GRACE)),
    _E.ENDING: _END,
}
_PAUSE = Move(_S.PAUSED, (Effect.FREEZE,))

TABLE: Final[dict[tuple[Status, Event], Move]] = {
    (_S.NEW, _E.START): Move(_S.STARTING, (Effect.LAUNCH,)),
    (_S.NEW, _E.STOP): Move(_S.DEAD, (Effect.CANCEL_NEW,)),
    (_S.NEW, _E.KILL): Move(_S.DEAD, (Effect.CANCEL_NEW,)),
    (_S.NEW, _E.ENDING): Move(_S.DEAD, (Effect.CANCEL_NEW,)),
    **{
        (status, event): move
        for status in (_S.STARTING, _S.READY, _S.IDLE, _S.BUSY)
        for event, move in _RUNNING_MOVES.items()
    },
    **{(s, _E.RUNNING): Move(_S.BUSY) for s in (_S.STARTING, _S.IDLE, _S.READY)},
    **{(s, _E.IDLING): Move(_S.IDLE) for s in (_S.STARTING, _S.BUSY)},
    **{(s, _E.READYING): Move(_S.READY) for s in (_S.STARTING, _S.BUSY)},
    (_S.READY, _E.PAUSE): _PAUSE,
    (_S.IDLE, _E.PAUSE): _PAUSE,
    (_S.BUSY, _E.PAUSE): _PAUSE,
    (_S.BUSY, _E.ABORT): Move(_S.PAUSED, (Effect.ABORT_RUN,)),
    (_S.PAUSED, _E.STOP): Move(_S.STOPPING, (Effect.THAW, Effect.END)),
    (_S.PAUSED, _E.KILL): Move(_S.STOPPING, (Effect.THAW, Effect.END, Effect.SKIP_GRACE)),
    (_S.PAUSED, _E.ENDING): Move(_S.STOPPING, (Effect.THAW, Effect.END)),
    (_S.PAUSED, _E.RESUME): Move(None, (Effect.THAW,)),
    (_S.PAUSED, _E.ABORT): Move(_S.PAUSED, (Effect.ABORT_RUN,)),
    (_S.STOPPING, _E.KILL): Move(_S.STOPPING, (Effect.SKIP_GRACE,)),
    (_S.STOPPING, _E.ENDED): Move(_S.DEAD, (Effect.RECORD_END,)),
    (_S.STOPPING, _E.RESTARTING): Move(_S.STARTING, (Effect.BACK_OFF,)),
    (_S.DEAD, _E.RESET): Move(_S.NEW, (Effect.RENEW,)),
}


def refusal(status: Status, event: Event) -> CtxError:
    """The error for a pair that the table does not have."""
    if event is Event.ABORT and status is not Status.STOPPING:
        return NotRunningError(f"no run to abort: the agent is {status}")
    accepted = sorted(e for s, e in TABLE if s is status and e in VERBS)
    what = ", ".join(accepted) if accepted else "nothing"
    return WrongStateError(f"{event} does not fit: the agent is {status}, which takes {what}")


def move(status: Status, event: Event) -> Move:
    """The move for ``event`` in ``status``; ``WrongStateError`` or ``NotRunningError``."""
    found = TABLE.get((status, event))
    if found is None:
        raise refusal(status, event)
    return found
