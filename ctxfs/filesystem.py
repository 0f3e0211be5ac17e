"""The whole of ``/ctx``: from inode numbers to nodes, by the table of layouts."""

from __future__ import annotations

from typing import Any, Final

from ctxfs.files import agent, ask, history, home, root, session, shared, task, tool, waiting, work
from ctxfs.forgetting import Forgetting
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout, split_inode
from ctxfs.tree.nodes import GoneNode, Node
from ctxfs.tree.rownodes import node_of
from runtime.errors import GoneError
from runtime.runtime import Runtime

ROOT_INODE: Final = 1
LAYOUTS: Final[tuple[Layout[Any], ...]] = (
    root.LAYOUT,
    agent.LAYOUT,
    agent.CHILD,
    session.LAYOUT,
    session.CHANNEL,
    home.LAYOUT,
    history.LAYOUT,
    task.LAYOUT,
    work.LAYOUT,
    waiting.LAYOUT,
    ask.LAYOUT,
    tool.LAYOUT,
    agent.SUPERVISOR,
    shared.LAYOUT,
)
_BY_NUMBER: Final = {layout.number: layout for layout in LAYOUTS}


class Filesystem:
    """The tree of ``/ctx``. Knows the runtime; knows no FUSE requests."""

    def __init__(self, runtime: Runtime) -> None:
        self.base = Base(runtime)
        runtime.agents.journal.subscribe(Forgetting(self.base, LAYOUTS))

    def node(self, inode: int) -> Node:
        """The node of an inode number that the kernel has been given; ``GoneError``.

        The kernel may have come here by a name that it kept: told that the inode is
        gone, it walks the path again and asks for each name anew.
        """
        if self.base.folders.owns(inode):
            return self.base.folders.get(inode)
        node = self._resolve(*split_inode(inode))
        if node is None:
            raise GoneError("this object was removed")
        return node

    def _resolve(self, layout_number: int, index: int, number: int) -> Node | None:
        layout = _BY_NUMBER.get(layout_number)
        row = layout.numbered.get(number) if layout is not None else None
        if layout is None or row is None:
            return None
        obj = layout.find(self.base, index, row)
        return node_of(self.base, layout, index, obj, number) if obj is not None else None

    # in the next daemon

    def is_gone(self, node: Node) -> bool:
        """Whether an open file is all that is left of its object."""
        return self._resolve(*split_inode(node.inode)) is None

    def opened_before(self, inode: int, path: str) -> Node:
        """The node that is open by this inode number, whatever has become of it."""
        try:
            return self.node(inode)
        except GoneError:
            return GoneNode(inode, path)

    @property
    def root(self) -> Node:
        return self.node(ROOT_INODE)
