"""Whose daemons are tested: root's, or those of an ordinary user, who runs the tests then
(tests/rootless.py)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import unified_mount

#: the cgroup that the user has
_CGROUP: Final = os.environ.get("CTXFS_TEST_ROOTLESS", "")
ROOTLESS: Final = bool(_CGROUP)
#: where daemons have their cgroups
HIERARCHY: Final = Path(_CGROUP) if ROOTLESS else unified_mount()
#: of agents that root makes; without root they have the user's
AGENT_UID: Final = os.geteuid() if ROOTLESS else 61000
#: who owns attackers, where that is another one than who asks; all of a user's are the user's
OTHER: Final = str(AGENT_UID) if ROOTLESS else "4000"
#: of an agent: what is the user's too
IDS: Final = frozenset(("owner", "uid", "gid", "groups")) if ROOTLESS else frozenset()
_PR_CAP_AMBIENT: Final = 47
_CLEAR_ALL: Final = 4


def keep_capabilities() -> None:
    """By which the tests look at daemons and are told of processes, from what they start."""
    ctypes.CDLL(None).prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
