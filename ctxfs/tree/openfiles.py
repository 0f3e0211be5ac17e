"""Open files of rows: rendered, staged, verbs, documents, histories, output, inlets.

A type of row is opened here by its fields. A control stages what is written: a complete line is
checked at once, so that ``echo`` fails, and flush commits the whole. An open file that keeps
something between requests needs ``save`` and ``restore`` (``ctxfs.reexec``); a test looks for what
such files keep.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, TypeVar

from ctxfs.caching import Waiter
from ctxfs.disks import Work, read_cached
from ctxfs.tree.members import Member
from ctxfs.tree.nodes import OpenFile
from ctxfs.tree.realfiles import OpenRealFile
from ctxfs.tree.rows import (
    Document,
    File,
    Gathered,
    History,
    Inlet,
    LinesCheck,
    Output,
    Real,
    Rendered,
    Staged,
    Verbs,
    decode,
)
from runtime.authority.accounts import Charge, Resource
from runtime.caller import Caller
from runtime.errors import (
    CtxError,
    ForbiddenError,
    MalformedError,
    QuotaError,
    TooLongError,
)
from runtime.kernel.handover import Descriptors
from runtime.texts import mounts
from runtime.texts.mounts import Source

_O = TypeVar("_O")
_R = TypeVar("_R")

#: bytes that an open file may hold in memory as part of being open
_FREE: Final = 1024
#: lines of a history or of a document that one write adds
_LINES_AT_ONCE: Final = 512
#: lines of a ``ctl`` that one write acts upon
_VERBS_AT_ONCE: Final = 4
_CHANGED: Final = select.POLLPRI | select.POLLERR | select.POLLIN


class OpenRow(OpenFile, Generic[_O]):
    """An open row: reads what the row renders, polls where the row can."""

    node: Member[_O]

    def __init__(self, node: Member[_O], caller: Caller, *, writing: bool) -> None:
        super().__init__(node, caller)
        self._base = node.base
        self._text: bytearray | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._memory: Charge | None = None
        #: bytes that are written and not committed, and those that were rendered
        self._written = self._rendered = 0
        #: whether the rest of the text was left behind by the daemon before
        self._cut = False
        self.direct = writing or not node.cached
        self.keep = not self.direct
        self.flushes = writing
        #: the version that was read last, and the last one that poll(2) reported
        self._seen = self._reported = -1
        if self.keep:
            # from now on it may be read without asking here
            self._seen = self._base.cache.poller.version(node.inode)
            self._base.cache.note_pages(node.inode)

    def charge(self, size: int) -> None:
        """Tells how many bytes this open file holds that are not committed; ``QuotaError``."""
        self._charge(size + self._rendered)
        self._written = size

    def _charge(self, size: int) -> None:
        """Charges the opener's account for so many bytes of memory."""
        if self._memory is None:
            if size <= _FREE:
                return
            runtime = self._base.runtime
            who = runtime.agents.identity.payer(self.caller)
            self._memory = Charge(runtime.accounts, who, Resource.MEMORY)
        self._memory.resize(size)

    def release(self) -> None:
        self._charge(0)
        self._base.cache.poller.closed(self.node.inode, id(self))

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        if self._text is not None and not self._cut:
            self._cut = not self._read_rest(self._text, self._pieces)
        return {
            "text": self._text,
            "cut": self._cut,
            "written": self._written,
            "rendered": self._rendered,
            "direct": self.direct,
            "keep": self.keep,
            "seen": self._seen,
            "reported": self._reported,
        }

    def _read_rest(self, text: bytearray, pieces: Iterator[bytes]) -> bool:
        """What makes a text does not outlive this daemon. False if the rest is more than the
        opener's account has room for: then it could not have read on, either."""
        try:
            for piece in pieces:
                self._charge(self._written + len(text) + len(piece))
                text += piece
                self._rendered = len(text)
        except (CtxError, OSError):
            return False
        return True

    def last_text(self) -> bytes:
        text = bytearray()
        if isinstance(self.node.row, Rendered) and not self._read_rest(
            text, self.node.pieces(self.caller)
        ):
            text.clear()
        return bytes(text)

    def restore(self, saved: dict[str, Any]) -> None:
        self._text = bytearray(saved["text"]) if saved["text"] is not None else None
        self._cut = saved.get("cut", False)  # not in a version before
        self._written, self._rendered = saved["written"], saved["rendered"]
        self.direct, self.keep = saved["direct"], saved["keep"]
        self._seen, self._reported = saved["seen"], saved["reported"]
        self._memory = None
        if (size := self._written + self._rendered) > _FREE:
            runtime = self._base.runtime
            who = runtime.agents.identity.payer(self.caller)
            self._memory = runtime.accounts.charged_anyway(who, Resource.MEMORY, size)

    def _check_alive(self) -> None:
        self.node.check_alive(self.caller)

    def _check_reader(self) -> None:
        self.node.check_reader(self.caller)

    def read(self, offset: int, size: int) -> bytes | None:
        self._check_reader()
        text = self._text
        if offset == 0 or text is None:
            text = self._text = bytearray()
            self._rendered, self._cut = 0, False
            self._pieces = self._begin()
        if self._cut and offset >= len(text):
            raise QuotaError(
                f"the rest of {self.node.row.name} had no room while ctxd was executed again: "
                "read it from its beginning"
            )
        more = list(self._more(offset + size - len(text)))
        if more:
            # later reads go on with it
            self._charge(self._written + len(text) + sum(map(len, more)))
            for piece in more:
                text += piece
            self._rendered = len(text)
        if self.keep:
            self._base.cache.note_pages(self.node.inode)
        return bytes(memoryview(text)[offset : offset + size])

    def _begin(self) -> Iterator[bytes]:
        """The content as it is now, or, into pages, as it was when the kernel was told its size."""
        cache, inode = self._base.cache, self.node.inode
        told = cache.told(inode) if self.keep else None
        if told is not None and told != self.node.render(self.caller):
            # The read began before the change. The page goes when anybody asks for the attributes,
            # as the next reader does. To drop it here would void what pollers are told of them.
            return iter((told,))
        self._seen = cache.poller.version(inode)
        return self.node.pieces(self.caller)

    def _more(self, size: int) -> Iterator[bytes]:
        """At least so many bytes more, up to a limit: a first read far behind finds the end."""
        assert isinstance(self.node.row, Rendered)
        size = left = min(size, self.node.row.at_once)
        while left > 0 and (piece := next(self._pieces, None)) is not None:
            if not piece and left < size:
                return
            left -= len(piece)
            yield piece

    def poll(self, waiter: Waiter | None) -> int | None:
        if not self.node.row.polled:
            return None
        poller = self._base.cache.poller
        if self._seen != poller.version(self.node.inode):
            if self.keep and self._reported == poller.version(self.node.inode):
                # another reader has filled the page: the next read is to come here
                self._base.cache.drop_pages(self.node.inode)
            self._reported = poller.version(self.node.inode)
            return _CHANGED
        if waiter is not None:
            poller.wait(self.node.inode, id(self), waiter)
        return select.POLLIN


class OpenGathered(OpenFile, Generic[_O]):
    """An open file whose text a helper finds out, at each read at offset 0."""

    gathers = True
    node: Member[_O]

    def __init__(self, node: Member[_O], row: Gathered[_O], caller: Caller) -> None:
        super().__init__(node, caller)
        self._row = row
        self._text: bytes | None = None
        runtime = node.base.runtime
        payer = runtime.agents.identity.payer(caller)
        self._memory = Charge(runtime.accounts, payer, Resource.MEMORY)

    def read(self, offset: int, size: int) -> bytes | None:
        self.node.check_reader(self.caller)
        if offset == 0 or self._text is None:
            return None
        return self._text[offset : offset + size]

    async def gathered(self, offset: int, size: int) -> bytes:
        self.node.check_reader(self.caller)
        text: bytes = await self._row.gather(self.node.base, self.node.obj, self.caller)
        self._memory.resize(len(text))  # later reads go on with it
        self._text = text
        return text[offset : offset + size]

    def release(self) -> None:
        self._memory.release()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {"text": self._text}

    def restore(self, saved: dict[str, Any]) -> None:
        self._text = saved["text"]
        self._memory.set(len(self._text or b""))


def _after_lines(data: bytes, count: int) -> bytes:
    """What follows the first so many lines; nothing if no more than the last goes on."""
    rest = data.split(b"\n", count)[-1] if data.count(b"\n") >= count else b""
    return rest


class OpenControl(OpenRow[_O]):
    """A control open for writing: staged, checked by line, committed as a whole at flush.

    What is appended, or merges, is staged alone and joined to the value that is
    there at the commit: two who append lose nothing.
    """

    def __init__(
        self, node: Member[_O], row: Staged[_O], caller: Caller, flags: int
    ) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._adds = bool(flags & os.O_APPEND) or row.merges
        self._append = bool(flags & os.O_APPEND) and not row.merges
        self._truncated = bool(flags & os.O_TRUNC)
        self._limit = row.limit(self._base.runtime.config)
        self._staged: bytearray | None = None
        self._fresh = False
        #: what the paths in the lines that were written lead to
        self._found: dict[str, Source] = {}
        #: of a row that is checked over several lines, and what of the staged it has taken
        self._check: LinesCheck | None = None
        self._taken = 0

    async def prepare(self, data: bytes) -> None:
        """Where the paths lead that this completes the lines of (``PathControl``)."""
        row = self._row
        staged = self._staged if self._staged is not None else b""
        if not row.looks or len(staged) + len(data) > self._limit + 1:
            return
        tail = bytes(staged[staged.rfind(b"\n") + 1 :])
        lines, newline, _ = (tail + data).rpartition(b"\n")
        if not newline or not lines.strip():
            return
        try:
            self._check_alive()
            self.node.check_writer(self.caller)
            text = decode(lines)
            wanted = row.wanted(self._base, self.node.obj, self.caller, text)
            missing = [path for path in wanted if path not in self._found]
            agent = self.node.agent
            assert agent is not None  # only files of agents name paths
            looked = await self._base.runtime.supervisor.look(agent, missing)
            found = {**self._found, **looked}
            if self.caller.agent is not None:
                # The commit refuses it too, but dash(1) does not look at what close(2) returns.
                mounts.check_found(found, wanted)
            row.check_looked(self._base, self.node.obj, self.caller, text, found)
            self._found = found
        except Exception:
            self._drop()
            raise

    @property
    def unfinished(self) -> bool:
        return self._fresh

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {
            **super().save(descriptors),
            "staged": self._staged,
            "fresh": self._fresh,
            "truncated": self._truncated,
            "found": {path: [to.path, to.identity] for path, to in self._found.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        super().restore(saved)
        staged = saved["staged"]
        self._staged = bytearray(staged) if staged is not None else None
        self._fresh, self._truncated = saved["fresh"], saved["truncated"]
        # lines that were taken are taken once more with the next ones (``_check_more``)
        self._found = {path: Source(*to) for path, to in saved["found"].items()}

    def _stage(self) -> bytearray:
        if self._staged is None:
            empty = self._truncated or self._adds
            self._staged = bytearray(b"" if empty else self.node.render(self.caller))
        return self._staged

    def _before(self) -> bytes:
        """What the staged text is added to."""
        return self.node.render(self.caller) if self._append and not self._truncated else b""

    def _size_before(self) -> int:
        return self.node.attributes().size if self._append and not self._truncated else 0

    def truncate(self, size: int) -> None:
        self._check = None
        if size == 0:
            self._truncated, self._staged = True, None
        elif self._staged is not None:
            del self._staged[size:]

    def write(self, offset: int, data: bytes) -> int:
        try:
            self._check_alive()
            self.node.check_writer(self.caller)
            staged = self._stage()
            if self._row.long:
                # a short write(2): the writer goes on with the rest
                data = data[: len(data) - len(_after_lines(data, _LINES_AT_ONCE))]
            if self._adds:
                offset = len(staged)
            end = offset + len(data)
            if self._size_before() + end > self._limit:
                raise self._row.too_long(self._limit)
            self.charge(max(end, len(staged)))
            if offset > len(staged):
                staged.extend(b"\0" * (offset - len(staged)))
            staged[offset:end] = data
            self._check_lines(staged, offset, end)
        except Exception:
            # what was rejected must not be committed by a later flush
            self._drop()
            raise
        self._fresh = True
        return len(data)

    def _drop(self) -> None:
        self._staged, self._fresh = None, False
        self._found, self._check = {}, None
        self.charge(0)

    def _check_lines(self, staged: bytearray, offset: int, finish: int) -> None:
        """The complete lines among those that this write, from ``offset`` on, is in."""
        begin = staged.rfind(b"\n", 0, offset) + 1
        end = staged.find(b"\n", max(begin, finish - 1))
        if end < 0:
            end = staged.rfind(b"\n", begin)
            self._check_length(len(staged) - max(begin, end + 1))
        if end < 0:
            return
        if self._row.single and staged.count(b"\n") > 1:
            raise MalformedError(f"{self.node.row.name} takes one value, on one line")
        if self._row.first and begin > 0:
            return
        if self._row.checking is not None:
            self._check_more(self._row.checking, staged, begin, end)
            return
        lines = bytes(staged[begin:end]).split(b"\n")[: 1 if self._row.first else None]
        # equal lines are checked once
        for line in dict.fromkeys(lines):
            self._check_line(line)

    def _check_more(
        self, begun: Callable[..., LinesCheck], staged: bytearray, begin: int, end: int
    ) -> None:
        """The lines that were not taken yet; all of them, if one that was is another now."""
        if self._check is None or begin < self._taken:
            self._check = begun(self._base, self.node.obj, self.caller)
            self._taken = 0
        self._check.take(decode(bytes(staged[self._taken : end])))
        self._taken = end + 1

    def _check_length(self, size: int) -> None:
        """A document may be long, what one line of it costs to look at may not."""
        limit = self._base.runtime.config.control_max
        if self._row.long and size > limit:
            raise TooLongError(f"a line of {self.node.row.name} may have at most {limit} bytes")

    def flush(self) -> None:
        if not self._fresh or self._staged is None:
            return
        staged, self._fresh = bytes(self._staged), False
        self._text = None
        try:
            self._check_alive()
            self.node.check_writer(self.caller)
            whole = self._checked(staged) if self._row.long else self._before() + staged
            with self.node.acting(self.caller):
                self._row.put(self._base, self.node.obj, self.caller, whole, self._found)
        except Exception:
            self._drop()
            raise
        if self._adds:
            self._drop()
            self._truncated = False

    def _checked(self, staged: bytes) -> bytes:
        """The whole of a document, after the lines that no write completed were checked: the
        last one, and that which an append went on with."""
        before = self._before()
        rest = before[before.rfind(b"\n") + 1 :]
        if rest:
            end = staged.find(b"\n")
            self._check_line(rest + (staged[:end] if end >= 0 else staged))
        self._check_line(staged[staged.rfind(b"\n") + 1 :])
        return before + staged if before else staged

    def _check_line(self, line: bytes) -> None:
        self._check_length(len(line))
        if self._row.check is not None:
            self._row.check(self._base, self.node.obj, self.caller, decode(line))

    def syncing(self) -> None:
        self.flush()


class OpenVerbs(OpenRow[_O]):
    """``ctl``: each complete line acts at once; a last line without newline at flush.

    Nothing waits with its lock, which who wants to kill the agent waits for: close(2) does, for
    which the kernel holds none.
    """

    settles = False
    lasts = False  # nothing waits for the disk with its lock

    def __init__(self, node: Member[_O], row: Verbs[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._rest = b""
        self._limit = self._base.runtime.config.control_max

    def write(self, offset: int, data: bytes) -> int:
        if len(self._rest) + len(data) > self._limit:
            self._rest = b""
            raise TooLongError(f"a control may have at most {self._limit} bytes")
        *lines, rest = (self._rest + data).split(b"\n", _VERBS_AT_ONCE)
        taken = len(data)
        if b"\n" in rest:
            # a short write(2): the writer goes on with the rest
            taken, rest = taken - len(rest), b""
        self._rest = b""
        for line in lines:
            self._act(line)
        self.charge(len(rest))
        self._rest = rest
        return taken

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        self.charge(0)
        if rest:
            self._act(rest)

    @property
    def unfinished(self) -> bool:
        return bool(self._rest)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {**super().save(descriptors), "rest": self._rest}

    def restore(self, saved: dict[str, Any]) -> None:
        super().restore(saved)
        self._rest = saved["rest"]

    def _act(self, line: bytes) -> None:
        if line.strip(b" \t"):
            self._check_alive()
            self.node.check_writer(self.caller)
            with self.node.acting(self.caller):
                self._row.act(self._base, self.node.obj, self.caller, decode(line))


class OpenByPath(OpenRow[_O]):
    """A real file that need not be there: it is opened for each read."""

    def __init__(self, node: Member[_O], row: Real[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._path = row.real(node.base, node.obj)

    def read(self, offset: int, size: int) -> bytes | None:
        self._check_reader()
        if offset == 0:
            self._seen = self._base.cache.poller.version(self.node.inode)
        return self._read(read_cached, size, offset)

    def reading(self, offset: int, size: int) -> Work[bytes]:
        def read() -> bytes:
            return self._read(os.pread, size, offset)

        return self._as_reader(read)

    @contextmanager
    def _as_reader(self, read: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
        self._check_reader()
        yield read

    def _read(self, pread: Callable[[int, int, int], _R], size: int, offset: int) -> _R | bytes:
        try:
            with open(self._path, "rb") as file:
                return pread(file.fileno(), size, offset)
        except FileNotFoundError:
            return b""

    def syncing(self) -> Callable[[], None]:
        def sync() -> None:
            with suppress(FileNotFoundError), open(self._path, "rb") as file:
                os.fsync(file.fileno())

        return sync


class OpenHistory(OpenByPath[_O]):
    """A file of lines that only grows: what is appended are whole JSON lines."""

    def __init__(
        self, node: Member[_O], row: History[_O], caller: Caller, flags: int
    ) -> None:
        super().__init__(node, row, caller)
        self._row = row
        self._appends = bool(flags & os.O_APPEND)
        self._limit = self._base.runtime.config.frame_max
        self._rest = b""
        self._refused = False
        if flags & os.O_TRUNC:
            self.truncate(0)

    def read(self, offset: int, size: int) -> bytes | None:
        found = super().read(offset, size)
        held = self._row.held(self._base, self.node.obj)
        return found if held is None else held[offset : offset + size]

    def truncate(self, size: int) -> None:
        raise ForbiddenError("a history cannot be truncated")

    def write(self, offset: int, data: bytes) -> int:
        if self._row.append is None:
            raise ForbiddenError("only the runtime writes this history")
        self._check_alive()
        self.node.check_writer(self.caller)
        size = self._path.stat().st_size if self._path.exists() else 0
        if not self._appends and offset != size:
            raise ForbiddenError("a history takes only additions: open it with O_APPEND (>>)")
        share = self._row.share(self._base, self.node.obj)
        share.check(self.caller, len(data))
        if self._refused or len(self._rest) + len(data) > self._limit:
            # the kernel splits a long write(2): the rest belongs to the refused line
            self._rest = b""
            self.charge(0)
            self._refused = True
            raise TooLongError(f"a line of a history may have at most {self._limit} bytes")
        *lines, rest = (self._rest + data).split(b"\n", _LINES_AT_ONCE)
        taken = len(data)
        if b"\n" in rest:
            # a short write(2): the writer goes on with the rest
            taken, rest = taken - len(rest), b""
        self._rest = b""
        self._append_all(lines)
        self.charge(len(rest))
        self._rest = rest
        return taken

    @property
    def unfinished(self) -> bool:
        return bool(self._rest)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {**super().save(descriptors), "rest": self._rest, "refused": self._refused}

    def restore(self, saved: dict[str, Any]) -> None:
        super().restore(saved)
        self._rest = saved["rest"]
        self._refused = saved["refused"]

    def _append_all(self, lines: list[bytes]) -> None:
        """As one change: all of them, or none."""
        wanted = [decode(line) for line in lines if line.strip()]
        if wanted and self._row.append is not None:
            self.node.check_writer(self.caller)
            self._row.append(self._base, self.node.obj, wanted)

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        self._refused = False
        self.charge(0)
        self._append_all([rest])


class OpenOutput(OpenRow[_O]):
    """What a program has written, as it grows."""

    def __init__(self, node: Member[_O], row: Output[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._content: Callable[[int, int], bytes] | None = None

    def read(self, offset: int, size: int) -> bytes:
        self._check_reader()
        if offset == 0 or self._content is None:
            self._content = self._row.content(self._base, self.node.obj)
        return self._content(offset, size)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        return {**super().save(descriptors), "begun": self._content is not None}

    def restore(self, saved: dict[str, Any]) -> None:
        super().restore(saved)
        if saved["begun"]:
            # as it is now, which has grown at its end
            self._content = self._row.content(self._base, self.node.obj)


class _OpenEmpty(OpenRow[_O]):
    """What is written there is not to be read."""

    def __init__(self, node: Member[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)

    def read(self, offset: int, size: int) -> bytes:
        self._check_reader()
        return b""


class OpenFeed(_OpenEmpty[_O]):
    """An inlet for bytes: a write takes as many as there is room for."""

    def __init__(
        self, node: Member[_O], caller: Caller, feed: Callable[[bytes], int]
    ) -> None:
        super().__init__(node, caller)
        self._feed = feed

    def write(self, offset: int, data: bytes) -> int:
        self._check_alive()
        self.node.check_writer(self.caller)
        return self._feed(data)


class OpenInlet(_OpenEmpty[_O]):
    """An inlet for messages: each flush with new data sends one."""

    def __init__(self, node: Member[_O], row: Inlet[_O], caller: Caller) -> None:
        super().__init__(node, caller)
        self._row = row
        self._text = bytearray()
        self._refused = False
        limit = self._base.runtime.config.frame_max
        self._limit = limit if row.most is None else min(limit, row.most)

    def write(self, offset: int, data: bytes) -> int:
        assert self._text is not None
        self._check_alive()
        self.node.check_writer(self.caller)
        limit = self._limit
        # a newline at the end belongs to the last line, not to the text
        if self._refused or len(self._text) + len(data) > limit + 1:
            # the kernel splits a long write(2): the rest belongs to the refused message
            self._drop()
            self._refused = True
            raise TooLongError(f"a {self._row.what} may have at most {limit} bytes")
        self.charge(len(self._text) + len(data))
        self._text += data
        return len(data)

    @property
    def unfinished(self) -> bool:
        return bool(self._text)

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        saved = super().save(descriptors)
        return {**saved, "inlet": self._text or b"", "refused": self._refused}

    def restore(self, saved: dict[str, Any]) -> None:
        super().restore(saved)
        self._text, self._refused = bytearray(saved["inlet"]), saved["refused"]

    def _drop(self) -> None:
        self._text = bytearray()
        self.charge(0)

    def flush(self) -> None:
        data = bytes(self._text or b"")
        self._drop()
        if self._refused:
            self._refused = False
            raise TooLongError(f"the {self._row.what} is too long and was not sent")
        if data:
            self._check_alive()
            self.node.check_writer(self.caller)
            text = decode(data).removesuffix("\n")
            self._row.send(self._base, self.node.obj, self.caller, text)


# what opens which kind of row


def open_row(node: Member[_O], row: File[_O], caller: Caller, flags: int) -> OpenFile:
    """A row, opened; the caller may open it like this."""
    match row:
        case Verbs():
            return OpenVerbs(node, row, caller)
        case Staged() if flags & os.O_ACCMODE != os.O_RDONLY:
            return OpenControl(node, row, caller, flags)
        case Rendered():
            return OpenRow(node, caller, writing=False)
        case Document():
            return open_document(node, row, caller, flags)
        case History():
            return OpenHistory(node, row, caller, flags)
        case Output():
            return OpenOutput(node, row, caller)
        case Gathered():
            return OpenGathered(node, row, caller)
        case Inlet():
            feed = row.feed(node.base, node.obj) if row.feed is not None else None
            if feed is not None:
                return OpenFeed(node, caller, feed)
            return OpenInlet(node, row, caller)
    raise NotImplementedError(type(row).__name__)


def reopen_row(
    node: Member[_O], row: File[_O], caller: Caller, flags: int, saved: dict[str, Any]
) -> OpenFile:
    """One that was open in the daemon before, as it was there: nobody asks whether it may be.

    ``LookupError`` if it is of another kind now.
    """
    flags &= ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL)
    opened: OpenFile
    if isinstance(row, Document):
        fd = saved.get("fd")
        opened = OpenByPath(node, row, caller) if fd is None else _in_place(
            node, row, caller, flags, fd
        )
    else:
        opened = open_row(node, row, caller, flags)
    if type(opened).__name__ != saved["kind"]:
        raise LookupError(f"{row.name} is a {type(opened).__name__} now")
    opened.restore(saved)
    return opened


def open_document(
    node: Member[_O], row: Document[_O], caller: Caller, flags: int
) -> OpenFile:
    """The file behind a row; who only reads does not make it."""
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        return open_to_write(node, row, caller, flags)
    try:
        fd = os.open(row.real(node.base, node.obj), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return OpenByPath(node, row, caller)
    return _in_place(node, row, caller, flags, fd)


def open_to_write(
    node: Member[_O], row: Document[_O], caller: Caller, flags: int
) -> OpenRealFile:
    """The file behind a row, made if it is not there yet."""
    row.ensure(node.base, node.obj)
    wanted = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(row.real(node.base, node.obj), wanted, 0o644)
    return _in_place(node, row, caller, flags, fd)


def _in_place(
    node: Member[_O], row: Document[_O], caller: Caller, flags: int, fd: int
) -> OpenRealFile:
    base, obj = node.base, node.obj

    def may_write() -> None:
        node.check_alive(caller)
        node.check_writer(caller)

    return OpenRealFile(
        node,
        caller,
        fd,
        limit=base.runtime.config.document_max,
        append=bool(flags & os.O_APPEND),
        share=row.share(base, obj),
        may_read=lambda: node.check_reader(caller),
        may_write=may_write,
        changed=lambda: row.changed(base, obj),
        close=base.disks.close,
    )
