"""Files of placed agents, on their way between two machines.

The host lacks what an agent is given, ``handoff.md`` and its like (``runtime.peers.supplies``). The
lead lacks what it gives back: ``out`` and ``log`` as they grow, and at its end its documents, its
artifacts and its conversation (``runtime.peers.returns``). Whoever lacks bytes asks for them, a
piece of each agent in turn, as far as the connection has credit and the owner's account has room.
What cannot be kept is not asked for, and is not lost: the other side has it.

How far a file has come is known by what is on the disk, and by nothing else: a connection, or a
daemon, that ends makes no difference. Output is where readers look for it (``Copy``); anything
else is in ``agent/INCARNATION/parcel/`` until it is whole, and shown then by a second name: it
stays there, as done, until ``forget``. A rename from one directory to another would take a lock of
the whole filesystem.

The other machine may be hostile: names are looked at component by component, no link is followed,
and sizes are those that this side's configuration allows. What breaks that ends the parcel of one
agent, and nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime.agents.bundles import PACK
from runtime.authority.accounts import Payer
from runtime.authority.loop import Threads, Timed
from runtime.cell.port import Host, Part, about, guarded
from runtime.errors import CtxError, MalformedError, NoSpaceError, QuotaError
from runtime.peers.contents import File
from runtime.peers.peering import PART_LEAST, WANTS_MAX, Bytes, Grown, Peering, Want
from runtime.peers.post import Post
from runtime.records.model import Agent
from runtime.texts.names import escape

log = logging.getLogger("ctxd.peers")

#: of one step, in seconds
SLICE: Final = 0.002
#: files of one agent that come at once, beside its output
_AT_ONCE: Final = 8
#: bytes that are not written at once
_MUCH: Final = 16 << 10
#: bytes that are asked for and have not come: at first, and at least; half of them come within so
#: many seconds, since nothing else comes before them
_WINDOW: Final = 256 << 10
_WINDOW_MIN: Final = 64 << 10
_WINDOW_SECONDS: Final = 0.2
#: that write what came, each for one registration
_THREADS: Final = 4
#: until it is tried again, if there was no room
_FULL_SECONDS: Final = 1.0

#: a file that is to come: name, length, and what else was said of it
Expected = tuple[str, int | None, Any]


@dataclass(slots=True, eq=False)
class Parcel:
    """All files of an agent that one side lacks."""

    agent: Agent
    directory: Path
    #: those that are on their way
    files: dict[str, File] = field(default_factory=dict)
    #: those after them, and the first of these; bytes of them as far as that is known
    rest: Iterator[Expected] = field(default_factory=lambda: iter(()))
    next: Expected | None = None
    left: int = 0
    #: files that were begun, and their bytes
    count: int = 0
    total: int = 0
    #: nothing else will be expected
    is_closed: bool = False
    #: how much is being done with what came
    at_work: int = 0
    is_in_turn: bool = False
    is_told: bool = False
    #: why no more is taken, or was not
    error: str = ""

    @property
    def is_complete(self) -> bool:
        if self.error or not self.is_closed or self.next is not None or self.at_work:
            return bool(self.error)
        return all(each.copy is not None and each.is_whole for each in self.files.values())

    def path(self, name: str) -> Path:
        """Where a file is until it is whole, and longer."""
        return self.directory / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Came:
    """Bytes of a file that are to be written, and what prevented it."""

    parcel: Parcel
    file: File
    offset: int
    #: one after the other; empty if there are no more
    pieces: list[bytes | memoryview]
    error: CtxError | OSError | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def name(self) -> tuple[str, str]:
        return self.parcel.agent.incarnation, self.file.name

    def goes_on(self, file: File, event: Bytes) -> bool:
        """Whether what came now is to be written after this, at once."""
        follows = file is self.file and event.offset == self.offset + self.size
        return follows and bool(self.pieces and event.data)


@dataclass(slots=True, eq=False)
class _Asked:
    """Bytes that were asked for, how many of them are still to come, and when that was."""

    size: int
    left: int
    since: float


@dataclass(slots=True, eq=False)
class _Way:
    """A registration, and its connection if there is one."""

    key: str
    peering: Peering | None = None
    #: what an earlier daemon asked for is still to come on it
    drains: bool = False
    #: nothing can be asked for before there is so much credit again
    credit: int = 0
    window: int = _WINDOW
    #: by agent and file, what was asked for and is still to come
    coming: dict[tuple[str, str], deque[_Asked]] = field(default_factory=dict)
    #: by incarnation; and of those, who has something to ask for
    parcels: dict[str, Parcel] = field(default_factory=dict)
    turns: deque[Parcel] = field(default_factory=deque)
    #: bytes that came, and are not written yet; they are being written
    came: list[_Came] = field(default_factory=list)
    unwritten: int = 0
    writes: bool = False
    #: it goes on later; not before, if there is no room
    rests: bool = False
    is_full: bool = False

    def free(self, peering: Peering) -> int:
        return self.window - (peering.credit_max - peering.credit) - self.unwritten

    def take(self, peering: Peering, name: tuple[str, str], size: int) -> None:
        """So many bytes came of what was asked for, or no more will. What takes long is asked for
        in smaller pieces: the other side's lease is asked for behind them."""
        coming = self.coming[name]
        asked = coming[0]
        asked.left -= size
        if not size or asked.left <= 0:
            coming.popleft()
            took = trio.current_time() - asked.since
            if took > _WINDOW_SECONDS:
                self.window = max(self.window // 2, _WINDOW_MIN)
                self.credit = 0  # the next piece is smaller
            elif took < _WINDOW_SECONDS / 2 and asked.size == self.window // 2:
                self.window = min(2 * self.window, peering.credit_max)
        if not coming:
            del self.coming[name]


class Parcels(Part):
    """Files that one side lacks, and that it has for the other side, of all registrations."""

    def __init__(self, host: Host, post: Post) -> None:
        super().__init__(host)
        self._post = post
        self._ways: dict[str, _Way] = {}
        self._threads = Threads(_THREADS, self._nursery)
        #: told once of each agent of which all has come, or no more is taken (``error``)
        self.done: Callable[[Agent], object] = lambda agent: None

    # what it is told

    def opened(self, key: str, peering: Peering) -> None:
        """Both sides have said hello on a new connection, or it was taken over."""
        way = self._way(key)
        way.peering, way.drains = peering, peering.lacks
        self._start(way)

    def closed(self, key: str, peering: Peering) -> None:
        """A connection is over."""
        if (way := self._ways.get(key)) and way.peering is peering:
            way.peering = None
            self._let_go(way)

    def hear(self, key: str, peering: Peering, event: Want | Bytes | Grown) -> None:
        """Something was said of a file."""
        if isinstance(event, Bytes):
            self._take(key, peering, event)
            return
        agent = self._agents.registry.incarnation(event.agent)
        if agent is not None and agent.peer != key:
            agent = None
        if isinstance(event, Want):
            self._give(agent, peering, event)
        elif agent is not None:
            self.grown(agent, event.file, event.length)

    def grown(self, agent: Agent, file: str, length: int) -> None:
        """The other side has so much of a file that grows."""

    # how far it is

    def is_complete(self, agent: Agent) -> bool:
        """Whether all of an agent has come, or no more is taken."""
        parcel = self._parcel(agent)
        return parcel is not None and parcel.is_complete

    def error(self, agent: Agent) -> str:
        """Why something of it is missing."""
        parcel = self._parcel(agent)
        return parcel.error if parcel is not None else ""

    def left(self, agent: Agent) -> int:
        """Bytes that are still to come, as far as that is known."""
        parcel = self._parcel(agent)
        if parcel is None or parcel.error:
            return 0
        files = parcel.files.values()
        return parcel.left + sum((each.length or each.kept) - each.kept for each in files)

    def forget(self, agent: Agent) -> None:
        """Takes no more of it; what is shown stays."""
        if (way := self._ways.get(agent.peer)) is not None:
            way.parcels.pop(agent.incarnation, None)
            self._let_go(way)
        self._agents.trash.discard(self._directory(agent), agent.owner)

    def _let_go(self, way: _Way) -> None:
        if way.peering is None and not way.parcels:
            self._ways.pop(way.key, None)

    # giving

    def _give(self, agent: Agent | None, peering: Peering, want: Want) -> None:
        offset, left = want.offset, want.credit
        size = max(PART_LEAST, min(peering.part_max, want.credit // 4))  # all else waits for one
        while left:
            data = b""
            with suppress(OSError):
                if agent is not None:
                    offset, data = self._read(agent, want.file, offset, left)
            if not data:
                peering.give_up(want.agent, want.file)
                return
            left -= len(data)
            for begin in range(0, len(data), size):
                part = memoryview(data)[begin : begin + size]
                peering.give(want.agent, want.file, offset + begin, part)
            offset += len(data)

    def _read(self, agent: Agent, name: str, offset: int, size: int) -> tuple[int, bytes]:
        """Bytes of a file of an agent's, from ``offset`` or later, and the number of the first of
        them; none if there are no more."""
        raise NotImplementedError

    # asking

    def _start(self, way: _Way) -> None:
        """Asks for all that is not there, on a new connection."""
        way.coming.clear()
        way.window, way.credit = _WINDOW, 0
        for parcel in way.parcels.values():
            for file in parcel.files.values():
                file.start_over()
            self._queue(way, parcel)
        self._later(way)

    def _way(self, key: str) -> _Way:
        return self._ways.setdefault(key, _Way(key))

    def _directory(self, agent: Agent) -> Path:
        return self._agents.documents.directory(agent) / "parcel"

    def _parcel(self, agent: Agent) -> Parcel | None:
        way = self._ways.get(agent.peer)
        return way.parcels.get(agent.incarnation) if way else None

    def _begun(self, agent: Agent) -> Parcel:
        """The parcel of an agent, which may be new."""
        parcels = self._way(agent.peer).parcels
        if agent.incarnation not in parcels:
            parcels[agent.incarnation] = Parcel(agent, self._directory(agent))
        return parcels[agent.incarnation]

    def _expect(self, agent: Agent, files: Iterator[Expected], size: int) -> None:
        """These files are to come, ``size`` bytes, and nothing else."""
        parcel = self._begun(agent)
        if not parcel.is_closed:
            parcel.rest, parcel.left, parcel.is_closed = files, size, True
            self._go_on(parcel)

    def _go_on(self, parcel: Parcel) -> None:
        """There may be something to ask for, or to be done."""
        if parcel.next is None:
            try:
                parcel.next = next(parcel.rest, None)
            except CtxError as error:
                self._judge(parcel, error)
        if parcel.next is None and not parcel.files:
            self._tell_if_complete(parcel)
            return
        way = self._way(parcel.agent.peer)
        self._queue(way, parcel)
        self._later(way)

    def _queue(self, way: _Way, parcel: Parcel) -> None:
        if not parcel.is_in_turn:
            parcel.is_in_turn = True
            way.turns.append(parcel)

    def _later(self, way: _Way, seconds: float = 0.0) -> None:
        """Has it go on in another step, on the account of whose agents these are."""
        if way.rests:
            return
        way.rests = True
        owner = next((each.agent.owner for each in way.parcels.values()), 0)
        pay = partial(self._agents.accounts.time.pay, Payer(owner))

        async def run() -> None:
            await Timed(self._after(way, seconds), pay)

        self._nursery.start_soon(run)

    async def _after(self, way: _Way, seconds: float) -> None:
        await trio.sleep(seconds)
        way.rests = way.is_full = False
        try:
            self._ask(way)
            self._post.wakeup(way.key).notify()
        except Exception:
            log.exception("files of agents of %s: a bug in ctxfs", way.key)

    def _ask(self, way: _Way) -> None:
        """Asks for a piece of each agent in turn, as long as there is credit."""
        if way.peering is not None and way.free(way.peering) < way.credit:
            return
        until = time.monotonic() + SLICE
        while way.turns and not way.is_full:
            parcel = way.turns[0]
            try:
                if not self._prepare(parcel, until):
                    self._later(way)
                    return
            except (CtxError, OSError) as error:
                self._judge(parcel, error)
                continue
            file = next((each for each in parcel.files.values() if each.piece(1)), None)
            peering = way.peering if not way.drains else None
            forgotten = self._parcel(parcel.agent) is not parcel
            if file is None or peering is None or parcel.error or forgotten:
                way.turns.popleft().is_in_turn = False
                self._tell_if_complete(parcel)
            elif not self._want(way, peering, parcel, file):
                return

    def _want(self, way: _Way, peering: Peering, parcel: Parcel, file: File) -> bool:
        """Asks for a piece of a file; False if no more can be asked for now."""
        size, agent = file.piece(way.window // 2), parcel.agent
        key = agent.incarnation, file.name
        many = len(way.coming) >= WANTS_MAX and key not in way.coming
        if many or size > way.free(peering):
            way.credit = 0 if many else size
            return False
        try:
            self._agents.disk.check(agent.owner, size + peering.credit_max - peering.credit)
        except QuotaError:
            self._rest(way)
            return False
        way.credit = 0
        peering.want(*key, file.asked, size)
        way.coming.setdefault(key, deque()).append(_Asked(size, size, trio.current_time()))
        file.asked += size
        way.turns.rotate(-1)
        return True

    def _rest(self, way: _Way) -> None:
        """There is no room: nothing is asked for, for a while."""
        way.is_full = True
        self._later(way, _FULL_SECONDS)

    def _prepare(self, parcel: Parcel, until: float) -> bool:
        """Shows what is whole, and begins with what follows; False if that goes on later."""
        while not parcel.error:
            if time.monotonic() > until:
                return False
            whole = (each for each in parcel.files.values() if each.copy is None and each.is_whole)
            if (file := next(whole, None)) is not None:
                self._show(parcel, file)
                del parcel.files[file.name]
                continue
            if parcel.next is None or len(parcel.files) >= _AT_ONCE:
                return True
            self._begin(parcel, *parcel.next)
            parcel.left = max(0, parcel.left - (parcel.next[1] or 0))
            parcel.next = next(parcel.rest, None)
        return True

    def _begin(self, parcel: Parcel, name: str, length: int | None, right: Any) -> None:
        config = self._agents.settings.config
        self._check(name, right)
        parcel.count += 1
        parcel.total += length or 0
        if parcel.count > config.files or parcel.total > config.artifact_max:
            raise MalformedError(f"{parcel.count} files of {parcel.total} bytes are too many")
        if name != PACK and (length or 0) > config.document_max:
            raise MalformedError(f"{name} is longer than document_max")
        most = config.document_max if length is None else length
        file = File(name=name, length=length, most=most, right=right)
        parcel.files[name] = file
        self._find(parcel, file)

    def _find(self, parcel: Parcel, file: File) -> None:
        """Finds as much of a file as is there."""
        parcel.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(parcel.path(file.name), flags, 0o600), "r+b") as there:
            file.kept = os.fstat(there.fileno()).st_size
            if file.length is None or file.kept > file.length:
                os.truncate(there.fileno(), 0)
                file.kept = 0
            file.asked = file.kept

    def _check(self, name: str, right: Any) -> None:
        """``MalformedError`` if there can be no such file."""
        raise NotImplementedError

    def _show(self, parcel: Parcel, file: File) -> None:
        """Has a file that is whole be where readers look for it; ``OSError``."""
        raise NotImplementedError

    # taking

    def _take(self, key: str, peering: Peering, event: Bytes) -> None:
        way, name = self._way(key), (event.agent, event.file)
        if way.drains:
            way.drains = peering.lacks
            if not way.drains:
                self._start(way)
        elif name in way.coming:
            way.take(peering, name, len(event.data))
            parcel = way.parcels.get(event.agent)
            if parcel is not None and (file := parcel.files.get(event.file)) is not None:
                self._put(way, parcel, file, event)
        if not way.came:  # what is to be written has the room of what came
            self._ask(way)

    def _put(self, way: _Way, parcel: Parcel, file: File, event: Bytes) -> None:
        if way.came and way.came[-1].goes_on(file, event):
            way.came[-1].pieces.append(event.data)
        else:
            way.came.append(_Came(parcel, file, event.offset, [event.data] if event.data else []))
        way.unwritten += len(event.data)
        if not way.writes and self._is_due(way):
            self._write(way)

    @staticmethod
    def _is_due(way: _Way) -> bool:
        """Whether what came is to be written: as much as is asked for at once, or all of a file."""
        is_much = way.unwritten >= way.window // 2
        return is_much or any(each.name not in way.coming for each in way.came)

    def _write(self, way: _Way) -> None:
        """Has what came be written: beside the loop if it is much, which may wait for the disk."""
        batch, way.came = way.came, []
        way.writes = way.unwritten >= _MUCH
        if way.writes:
            self._threads.do(partial(_write_all, batch), partial(self._written, way, batch))
        else:
            _write_all(batch)
            self._note_all(way, batch)

    def _written(self, way: _Way, batch: list[_Came]) -> None:
        begun, way.writes = time.thread_time(), False
        try:
            self._note_all(way, batch)
            if self._is_due(way):
                self._write(way)
            self._ask(way)
            if way.peering is not None:
                way.peering.push()
        except Exception:
            log.exception("files of agents of %s: a bug in ctxfs", way.key)
        payer = Payer(batch[0].parcel.agent.owner)
        self._agents.accounts.time.pay(payer, time.thread_time() - begun)

    def _note_all(self, way: _Way, batch: list[_Came]) -> None:
        for each in batch:
            way.unwritten -= each.size
            self._note(each)
        for each in batch:
            later = any(other.file is each.file for other in way.came)
            if each.name not in way.coming and not later:
                each.file.start_over()
            self._queue(way, each.parcel)

    def _note(self, came: _Came) -> None:
        """Something was written, or could not be."""
        parcel, file, agent = came.parcel, came.file, came.parcel.agent
        self._agents.disk.note(agent.owner, file.more)
        file.more = 0
        if self._parcel(agent) is not parcel or parcel.files.get(file.name) is not file:
            return
        while file.copy is not None and file.copy.dropped:
            self._agents.trash.discard(file.copy.dropped.pop(), agent.owner)
        try:
            if came.error is not None:
                raise came.error
            if not came.pieces and not file.spoiled:
                self._end(file)
        except (CtxError, OSError) as error:
            file.spoiled = True
            self._judge(parcel, error)

    def _end(self, file: File) -> None:
        """There is no more of it."""
        if file.copy is not None or file.length is None:
            file.length = file.kept
        elif not file.is_whole:
            raise MalformedError(f"{file.name} is shorter than was said")

    def _judge(self, parcel: Parcel, error: CtxError | OSError) -> None:
        """Waits for room if there is none; whatever else goes wrong ends one parcel."""
        if _is_of_room(error):
            self._rest(self._way(parcel.agent.peer))
        elif not parcel.error:
            parcel.error = escape(error.sentence if isinstance(error, CtxError) else str(error))
            agent = parcel.agent
            log.warning("%s: not all came: %s", agent.name, parcel.error, extra=about(agent))

    def _work(self, parcel: Parcel, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has something be done with what came, in steps, and from the start if there was no room.
        The parcel is not complete before."""
        agent = parcel.agent
        pay = partial(self._agents.accounts.time.pay, Payer(agent.owner, agent.name))

        async def run() -> None:
            with guarded(agent):
                while self._parcel(agent) is parcel:
                    try:
                        await Timed(work(), pay)
                        break
                    except (CtxError, OSError) as error:
                        self._judge(parcel, error)
                        if parcel.error:
                            break
                    await trio.sleep(_FULL_SECONDS)
            parcel.at_work -= 1
            self._go_on(parcel)

        parcel.at_work += 1
        self._nursery.start_soon(run)

    def _tell_if_complete(self, parcel: Parcel) -> None:
        if parcel.is_complete and not parcel.is_told:
            parcel.is_told = True
            self.done(parcel.agent)


def _write_all(batch: list[_Came]) -> None:
    """In a thread."""
    for came in batch:
        if came.file.spoiled or not came.pieces or came.parcel.error:
            continue
        try:
            path = came.parcel.path(came.file.name)
            came.file.add(path, came.offset, b"".join(came.pieces))
        except (CtxError, OSError) as error:
            came.error, came.file.spoiled = error, True


def _is_of_room(error: CtxError | OSError) -> bool:
    """Whether there may be room for it later."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, NoSpaceError | QuotaError)
