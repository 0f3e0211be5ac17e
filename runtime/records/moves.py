"""Moves of records: a table of (status, cue) -> next status, and what that calls for.

Pure. One table for agents (``runtime.records.lifecycle``), one for each kind of record below them
(``runtime.agents.planes``); ``Change.move`` and ``Change.step`` are what looks moves up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from runtime.errors import CtxError, WrongStateError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Move(Generic[S]):
    """``status`` None means: what it was before it was paused."""

    status: S | None
    #: what to do once the move is committed, in this order
    effects: tuple[StrEnum, ...] = ()


class Moves(Generic[S, E]):
    """The moves of one kind of record. ``verbs`` are the cues that somebody may ask for."""

    def __init__(
        self,
        what: str,
        table: Mapping[tuple[S, E], Move[S] | S],
        *,
        verbs: frozenset[E] = frozenset(),
    ) -> None:
        self.what = what
        self.table = {
            pair: to if isinstance(to, Move) else Move(to) for pair, to in table.items()
        }
        self.verbs = verbs
        self.terminal = frozenset(
            s
            for s in (type(next(iter(table))[0]) if table else ())
            if not any(s is at for at, _ in table)
        )

    def move(self, status: S, cue: E) -> Move[S]:
        """The move for ``cue`` in ``status``; an error for a pair that the table lacks."""
        found = self.table.get((status, cue))
        if found is None:
            raise self.refusal(status, cue)
        return found

    def refusal(self, status: S, cue: E) -> CtxError:
        """``WrongStateError`` that names the verbs that would have been accepted."""
        fits = sorted(e.value for s, e in self.table if s is status and e in self.verbs)
        *before, last = fits or [""]
        use = f"{', '.join(before)} or {last}" if before else last
        remedy = f"; use {use}" if use else ""
        wanted = f"become {cue}" if isinstance(cue, type(status)) else cue
        return WrongStateError(f"cannot {wanted}: the {self.what} is {status}{remedy}")
