"""Files of agents that are placed elsewhere, at their lead: what they give back comes.

Whatever readers of an agent look at is here, and as if its program had run here: its output in
segments, its documents and artifacts, the lines of its conversation. This side's own limits hold:
``log_max``, ``document_max``, ``files``, ``artifact_max``, and the disk account of the owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from runtime.agents import bundles
from runtime.agents.bundles import PACK
from runtime.agents.gitcalls import FIRST
from runtime.agents.messages import OWN, provenance_of_handoff, sender_of_handoff
from runtime.agents.results import check_ref
from runtime.errors import MalformedError
from runtime.kernel.output import Copy
from runtime.peers.contents import (
    ARTIFACT,
    CONVERSATION,
    DOCUMENTS,
    LISTING,
    OUTPUTS,
    SUPPLIES,
    File,
    lines_of,
    link,
    unnamed,
)
from runtime.peers.parcels import Expected, Parcel, Parcels
from runtime.records.model import Agent
from runtime.texts.names import parse_json, parse_json_object, quote

#: of a file in ``want``
_NAME_MAX: Final = 1024
_PART_MAX: Final = 255
#: bytes of a line in the list of files
_ENTRY_MAX: Final = 8 * _NAME_MAX
#: the bits of a mode that a file gets, as from any caller
_MODE: Final = 0o777
_DIRECTORY_MODE: Final = 0o755
#: those of a directory that it keeps: without root, more of what is in it is still to be linked
_OWN_MODE: Final = 0o700
_ROLES: Final = ("user", "assistant", "system")
#: of a line, whatever its writer says
_GIVEN: Final = ("id", "ts", "from", "provenance", "run", "at", "node")
_BENEATH: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Returns(Parcels):
    """The files of all agents that are placed elsewhere."""

    def supplies(self, agent: Agent) -> dict[str, Path]:
        """Where the documents are that an agent is given, if there are such."""
        return {name: self._agents.documents.path(agent, name) for name in SUPPLIES if name != PACK}

    def _read(self, agent: Agent, name: str, offset: int, size: int) -> tuple[int, bytes]:
        if name not in SUPPLIES:
            return offset, b""
        path = self._agents.documents.path(agent, name)
        if name == PACK:
            path = bundles.made(self._agents, agent) / FIRST
        with open(path, "rb") as file:
            return offset, os.pread(file.fileno(), size, offset)

    # what comes while it runs

    def grown(self, agent: Agent, file: str, length: int) -> None:
        if file not in OUTPUTS or not agent.live:
            return
        parcel = self._begun(agent)
        if file not in parcel.files:
            directory = self._agents.documents.directory(agent) / file
            copy = Copy(directory, self._agents.settings.log_max(agent))
            end = copy.end
            parcel.files[file] = File(name=file, length=end, kept=end, asked=end, copy=copy)
        known = parcel.files[file]
        known.length = max(length, known.length or 0)
        self._go_on(parcel)

    # what comes at its end

    def ended(self, agent: Agent, said: Mapping[str, Any]) -> None:
        """An agent has ended, and so much is to come: the fields ``files``, ``out`` and ``log``
        of ``ended``. May be said again; a daemon that starts does."""
        if self._begun(agent).is_closed:
            return
        for name in OUTPUTS:
            if length := said.get(name):
                self.grown(agent, name, length)
        files = said.get("files")
        files = files if isinstance(files, dict) else {}
        if PACK in files and not self._may_have(agent, files):
            files = {name: value for name, value in files.items() if name != PACK}
        total = sum(
            number for value in files.values() if isinstance(value, list)
            for number in value[:1] if isinstance(number, int)
        )  # fmt: skip
        self._expect(agent, self._expected(files), total)

    def _may_have(self, agent: Agent, files: Mapping[str, Any]) -> bool:
        """Whether what an agent committed is taken: beside all else that it gives back."""
        most = self._agents.settings.config.artifact_max
        listed = files.get(LISTING, [])
        sizes = [value[0] for value in files.values() if isinstance(value, list) and value]
        sizes += listed[1:] if isinstance(listed, list) else []  # all that is in the list
        own = sum(size for size in sizes if size.__class__ is int)
        return agent.worktree is not None and agent.worktree_made and own <= most

    def _expected(self, files: Mapping[str, Any]) -> Iterator[Expected]:
        for name, value in files.items():
            match value:
                case [None, int()] if name == CONVERSATION[0]:
                    yield name, None, 0
                case [int(size), int(right)] if size >= 0:
                    yield name, size, right
                case _:
                    raise MalformedError(f"{quote(name)} has no right size and mode")

    def _listed(self, path: Path) -> Iterator[Expected]:
        with open(path, "rb") as file:
            while line := file.readline(_ENTRY_MAX):
                try:
                    value = parse_json(line.decode())
                except (UnicodeDecodeError, MalformedError):
                    value = None
                match value:
                    case [str(name), int(size), int(right)] if size >= 0 and ARTIFACT in name[:9]:
                        yield name, size, right
                    case _:
                        raise MalformedError("the list of files has a line that is none")

    def _check(self, name: str, right: Any) -> None:
        if name.startswith(ARTIFACT):
            _parts(name)
        elif name not in (*DOCUMENTS, *CONVERSATION, LISTING, PACK):
            raise MalformedError(f"{quote(name)} is nothing that an agent gives back")

    def _show(self, parcel: Parcel, file: File) -> None:
        agent, path = parcel.agent, parcel.path(file.name)
        documents, sessions = self._agents.documents, self._agents.sessions
        session = sessions.get(agent.session)
        if file.name == LISTING:
            parcel.rest = self._listed(path)
            parcel.left = file.right
            parcel.next = next(parcel.rest, None)
        elif file.name in DOCUMENTS:
            self._work(parcel, partial(self._keep_document, agent, file.name, path))
        elif file.name == "latest.md" and session is not None:
            link(path, sessions.ensure(session) / file.name)
            self._agents.journal.tell_session(agent.session, (file.name,))
        elif file.name == CONVERSATION[0]:
            self._work(parcel, partial(self._converse, agent, path))
        elif file.name == PACK:
            link(path, bundles.came(self._agents, agent))
        elif file.name.startswith(ARTIFACT):
            documents.ensure(agent)
            path.chmod(file.right & _MODE)
            # a directory takes as much of the disk as a file does
            root = documents.path(agent, "artifact")
            mode = file.right & _MODE | _OWN_MODE
            parcel.count += _link_beneath(path, root, _parts(file.name), mode)
            self._agents.journal.tell_agent(agent.index, ("artifact",))

    async def _keep_document(self, agent: Agent, name: str, path: Path) -> None:
        if name == "refs.jsonl":
            async with aclosing(lines_of(path)) as parts:
                async for _, lines in parts:
                    for line in lines:
                        check_ref(line)
        self._agents.documents.ensure(agent)
        link(path, self._agents.documents.path(agent, name))
        self._agents.journal.tell_agent(agent.index, (name,))

    async def _converse(self, agent: Agent, path: Path) -> None:
        """Adds lines to the conversation; how far they reach is noted in the same change."""
        async with aclosing(lines_of(path, agent.heard.get("conversation", 0))) as parts:
            async for end, lines in parts:
                with self._agents.journal.changing() as change:
                    for line in lines:
                        if said := _message(agent, line):
                            change.say(agent.session, **said)
                    change.set(agent, heard={**agent.heard, "conversation": end})


def _parts(name: str) -> list[bytes]:
    """The components of a path below ``artifact/``; the last is empty for a directory."""
    parts = unnamed(name.removeprefix(ARTIFACT)).split(b"/")
    named = parts if parts[-1] else parts[:-1]
    right = named and all(0 < len(part) <= _PART_MAX for part in named)
    if not right or len(name) > _NAME_MAX:
        raise MalformedError(f"{quote(name, 300)} is too long a name, or empty")
    if any(part in (b".", b"..") or b"\0" in part for part in named):
        raise MalformedError(f"{quote(name, 300)} is the name of no file")
    return parts


def _message(agent: Agent, line: str) -> dict[str, Any]:
    """The fields of a line of the conversation, from one of the host's: who says it is known here.
    None of what the end of a message has told. ``CtxError``."""
    said = parse_json_object(line)
    role = said.get("role")
    if role not in _ROLES or "content" not in said:
        raise MalformedError("messages.jsonl has a line that is no message")
    own = role != "user" or said.get("provenance") == OWN
    if agent.how.takes_messages and (not own or said.get("told") is True):
        return {}
    given = {
        "from": f"agent:{agent.name}" if own else sender_of_handoff(agent),
        "provenance": OWN if own else provenance_of_handoff(agent),
        "run": agent.run.id,
        "node": agent.node,
        "at": str(said.get("ts", ""))[:64],
    }
    return {**given, **{key: value for key, value in said.items() if key not in _GIVEN}}


def _link_beneath(path: Path, root: Path, parts: list[bytes], mode: int) -> int:
    """A second name of a file, below a directory, and whatever is missing above it: how many
    directories. What is a directory itself gets a mode. No link is followed; ``OSError`` if
    something else is in the way."""
    above, made = os.open(root, _BENEATH), 0
    try:
        for part in parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=above)
                made += 1
                os.chmod(part, _DIRECTORY_MODE, dir_fd=above)
            below = os.open(part, _BENEATH, dir_fd=above)
            os.close(above)
            above = below
        if not parts[-1]:
            os.chmod(f"/proc/self/fd/{above}", mode)
        else:
            try:
                os.link(path, parts[-1], dst_dir_fd=above)
            except FileExistsError:
                there = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
                if not os.path.samestat(there, path.stat()):
                    raise
        return made
    finally:
        os.close(above)
