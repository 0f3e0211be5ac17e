"""Durable trees that cells get: the homes of agents, and those that mount lines name.

Where they are, and of the latter which they were when they were named.

These are directories of the daemon's own state, whose names it makes itself. No agent's path is
resolved here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from runtime.errors import MissingError, StaleError
from runtime.kernel import linux
from runtime.records.model import Agent
from runtime.records.sessions import Sessions
from runtime.records.spaces import tree_of_home, tree_of_space
from runtime.texts import mounts
from runtime.texts.mounts import Mount, Source
from runtime.texts.names import quote

#: stands for the agent's own home, which no line can name
HOMEDIR: Final = "homedir"


def below_trees(sessions: Sessions, agent: Agent, source: str) -> str:
    """The path of a tree in the directory of all of them."""
    if source == HOMEDIR:
        return sessions.home(agent)
    space = mounts.space_of(source)
    return tree_of_space(space) if space else tree_of_home(agent.owner)


def look(trees: Path, sessions: Sessions, agent: Agent, source: str) -> Source:
    """The tree as it is now; ``MissingError`` if there is none.

    Beside the device and inode that lend.c compares, it has the time at which it was made: a
    filesystem may give the inode of a removed space to the next one.
    """
    path = trees / below_trees(sessions, agent, source)
    try:
        st = os.lstat(path)
        if not stat.S_ISDIR(st.st_mode):
            raise FileNotFoundError
        made = linux.birth_time(path)
    except FileNotFoundError:
        space = mounts.space_of(source)
        raise MissingError(
            f"mount source {source}: there is no space {quote(space)}: an operator makes it by "
            "mkdir in shared/" if space else f"mount source {source}: it was removed"
        ) from None
    return Source(source, f"{st.st_dev}:{st.st_ino}:{made}")


def check(trees: Path, sessions: Sessions, agent: Agent, table: Iterable[Mount]) -> None:
    """``MissingError`` or ``StaleError`` for a tree that is no longer what was named."""
    for mount in table:
        if mount.tree:
            found = look(trees, sessions, agent, mount.source).identity
            if mount.identity not in ("*", "-", found):
                raise StaleError(
                    f"ESTALE: mount source {mount.source}: another directory is there than when "
                    "the line was written: write the line again"
                )
