"""A clock that jumps to what is waited for, but not past the work of a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import Any
from unittest import mock

import trio
import trio.testing


def run_jumping(main: Callable[[], Awaitable[Any]], threshold: float = 0.01) -> Any:
    """``trio.run`` by a clock that jumps when nothing has happened for ``threshold`` seconds.

    To trio a thread is nothing that happens: on a busy machine, minutes would pass while it writes
    a file, and whatever has a deadline would be over.
    """
    clock = trio.testing.MockClock(autojump_threshold=threshold)
    in_threads, working = trio.to_thread.run_sync, 0

    async def run_sync(*args: Any, **more: Any) -> Any:
        nonlocal working
        working += 1
        clock.autojump_threshold = inf
        try:
            return await in_threads(*args, **more)
        finally:
            working -= 1
            if not working:
                clock.autojump_threshold = threshold

    with mock.patch("trio.to_thread.run_sync", run_sync):
        return trio.run(main, clock=clock)
