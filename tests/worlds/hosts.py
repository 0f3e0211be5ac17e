"""What programs run on, as far as a test has it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from runtime.cell.port import Host, LiveCells, Port
from runtime.cell.windows import Ends


def host_with(**parts: Any) -> Host:
    """One with these parts alone."""
    parts_of_port = ("hierarchy", "watcher", "spawner", "sweeper")
    machine: Any = {name: parts.pop(name, None) for name in parts_of_port}
    port = Port(**machine, places=cast(Any, parts.get("places")))
    missing: dict[str, Any] = dict.fromkeys((each.name for each in fields(Host)), None)
    made = {"live_cells": LiveCells(), "ends": Ends(), "port": port}
    return Host(**{**missing, **made, **parts})
