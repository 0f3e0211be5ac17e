"""How Python's collector of cycles looks at the daemon's objects: seldom at those that stay.

A full collection looks at every object, and everybody waits meanwhile: 75 ms with 10,000
agents. Nearly all of them are found alive each time, since what agents are made of has no
cycles. So what a full collection leaves is set aside (gc.freeze), and the next one looks at
what was made since. What is set aside is looked at again once it has doubled: a cycle that
was alive then, and has become garbage, goes at the latest with that.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

_FULL = 2


class Collecting:
    """Sets aside what full collections leave, from ``begin`` on."""

    def __init__(self) -> None:
        #: objects that the last look at everything has left; None before it
        self._left: int | None = None

    def begin(self) -> None:
        """Looks at everything once. In a process, once."""
        gc.callbacks.append(self._watch)
        gc.collect()

    def _watch(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase != "stop" or info["generation"] != _FULL:
            return
        gc.freeze()
        count = gc.get_freeze_count()
        if self._left is None:
            self._left = count
        elif count > 2 * self._left:
            self._left = None
            gc.unfreeze()
