"""Mounts that nothing else on the machine sees, and that no killed test leaves behind."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from runtime.kernel.linux import MS_SHARED, mount
from tests.worlds.daemon import Daemon

_libc: Final = ctypes.CDLL(None, use_errno=True)
_CLONE_FS: Final = 0x200
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 1 << 14
_MS_SLAVE: Final = 1 << 19


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the mount namespace cannot be changed")


@contextmanager
def own_mounts() -> Iterator[None]:
    """The calling thread, and what it starts, have a mount namespace of their own.

    The last process in it takes its mounts along. A mount on a file of a cgroup would
    otherwise outlive its cgroup, and then nobody can name it to unmount it.
    """
    directory = os.getcwd()
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.unshare(_CLONE_NEWNS))
        mount("none", Path("/"), "none", _MS_REC | _MS_SLAVE)
        # sandboxes that live receive a new mount of the filesystem by it
        mount("none", Path("/"), "none", _MS_REC | MS_SHARED)
        try:
            yield
        finally:
            # a thread that was started meanwhile shares root and working directory until here
            _checked(_libc.unshare(_CLONE_FS))
            _checked(_libc.setns(before, _CLONE_NEWNS))
            os.chdir(directory)
    finally:
        os.close(before)


class SecludedDaemon(Daemon):
    """A daemon to be started within ``own_mounts``: executed, as a child of the test."""

    executed = True
