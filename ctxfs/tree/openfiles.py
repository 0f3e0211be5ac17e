"""Open files of rows: rendered, staged, verbs, output, inlets.

A control stages what is written: a complete line is checked at once, so that ``echo`` fails, and
flush commits the whole. An open file that keeps something between requests names it in ``HANDED``
(``runtime.kernel.handover``); a test looks for what such files keep.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

from ctxfs.caching import Waiter
from ctxfs.tree import rows
from ctxfs.tree.members import Member
from ctxfs.tree.nodes import OpenFile
from runtime.authority.accounts import Charge, Resource
from runtime.caller import Caller
from runtime.errors import CtxError, MalformedError, QuotaError, TooLargeError, TooLongError
from runtime.kernel.handover import Descriptors
from runtime.texts import mounts
from runtime.texts.mounts import Source
from runtime.texts.names import decode

_O = TypeVar("_O")
_R = TypeVar("_R")

#: bytes that an open file may hold in memory as part of being open
_FREE: Final = 1024
#: lines of a history or of a document that one write adds
LINES_AT_ONCE: Final = 512
#: lines of a ``ctl`` that one write acts upon
_VERBS_AT_ONCE: Final = 4
_CHANGED: Final = select.POLLPRI | select.POLLERR | select.POLLIN


class OpenRow(OpenFile, Generic[_O]):
    """An open row: reads what the row renders, polls where the row can."""

    HANDED: ClassVar[tuple[str, ...]] = (
        *("_text", "_cut", "_written", "_rendered"),
        *("direct", "keep", "_seen", "_reported"),
    )
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
        self._base.cache.poller.closed(self.node.watched(self.caller)[0], id(self))

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        if self._text is not None and not self._cut:
            self._cut = not self._read_rest(self._text, self._pieces)
        return super().save(descriptors)

    def _read_rest(self, text: bytearray, pieces: Iterator[bytes]) -> bool:
        """Reads the rest of a text, since the maker of it does not outlive this daemon. False if
        the rest is more than the opener's account has room for: then it could not have read on,
        either."""
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
        if isinstance(self.node.row, rows.Rendered) and not self._read_rest(
            text, self.node.pieces(self.caller)
        ):
            text.clear()
        return bytes(text)

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        if (size := self._written + self._rendered) > _FREE:
            runtime = self._base.runtime
            who = runtime.agents.identity.payer(self.caller)
            self._memory = runtime.accounts.charged_anyway(who, Resource.MEMORY, size)

    def read(self, offset: int, size: int) -> bytes | None:
        self.node.check_reader(self.caller)
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
        self._seen = self.node.watched(self.caller)[1]
        return self.node.pieces(self.caller)

    def _more(self, size: int) -> Iterator[bytes]:
        """At least so many bytes more, up to a limit: a first read far behind finds the end."""
        assert isinstance(self.node.row, rows.Rendered)
        size = left = min(size, self.node.row.at_once)
        while left > 0 and (piece := next(self._pieces, None)) is not None:
            if not piece and left < size:
                return
            left -= len(piece)
            yield piece

    def poll(self, waiter: Waiter | None) -> int | None:
        if not self.node.row.polled:
            return None
        inode, version = self.node.watched(self.caller)
        if self._seen != version:
            if self.keep and self._reported == version:
                # another reader has filled the page: the next read is to come here
                self._base.cache.drop_pages(self.node.inode)
            self._reported = version
            return _CHANGED
        if waiter is not None:
            self._base.cache.poller.wait(inode, id(self), waiter)
        return select.POLLIN


class OpenGathered(OpenRow[_O]):
    """An open file whose text a helper finds out, at each read at offset 0."""

    gathers = True

    def __init__(self, node: Member[_O], row: rows.Gathered[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=False)
        self._row = row

    def read(self, offset: int, size: int) -> bytes | None:
        self.node.check_reader(self.caller)
        if offset == 0 or self._text is None:
            return None
        return bytes(self._text[offset : offset + size])

    async def gathered(self, offset: int, size: int) -> bytes:
        self.node.check_reader(self.caller)
        text = await self._row.gather(self._base, self.node.obj, self.caller)
        self._charge(len(text))  # later reads go on with it
        self._text, self._rendered = bytearray(text), len(text)
        return text[offset : offset + size]


def whole_lines(text: bytes, most: int) -> tuple[list[bytes], bytes, int]:
    """At most so many whole lines of what is written, what begins the next one, and how much is
    left: of a short write(2), after which the writer goes on with the rest."""
    *lines, rest = text.split(b"\n", most)
    return (lines, b"", len(rest)) if b"\n" in rest else (lines, rest, 0)


class OpenControl(OpenRow[_O]):
    """A control open for writing: staged, checked by line, committed as a whole at flush.

    What is appended, or merges, is staged alone and joined to the value that is
    there at the commit: two who append lose nothing.
    """

    HANDED = ("_staged", "_fresh", "_truncated")

    def __init__(
        self, node: Member[_O], row: rows.Staged[_O], caller: Caller, flags: int
    ) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._adds = bool(flags & os.O_APPEND) or row.merges
        self._append = bool(flags & os.O_APPEND) and not row.merges
        self._truncated = bool(flags & os.O_TRUNC)
        config = self._base.runtime.config
        self._limit = config.document_max if row.long else config.control_max
        self._staged: bytearray | None = None
        self._fresh = False
        #: what the paths in the lines that were written lead to
        self._found: dict[str, Source] = {}
        #: of a row that is checked over several lines, and what of the staged it has taken
        self._check: rows.LinesCheck | None = None
        self._taken = 0

    async def prepare(self, data: bytes) -> None:
        """Where the paths lead that this completes the lines of (``PathControl``)."""
        row = self._row
        staged = self._staged if self._staged is not None else b""
        if not isinstance(row, rows.PathControl) or len(staged) + len(data) > self._limit + 1:
            return
        tail = bytes(staged[staged.rfind(b"\n") + 1 :])
        lines, newline, _ = (tail + data).rpartition(b"\n")
        if not newline or not lines.strip():
            return
        try:
            self.node.check_writing(self.caller)
            text = decode(lines)
            wanted = row.paths(self._base, self.node.obj, self.caller, text)
            missing = [path for path in wanted if path not in self._found]
            agent = self.node.agent
            assert agent is not None  # only files of agents name paths
            looked = await self._base.runtime.looker.look(agent, missing)
            found = {**self._found, **looked}
            if self.caller.agent is not None:
                # The commit refuses it too, but dash(1) does not look at what close(2) returns.
                mounts.check_found(found, wanted)
            row.check_found(self._base, self.node.obj, self.caller, text, found)
            self._found = found
        except Exception:
            self._drop()
            raise

    @property
    def unfinished(self) -> bool:
        return self._fresh

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        found = {path: [to.path, to.identity] for path, to in self._found.items()}
        return {**super().save(descriptors), "found": found}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        # lines that were taken are taken once more with the next ones (``_check_more``)
        self._found = {path: Source(*to) for path, to in saved["found"].items()}

    def _stage(self) -> bytearray:
        if self._staged is None:
            empty = self._truncated or self._adds
            self._staged = bytearray(b"" if empty else self.node.render(self.caller))
        return self._staged

    def _before(self) -> bytes:
        """The text that the staged one is added to."""
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
            self.node.check_writing(self.caller)
            staged = self._stage()
            if self._row.long:
                data = data[: len(data) - whole_lines(data, LINES_AT_ONCE)[2]]
            if self._adds:
                offset = len(staged)
            end = offset + len(data)
            if self._size_before() + end > self._limit:
                raise self._too_long()
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

    def _too_long(self) -> CtxError:
        if self._row.long:
            return TooLargeError(f"a document may have at most {self._limit} bytes (document_max)")
        return TooLongError(f"a control may have at most {self._limit} bytes")

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
        row = self._row
        if row.single and b"\n" in staged.removesuffix(b"\n"):
            hint = row.shape.hint if row.shape is not None else ""
            raise MalformedError(f"{row.name} takes one value, on one line{hint}")
        if end < 0:
            return
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
        self, begun: Callable[..., rows.LinesCheck], staged: bytearray, begin: int, end: int
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
            self.node.check_writing(self.caller)
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

    HANDED = ("_rest",)
    settles = False
    lasts = False  # nothing waits for the disk with its lock

    def __init__(self, node: Member[_O], row: rows.Verbs[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._rest = b""
        self._limit = self._base.runtime.config.control_max

    def write(self, offset: int, data: bytes) -> int:
        if len(self._rest) + len(data) > self._limit:
            self._rest = b""
            raise TooLongError(f"a control may have at most {self._limit} bytes")
        lines, rest, left = whole_lines(self._rest + data, _VERBS_AT_ONCE)
        self._rest = b""
        for line in lines:
            self._act(line)
        self.charge(len(rest))
        self._rest = rest
        return len(data) - left

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        self.charge(0)
        if rest:
            self._act(rest)

    @property
    def unfinished(self) -> bool:
        return bool(self._rest)

    def _act(self, line: bytes) -> None:
        if line.strip(b" \t"):
            self.node.check_alive(self.caller)
            self.node.check_there()  # who may is asked for each verb
            with self.node.acting(self.caller):
                self._row.act(self._base, self.node.obj, self.caller, decode(line))


class OpenOutput(OpenRow[_O]):
    """The output of a program, as it grows."""

    def __init__(self, node: Member[_O], row: rows.Output[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._content: Callable[[int, int], bytes] | None = None

    def read(self, offset: int, size: int) -> bytes:
        self.node.check_reader(self.caller)
        if offset == 0 or self._content is None:
            self._content = self._row.content(self._base, self.node.obj)
        return self._content(offset, size)


class OpenInlet(OpenRow[_O]):
    """An inlet for messages, of which each flush with new data sends one; or for bytes, of which a
    write takes as many as there is room for. What is written there is not to be read."""

    HANDED = ("_inlet", "_refused")

    def __init__(self, node: Member[_O], row: rows.Inlet[_O], caller: Caller) -> None:
        super().__init__(node, caller, writing=True)
        self._row = row
        self._feed = row.feed(node.base, node.obj) if row.feed is not None else None
        self._inlet = bytearray()
        self._refused = False
        limit = self._base.runtime.config.frame_max
        self._limit = limit if row.most is None else min(limit, row.most)

    def read(self, offset: int, size: int) -> bytes:
        self.node.check_reader(self.caller)
        return b""

    def write(self, offset: int, data: bytes) -> int:
        self.node.check_writing(self.caller)
        if self._feed is not None:
            return self._feed(data)
        limit = self._limit
        # a newline at the end belongs to the last line, not to the text
        if self._refused or len(self._inlet) + len(data) > limit + 1:
            # the kernel splits a long write(2): the rest belongs to the refused message
            self._drop()
            self._refused = True
            raise TooLongError(f"a {self._row.what} may have at most {limit} bytes")
        self.charge(len(self._inlet) + len(data))
        self._inlet += data
        return len(data)

    @property
    def unfinished(self) -> bool:
        return bool(self._inlet)

    def _drop(self) -> None:
        self._inlet = bytearray()
        self.charge(0)

    def flush(self) -> None:
        data = bytes(self._inlet)
        self._drop()
        if self._refused:
            self._refused = False
            raise TooLongError(f"the {self._row.what} is too long and was not sent")
        if data:
            self.node.check_writing(self.caller)
            text = decode(data).removesuffix("\n")
            self._row.send(self._base, self.node.obj, self.caller, text)
