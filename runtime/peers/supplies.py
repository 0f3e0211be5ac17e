"""Files of guests, at their host: what they are given comes, what they give back goes.

``put`` names what is to come, with its sizes and digests; what comes is as if an agent had written
it. What a guest says is noticed by the change of a file, a few times a second at most, and costs
nothing while it says nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime.agents import bundles
from runtime.agents.bundles import PACK
from runtime.agents.gitcalls import FIRST
from runtime.authority.accounts import Payer
from runtime.authority.loop import Timed
from runtime.cell.port import Host as Machine
from runtime.cell.port import guarded
from runtime.errors import MalformedError
from runtime.kernel import linux
from runtime.kernel.inotify import Wakeup
from runtime.kernel.output import Segments
from runtime.peers.contents import (
    ARTIFACT,
    CONVERSATION,
    DOCUMENTS,
    LISTING,
    OUTPUTS,
    File,
    are_short,
    digests,
    lines_of,
    link,
    named,
    unnamed,
)
from runtime.peers.parcels import SLICE, Parcel, Parcels
from runtime.peers.peering import CREDIT_MAX, Host, Peering
from runtime.peers.post import Post
from runtime.records.model import Agent
from runtime.texts.names import dump_json, parse_json_object

_LISTED_MAX: Final = 32 << 10
#: between two looks at what grows, in seconds; bytes of which is told before
_PAUSE: Final = 0.25
_MUCH: Final = 128 << 10


@dataclass(slots=True, eq=False)
class _Watch:
    """A guest that may print something."""

    agent: Agent
    changed: Wakeup = field(default_factory=Wakeup)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    #: what its lead was told on the connection at hand
    told: dict[str, int] = field(default_factory=dict)


class Supplies(Parcels):
    """The files of all guests."""

    def __init__(self, host: Machine, post: Post) -> None:
        super().__init__(host, post)
        self._hashing = trio.CapacityLimiter(1)
        #: by incarnation
        self._watched: dict[str, _Watch] = {}

    def expect(self, agent: Agent, files: Mapping[str, Any]) -> None:
        """These files of a guest are to come, ``{NAME: [SIZE, SHA256]}`` as ``put`` has them. A
        daemon that starts says it again, of guests that have not begun."""
        expected = [(name, size, digest) for name, (size, digest) in files.items()]
        self._expect(agent, iter(expected), sum(size for _, size, _ in expected))

    def _check(self, name: str, right: Any) -> None:
        """``put`` was judged (``runtime.peers.admission``)."""

    def _show(self, parcel: Parcel, file: File) -> None:
        agent, path = parcel.agent, parcel.path(file.name)
        if file.name == PACK:  # git makes a commit of it that put names, or of other bytes nothing
            link(path, bundles.came(self._agents, agent))
        else:
            self._work(parcel, partial(self._give_to, agent, file, path))

    def drop_pack(self, agent: Agent) -> None:
        """Its repository is made: what it was made of is not needed any more."""
        if agent.guest.get("worktree"):
            path = Parcel(agent, self._directory(agent)).path(PACK)
            for each in (path, bundles.came(self._agents, agent)):
                self._agents.trash.discard(each, agent.owner)

    async def _give_to(self, agent: Agent, file: File, path: Path) -> None:
        name, paths = file.name, {file.name: path}
        if are_short(paths):
            found = digests(paths)
        else:
            found = await trio.to_thread.run_sync(digests, paths, limiter=self._hashing)
        if found.get(name) != (file.length, file.right):
            path.unlink()
            raise MalformedError(f"{name} is not what its lead said that it would be")
        async with aclosing(lines_of(path)) as parts:
            async for _, lines in parts:
                for line in lines if name == "input.jsonl" else ():
                    parse_json_object(line)
        self._agents.documents.ensure(agent)
        link(path, self._agents.documents.path(agent, name))
        self._agents.journal.tell_agent(agent.index, (name,))

    # what it prints

    def watch(self, agent: Agent) -> None:
        """From now on its lead is told how much it prints."""
        if agent.incarnation not in self._watched:
            watch = self._watched[agent.incarnation] = _Watch(agent)
            pay = partial(self._agents.accounts.time.pay, Payer(agent.owner, agent.name))

            async def run() -> None:
                with guarded(agent), watch.scope:
                    await Timed(self._follow(watch), pay)

            self._nursery.start_soon(run)

    def unwatch(self, agent: Agent) -> None:
        """It prints nothing more, or nobody wants to know."""
        if (watch := self._watched.pop(agent.incarnation, None)) is not None:
            watch.scope.cancel()

    def opened(self, key: str, peering: Peering) -> None:
        super().opened(key, peering)
        for watch in self._watched.values():
            if watch.agent.peer == key:
                watch.told.clear()
                watch.changed.notify()

    async def _follow(self, watch: _Watch) -> None:
        directory = self._agents.documents.directory(watch.agent)
        paths = [directory / name for name in OUTPUTS]
        while True:
            with suppress(OSError):  # a full disk: then it prints nothing either
                for path in paths:
                    path.mkdir(parents=True, mode=0o700, exist_ok=True)
            with self._port.watcher.watching_present(watch.changed, *paths):
                if self._tell_lengths(watch, self.lengths(watch.agent)):
                    await watch.changed.wait_changed()
            self._tell_lengths(watch, self.lengths(watch.agent))
            await trio.sleep(_PAUSE)

    def connection(self, key: str) -> Host | None:
        """The connection of a registration, if there is one."""
        peering = way.peering if (way := self._ways.get(key)) else None
        return peering if isinstance(peering, Host) else None

    def _tell_lengths(self, watch: _Watch, lengths: Mapping[str, int]) -> bool:
        """False if the other side is to be told again."""
        agent = watch.agent
        peering = self.connection(agent.peer)
        if peering is None:
            return True
        for name, length in lengths.items():
            if length > watch.told.get(name, 0):
                if not peering.grown(agent.incarnation, name, length):
                    return False
                watch.told[name] = length
                self._post.wakeup(agent.peer).notify()
        return True

    # what it gives back

    def lengths(self, agent: Agent) -> dict[str, int]:
        """How much it has printed: fields of ``ended``."""
        directory = self._agents.documents.directory(agent)
        return {name: Segments(directory / name).end for name in OUTPUTS}

    async def files_of(self, agent: Agent) -> dict[str, list[int | None]]:
        """The field ``files`` of ``ended``: sizes and modes of what a guest gives back, now that
        it changes no more; there may be very many, which are looked at in several steps. The size
        of a conversation, to which something may still be added, is known when it has come; that
        of a ``LISTING`` is followed by that of all in it."""
        found, pack = self._documents_of(agent)
        pay = partial(self._agents.accounts.time.pay, Payer(agent.owner, agent.name))
        artifacts, lines = await Timed(self._listed(agent), pay)
        if len(lines) <= _LISTED_MAX:
            return {**found, **{name: [size, mode] for name, size, mode in artifacts}, **pack}
        listing = self._directory(agent) / LISTING
        with suppress(OSError):
            # here, lest a thread that is late make it anew of an agent that is gone
            listing.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            await trio.to_thread.run_sync(
                lambda: listing.write_bytes(lines), limiter=self._hashing
            )
        return {**found, **pack, LISTING: [len(lines), sum(size for _, size, _ in artifacts)]}

    def few_files_of(self, agent: Agent) -> dict[str, list[int | None]] | None:
        """That field for a guest without artifacts, at once; None for any other."""
        with suppress(FileNotFoundError), os.scandir(
            self._agents.documents.path(agent, "artifact")
        ) as entries:
            if any(entries):
                return None
        found, pack = self._documents_of(agent)
        return {**found, **pack}

    def _documents_of(
        self, agent: Agent
    ) -> tuple[dict[str, list[int | None]], dict[str, list[int | None]]]:
        """Its documents and its conversation; and the pack of its worktree, if there is one."""
        documents, session = self._agents.documents, self._agents.sessions.get(agent.session)
        found: dict[str, list[int | None]] = {}
        for name in DOCUMENTS:
            if size := documents.size(agent, name):
                found[name] = [size, 0]
        if session is not None:
            for name in CONVERSATION:
                with suppress(FileNotFoundError):
                    size = (self._agents.sessions.directory(session) / name).stat().st_size
                    found[name] = [None if name == CONVERSATION[0] else size, 0]
        pack: dict[str, list[int | None]] = {}
        if size := agent.guest.get("left", {}).get("size"):
            pack[PACK] = [size, 0]
        return found, pack

    async def _listed(self, agent: Agent) -> tuple[list[tuple[str, int, int]], bytes]:
        """The artifacts, and a line for each."""
        artifacts, lines, begun = [], bytearray(), time.monotonic()
        for each in self._artifacts(agent):
            artifacts.append(each)
            lines += dump_json(list(each)).encode() + b"\n"
            if time.monotonic() - begun > SLICE:
                await trio.lowlevel.checkpoint()
                begun = time.monotonic()
        return artifacts, bytes(lines)

    def _artifacts(self, agent: Agent) -> Iterator[tuple[str, int, int]]:
        """Name, size and mode of each file, and of each directory with nothing in it or an unusual
        mode; no more than there may be."""
        root = os.fsencode(self._agents.documents.path(agent, "artifact"))
        most, left = self._agents.settings.config.files, [b""]
        while left and most >= 0:
            below = left.pop()
            try:
                entries = sorted(os.scandir(root + b"/" + below), key=lambda entry: entry.name)
            except OSError:
                continue
            most -= len(entries)
            mode = os.lstat(root + b"/" + below).st_mode & 0o777
            if below and (not entries or mode != 0o755):
                yield ARTIFACT + named(below), 0, mode
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(below + entry.name + b"/")
                elif entry.is_file(follow_symlinks=False):
                    st = entry.stat(follow_symlinks=False)
                    yield ARTIFACT + named(below + entry.name), st.st_size, st.st_mode & 0o777

    def _read(self, agent: Agent, name: str, offset: int, size: int) -> tuple[int, bytes]:
        directory = self._agents.documents.directory(agent)
        if name in OUTPUTS:
            for _ in range(2):  # its monitor may remove a segment meanwhile
                segments = Segments(directory / name)
                data, end = segments.since(offset, size)
                if data:
                    watch = self._watched.get(agent.incarnation)
                    told = watch.told.get(name, 0) if watch else segments.end
                    if watch and segments.end - told > _MUCH and told - end < CREDIT_MAX:
                        # all that was told is asked for before there is a pause
                        self._tell_lengths(watch, {name: segments.end})
                    return end - len(data), data
            return offset, b""
        if name.startswith(ARTIFACT):
            return offset, self._read_artifact(agent, name.removeprefix(ARTIFACT), offset, size)
        path = self._path(agent, name)
        if path is None:
            return offset, b""
        with open(path, "rb") as file:
            return offset, os.pread(file.fileno(), size, offset)

    def _path(self, agent: Agent, name: str) -> Path | None:
        if name == LISTING:
            return self._directory(agent) / LISTING
        if name == PACK:
            return bundles.made(self._agents, agent) / FIRST
        if name in DOCUMENTS:
            return self._agents.documents.path(agent, name)
        session = self._agents.sessions.get(agent.session)
        if name in CONVERSATION and session is not None:
            return self._agents.sessions.directory(session) / name
        return None

    def _read_artifact(self, agent: Agent, name: str, offset: int, size: int) -> bytes:
        root = self._agents.documents.path(agent, "artifact")
        above = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            path = os.fsdecode(unnamed(name))
            fd = linux.open_beneath(above, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        finally:
            os.close(above)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)
