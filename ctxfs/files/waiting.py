"""The waiting plane, ``agent/NAME.d/waiting``, as rows (ABI section 10)."""

from __future__ import annotations

from typing import Final

from ctxfs.rows import ITEM, ItemPlane, Kind, Plane, Row, Table
from runtime.planes import Wait

ROWS: Final = (
    Row(name="", within=ITEM, kind=Kind.DIRECTORY, mode=0o755),
    Row(name="status", polled=True, render=lambda fs, item, caller: f"{item.status}\n",
        doc="new armed fired cancelled expired"),
)

TABLE: Final = Table(Plane.WAITING, ROWS)
PLANE: Final = ItemPlane(
    name="waiting", cls=Wait, table=TABLE, records=lambda agents: agents.waiting
)
