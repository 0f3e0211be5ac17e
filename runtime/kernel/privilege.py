"""The rights of the daemon: root's, or an ordinary user's.

What differs between the two is asked for here, or follows from ``rootless``.
Without root every agent has the daemon's own ids, for no process may take
others, and that user's processes outside all agents are what root is elsewhere.

- Agents have the daemon's uid, so there are no ids to drop, only ways to gain rights. Elsewhere
  the uid keeps root's files from agents; here the view does. The shared directory is read-only in
  sandboxes except for the filesystem below it, and standard input is a sealed copy of the task.
- A keeper is not dumpable, so neither its agent nor another process of the uid can trace it.
  ``enter`` can still join its namespaces: the owner of a user namespace has all capabilities in it
  from outside, and the agent is inside.
- ``stage`` makes a user namespace in which to bind. The host's mounts are locked in there, so it
  covers procfs, cgroupfs and the daemon's directories, where root removes them.
- ``fusermount3`` mounts, and the mount point is a link, since a bind mount needs root. The shared
  directory is not a mount of its own: whether a filesystem that is mounted again reaches living
  sandboxes depends on the mount it is on, which systemd makes shared. The guard aborts the
  connection through fusectl.
- An agent can make more cgroups in its own (``runtime.kernel.cgroups``).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from runtime.errors import ForbiddenError


@dataclass(frozen=True, slots=True, kw_only=True)
class Privilege:
    """The ids of the daemon, and what follows from them."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @classmethod
    def of_this_process(cls) -> Privilege:
        return cls(uid=os.geteuid(), gid=os.getegid(), groups=tuple(sorted(os.getgroups())))

    @property
    def rootless(self) -> bool:
        return self.uid != 0

    def is_master(self, uid: int) -> bool:
        """Whether an operator with this uid has the last word on everything here."""
        return uid in (0, self.uid)

    def check_ids(self, what: str, wanted: Collection[int], own: Collection[int]) -> None:
        """``ForbiddenError`` for ids that no process of this daemon can have."""
        if self.rootless and set(wanted) != set(own):
            raise ForbiddenError(
                f"{what}: this ctxd runs without root, as uid {self.uid}: "
                "its agents have its own uid, gid and groups"
            )

    def groups_of(self, groups: tuple[int, ...]) -> tuple[int, ...] | str:
        """GROUPS as programs are told them (take_ids of orders.h): as they are, where nobody
        may change them."""
        return "=" if self.rootless else groups


ROOT: Final = Privilege(uid=0, gid=0)
