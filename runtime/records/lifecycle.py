"""The life of an agent as one table: (status, cue) -> (status, effects).

Pure: ``Change.move`` looks a move up and records it, and the supervisor performs its
effects, most of them once that is committed. A pair that is not in the table is refused, with the
error that ctxfs(5) gives for the verb.

An end by a verb, by a program, by a lost monitor or by a reboot is a row of the same table.

No status claims what the kernel refused. Freeze and thaw come before the commit: if the kernel
refuses, the writer gets its errno, and nothing has changed; if the commit fails, or the daemon
dies before it, the cgroup is made again what the record says. A kill cannot be undone, so it comes
after the record that says who wanted it: if it fails, the writer is told, and it is tried again
after the grace. A launch takes time: ``outcome`` and ``reason`` tell how it went.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from runtime.errors import CtxError, NotRunningError
from runtime.records.moves import Move, Moves


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


class Cue(StrEnum):
    """A cause for a status to change: verbs of ``ctl``, then what the runtime itself observes."""

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
    #: its program has ended, its time is up, or the daemon shuts down
    ENDING = "ending"
    #: its owner ends, and the task that leads that end leads this one
    OWNER_ENDING = "owner_ending"
    #: nothing of it is left
    ENDED = "ended"
    RESTARTING = "restarting"
    #: it ran when the machine went down; its monitor is gone, and with it what became of it
    REBOOTED = "rebooted"
    LOST = "lost"
    #: the same, and it goes on in a new cell
    RETURNING = "returning"
    #: somebody takes its directory away before it was ever started
    REMOVING = "removing"


VERBS: Final = frozenset(
    {Cue.START, Cue.STOP, Cue.KILL, Cue.PAUSE, Cue.RESUME, Cue.ABORT, Cue.RESET}
)
#: that are always obeyed, whatever an owner has used up
ENDING_VERBS: Final = frozenset({Cue.STOP, Cue.KILL, Cue.ABORT})


class Effect(StrEnum):
    """The things that a move has done to processes, files and those who wait."""

    #: a task of the supervisor leads it from now on, and makes its cell
    LAUNCH = "launch"
    #: nobody may ask it for anything any more, or wait for it to begin
    REFUSE = "refuse"
    #: SIGTERM to all that it owns, then the grace period
    END = "end"
    #: SIGKILL to the same, now
    KILL = "kill"
    FREEZE = "freeze"
    THAW = "thaw"
    #: the cgroup and the record of what has ended go
    CLEAR = "clear"
    #: those who wait for its end are let go
    RELEASE = "release"
    #: somebody follows its run, and sees that this is to end
    FOLLOW = "follow"


#: performed before the change is committed, and undone by ``Subscriber.restore`` or the next daemon
BEFOREHAND: Final = frozenset({Effect.FREEZE, Effect.THAW})
#: performed when everybody has been told of the change: those who are let go look at it at once
AFTERWARDS: Final = frozenset({Effect.KILL, Effect.CLEAR, Effect.RELEASE})


_S, _E = Status, Cue
_END: Final = Move(_S.STOPPING, (Effect.REFUSE, Effect.END))
_KILL: Final = Move(_S.STOPPING, (Effect.REFUSE, Effect.END, Effect.KILL))
_PAUSE: Final = Move(_S.PAUSED, (Effect.FREEZE,))
#: it has no cgroup, or no longer has one
_GONE: Final = Move(_S.DEAD, (Effect.RELEASE,))
_NOT_ENDING: Final = (_S.STARTING, _S.READY, _S.IDLE, _S.BUSY, _S.PAUSED)

TABLE: Final[dict[tuple[Status, Cue], Move[Status]]] = {
    (_S.NEW, _E.START): Move(_S.STARTING, (Effect.LAUNCH,)),
    **{(_S.NEW, e): _GONE for e in (_E.STOP, _E.KILL, _E.ENDING, _E.OWNER_ENDING)},
    # its wait goes with it; what starts and is removed has waited for its turn
    **{(s, _E.REMOVING): Move(_S.DEAD) for s in (_S.NEW, _S.STARTING)},
    # what is frozen is sent the signal first, and thawed by the task that leads the end
    **{(s, e): _END for s in _NOT_ENDING for e in (_E.STOP, _E.ENDING)},
    **{(s, _E.KILL): _KILL for s in _NOT_ENDING},
    **{(s, _E.OWNER_ENDING): Move(_S.STOPPING, (Effect.REFUSE,)) for s in _NOT_ENDING},
    **{(s, _E.RUNNING): Move(_S.BUSY) for s in (_S.STARTING, _S.IDLE, _S.READY)},
    **{(s, _E.IDLING): Move(_S.IDLE) for s in (_S.STARTING, _S.BUSY)},
    **{(s, _E.READYING): Move(_S.READY) for s in (_S.STARTING, _S.BUSY)},
    **{(s, _E.PAUSE): _PAUSE for s in (_S.READY, _S.IDLE, _S.BUSY)},
    (_S.PAUSED, _E.RESUME): Move(None, (Effect.THAW,)),
    # the run ends, not the agent: the task that leads the run sees its cause
    (_S.BUSY, _E.ABORT): Move(_S.PAUSED),
    (_S.PAUSED, _E.ABORT): Move(_S.PAUSED),
    (_S.STOPPING, _E.KILL): Move(_S.STOPPING, (Effect.KILL,)),
    (_S.STOPPING, _E.ENDED): Move(_S.DEAD, (Effect.CLEAR, Effect.RELEASE)),
    (_S.STOPPING, _E.RESTARTING): Move(_S.STARTING, (Effect.CLEAR,)),
    **{(s, e): _GONE for s in sorted(LIVE) for e in (_E.REBOOTED, _E.LOST)},
    **{(s, _E.RETURNING): Move(_S.STARTING) for s in _NOT_ENDING},
    # a new life in its place, which nobody leads yet
    (_S.DEAD, _E.RESET): Move(_S.NEW),
}


class _Lifecycle(Moves[Status, Cue]):
    def refusal(self, status: Status, cue: Cue) -> CtxError:
        if cue is Cue.ABORT and status is not Status.STOPPING:
            return NotRunningError(f"no run to abort: the agent is {status}")
        return super().refusal(status, cue)


AGENT_MOVES: Final = _Lifecycle("agent", TABLE, verbs=VERBS)
