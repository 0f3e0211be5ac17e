"""Durable trees: where they lie and are seen, and those of an older version.

Agents can open the root of a tree, and hold its lock for as long as they like. What is done to a
tree is done by a helper (tree.c); the directories above trees are the daemon's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import ExitStack
from typing import Final

from runtime.cell.cell import Places
from runtime.errors import StartupError
from runtime.kernel import linux, orders
from runtime.kernel.privilege import Privilege
from runtime.kernel.spawn import Spawner
from runtime.records.spaces import Spaces

log = logging.getLogger("ctxd.trees")

#: of trees, and of what was kept of some that were removed
_KINDS: Final = ("shared", "home", "agent", "lost")
#: many times what it takes to rename every tree
_ADOPT_SECONDS: Final = 60.0


def adopt(places: Places, spawner: Spawner, spaces: Spaces, closed: Collection[int]) -> None:
    """Trees of an older version get their places, before the daemon serves; homes of ``closed``
    uids, for root alone. ``StartupError``.

    An earlier start may have died at any step of it. The directory that had the spaces goes last,
    so that the next start does what is left.
    """
    older = places.state / "shared"
    if not older.is_dir():
        return
    with ExitStack() as stack:
        fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("said", "complained")]
        for fd in fds:
            stack.callback(os.close, fd)
        command = orders.words(places.program("tree"), places.state, "adopt", list(closed))
        moving = spawner.start_now(spawner.home, command, fds=[None, *fds])
        status = moving.wait_now(_ADOPT_SECONDS)
        if status is None:
            moving.kill()
        said, complained = (os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in fds)
    if status != 0:
        why = complained.strip().removeprefix("ctxfs: ") or "a process holds one of them"
        raise StartupError(
            f"{places.state}: the durable trees of an older ctxd cannot be moved to "
            f"{places.trees} ({why}): end the agents that live, then start ctxd again"
        )
    for line in said.splitlines():
        owner, _, name = line.partition(" ")
        if spaces.named(name) is None:
            spaces.adopt(name, int(owner))
    places.trees.mkdir(exist_ok=True)
    os.rename(older, places.trees / "shared")
    log.info(
        "the durable trees of an older ctxd are now in %s: data of a space or home leads there",
        places.trees,
    )


def show(places: Places, privilege: Privilege) -> None:
    """They are seen below the runtime directory, by the modes of each; ``StartupError``."""
    try:
        for path in (places.trees, *(places.trees / kind for kind in _KINDS)):
            path.mkdir(exist_ok=True)
            path.chmod(0o711)
        if privilege.rootless:
            _link(places)
        else:
            _mount(places)
    except OSError as error:
        raise StartupError(f"{places.tree}: cannot show {places.trees} there: {error}") from None


def _link(places: Places) -> None:
    if not places.tree.is_symlink() or os.readlink(places.tree) != str(places.trees):
        places.tree.unlink(missing_ok=True)
        places.tree.symlink_to(places.trees)


def _mount(places: Places) -> None:
    # of a daemon that was killed, or was executed before in this process, is known again
    while linux.mount_at(places.tree) is not None and not places.tree.samefile(places.trees):
        linux.unmount(places.tree, linux.MNT_DETACH)
    if linux.mount_at(places.tree) is None:
        if places.tree.is_symlink():
            places.tree.unlink()
        places.tree.mkdir(mode=0o711, exist_ok=True)
        linux.mount(str(places.trees), places.tree, "none", linux.MS_BIND)
    linux.narrow_mount(places.tree)


def hide(places: Places) -> None:
    if linux.mount_at(places.tree) is not None:
        linux.unmount(places.tree, linux.MNT_DETACH)
    if places.tree.is_symlink():
        places.tree.unlink()
    elif places.tree.is_dir():
        places.tree.rmdir()
