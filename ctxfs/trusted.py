"""Files that the operator of the machine alone may write, as with sudoers(5)."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from runtime.errors import MalformedError

#: bytes of one file
FILE_MAX: Final = 1 << 20


def why_not_trusted(found: os.stat_result, trusted: Collection[int]) -> str:
    """Empty if a file or directory belongs to one of the ``trusted`` uids and is writable by nobody
    else; otherwise what is wrong with it."""
    if found.st_uid not in trusted:
        users = " or ".join(f"uid {uid}" for uid in sorted(trusted))
        return f"belongs to uid {found.st_uid}: it declares agents only if it belongs to {users}"
    if found.st_mode & 0o022:
        return "others may write it: chmod go-w"
    return ""


def read_trusted(path: Path, trusted: Collection[int]) -> str:
    """The text of a regular file, whatever else the name may lead to; ``MalformedError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise MalformedError("not a regular file")
        if why := why_not_trusted(found, trusted):
            raise MalformedError(why)
        with open(fd, "rb", closefd=False) as file:
            data = file.read(FILE_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > FILE_MAX:
        raise MalformedError(f"longer than {FILE_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedError("not UTF-8") from None
