"""Files as rows: everything about a file is said once, by a row of the kind that it is of.

Lookup, listing, mode bits, permission checks and the tables of the man pages all come from the
rows. Each kind has the fields that mean something for it; ``rownodes`` opens it by them. A row
is generic in the class of the objects of its layout.

A new file is one new row, and a number in ``numbers``. Verbs are rows too (``ctxfs.files.verbs``),
and one table has the statuses that they change (``runtime.records.lifecycle``).

Everything whose cost grows with its size has a maximum here or in its parser: lines of a policy,
values in a JSON text, the length of a line, entries of a list. A generated file has size 0, as in
procfs: stat(2) generates nothing, and a read generates what it shows. One write takes a limited
number of lines; it is then short (write(2)), and the writer goes on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from ctxfs.tree.base import Base
from ctxfs.tree.folder import FolderRow
from ctxfs.tree.inodes import Treatment
from ctxfs.tree.nodes import Attributes, Call, Node
from ctxfs.tree.shapes import Shape
from runtime.authority.disk import Share
from runtime.authority.guard import ANY_STATUS, NEVER, Act, AnyGuard, Guard
from runtime.caller import INSIDERS, NOBODY, Caller, Role
from runtime.errors import MalformedError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.mounts import Source
from runtime.texts.names import decode

#: the object that a row is of, and one that is removed from its directory
_O = TypeVar("_O")
_R = TypeVar("_R")


class Kind(IntEnum):
    """As in the mode of stat(2)."""

    FILE = stat.S_IFREG
    DIRECTORY = stat.S_IFDIR
    LINK = stat.S_IFLNK
    SOCKET = stat.S_IFSOCK


NEW: Final = frozenset({Status.NEW})
NOT_BUSY: Final = ANY_STATUS - {Status.STARTING, Status.BUSY, Status.STOPPING}
NOT_TERMINAL: Final = ANY_STATUS - {Status.DEAD}

#: functions of a row get what the tree stands on, and the row's object, first
Render = Callable[[Base, _O, Caller], str | bytes | Iterator[str] | Iterator[bytes]]
#: raises for what is refused
Check = Callable[[Base, _O, Caller, str], object]
#: where the paths in a text lead
Found = Mapping[str, Source]
CheckFound = Callable[[Base, _O, Caller, str, Found], object]
#: of what is on the disk, None if that tells it
Size = Callable[[Base, _O], int | None]
Time = Callable[[Base, _O], float | None]


class LinesCheck(Protocol):
    """Takes complete lines as they are written, each once; raises for what is refused."""

    def take(self, text: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Generic[_O]):
    """The fields that every name in the tree has.

    ``within`` names the directory of the object that lists it. The ``top`` row is the
    object's own directory, which another plane lists. A row that is listed beside the top
    has a ``path``: its directory, from the root. One that is not ``listed`` is there by name
    only. The kernel may keep a name that is ``kept``;
    a name is not if only some callers see it, or if it goes soon. All may read ``public``
    rows of a public agent; the roles in ``read`` may read the others. The ``guard`` says who
    may write, and when. A row shows the field of its name, and those in ``depends``. Where
    nothing can be written, or made, ``instead`` is the name beside it, or below it, where it can.
    """

    kind: ClassVar[Kind] = Kind.FILE

    name: str
    doc: str = ""
    mode: int = 0o444
    within: str = ""
    top: bool = False
    path: Callable[[_O], str] | None = None
    listed: bool = True
    kept: bool = True
    public: bool = False
    read: Role = INSIDERS
    depends: tuple[str, ...] = ()
    instead: str = ""
    guard: Guard[_O] = field(default=NEVER, init=False)
    #: it changes by itself, so that attributes are never kept; poll(2) tells of changes
    volatile: bool = field(default=False, init=False)
    polled: bool = field(default=False, init=False)

    #: whether it is listed in the directory of its object, or below that
    is_inside: bool = field(init=False)
    #: what the kernel may do with it without asking
    treatment: Treatment = field(init=False)

    def __post_init__(self) -> None:
        # once for each row, as every look-up asks
        object.__setattr__(self, "is_inside", not self.top and self.path is None)
        object.__setattr__(self, "treatment", self.treated())

    @property
    def key(self) -> str:
        """Its name in the table of numbers (``ctxfs.tree.numbers``)."""
        if self.top:
            return "."
        if self.path is not None:
            return f"*{self.name}"
        return f"{self.within}/{self.name}" if self.within else self.name

    def treated(self) -> Treatment:
        """The treatment of its inode by the kernel."""
        return Treatment.NAMED

    def size_of(self, base: Base, obj: _O) -> int:
        return 0

    def time_of(self, base: Base, obj: _O) -> float | None:
        """When it was changed, None if that is not known."""
        return None


# names that are not files


@dataclass(frozen=True, slots=True, kw_only=True)
class Making(Generic[_O]):
    """mkdir(2) in a directory. ``act`` judges the name, then all of the guard but who may."""

    guard: AnyGuard
    act: Callable[[Base, _O, Call, str, int], Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Generic[_R]):
    """The object to be removed, and the agent to which the caller has roles and whose status
    counts; or, of no agent's, the caller's ``roles`` towards it."""

    obj: _R
    agent: Agent | None = None
    roles: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removing(Generic[_O, _R]):
    """The removal of one kind of things; ``find`` raises ``MissingError``."""

    guard: Guard[_R]
    find: Callable[[Base, _O, Caller, str], Target[_R]]
    act: Callable[[Base, _O, Caller, _R], object]

    def remove(self, base: Base, obj: _O, caller: Caller, name: str, path: str) -> None:
        """Finds, judges and removes; ``path`` is what refusals call it."""
        agents = base.agents
        found = self.find(base, obj, caller, name)
        self.guard.check(Act.REMOVE, path, agents, caller, found.agent, found.obj, found.roles)
        with agents.journal.acting(caller):
            self.act(base, obj, caller, found.obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Row[_O]):
    """``entries`` and ``find`` are what it has beside the rows that are within it.

    ``tell`` makes the listing of many entries cheap: what it returns gives the attributes that the
    node which ``find`` finds would have, or None.

    ``receive`` takes files that are renamed into it. ``bind`` finds the socket that the
    binder makes in it by another name. As a ``folder`` it is one of real files. No reason shows
    a name in a ``secret`` one.
    """

    kind: ClassVar[Kind] = Kind.DIRECTORY

    mode: int = 0o755
    guard: Guard[_O] = NEVER
    entries: Callable[[Base, _O, Call], Iterable[str]] | None = None
    find: Callable[[Base, _O, Call, str], Node | None] | None = None
    tell: Callable[[Base], Callable[[str], Attributes | None]] | None = None
    make: Making[_O] | None = None
    remove: Removing[_O, Any] | None = None
    receive: Callable[[Base, _O, Call, Node, str, str], None] | None = None
    bind: Callable[[Base, _O, str], Node | None] | None = None
    folder: FolderRow[Any] | None = None
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Row[_O]):
    """A symbolic link. ``ready`` returns when what it leads to is there, or raises."""

    kind: ClassVar[Kind] = Kind.LINK

    mode: int = 0o777
    target: Callable[[Base, _O], str]
    ready: Callable[[Base, _O, Call], Awaitable[None]] | None = None

    def size_of(self, base: Base, obj: _O) -> int:
        return len(os.fsencode(self.target(base, obj)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket(Row[_O]):
    """Bound by the daemon's binder; who connects is asked for at the other end."""

    kind: ClassVar[Kind] = Kind.SOCKET

    mode: int = 0o666


# files


@dataclass(frozen=True, slots=True, kw_only=True)
class File(Row[_O]):
    """``default`` is what the manual says that it holds at first. One with a ``shape`` can be
    said where agents are declared. ``real`` is where it is on the disk, which says its ``size`` and
    when it ``changed`` if the row does not: it need not be there.
    """

    default: str = ""
    shape: Shape | None = None
    real: Callable[[Base, _O], Path] | None = None
    size: Size[_O] | None = None
    changed: Time[_O] | None = None

    def treated(self) -> Treatment:
        return Treatment.CONTROL

    def size_of(self, base: Base, obj: _O) -> int:
        known = self.size(base, obj) if self.size is not None else None
        if known is not None:
            return known
        found = self._found(base, obj)
        return found.st_size if found is not None else 0

    def time_of(self, base: Base, obj: _O) -> float | None:
        known = self.changed(base, obj) if self.changed is not None else None
        if known is not None or self.real is None:
            return known
        found = self._found(base, obj)
        return found.st_mtime if found is not None else _made(obj)

    def _found(self, base: Base, obj: _O) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return self.real(base, obj).stat() if self.real is not None else None
        return None


#: when an agent or a session was made
_made: Callable[[Any], float] = attrgetter("created")


def _nothing(base: Base, obj: Any, caller: Caller) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered(File[_O]):
    """A file whose content ``render`` makes when it is read, or that is read from the disk.

    Of something long, one read makes ``at_once`` bytes: as many as cost no more than a step may.
    An empty piece says that those before it cost as much.
    """

    render: Render[_O] = _nothing
    at_once: int = 2 << 20

    def pieces(self, base: Base, obj: _O, caller: Caller) -> Iterator[bytes]:
        """The content; of something long one piece after the other."""
        if self.real is not None:
            with suppress(FileNotFoundError):
                yield self.real(base, obj).read_bytes()
            return
        text = self.render(base, obj, caller)
        if isinstance(text, bytes):
            yield text
        elif isinstance(text, str):
            yield text.encode()
        else:
            for piece in text:
                yield piece.encode() if isinstance(piece, str) else piece

    def size_of(self, base: Base, obj: _O) -> int:
        if self.real is not None:
            return File.size_of(self, base, obj)
        return sum(map(len, self.pieces(base, obj, NOBODY)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Rendered[_O]):
    """A value that is shown and never written; ``changed`` says when it got what it is.

    A ``generated`` one is made anew for each reader and costs what it costs: as in procfs its
    size is 0, so that stat(2) makes nothing. Where readers see different things, ``followed``
    numbers those that see the same, and tells the version that they see now.
    """

    volatile: bool = False
    polled: bool = False
    generated: bool = False
    followed: Callable[[Base, Caller], tuple[int, int]] | None = None

    def treated(self) -> Treatment:
        # pages of what can be polled are those of its time
        dated = self.changed is not None or not self.polled
        kept = self.public and dated and not (self.volatile or self.generated)
        return Treatment.PUBLIC if kept else Treatment.CONTROL

    def size_of(self, base: Base, obj: _O) -> int:
        return 0 if self.generated else Rendered.size_of(self, base, obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(File[_O]):
    """A value that a helper finds out, made anew for each reader. Its size is 0, as in procfs."""

    gather: Callable[[Base, _O, Caller], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Rendered[_O]):
    """A file that collects what is written, for each open file, and takes it as a whole.

    ``check`` sees each complete line at write(2); with ``first`` the first line only.
    ``checking`` begins a check that keeps count over several lines. A ``single`` file holds
    one value on one line. A file that ``merges`` takes what is written alone, without the
    value that is there.
    """

    mode: int = 0o644
    guard: Guard[_O]
    volatile: bool = False
    polled: bool = False
    check: Check[_O] | None = None
    single: bool = False
    first: bool = False
    merges: bool = False
    checking: Callable[[Base, _O, Caller], LinesCheck] | None = None
    #: whether it may be as long as a document, and its lines as long as a control
    long: ClassVar[bool] = False

    def put(self, base: Base, obj: _O, caller: Caller, whole: bytes, found: Found) -> None:
        """The whole of it, after it was written, with what the paths in it lead to."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Staged[_O]):
    """A value that is written: ``commit`` gets the whole of it."""

    commit: Check[_O]

    def treated(self) -> Treatment:
        changes = self.volatile or self.polled
        return Treatment.PUBLIC if self.public and not changes else Treatment.CONTROL

    def put(self, base: Base, obj: _O, caller: Caller, whole: bytes, found: Found) -> None:
        self.commit(base, obj, caller, decode(whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class PathControl(Staged[_O]):
    """A control with paths in its value, which a helper looks at before it is taken.

    ``paths`` finds the paths in some lines, ``check_found`` sees what they lead to, and
    ``commit_found`` gets the same with the whole value.
    """

    paths: Callable[[Base, _O, Caller, str], list[str]]
    check_found: CheckFound[_O]
    commit_found: CheckFound[_O]

    def put(self, base: Base, obj: _O, caller: Caller, whole: bytes, found: Found) -> None:
        self.commit_found(base, obj, caller, decode(whole), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Staged[_O]):
    """A document of JSON lines, each checked as it is written: ``store`` gets the bytes."""

    check: Check[_O]
    real: Callable[[Base, _O], Path]
    store: Callable[[Base, _O, Caller, bytes], object]
    long: ClassVar[bool] = True

    def put(self, base: Base, obj: _O, caller: Caller, whole: bytes, found: Found) -> None:
        self.store(base, obj, caller, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs(Rendered[_O]):
    """A ``ctl``: each complete line that is written acts at once, by ``act``."""

    mode: int = 0o660
    guard: Guard[_O]
    act: Check[_O]


@dataclass(frozen=True, slots=True, kw_only=True)
class Real(File[_O]):
    """A real file; ``share`` is the part of an account that it is on."""

    real: Callable[[Base, _O], Path]
    share: Callable[[Base, _O], Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Real[_O]):
    """A text, or of any bytes. ``written`` is told after each change, and ``ensure`` makes the
    directory of the file before there is one."""

    mode: int = 0o644
    guard: Guard[_O]
    ensure: Callable[[Base, _O], object]
    written: Callable[[Base, _O], object]
    #: whether what is written must be UTF-8 without NUL
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Real[_O]):
    """A file of lines that only grows. What is written goes to ``append``, several lines at
    once; without that only the runtime writes it. ``held`` is all of it before it is a file."""

    mode: int = 0o444
    guard: Guard[_O] = NEVER
    polled: bool = False
    append: Callable[[Base, _O, list[str]], None] | None = None
    held: Callable[[Base, _O], bytes | None] = lambda base, obj: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(File[_O]):
    """The output of a program, as it grows. Each read at offset 0 calls ``content``, for what then
    reads from an offset, at most so many bytes."""

    volatile: bool = True
    content: Callable[[Base, _O], Callable[[int, int], bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inlet(File[_O]):
    """A file that is only written: messages, or the input of a program. It is empty to its readers
    and to who may write it, so that who reads all files of a directory can.

    ``send`` gets the text of each flush, of at most ``most`` bytes if that is less than a
    message may have. If ``feed`` makes something of the object, that takes
    bytes instead, as they come, and tells how many it took.
    """

    mode: int = 0o660
    guard: Guard[_O]
    send: Check[_O]
    what: str = "message"
    most: int | None = None
    feed: Callable[[Base, _O], Callable[[bytes], int] | None] | None = None


def one_line(text: str) -> str:
    """The value of a control that holds one: without its newline; ``MalformedError``."""
    value = text.removesuffix("\n")
    if "\n" in value:
        raise MalformedError("write one value, on one line")
    return value
