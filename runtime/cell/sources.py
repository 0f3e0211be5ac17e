"""The files that paths in controls lead to; a helper looks them up when they are written.

The daemon resolves no such path itself, neither with its rights nor in its loop: look.c does,
with the ids of the writer, in the view that the path belongs to, for a second at most.

The agent's record keeps the path without links, with device, inode and boot. ``stage`` and
``view`` open that path without following links, and compare. Agents share their owner's uid:
without this check, a process that may write a directory would decide what the next agent gets. One
call resolves all paths of a write. The helper walks a cell's tree from ``/proc/KEEPER/root`` and
joins none of its namespaces: so it sees owners as the host does, and no agent can make a link that
appears to belong to uid 0.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from runtime.cell import networks
from runtime.cell.port import Host, Part
from runtime.errors import (
    CtxError,
    ExceedingError,
    KernelError,
    MalformedError,
    MissingError,
    NotADirectoryNodeError,
    UnansweredError,
)
from runtime.kernel import linux, orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.helpers import Helpers
from runtime.kernel.lanes import Lanes
from runtime.records.model import Agent
from runtime.texts import mounts
from runtime.texts.mounts import Source
from runtime.texts.names import check_absolute, quote

_SECONDS: Final = 1.0
#: helpers at once for one agent's view, or for one user's paths on the host: some may hang
_HELPERS_MAX: Final = 4
#: for all views of one owner's agents: children are not asked for more of those that hang
_OWNERS_HELPERS_MAX: Final = 16
_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom a helper looks, in which view, and where it lives."""

    owner: int
    view: str
    leaf: Cgroup
    #: uid, gid and groups
    ids: tuple[int, int, tuple[int, ...]]
    #: of a view that is not the host's: a pidfd of its PID 1, and how a refusal names it
    keeper: int | None = None
    words: str = ""


class Looker(Part):
    """Starts the helpers."""

    def __init__(self, host: Host, helpers: Helpers) -> None:
        super().__init__(host)
        self._helpers = helpers
        self._views = Lanes[str](_HELPERS_MAX)
        self._owners = Lanes[int](_OWNERS_HELPERS_MAX)
        self._boot = linux.boot_id()

    async def look(self, agent: Agent, paths: Iterable[str]) -> dict[str, Source]:
        """Looks at paths in the view of an agent's creator, at each once.

        Finds nothing if the parent has no cell (yet): the paths are looked at when it starts.
        Raises for the first path that does not exist (``MissingError``) or that may not be
        given (``ExceedingError``); ``UnansweredError`` if there is no answer within a second.
        """
        deadline = trio.current_time() + _SECONDS
        plain = {path: self._agents.authority.places.plain(path) for path in paths}
        found = await self._look(agent, list(dict.fromkeys(plain.values())), deadline)
        return {path: found[way] for path, way in plain.items() if way in found}

    async def _look(self, agent: Agent, wanted: list[str], deadline: float) -> dict[str, Source]:
        parent = self._agents.registry.parent_of(agent)
        if not wanted:
            return {}
        if parent is None:
            ids = (agent.creator_uid, agent.creator_gid, agent.creator_groups)
            helpers = self._port.hierarchy.helpers
            asker = Asker(agent.creator_uid, f"uid {agent.creator_uid}", helpers, ids)
            return await self._ask(asker, wanted, deadline)
        live_cell = self._live_cells.get(parent.index)
        if live_cell is None:
            return {}
        # Its program may run, and write this path, before the monitor has told who the keeper is.
        with trio.move_on_at(deadline):
            await self._port.wait_settled(live_cell)
        try:
            keeper = self._port.open_keeper(live_cell)
        except OSError:
            return {}
        try:
            ids = (agent.uid, agent.gid, agent.groups)
            leaf = live_cell.node.child("look")
            words = f" in the view of {quote(parent.name)}"
            view = f"agent {parent.index}"
            asker = Asker(parent.owner, view, leaf, ids, keeper, words)
            return await self._ask(asker, wanted, deadline)
        finally:
            os.close(keeper)

    async def complete(self, agent: Agent) -> None:
        """Looks at what was written while nobody could look; raises like ``look``."""
        for name, wanted in mounts.paths_of(agent.mount, agent.root, agent.workspace).items():
            record = mounts.Sources.load(agent.sources.get(name))
            missing = record.missing(wanted)
            found = await self.look(agent, missing) if missing else {}
            if found:
                kept = record.joined(self._boot, found, [*record.found, *wanted]).dump()
                self._agents.journal.update(agent, sources={**agent.sources, name: kept})

    async def _ask(self, asker: Asker, paths: list[str], deadline: float) -> dict[str, Source]:
        if self._views.is_full(asker.view) or self._owners.is_full(asker.owner):
            raise UnansweredError(
                f"{quote(paths[0])}: {_HELPERS_MAX} look-ups in this view, or "
                f"{_OWNERS_HELPERS_MAX} of uid {asker.owner}, are running already: try again later"
            )
        uid, gid, groups = asker.ids
        keeper = asker.keeper
        groups_word = self._agents.privilege.groups_of(groups)
        own = [*map(str, self._places.own), networks.DIRECTORY]
        spec = orders.message(uid, gid, groups_word, own, self._places.tree, paths)
        words = orders.words(self._places.program("look"), 3, "-" if keeper is None else 4)
        fds = [] if keeper is None else [keeper]
        self._views.enter_anyway(asker.view)
        self._owners.enter_anyway(asker.owner)
        try:
            asker.leaf.create(self._port.hierarchy.controllers)
        except OSError as error:
            self._left(asker)
            raise _failed(paths, error) from None
        try:
            with trio.move_on_at(deadline):
                answer = await self._helpers.run(
                    *(asker.owner, "look", words),
                    leaf=asker.leaf,
                    message=spec,
                    fds=fds,
                    # one that hangs may not end before what it waits for does
                    gone=partial(self._left, asker),
                )
                return _parse(answer, paths, asker.words)
        except (KernelError, OSError) as error:
            raise _failed(paths, error) from None
        raise UnansweredError(
            "the file system of the path did not answer within a second: try again"
        )

    def _left(self, asker: Asker) -> None:
        self._owners.leave(asker.owner)
        self._views.leave(asker.view)
        if not self._views.users(asker.view) and asker.keeper is not None:
            asker.leaf.remove()


def _failed(paths: list[str], why: Exception) -> UnansweredError:
    return UnansweredError(f"{quote(paths[0])}: cannot look up the path: {why}")


_DAMAGED: Final = "the answer of the path look-up is damaged: try again"


def _parse(answer: bytes, paths: list[str], view: str) -> dict[str, Source]:
    """Raises the first refusal; ``UnansweredError`` if the answer is damaged."""
    words = answer.split(b"\0")
    if len(words) != _FIELDS * len(paths) + 1 or words[-1]:
        raise UnansweredError(_DAMAGED)
    found = {}
    for number, source in enumerate(paths):
        code, why, identity, path, text = words[_FIELDS * number : _FIELDS * (number + 1)]
        if not code.isdigit():
            raise UnansweredError(_DAMAGED)
        if int(code):
            raise _refusal(source, int(code), os.fsdecode(why), os.fsdecode(path), text, view)
        found[source] = Source(_plain(source, path), identity.decode("ascii"))
    return found


def _plain(source: str, path: bytes) -> str:
    try:
        return check_absolute(path.decode(), "what it leads to")
    except (UnicodeDecodeError, MalformedError):
        raise MalformedError(
            f"{quote(source)} leads to a path that is not UTF-8, or has control characters"
        ) from None


def _refusal(source: str, code: int, why: str, path: str, text: bytes, view: str) -> CtxError:
    at = "" if path == source else f" ({quote(path)})"
    if why == "link":
        return ExceedingError(
            f"{quote(source)}: the link {quote(path)} to {quote(os.fsdecode(text))} does not "
            "belong to root, so an agent may have made it: write the path to which it leads"
        )
    if why in ("kernel", "daemon"):
        return ExceedingError(
            f"{quote(source)}{at}: procfs, cgroupfs, {networks.DIRECTORY} and the daemon's own "
            "directories cannot be given to an agent"
        )
    says = os.strerror(code)
    by_errno: dict[int, CtxError] = {
        errno.ENOENT: MissingError(f"{quote(source)}{at} does not exist{view}"),
        errno.ENOTDIR: NotADirectoryNodeError(f"{quote(source)}{at} is not in a directory{view}"),
        errno.EAGAIN: UnansweredError(f"{quote(source)} was moved meanwhile: try again"),
        errno.ENAMETOOLONG: MalformedError(f"{quote(source)}: {says}"),
    }
    unreached = ExceedingError(f"{quote(source)}{at} cannot be reached{view}: {says}")
    return by_errno.get(code) or unreached
