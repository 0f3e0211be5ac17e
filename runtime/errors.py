"""Errors, named by whose fault they are.

The runtime knows no errno: the filesystem maps these classes in one table
(``ctxfs.errnos``). The message of each is one sentence that names the
offending text and what would have been accepted.
"""

from __future__ import annotations


class CtxError(Exception):
    """Base of every error that a caller of the runtime may be told."""

    #: somebody has kept it as the caller's reason
    kept = False

    @property
    def sentence(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class MalformedError(CtxError):
    """The caller's text is not in the format that the file or verb takes."""


class DeniedError(CtxError):
    """Identity, policy or attenuation forbids this caller the operation."""


class ExceedingError(DeniedError):
    """An agent would get more than its parent has, or than any agent may have; no matter who
    asks."""


class ForbiddenError(CtxError):
    """Nobody may do this, whatever the identity."""


class WrongStateError(CtxError):
    """The object's present state does not allow the operation."""


class MissingError(CtxError):
    """There is no object of that name."""


class TakenError(CtxError):
    """The name is in use."""


class NotEmptyError(CtxError):
    """The directory still has entries."""


class NotADirectoryNodeError(CtxError):
    """A directory was asked for and something else is there."""


class IsADirectoryNodeError(CtxError):
    """Something else than a directory was asked for and a directory is there."""


class QuotaError(CtxError):
    """A configured maximum, or an owner's account, is reached."""


class AgainError(CtxError):
    """Nothing is wrong with the operation: it may be tried again."""


class OverTimeError(AgainError):
    """Its owner's account of the event loop's time is used up; it may try again."""


class UnansweredError(AgainError):
    """Somebody who had to be asked did not answer in time, but may, if it is tried again."""


class TooLongError(CtxError):
    """A control value, message or frame is longer than its limit."""


class TooLargeError(CtxError):
    """A document is larger than ``document_max``."""


class UnsupportedError(CtxError):
    """This machine or set-up cannot do it; the sentence says what is missing."""


class StaleError(CtxError):
    """A guard given by the caller no longer holds."""


class GoneError(StaleError):
    """The object of an inode of the kernel is gone: its path has to be walked again."""


class CrossingError(CtxError):
    """The request would cross the border of a tree of real files."""


class NotRunningError(CtxError):
    """Nothing is running that the operation could act on."""


class NoSpaceError(CtxError):
    """The disk under the daemon's state is full."""


class KernelError(CtxError):
    """The kernel refused a step that the operation needs; ``errno`` is its own number."""

    def __init__(self, sentence: str, cause: OSError | None = None) -> None:
        why = f": {cause.strerror}" if cause is not None and cause.strerror else ""
        super().__init__(sentence + why)
        self.errno = cause.errno if cause is not None else None


class StartupError(Exception):
    """The daemon cannot start; the message is one sentence for the terminal."""
