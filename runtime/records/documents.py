"""The files that belong to one incarnation: its documents, what it printed, what it runs on.

What is not there is shown all the same: a file as empty, a directory as empty and as changed when
its agent or session was created. Reading makes nothing. The first write makes the directories
(``Documents.ensure``, ``Sessions.ensure``), charges them to the owner, and leaves inode numbers as
they are, because the number of a folder belongs to its object and not to the directory behind it.
On a full disk that write gets ``ENOSPC``; directories that were made by then are empty, and the
next write uses them.

Below the state are ``agent/INCARNATION/doc/`` once a document or an artifact is written, and
``agent/INCARNATION/{out,log,reply,task}`` once a program says something, or the runtime does in
``log``. What the runtime says last, of the end, is in the agent's row: a program that says nothing
leaves no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runtime.ids import Incarnation
from runtime.kernel.trash import Trash
from runtime.records.journal import Journal
from runtime.records.model import Agent
from runtime.records.sessions import ensure_directory


class Documents:
    """The directories of all incarnations, below ``agent`` in the state."""

    def __init__(self, *, journal: Journal, trash: Trash, state: Path) -> None:
        self._journal = journal
        self._trash = trash
        self.base = state / "agent"
        #: is told of the directories that are made for an owner
        self.made: Callable[[int], None] = lambda owner: None

    def directory(self, agent: Agent) -> Path:
        """The incarnation's own directory: records, output, documents. It is there once one of
        these is written."""
        return self.base / agent.incarnation

    def path(self, agent: Agent, name: str) -> Path:
        return self.base / f"{agent.incarnation}/doc/{name}"

    def size(self, agent: Agent, name: str) -> int:
        try:
            return self.path(agent, name).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, agent: Agent, name: str, size: int = -1) -> bytes:
        """All of it, or so many bytes; nothing if it was never written."""
        try:
            with open(f"{self.base}/{agent.incarnation}/doc/{name}", "rb") as file:
                return file.read(size)
        except FileNotFoundError:
            return b""

    def write(self, agent: Agent, name: str, data: bytes) -> None:
        """Replaces a document as a whole; readers see the old or the new one."""
        self.ensure(agent)
        replace_file(self.path(agent, name), data)
        self._journal.tell_agent(agent.index, (name,))

    def result_written(self, agent: Agent) -> None:
        """The agent writes its result itself, which stays: no later run makes it anew."""
        if agent.said.result_from_output:
            with self._journal.changing() as change:
                change.hear(agent, result_from_output=False)

    def ensure(self, agent: Agent) -> None:
        """The directories of its documents, for what is about to be written; ``NoSpaceError``."""
        artifact = self.path(agent, "artifact")
        if not artifact.is_dir():
            ensure_directory(artifact.parent, agent.created, mode=0o700)
            ensure_directory(artifact, agent.created)
            self.made(agent.owner)

    def discard(self, agent: Agent) -> None:
        """All of it."""
        self._trash.discard(self.directory(agent), agent.owner)

    def clear(self, agent: Agent, *, kept: bool) -> None:
        """Removes what only the object had; its documents stay if they are ``kept``."""
        self._clear(self.directory(agent), agent.owner, kept=kept)

    def _clear(self, directory: Path, owner: int, *, kept: bool) -> None:
        if not kept or not (directory / "doc").is_dir():
            self._trash.discard(directory, owner)
            return
        for path in directory.iterdir():
            if path.name != "doc":
                self._trash.discard(path, owner)

    def remove_strays(self, known: set[Incarnation], kept: set[Incarnation]) -> None:
        """Files of incarnations that are neither known nor, for their documents, kept."""
        for directory in self.base.iterdir():
            if directory.name not in known:
                self._clear(directory, 0, kept=directory.name in kept)


def replace_file(path: Path, data: bytes) -> None:
    """Writes beside it, then renames over it (rename(2))."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
