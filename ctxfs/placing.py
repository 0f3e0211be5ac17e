"""The files of agents that other machines' daemons place here: written as an operator would.

The same parsers and checks judge what a lead says; only who may write is decided elsewhere
(``runtime.peers.guests``).
"""

from __future__ import annotations

from ctxfs import recipes
from ctxfs.errnos import name_of
from ctxfs.files.agent import LAYOUT
from ctxfs.tree.base import Base
from ctxfs.tree.rows import Staged
from runtime.caller import Caller
from runtime.records.model import Agent


class Placing:
    """Writes files of agents for ``runtime.peers.guests``."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self.recipes = recipes.shipped()

    def write(self, agent: Agent, caller: Caller, name: str, text: str) -> None:
        """Writes a whole file, if that has another text; raises what a write would."""
        row = LAYOUT.row(name)
        assert isinstance(row, Staged), name
        is_same = getattr(agent, name.removesuffix(".json"), None) == text
        if not is_same and row.render(self._base, agent, caller) != text:
            row.put(self._base, agent, caller, text.encode(), {})

    code = staticmethod(name_of)
