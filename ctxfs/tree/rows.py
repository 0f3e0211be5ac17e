"""Files as rows: everything about a file is said once, by a row of the kind that it is of.

Lookup, listing, mode bits, permission checks and the tables of ctxfs(5) all come from the
rows. Each kind has the fields that mean something for it, and opens what it is of.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ctxfs.tree.handles import ControlHandle, RowHandle, VerbHandle, decode
from ctxfs.tree.inodes import CONTROL, NAMED, PUBLIC, Treatment
from ctxfs.tree.nodes import Call, Handle, Node
from runtime.authority.guard import ANY_STATUS, NEVER, Guard
from runtime.caller import INSIDERS, Caller, Role
from runtime.errors import CtxError, MalformedError, TooLargeError, TooLongError
from runtime.records.config import Config
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts.mounts import Source

if TYPE_CHECKING:
    from ctxfs.files.spaces import SpaceRow
    from ctxfs.filesystem import Filesystem
    from ctxfs.tree.rownodes import RowNode


class Kind(Enum):
    FILE = stat.S_IFREG
    DIRECTORY = stat.S_IFDIR
    LINK = stat.S_IFLNK
    SOCKET = stat.S_IFSOCK


NEW: Final = frozenset({Status.NEW})
NOT_BUSY: Final = ANY_STATUS - {Status.STARTING, Status.BUSY, Status.STOPPING}
NOT_TERMINAL: Final = ANY_STATUS - {Status.DEAD}

#: functions of a row get the filesystem and the row's object first
Render = Callable[["Filesystem", Any, Caller], "str | bytes | Iterator[str]"]
Check = Callable[["Filesystem", Any, Caller, str], None]
CheckFound = Callable[["Filesystem", Any, Caller, str, Mapping[str, Source]], None]
Opener = Callable[["Filesystem", "RowNode", Call, int], Handle]
Size = Callable[["Filesystem", Any], int]
Time = Callable[["Filesystem", Any], float]


class LinesCheck(Protocol):
    """Takes complete lines as they are written, each once; raises for what is refused."""

    def take(self, text: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What there is to say of every name in the tree.

    ``within`` names the directory of the object's that lists it. The ``top`` row is the
    object's own directory, which another plane lists; what that lists beside it tells its
    ``path`` from the root. What is there for some callers only, or for a moment, is not
    ``kept``. ``public`` rows of a public agent are open to all, others are read by ``read``.
    The ``guard`` says who may write, and when. ``depends`` are the fields that it shows,
    beside that of its name.
    """

    kind: ClassVar[Kind] = Kind.FILE

    name: str
    doc: str = ""
    mode: int = 0o444
    within: str = ""
    top: bool = False
    path: Callable[[Any], str] | None = None
    kept: bool = True
    public: bool = False
    read: Role = INSIDERS
    depends: tuple[str, ...] = ()
    guard: Guard = field(default=NEVER, init=False)
    #: it changes by itself, so that attributes are never kept; poll(2) tells of changes
    volatile: bool = field(default=False, init=False)
    polled: bool = field(default=False, init=False)

    @property
    def is_inside(self) -> bool:
        """Whether it is listed in the directory of its object, or below that."""
        return not self.top and self.path is None

    @property
    def treatment(self) -> Treatment:
        """What the kernel may do with it without asking."""
        return NAMED

    def size_of(self, node: RowNode) -> int:
        return 0

    def time_of(self, node: RowNode) -> float | None:
        """When it was changed, None if that is not known."""
        return None


# what is no file


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """mkdir(2) in a directory. The guard's statuses are judged by ``act``, after the name."""

    guard: Guard
    act: Callable[[Filesystem, Any, Call, str, int], Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is removed, what the caller is to it, and the agent whose status counts."""

    obj: Any
    roles: Role
    agent: Agent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removing:
    """rmdir(2) in a directory; ``find`` raises ``MissingError``."""

    guard: Guard
    find: Callable[[Filesystem, Any, Caller, str], Target]
    act: Callable[[Filesystem, Any, Caller, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Row):
    """``entries`` and ``find`` are what it has beside the rows that are within it.

    Files are renamed into it by ``receive``. With a ``space`` it is one of real files. The
    names in a ``secret`` one are told to nobody, in no reason either.
    """

    kind: ClassVar[Kind] = Kind.DIRECTORY

    mode: int = 0o755
    guard: Guard = NEVER
    entries: Callable[[Filesystem, Any, Call], Iterator[str]] | None = None
    find: Callable[[Filesystem, Any, Call, str], Node | None] | None = None
    make: Making | None = None
    remove: Removing | None = None
    receive: Callable[[Filesystem, Any, Call, Node, str, str], None] | None = None
    space: SpaceRow | None = None
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Row):
    """A symbolic link."""

    kind: ClassVar[Kind] = Kind.LINK

    mode: int = 0o777
    target: Callable[[Filesystem, Any], str]

    def size_of(self, node: RowNode) -> int:
        return len(os.fsencode(self.target(node.fs, node.obj)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket(Row):
    """Bound by the daemon's binder; who connects is asked for at the other end."""

    kind: ClassVar[Kind] = Kind.SOCKET

    mode: int = 0o666


# files


@dataclass(frozen=True, slots=True, kw_only=True)
class File(Row):
    """``default`` is what the manual says that it holds at first."""

    default: str = ""

    @property
    def treatment(self) -> Treatment:
        return CONTROL

    def open(self, fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered(File):
    """A file whose content is made by ``render`` when it is read."""

    render: Render

    def size_of(self, node: RowNode) -> int:
        return len(node.render(node.fs.nobody))

    def open(self, fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        return RowHandle(fs, node, call.caller, writing=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Rendered):
    """A value that is shown and never written.

    A ``generated`` one is made anew for each reader and costs what it costs: as in procfs its
    size is 0, so that stat(2) makes nothing.
    """

    volatile: bool = False
    polled: bool = False
    generated: bool = False

    @property
    def treatment(self) -> Treatment:
        changes = self.volatile or self.generated or self.polled
        return PUBLIC if self.public and not changes else CONTROL

    def size_of(self, node: RowNode) -> int:
        return 0 if self.generated else Rendered.size_of(self, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Rendered):
    """A text that is kept on the disk and shown, never written: not read to be measured."""

    size: Size
    mtime: Time

    def size_of(self, node: RowNode) -> int:
        return self.size(node.fs, node.obj)

    def time_of(self, node: RowNode) -> float:
        return self.mtime(node.fs, node.obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Rendered):
    """What is written is collected for each open file, and put in force as a whole.

    ``check`` sees each complete line at write(2); with ``first`` the first line only.
    ``checking`` begins a check of lines that counts those before them. ``single`` files hold
    one value on one line. What is written to one that ``merges`` is joined to nothing.
    """

    mode: int = 0o644
    guard: Guard
    check: Check | None = None
    single: bool = field(default=False, init=False)
    first: bool = field(default=False, init=False)
    merges: bool = field(default=False, init=False)
    checking: Callable[[Filesystem, Any, Caller], LinesCheck] | None = field(
        default=None, init=False
    )
    #: whether it may be as long as a document, and its lines as long as a control
    long: ClassVar[bool] = False
    looks: ClassVar[bool] = False

    def open(self, fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return Rendered.open(self, fs, node, call, flags)
        return ControlHandle(fs, node, self, call.caller, flags)

    def put(
        self, node: RowNode, caller: Caller, whole: bytes, found: Mapping[str, Source]
    ) -> None:
        """The whole of it, after it was written."""
        raise NotImplementedError(type(self).__name__)

    def wanted(self, fs: Filesystem, obj: Any, caller: Caller, text: str) -> list[str]:
        """The paths in some lines that have to be looked at, if the kind ``looks``."""
        return []

    def check_looked(
        self, fs: Filesystem, obj: Any, caller: Caller, text: str, found: Mapping[str, Source]
    ) -> None:
        """Whether what they lead to may be written."""

    def limit(self, config: Config) -> int:
        return config.control_max

    def too_long(self, limit: int) -> CtxError:
        return TooLongError(f"a control may have at most {limit} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Staged):
    """A value that is written: ``commit`` gets the whole of it."""

    volatile: bool = False
    polled: bool = False
    single: bool = False
    first: bool = False
    merges: bool = False
    checking: Callable[[Filesystem, Any, Caller], LinesCheck] | None = None
    commit: Check

    @property
    def treatment(self) -> Treatment:
        changes = self.volatile or self.polled
        return PUBLIC if self.public and not changes else CONTROL

    def put(
        self, node: RowNode, caller: Caller, whole: bytes, found: Mapping[str, Source]
    ) -> None:
        text = decode(whole)
        with node.acting(caller):
            self.commit(node.fs, node.obj, caller, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathControl(Staged):
    """A control with paths in its value, which a helper looks at before it is taken.

    ``paths`` are those of some lines, ``check_found`` sees what they lead to, and
    ``commit_found`` gets that with the whole.
    """

    single: bool = False
    paths: Callable[[Filesystem, Any, Caller, str], list[str]]
    check_found: CheckFound
    commit_found: CheckFound
    looks: ClassVar[bool] = True

    def put(
        self, node: RowNode, caller: Caller, whole: bytes, found: Mapping[str, Source]
    ) -> None:
        text = decode(whole)
        with node.acting(caller):
            self.commit_found(node.fs, node.obj, caller, text, found)

    def wanted(self, fs: Filesystem, obj: Any, caller: Caller, text: str) -> list[str]:
        return self.paths(fs, obj, caller, text)

    def check_looked(
        self, fs: Filesystem, obj: Any, caller: Caller, text: str, found: Mapping[str, Source]
    ) -> None:
        self.check_found(fs, obj, caller, text, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Staged):
    """A document of JSON lines, each checked as it is written: ``store`` gets the bytes."""

    check: Check
    store: Callable[[Filesystem, Any, Caller, bytes], None]
    size: Size
    mtime: Time
    long: ClassVar[bool] = True

    def put(
        self, node: RowNode, caller: Caller, whole: bytes, found: Mapping[str, Source]
    ) -> None:
        self.store(node.fs, node.obj, caller, whole)

    def size_of(self, node: RowNode) -> int:
        return self.size(node.fs, node.obj)

    def time_of(self, node: RowNode) -> float:
        return self.mtime(node.fs, node.obj)

    def limit(self, config: Config) -> int:
        return config.document_max

    def too_long(self, limit: int) -> CtxError:
        return TooLargeError(f"a document may have at most {limit} bytes (document_max)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs(Rendered):
    """A ``ctl``: each complete line that is written acts at once, by ``act``."""

    mode: int = 0o666
    guard: Guard
    act: Check

    def open(self, fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        return VerbHandle(fs, node, self, call.caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(File):
    """A file that is read and written in place, by the handle that its ``opener`` makes."""

    opener: Opener

    def open(self, fs: Filesystem, node: RowNode, call: Call, flags: int) -> Handle:
        return self.opener(fs, node, call, flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Opened):
    """A real file."""

    mode: int = 0o644
    guard: Guard
    size: Size
    mtime: Time

    def size_of(self, node: RowNode) -> int:
        return self.size(node.fs, node.obj)

    def time_of(self, node: RowNode) -> float:
        return self.mtime(node.fs, node.obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Document):
    """A real file that only grows, and tells of it; that of the runtime is written by nobody."""

    mode: int = 0o444
    guard: Guard = NEVER
    polled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Opened):
    """What a program writes, as it grows."""

    volatile: bool = True
    size: Size

    def size_of(self, node: RowNode) -> int:
        return self.size(node.fs, node.obj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inlet(Opened):
    """What goes in there does not come out: messages, or a program's input."""

    mode: int = 0o222
    read: Role = Role.NONE
    guard: Guard


def one_line(text: str) -> str:
    """The value of a control that holds one: without its newline; ``MalformedError``."""
    value = text.removesuffix("\n")
    if "\n" in value:
        raise MalformedError("write one value, on one line")
    return value
