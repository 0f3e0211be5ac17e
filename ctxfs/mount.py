"""Mounting: where the filesystem appears, and what may be in the way.

The filesystem itself is mounted below the shared runtime directory, where
living sandboxes see it again after a restart; the mount point that users know
is a bind of it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyfuse3

from ctxfs.operations import Operations
from runtime import linux
from runtime.cell import Places
from runtime.errors import StartupError

_FSNAME: Final = "ctxfs"
_SUBTYPE: Final = "ctxfs"
_ANSWER_SECONDS: Final = 5.0


def check_device(path: Path = Path("/dev/fuse")) -> None:
    """``StartupError`` if FUSE cannot be used here."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise StartupError(
            f"{path} is missing: load the module (modprobe fuse), or give it to the container"
        ) from None
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}: run ctxd as root") from None


def _is_dead(path: Path) -> bool:
    """Whether the daemon behind a FUSE mount is gone. One that hangs counts as alive."""
    answers: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # never answered from a cache, unlike stat(2)
            answers.append(0)
        except OSError as error:
            answers.append(error.errno or 0)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return bool(answers) and answers[0] in (errno.ENOTCONN, errno.ECONNABORTED)


def clear_stale(point: Path) -> None:
    """Detaches mounts of dead daemons of ours; ``StartupError`` for anything else there."""
    while (entry := linux.mount_at(point)) is not None:
        if entry.fstype != f"fuse.{_SUBTYPE}":
            what = f"a {entry.fstype} filesystem ({entry.source})"
            raise StartupError(f"{point}: {what} is mounted there; choose another --mount")
        if not _is_dead(point):
            raise StartupError(f"{point}: a running ctxd is mounted there")
        linux.unmount(point, linux.MNT_DETACH)


def check_point(point: Path) -> None:
    """``StartupError`` unless the mount point is an empty directory, or can be made."""
    if not point.is_absolute():
        raise StartupError(f"{point}: the mount point is an absolute path")
    clear_stale(point)
    if not point.exists():
        if not point.parent.is_dir():
            raise StartupError(f"{point.parent}: no such directory")
        return
    if not point.is_dir() or point.is_symlink():
        raise StartupError(f"{point}: not a directory")
    if any(point.iterdir()):
        raise StartupError(f"{point}: not empty; mount on an empty directory")


@contextmanager
def mounted(operations: Operations, places: Places, *, debug: bool) -> Iterator[None]:
    """The filesystem, mounted in both places as long as the context lasts."""
    clear_stale(places.fuse)
    made = not places.mount.exists()
    if made:
        places.mount.mkdir(mode=0o755)
    options = set(pyfuse3.default_options)
    options |= {f"fsname={_FSNAME}", f"subtype={_SUBTYPE}", "allow_other", "nosuid", "nodev"}
    if debug:
        options.add("debug")
    try:
        pyfuse3.init(operations, str(places.fuse), options)
    except RuntimeError as error:
        raise StartupError(f"{places.fuse}: cannot be mounted: {error}") from None
    guard = subprocess.Popen(
        [str(places.program("guard")), str(places.fuse), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        env={},
    )
    try:
        linux.mount(str(places.fuse), places.mount, "none", linux.MS_BIND)
        try:
            yield
        finally:
            with suppress(OSError):
                linux.unmount(places.mount, linux.MNT_DETACH)
    finally:
        pyfuse3.close(unmount=True)
        guard.kill()
        guard.wait()
        with suppress(OSError):
            if linux.mount_at(places.fuse) is not None:
                linux.unmount(places.fuse, linux.MNT_DETACH)
        if made:
            with suppress(OSError):
                places.mount.rmdir()
