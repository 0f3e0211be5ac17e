"""Every error of the runtime has an errno, and what is not expected is a bug."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import pytest

from ctxfs.errnos import ERRNOS, errno_of, name_of
from runtime import errors

#: every error, and what the kernel calls it; errno(3) has the numbers
NAMES = {
    "AgainError": "EAGAIN",
    "CrossingError": "EXDEV",
    "DeniedError": "EACCES",
    "ExceedingError": "EACCES",
    "ForbiddenError": "EPERM",
    "GoneError": "ESTALE",
    "IsADirectoryNodeError": "EISDIR",
    "KernelError": "EIO",
    "MalformedError": "EINVAL",
    "MissingError": "ENOENT",
    "NoSpaceError": "ENOSPC",
    "NotADirectoryNodeError": "ENOTDIR",
    "NotEmptyError": "ENOTEMPTY",
    "NotRunningError": "ESRCH",
    "OverTimeError": "EAGAIN",
    "QuotaError": "EDQUOT",
    "StaleError": "ESTALE",
    "TakenError": "EEXIST",
    "TooLargeError": "EFBIG",
    "TooLongError": "EMSGSIZE",
    "UnansweredError": "EAGAIN",
    "UnsupportedError": "EOPNOTSUPP",
    "WrongStateError": "EBUSY",
}


def subclasses(cls: type[errors.CtxError]) -> Iterator[type[errors.CtxError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


ALL = sorted(set(subclasses(errors.CtxError)), key=lambda cls: cls.__name__)


def test_every_error_has_its_errno() -> None:
    assert {cls.__name__: name_of(cls("why")) for cls in ALL} == NAMES
    assert set(ERRNOS) == set(ALL), "none of them by its base alone"


def test_a_subclass_not_in_the_table_has_the_errno_of_its_base() -> None:
    class Narrower(errors.DeniedError):
        pass

    assert errno_of(Narrower("why")) == errno.EACCES


@pytest.mark.parametrize(
    "bug", [ValueError("x"), KeyError("x"), RecursionError(), OSError("no number")], ids=repr
)
def test_an_unexpected_error_is_eio_and_logged_with_its_traceback(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "ctxd.errors"):
        assert errno_of(bug) == errno.EIO
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is bug


def test_what_is_expected_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    for cls in ALL:
        errno_of(cls("why"))
    assert not caplog.records


def test_the_kernels_own_refusal_keeps_its_number() -> None:
    refusal = OSError(errno.ENOSPC, "full")
    assert errno_of(refusal) == errno.ENOSPC
    told = errors.KernelError("cannot freeze it", refusal)
    assert (errno_of(told), told.sentence) == (errno.ENOSPC, "cannot freeze it: full")


def test_a_number_without_a_name_is_called_eio() -> None:
    assert name_of(OSError(4095, "?")) == "EIO"


def test_the_sentence_is_the_message() -> None:
    assert errors.DeniedError("no").sentence == "no"
    assert errors.DeniedError().sentence == "DeniedError"
