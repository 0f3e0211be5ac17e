"""Names of real files: renames take no lock of a whole filesystem, and do not wait for the disk."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from runtime.errors import (
    CrossingError,
    CtxError,
    IsADirectoryNodeError,
    MissingError,
    NotADirectoryNodeError,
    NotEmptyError,
    TakenError,
)
from runtime.kernel import linux
from runtime.texts.names import quote

#: of what is there
ENTRY: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: what errors of real files are called here
_ERRORS: Final[dict[int | None, type[CtxError]]] = {
    errno.ENOENT: MissingError,
    errno.EEXIST: TakenError,
    errno.ENOTEMPTY: NotEmptyError,
    errno.ENOTDIR: NotADirectoryNodeError,
    errno.EISDIR: IsADirectoryNodeError,
}


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of the kernel are those of this name."""
    try:
        yield
    except OSError as error:
        cls = _ERRORS.get(error.errno)
        if cls is None:
            raise
        raise cls(f"{quote(name)}: {(error.strerror or '').lower()}") from None


def move(fd: int, name: str, to: int, new_name: str, flags: int) -> int | None:
    """Renames a file into another directory, by a second name.

    rename(2) of two directories takes a lock of the whole filesystem, which an agent that renames
    in a durable tree may hold. A directory has no second name.
    """
    if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        raise CrossingError("a directory cannot be renamed into another directory: copy it")
    if flags == linux.RENAME_EXCHANGE:
        raise CrossingError("files of two directories cannot be exchanged: copy them")
    linked = f".{secrets.token_hex(8)}"
    os.link(name, linked, src_dir_fd=fd, dst_dir_fd=to, follow_symlinks=False)
    try:
        replaced = replace(to, linked, new_name, flags)
    except OSError:
        os.unlink(linked, dir_fd=to)
        raise
    os.unlink(name, dir_fd=fd)
    return replaced


def replace(fd: int, name: str, new_name: str, flags: int) -> int | None:
    """Renames in a directory. Of what was there by the new name, a descriptor is left."""
    if flags:
        linux.rename(fd, name, new_name, flags)
        return None
    try:
        replaced = os.open(new_name, ENTRY, dir_fd=fd)
    except FileNotFoundError:
        linux.rename(fd, name, new_name)
        return None
    try:
        if not stat.S_ISREG(os.fstat(replaced).st_mode) or not _exchange(fd, name, new_name):
            linux.rename(fd, name, new_name)
    except OSError:
        os.close(replaced)
        raise
    return replaced


def _exchange(fd: int, name: str, new_name: str) -> bool:
    """Has a file replace another by two steps; False if the filesystem cannot do the first one."""
    try:
        linux.rename(fd, name, new_name, linux.RENAME_EXCHANGE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    os.unlink(name, dir_fd=fd)
    return True
