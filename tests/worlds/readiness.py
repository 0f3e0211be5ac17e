"""Waiting for descriptors, whatever their numbers: select(2) knows none above 1023."""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float | None = None) -> list[int]:
    """Those that can be read, or have ended; none after so many seconds, None for no limit."""
    poller = select.poll()
    for fd in descriptors:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)]
