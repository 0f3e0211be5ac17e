"""Durable trees that cells get: the homes of agents, and those that policies and lines name.

These are directories of the daemon's own state, whose names it makes itself. It looks at none of
them: what is there is the record of a space (``runtime.records.spaces``), and lend.c opens the
tree. No agent's path is resolved here.

No view contains the daemon's state, so these trees are not taken out of the parent's view as other
mounts are. ``lend`` clones the mount of each, with nosuid, nodev and perhaps read-only, and passes
the clone as a descriptor. It belongs to no mount namespace, so ``view`` can attach it in a child's
as in a root agent's. Nothing but attributes restricts it from then on, and the agent cannot change
them: the user namespace that owns the mounts is not its own.

Every view has them at one place, ``<runtime>/tree``, a small filesystem that is read-only once all
are attached: nothing else can appear there. A child gets it anew, and in it what its own policy
gives. So what it lacks is not there though its parent has it, and what its parent only hands on is
there. The answer of ``Authority.trees`` at the start is kept in the agent's record: it is what is
lent, and what no change of a policy may take.

A path into a tree is an ordinary source otherwise: ``look`` walks through the runtime directory to
``tree``, and to nothing else there. The link ``data`` is replaced in the text, since it need not
be uid 0's. A worktree of a repository in a tree is bound over what the child has there;
directories above it are pinned only where the child may write the tree.

A durable home reaches the cell in the same way, and no line names it. Any agent may make children
of any name. So what one leaves in its home must not be what an operator's agent of that name, or
another's child, finds there: the directory is that of the uid and of the names of all parents,
too.
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
