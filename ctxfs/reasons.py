"""Why the last call failed: one line for each caller, and for each agent."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from typing import Final

from ctxfs.errnos import errno_of, name_of
from runtime.authority.identity import Caller
from runtime.errors import CtxError, ExceedingError
from runtime.names import escape, timestamp

log = logging.getLogger("ctxd.rejected")

_KEPT: Final = 10_000
_LINE_MAX: Final = 1000


class Reasons:
    """The last rejections, bounded; those of the longest silent callers go first."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, str] = OrderedDict()

    def of_caller(self, caller: Caller) -> str:
        return self._lines.get(caller.key, "")

    def of_agent(self, incarnation: str) -> str:
        return self._lines.get(f"agent:{incarnation}", "")

    def note(
        self, error: BaseException, caller: Caller, path: str, incarnation: str | None
    ) -> None:
        """Keeps ``TIME ERRNO PATH: SENTENCE`` for the caller and, unless the caller was
        refused for who it is, for the agent whose file it was."""
        sentence = error.sentence if isinstance(error, CtxError) else _system(error)
        line = f"{timestamp()} {name_of(error)} {escape(path)}: {escape(sentence)}"[:_LINE_MAX]
        self._put(caller.key, line)
        for_who = errno_of(error) in (errno.EACCES, errno.EPERM)
        if incarnation is not None and (not for_who or isinstance(error, ExceedingError)):
            self._put(f"agent:{incarnation}", line)
        log.info("%s: %s", caller.key, line)

    def _put(self, key: str, line: str) -> None:
        self._lines[key] = line + "\n"
        self._lines.move_to_end(key)
        while len(self._lines) > _KEPT:
            self._lines.popitem(last=False)


def _system(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "an error inside ctxfs, see the daemon's log"
