"""Bounds that the kernel keeps on durable trees: project quotas of their filesystem (ext4, xfs).

A project is a number that files have beside their owner, and that what is made in a directory
inherits (ioctl_xfs_fsgetxattr(2)). Each owner has one for all of its trees.

The limit of a project is what the trees have and the account has left, set anew when that moves by
a sixteenth of the account. What walks the trees gives all that is there to the project (walk.c).
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Final

from runtime.kernel import linux

_SYS_QUOTACTL_FD: Final = 443
_PROJECT: Final = 2
_Q_SETQUOTA: Final = 0x800008
_BLOCK_LIMITS: Final = 1
#: of blocks in limits
_UNIT: Final = 1024


class _Limits(ctypes.Structure):
    """struct if_dqblk of linux/quota.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("hard", "soft", "space", "inode_hard")),
        *((name, ctypes.c_uint64) for name in ("inode_soft", "inodes", "time", "inode_time")),
        ("valid", ctypes.c_uint32),
    )


def are_enforced(path: Path) -> bool:
    """Whether the filesystem that it is on bounds projects: quotas that are merely counted are
    named otherwise, or not at all."""
    options = linux.mount_of(path.resolve()).super_options.split(",")
    return not {"prjquota", "pquota"}.isdisjoint(options)


class Quotas:
    """The projects of owners, in a file of the state."""

    def __init__(self, state: Path, first: int, count: int) -> None:
        self._state = state
        self._file = state / "projects.json"
        self._projects = range(first, first + count)
        self._owners: dict[str, int] = {}
        if self._file.exists():
            self._owners = json.loads(self._file.read_text())

    def project(self, owner: int) -> int | None:
        """That of an owner, which gets one; None if there are no more, or another setting gave it
        and so somebody else may have it."""
        known = self._owners.get(str(owner))
        if known is None:
            taken = set(self._owners.values())
            known = next((each for each in self._projects if each not in taken), None)
            if known is None:
                return None
            self._owners[str(owner)] = known
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._owners))
            new.replace(self._file)
        return known if known in self._projects else None

    def limit(self, project: int, size: int) -> None:
        """Bounds what all files of a project may take, in bytes; waits for the disk.
        ``OSError``."""
        limits = _Limits(hard=max(1, size // _UNIT), valid=_BLOCK_LIMITS)
        fd = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            command = ctypes.c_uint(_Q_SETQUOTA << 8 | _PROJECT)
            number = ctypes.c_uint(project)
            linux.syscall(_SYS_QUOTACTL_FD, fd, command, number, ctypes.byref(limits))
        finally:
            os.close(fd)
