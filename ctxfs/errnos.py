"""One table: what the runtime's errors are called by the kernel."""

from __future__ import annotations

import errno
import logging
from typing import Final

from runtime import errors

log = logging.getLogger("ctxd.errors")

ERRNOS: Final[dict[type[errors.CtxError], int]] = {
    errors.MalformedError: errno.EINVAL,
    errors.DeniedError: errno.EACCES,
    errors.ExceedingError: errno.EACCES,
    errors.ForbiddenError: errno.EPERM,
    errors.WrongStateError: errno.EBUSY,
    errors.MissingError: errno.ENOENT,
    errors.TakenError: errno.EEXIST,
    errors.NotEmptyError: errno.ENOTEMPTY,
    errors.NotADirectoryNodeError: errno.ENOTDIR,
    errors.IsADirectoryNodeError: errno.EISDIR,
    errors.QuotaError: errno.EDQUOT,
    errors.AgainError: errno.EAGAIN,
    errors.OverTimeError: errno.EAGAIN,
    errors.UnansweredError: errno.EAGAIN,
    errors.TooLongError: errno.EMSGSIZE,
    errors.TooLargeError: errno.EFBIG,
    errors.UnsupportedError: errno.EOPNOTSUPP,
    errors.StaleError: errno.ESTALE,
    errors.GoneError: errno.ESTALE,
    errors.CrossingError: errno.EXDEV,
    errors.NotRunningError: errno.ESRCH,
    errors.NoSpaceError: errno.ENOSPC,
    #: where the kernel gave no number
    errors.KernelError: errno.EIO,
}


def errno_of(error: BaseException) -> int:
    """The errno for an error; an unexpected error is logged and becomes ``EIO``."""
    if isinstance(error, OSError | errors.KernelError) and error.errno is not None:
        return error.errno
    for cls in type(error).__mro__:
        if cls in ERRNOS:
            return ERRNOS[cls]
    log.error("a bug in ctxfs: %s", error, exc_info=error)
    return errno.EIO


def name_of(error: BaseException) -> str:
    """The errno's name, such as ``EINVAL``."""
    number = errno_of(error)
    return "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, "EIO")
