"""Verbs that are said at a socket, as to the ``ctl`` of an agent or a task.

The lock of a ``ctl`` may be held for ever by somebody else's doing, as by a write to it from a
page of a user's own FUSE filesystem. So the daemon's socket has a second name in the runtime
directory, and ``ctx`` says verbs there. No lock of an inode, lane or account is in that way, and
the client finds it without asking the filesystem for anything.
"""

from __future__ import annotations

import os

from ctxfs.tree.base import Base
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rows import one_line
from runtime.caller import Caller


async def say(base: Base, root: Node, caller: Caller, agent: str, task: str, line: str) -> None:
    """Opens the file as the caller would, and writes the line: the same may, and the same is told.
    It acts in the first step. Raises what the file would."""
    call, node, mark = Call.of(base.runtime, caller), root, base.cache.mark()
    names = ["agent", f"{agent}.d", *(("task", task) if task else ()), "ctl"]
    try:
        for name in names:
            node = node.lookup(call, name)
        opened = node.open(call, os.O_WRONLY)
        try:
            opened.write(0, one_line(line).encode() + b"\n")
        finally:
            opened.release()
    except Exception as error:
        base.reasons.note(error, caller, "/".join(names), node.incarnation)
        raise
    # who is answered finds in the files what the answer says
    await base.cache.settled(mark)
