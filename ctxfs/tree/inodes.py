"""Grants of the kernel on an inode, which it makes without asking: one table by kind of file.

The kernel gives leases to an inode's owner, pages to every process that has it open, and
locks to everybody. This table decides, for each kind, who owns it and what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class ShownOwner(Enum):
    """Whose uid stat(2) shows."""

    DAEMON = "the daemon"
    AGENT = "the agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """One kind of file. ``pages`` is used by the code, the texts tell what follows."""

    name: str
    owner: ShownOwner
    pages: bool = False
    lease: str
    lock: str = "granted, blocks no other process"
    mmap: str


CONTROL: Final = Treatment(
    name="controls and documents",
    owner=ShownOwner.DAEMON,
    lease="EACCES",
    mmap="private only",
)
#: Everybody may read them, so nobody can lose the right to.
PUBLIC: Final = Treatment(
    name="public values of an agent that is not new or private, files of the root",
    owner=ShownOwner.DAEMON,
    pages=True,
    lease="EACCES",
    mmap="private, shared for reading",
)
#: The kernel lets only its owner remove a directory from the sticky ``agent/``.
NAMED: Final = Treatment(
    name="directories, sockets, links",
    owner=ShownOwner.AGENT,
    lease="none",
    mmap="none",
)
#: What an agent owns it could lease: the system call filter of its cell closes that.
REAL: Final = Treatment(
    name="files of artifact/, episode/",
    owner=ShownOwner.AGENT,
    lease="EPERM in a cell",
    mmap="private only",
)
TABLE: Final = (CONTROL, PUBLIC, NAMED, REAL)
