"""Durable trees that cells get: the homes of agents, and those that policies and lines name.

These are directories of the daemon's own state, whose names it makes itself. It looks at none of
them: what is there is the record of a space (``runtime.records.spaces``), and lend.c opens the
tree. No agent's path is resolved here.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.errors import MissingError, StaleError
from runtime.records.spaces import Spaces
from runtime.texts import mounts
from runtime.texts.mounts import Mount, Source
from runtime.texts.names import quote


def look(spaces: Spaces, source: str) -> Source:
    """The tree that a line names, as it is now; ``MissingError`` if there is none.

    The number of a record is never used again: a space that is removed and made anew is another.
    """
    name = mounts.space_of(source)
    if not name:
        return Source(source, "-")
    space = spaces.named(name)
    if space is None:
        raise MissingError(
            f"{source}: there is no space {quote(name)}: an operator makes it by mkdir in shared/"
        )
    return Source(source, str(space.index))


def check(spaces: Spaces, table: Iterable[Mount]) -> None:
    """``MissingError`` or ``StaleError`` for a tree that is no longer what was named."""
    for mount in table:
        # a line of an older version has another kind of number, and one of before a boot has none
        if mount.identity.isdigit() and mount.identity != look(spaces, mount.source).identity:
            raise StaleError(
                f"ESTALE: {mount.source}: another space is there than when the line was written: "
                "write the line again"
            )
        look(spaces, mount.source)
