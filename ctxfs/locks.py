"""Which lock the kernel holds while it waits for an answer: one table by operation.

Whoever else wants the lock waits too, in the kernel, where no order of service reaches: hundreds of
threads that merely queue are a lock on everybody. So the lock decides how soon an operation is
answered, what it may wait for, and what an owner meets that has used up its time. The locks are
those of Linux (Documentation/filesystems/locking.rst, fs/fuse); a test reads the handlers.

Who waits for such a lock cannot even be killed. Any number of requests may wait for what the rows
list, so requests that wait hold up nobody else. What is asked of a ``ctl`` is always answered in
the step that reads it: root's ``kill`` waits for its lock behind everybody who may write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Lock(Enum):
    """The lock that the kernel holds while an answer is outstanding."""

    NONE = "nothing"
    #: a fault inside write(2), or of a page that others want too
    READERS = "whatever the reader has locked: it may read a page while it writes to another file"
    #: also that of the file, where it is removed or gets a name; rename(2) from one directory to
    #: another locks out all others of the filesystem
    DIRECTORY = "the directory"
    FILE = "the file"
    #: permission is looked at, or the end of a file, with the lock of it
    EITHER = "the file or the directory"


class Over(Enum):
    """The answer to an owner over its account of the loop's time."""

    SERVED = "served"
    LATE = "late"
    REFUSED = "EAGAIN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that a handler may await: ``call`` is how the code says it."""

    call: str
    #: seconds; None where it is bounded in another way
    bound: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation. If it is not ``asked``, the first is answered ENOSYS, and the kernel knows
    the answer from then on. One that takes its ``turn`` is served when those before it are, the
    owners in turn; others are answered in the step that reads them, except for their ``waits``.
    What is asked of a ``ctl`` is always answered in that step.
    """

    lock: Lock
    over: Over = Over.SERVED
    turn: bool = False
    asked: bool = True
    waits: tuple[Wait, ...] = ()


_PAGES: Final = Wait(
    call="self._base.cache.settled",
    bound=0.25,
    reason="one notification to the kernel: pages of a public value",
)
_LOOKED: Final = Wait(call="opened.prepare", bound=1.0, reason="one helper that looks at paths")
_CHANGED: Final = Wait(
    call="self._base.disks.change",
    bound=None,
    reason="the disk: a thread changes a real file, one at a time for each agent",
)
_READ: Final = Wait(
    call="self._base.disks.read",
    bound=None,
    reason="the disk: a thread reads what is not in memory, one at a time for each agent",
)
_GATHERED: Final = Wait(
    call="opened.gathered", bound=1.0, reason="one helper of an owner that looks at processes"
)
_SYNCED: Final = Wait(
    call="self._pace.synced",
    bound=None,
    reason="the disk, for which fsync(2) asks to wait: one at a time for each owner, EAGAIN from "
    "the 17th on",
)

_READY: Final = Wait(
    call="node.followed",
    bound=1.0,
    reason="one helper of an owner that makes the tree where the link leads",
)

_NAMES: Final = Row(lock=Lock.DIRECTORY, over=Over.REFUSED)

TABLE: Final = {
    # FS_IOC_SETFLAGS has a directory locked and opens it; what is listed is copied to the memory
    # of who lists it with the lock, which is held for as long as that memory does not come
    **dict.fromkeys(("lookup", "opendir", "readdir", "create", "mkdir"), _NAMES),
    **dict.fromkeys(("mknod", "symlink", "link", "unlink", "rmdir", "rename"), _NAMES),
    "getattr": Row(lock=Lock.EITHER, over=Over.LATE),
    "setattr": Row(lock=Lock.FILE, over=Over.REFUSED, waits=(_CHANGED, _PAGES)),
    "write": Row(lock=Lock.FILE, over=Over.REFUSED, turn=True, waits=(_LOOKED, _CHANGED, _PAGES)),
    "read": Row(lock=Lock.READERS, over=Over.LATE, turn=True, waits=(_READ, _GATHERED)),
    "open": Row(lock=Lock.NONE, over=Over.LATE, turn=True, waits=(_CHANGED,)),
    # what was written is committed, or refused for what it is, however late
    "flush": Row(lock=Lock.NONE, over=Over.LATE, turn=True, waits=(_LOOKED, _PAGES)),
    "fsync": Row(lock=Lock.FILE, waits=(_SYNCED,)),
    "readlink": Row(lock=Lock.NONE, over=Over.LATE, turn=True, waits=(_READY,)),
    "poll": Row(lock=Lock.NONE, over=Over.LATE, turn=True),
    "statfs": Row(lock=Lock.NONE, over=Over.LATE, turn=True),
    # nobody waits for an answer
    **dict.fromkeys(("forget", "release", "releasedir"), Row(lock=Lock.NONE)),
    # before each write the kernel would ask for one
    **dict.fromkeys(
        ("getxattr", "listxattr", "setxattr", "removexattr"), Row(lock=Lock.FILE, asked=False)
    ),
    # names last with what was acknowledged; the kernel looks whether it may ask before it takes
    # the lock, so the binder is the first
    "fsyncdir": Row(lock=Lock.DIRECTORY, asked=False),
    # the kernel judges by the modes itself (default_permissions)
    "access": Row(lock=Lock.NONE, asked=False),
}
