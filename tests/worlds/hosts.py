"""What programs run on, as far as a test has it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from runtime.cell.port import Host, LiveCells, Port


def host_with(**parts: Any) -> Host:
    """One with these parts alone."""
    missing: dict[str, Any] = dict.fromkeys((each.name for each in fields(Host)), None)
    given = {**missing, "live_cells": LiveCells(), **parts}
    port = Port(given["hierarchy"], given["watcher"], given["sweeper"], given["places"])
    return Host(**{**given, "port": given["port"] or port})
