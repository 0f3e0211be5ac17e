"""In what a space differs from the filesystem behind it, and why: all of it, in one table."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.posix.operations import Operation

#: what a worker answers
Answer = tuple[str, object]

_SET_ID: Final = stat.S_ISUID | stat.S_ISGID
_KERNELS: Final = ("system.", "trusted.", "security.")
#: where a verb has its mode
_MODES: Final = {"open": 3, "mkfifo": 1, "mknod": 2, "chmod": 1}


@dataclass(frozen=True, slots=True)
class Deviation:
    """What ``applies`` to is asked of the backing filesystem as ``instead``, or, if that is
    None, not at all. ``allowed`` judges what the space answered then."""

    reason: str
    applies: Callable[[Operation], bool]
    instead: Callable[[Operation], Operation] | None
    allowed: Callable[[Answer], bool] = lambda answer: answer[0] == "error"


def _says(*errors: str) -> Callable[[Answer], bool]:
    return lambda answer: answer[0] == "error" and answer[1] in errors


def _sets_id(operation: Operation) -> bool:
    _, verb, arguments = operation
    return verb in _MODES and bool(arguments[_MODES[verb]] & _SET_ID)


def _without_set_id(operation: Operation) -> Operation:
    user, verb, arguments = operation
    if verb == "chmod":
        return user, "chmod_kept", arguments
    at = _MODES[verb]
    return user, verb, (*arguments[:at], arguments[at] & ~_SET_ID, *arguments[at + 1 :])


def _is_device(operation: Operation) -> bool:
    _, verb, arguments = operation
    return verb == "mknod" and arguments[1] in (stat.S_IFCHR, stat.S_IFBLK)


def _names_kernels(operation: Operation) -> bool:
    _, verb, arguments = operation
    if verb not in ("setxattr", "getxattr", "removexattr"):
        return False
    name: str = arguments[1]
    return name.startswith(_KERNELS)


def _removes_acl(operation: Operation) -> bool:
    return operation[1] == "removexattr" and _names_kernels(operation)


def _without_holes(answer: Answer) -> bool:
    """To the kernel's emulation all of a file is data, and its end is the only hole."""
    if answer[0] == "error":
        return True
    assert isinstance(answer[1], tuple)
    found, size = answer[1]
    return found == "ENXIO" or (isinstance(found, int) and 0 <= found <= size)


DEVIATIONS: Final = (
    Deviation("the mount is nodev, so nobody makes device nodes", _is_device, None),
    Deviation("there is never an ACL to remove, and the kernel says so in two ways",
              _removes_acl, None, lambda answer: answer[0] == "error" or answer[1] is None),
    Deviation("the mount is nosuid: set-id bits are kept of directories' groups only",
              _sets_id, _without_set_id),
    Deviation("pyfuse3 passes no fallocate on",
              lambda operation: operation[1] == "fallocate", None,
              _says("EOPNOTSUPP", "EBADF", "EINVAL", "ENODEV", "EPERM", "EISDIR", "ESPIPE",
                    "EFBIG")),
    Deviation("pyfuse3 passes no lseek on: the kernel takes all of a file for data",
              lambda operation: operation[1] == "holes", None, _without_holes),
    Deviation("ACLs would not be enforced, and what only the kernel or root may set would be set "
              "with the daemon's rights: only attributes user.* are kept",
              _names_kernels, None),
)
