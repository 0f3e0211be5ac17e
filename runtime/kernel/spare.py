"""Descriptors kept free for what must work when there are no others.

Who a caller is has to be known also when the process may open nothing more: out of
descriptors is not the same as unknown.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

_R = TypeVar("_R")
#: what one look at a caller needs at most
_COUNT: Final = 4
_OUT: Final = (errno.EMFILE, errno.ENFILE)

_kept: list[int] = []


def keep() -> None:
    """Holds some back, as many as there are to be had."""
    with suppress(OSError):
        while len(_kept) < _COUNT:
            _kept.append(os.open("/", os.O_PATH | os.O_CLOEXEC))


def release() -> None:
    """Holds none back any more."""
    while _kept:
        os.close(_kept.pop())


def with_spare(look: Callable[[], _R]) -> _R:
    """The value of ``look``, which opens a few files and closes them again.

    Where there are no descriptors left it has those that are kept for this. ``look``
    is called again then.
    """
    try:
        return look()
    except OSError as error:
        if error.errno not in _OUT or not _kept:
            raise
    release()
    try:
        return look()
    finally:
        keep()
