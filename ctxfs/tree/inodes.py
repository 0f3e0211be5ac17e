"""Grants of the kernel on an inode, which it makes without asking: by kind of file.

The kernel gives leases to an inode's owner, pages to every process that has it open, and
locks to everybody. So the kind decides whom stat(2) shows as the owner, and what is cached; what
follows for leases, locks and mappings is in ctxfs(5), Owners of files.
"""

from __future__ import annotations

from enum import Enum, auto


class Treatment(Enum):
    """How an inode is treated. Files of ``artifact/`` and ``episode/`` are no rows: they belong to
    the agent, without pages."""

    #: controls and documents: the daemon's, without pages
    CONTROL = auto()
    #: public values: the daemon's, with pages. Everybody may read them, so nobody can lose the
    #: right to.
    PUBLIC = auto()
    #: directories, sockets, links: the agent's, for the kernel lets only its owner remove a
    #: directory from the sticky ``agent/``. What an agent owns it could lease: the system call
    #: filter of its cell closes that.
    NAMED = auto()
