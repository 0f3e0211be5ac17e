"""Python's collector of cycles is no part of what a test measures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """What it takes is the whole heap's, of all tests before this one; the daemon sets aside what
    stays (``ctxfs.collecting``)."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
