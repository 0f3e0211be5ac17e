"""The work plane, ``agent/NAME.d/work``, as rows (ABI section 9)."""

from __future__ import annotations

from typing import Final

from ctxfs.rows import ITEM, ItemPlane, Kind, Plane, Row, Table
from runtime.names import timestamp
from runtime.planes import Work

ROWS: Final = (
    Row(name="", within=ITEM, kind=Kind.DIRECTORY, mode=0o755),
    Row(name="status", polled=True, render=lambda fs, item, caller: f"{item.status}\n",
        doc="open active blocked done cancelled"),
    Row(name="created_at", render=lambda fs, item, caller: timestamp(item.created) + "\n",
        doc="RFC 3339 time"),
    Row(name="updated_at", render=lambda fs, item, caller: timestamp(item.updated) + "\n",
        depends=("updated",), doc="RFC 3339 time of the last change"),
)

TABLE: Final = Table(Plane.WORK, ROWS)
PLANE: Final = ItemPlane(name="work", cls=Work, table=TABLE, records=lambda agents: agents.work)
