"""The visit of somebody who looks at a terminal, as a value in the record of whose terminal it is.

What the monitor tells of its viewers is true of this machine alone, and goes with the run. What
somebody asked for when he came is here: the next daemon has to know it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.records.stored import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit(Value):
    """A viewer, by its number in the run. ``uid`` pays for it.

    One that only ``looks`` cannot type. If it closes without leaving, the run is hung up, if it
    ``hangs_up``; and what it looks at is removed at its end, if it ``removes``.
    """

    number: int
    uid: int
    looks: bool = False
    hangs_up: bool = False
    removes: bool = False
