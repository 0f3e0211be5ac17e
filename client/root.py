"""A mounted ctxfs: its location, the paths in it, and the reasons of failures."""

from __future__ import annotations

import errno
import os
import time

from client.exits import NOT_RUNNING, Failure, Misuse
from client.files import Opened, read_ahead, read_control, read_file, timestamp, write_file
from client.output import decode, escape
from client.types import Callable, Iterator, Result

DEFAULT_ROOT = "/ctx"
LAST = 1 << 18  # bytes at the end of a file that its last lines are looked for in
SOME = 1 << 16  # bytes of lines that are looked at together: more memory takes longer
NOBODY = 65534
LINKS = 40  # as many as the kernel follows
CLOCK_SLACK = 0.002  # seconds; the daemon stamps rejections in whole milliseconds
HINTS = {
    errno.EACCES: "you are not allowed to do this",
    errno.EBUSY: "not possible in its current state",
    errno.EDQUOT: "a limit was reached",
    errno.EEXIST: "already exists: choose another name, or remove it first",
    errno.EINVAL: "invalid argument",
    errno.EIO: "internal error in ctxd; see its log",
    errno.EMSGSIZE: "too long",
    errno.EOPNOTSUPP: "not supported by this machine or configuration; see: ctx doctor",
    errno.EPERM: "not permitted to anyone",
    errno.ESRCH: "no process is running",
    errno.ESTALE: "it was replaced in the meantime",
}
#: of what the caller may not read, or is gone
UNREADABLE = (errno.EACCES, errno.ENOENT, errno.EPERM, errno.ESTALE)
#: the kind of object in each directory: at the root and in an agent
KINDS = {"agent": "an agent", "tool": "a tool"}
PARTS = {"task": "a task", "work": "a work item", "waiting": "a wait", "ask": "an ask"}


def start_hint(path: str) -> str:
    """Return how the caller gets a ctxd that is mounted at `path`."""
    uid = os.getuid()
    if uid and path == os.path.join(user_directory(uid), "ctx"):
        return "start it with: systemctl --user start ctxd (or: ctxd)"
    if path != DEFAULT_ROOT:
        return f"start it with: ctxd --mount {path} (and its other options)"
    hint = "start it as root with: systemctl start ctxd (or: ctxd)"
    own = uid and "CTX_ROOT" not in os.environ
    return f"{hint}, or your own with: systemctl --user start ctxd" if own else hint


def is_unmapped(uid: int) -> bool:
    """Return whether files of root look like this user's: they do in a user namespace without root,
    such as an agent's, where `nobody` is no user."""
    if uid != NOBODY:
        return False
    try:
        rows = [[*map(int, row.split())] for row in read_file("/proc/self/uid_map").splitlines()]
    except OSError:
        return False
    return not any(first <= uid < first + count for first, _, count in rows)


def why_not_trusted(path: str) -> str:
    """Return who could put something else where a path leads, empty if nobody.

    The caller may have another user's environment, as after su(1): that user could put anything
    there, such as links in place of control files. So every directory and link on the way has to
    be the caller's or root's, and not for others to write. A sticky one may be on the way, but
    must not be the end, where others could make what is not there yet.
    """
    import stat

    left = [*reversed(os.path.abspath(path).split("/"))]
    at, links, writable = "/", 0, False
    while left:
        part = left.pop()
        if part == ".":
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        try:
            found = os.lstat(at)
        except OSError:
            break  # nothing is there; nobody else can make it, unless they may write above
        if found.st_uid not in (0, os.getuid()) and not is_unmapped(found.st_uid):
            return f"belongs to user {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > LINKS:
                break
            target = os.readlink(at)
            left += reversed(target.split("/"))
            at = "/" if target.startswith("/") else os.path.dirname(at)
            continue
        # a user may share a group with nobody, root may not
        others = stat.S_IWOTH if found.st_uid == os.getuid() != 0 else stat.S_IWGRP | stat.S_IWOTH
        writable = bool(found.st_mode & others)
        if writable and not found.st_mode & stat.S_ISVTX:
            break
    return "others may write" if writable else ""


def user_directory(uid: int) -> str:
    """Return the runtime directory of a user's ctxd, which does not survive a reboot."""
    named = os.path.realpath(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}")
    try:
        is_own = os.stat(named).st_uid == uid and not why_not_trusted(named)
    except OSError:
        is_own = False
    return named if is_own else f"/run/user/{uid}"


def trusted(named: str) -> str:
    """Return the directory that CTX_ROOT names; `Failure` if others decide what is there."""
    why = why_not_trusted(named)
    if not why:
        return named
    raise Failure(
        f"CTX_ROOT leads to {named}, which {why}; this may be the environment of another user: "
        f"unset CTX_ROOT, or use ctx --root {named}"
    )


def default_root() -> str:
    """Return the mount point without ``--root``: CTX_ROOT, the user's own, else the machine's.

    `Failure` if CTX_ROOT leads to something of another user, as after su(1).
    """
    if named := os.environ.get("CTX_ROOT"):
        return trusted(named)
    own = os.path.join(user_directory(os.getuid()), "ctx")
    return own if os.path.lexists(own) else DEFAULT_ROOT


def below(owner: str, file: str) -> str:
    """Return the path of a file below the path of its owner."""
    if any(part in ("", ".", "..") for part in file.split("/")):
        raise Misuse(f'"{file}" is not a file of "{label(owner)}"')
    return f"{owner}/{file}"


def object_path(directory: str, name: str, file: str = "") -> str:
    """Return the path of an agent or a tool, or of a file in it, relative to the root."""
    if not name or "/" in name:
        raise Misuse(f'"{name}" cannot be the name of {KINDS[directory]}')
    owner = f"{directory}/{name}.d"
    return below(owner, file) if file else owner


def agent(name: str, file: str = "") -> str:
    """Return the path of an agent, or of a file in it, relative to the root."""
    return object_path("agent", name, file)


def tool(name: str, file: str = "") -> str:
    """Return the path of a tool's directory, or of a file in it, relative to the root."""
    return object_path("tool", name, file)


def label(owner: str) -> str:
    """Return the name of an agent, or of something of an agent, from its path."""
    return owner.rpartition("/")[2].removesuffix(".d")


def readable(function: Callable[[], Result], otherwise: Result) -> Result:
    """Return a result; `otherwise` if the caller may not read it, or it is gone."""
    try:
        return function()
    except Failure as failure:
        if failure.number in UNREADABLE:
            return otherwise
        raise


class Root:
    """A mounted ctxfs; its failures carry the reason that the daemon gave."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.held = ("", "")  # what paths begin with, and how its directory is reached
        self.window = -1  # of an agent that ends with this process

    def hold(self, owner: str) -> None:
        """Reach the files of an object by its directory from now on, not by the names above it.

        ctxd is asked for less, and what follows is about this one even if it is replaced.
        """
        fd = self.call(owner, lambda path: os.open(path, os.O_PATH | os.O_DIRECTORY))
        self.held = f"{owner}/", f"/proc/self/fd/{fd}"

    def let_go(self) -> None:
        """Reach everything by its name again."""
        directory = self.held[1]
        self.held = ("", "")
        if directory:
            os.close(int(label(directory)))

    def join(self, relative: str) -> str:
        """Return the absolute path of something below the root."""
        owner, directory = self.held
        if owner and relative.startswith(owner):
            return os.path.join(directory, relative[len(owner) :])
        return os.path.join(self.path, relative)

    def call(self, relative: str, operation: Callable[[str], Result]) -> Result:
        """Apply a file operation; an `OSError` becomes a `Failure` with the best known reason."""
        began = time.time()
        try:
            return operation(self.join(relative))
        except OSError as error:
            raise self.failure(error, relative, began) from None

    def read(self, relative: str) -> bytes:
        """Return the contents of a file."""
        return self.call(relative, read_file)

    def lines(self, relative: str) -> Iterator[str]:
        """Yield the contents of a file that may be long, some whole lines at a time."""
        pieces, rest = read_ahead(self.join(relative)), b""
        while piece := self.call(relative, lambda _: next(pieces, b"")):
            whole, _, rest = (rest + piece).rpartition(b"\n")
            begin = 0
            while begin < len(whole):
                end = whole.find(b"\n", begin + SOME)
                end = end if end >= 0 else len(whole)
                yield decode(whole[begin:end])
                begin = end + 1
        if rest:
            yield decode(rest)

    def write(self, relative: str, data: bytes) -> None:
        """Write a control file."""
        self.call(relative, lambda path: write_file(path, data))

    def open(self, relative: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor for a file."""
        return self.call(relative, lambda path: os.open(path, flags))

    def end_of(self, relative: str, most: int) -> tuple[int, bytes]:
        """Return the last bytes of a file, and how many there are before them."""

        def read(path: str) -> tuple[int, bytes]:
            with Opened(path) as fd:
                begin = max(0, os.fstat(fd).st_size - most)
                return begin, os.pread(fd, most, begin)

        return self.call(relative, read)

    def last_lines(self, relative: str, count: int, most: int = LAST) -> list[bytes]:
        """Return the last lines of a file, as far as they are in its last bytes."""
        lines = self.end_of(relative, most)[1].split(b"\n")
        lines = lines if lines[-1] else lines[:-1]
        return lines[-count:] if count else []

    def remove(self, owner: str) -> None:
        """Remove an agent, or a task, work item or wait of an agent."""
        self.call(owner, os.rmdir)

    def names(self, directory: str) -> list[str]:
        """Return the names of all agents, or of all tools, that the caller may see."""
        names = self.call(directory, os.listdir)
        return sorted(name[:-2] for name in names if name.endswith(".d"))

    def listed(self, relative: str) -> list[str]:
        """Return the names in a directory; none if it is gone, or not for the caller."""
        try:
            return sorted(os.listdir(self.join(relative)))
        except OSError:
            return []

    def value(self, relative: str) -> str:
        """Return a control, empty if the caller may not read it or it is gone."""
        began = time.time()
        try:
            return decode(read_control(self.join(relative))).rstrip("\n")
        except OSError as error:
            if error.errno in UNREADABLE:
                return ""
            raise self.failure(error, relative, began) from None

    def field(self, name: str, file: str) -> str:
        """Return a control of an agent, as `value` does."""
        return self.value(agent(name, file))

    def failure(self, error: OSError, relative: str, began: float) -> Failure:
        """Return what to tell of an operation that failed."""
        number = error.errno or errno.EIO
        if number in (errno.ENOTCONN, errno.ECONNABORTED):  # the latter in the middle of a request
            message = f"the ctxd of {self.path} died (ENOTCONN); {start_hint(self.path)}"
            return Failure(message, NOT_RUNNING, errno.ENOTCONN)
        if not self.present("agent"):
            message = f"no ctxd answers at {self.path}; {start_hint(self.path)}"
            return Failure(message, NOT_RUNNING, errno.ENOTCONN)
        message = self.rejection(number, relative, began) or self.guess(number, relative)
        return Failure(message, number=number)

    def rejection(self, number: int, relative: str, began: float) -> str | None:
        """Return the daemon's reason for an operation that just failed, None if it gave none."""
        try:
            line = decode(read_file(self.join("error"))).partition("\n")[0]
        except OSError:
            return None
        when, _, rest = line.partition(" ")
        code, _, rest = rest.partition(" ")
        subject = escape("/".join(relative.split("/")[:2]))
        if getattr(errno, code, None) != number or timestamp(when) < began - CLOCK_SLACK:
            return None
        if not rest.startswith((subject + ":", subject + "/")):
            return None
        return f"{rest} ({code})"

    def guess(self, number: int, relative: str) -> str:
        """Return a sentence about a failure without a reason from the daemon."""
        code = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, "?")
        missing = ""
        if number == errno.ENOENT:
            missing = self.missing(relative) or self.mistyped(relative)
        return missing or f"{relative}: {HINTS.get(number) or os.strerror(number)} ({code})"

    def missing(self, relative: str) -> str:
        """Return which object on the path to a file does not exist, empty if all do."""
        parts = relative.split("/")
        for depth, kinds in ((2, KINDS), (4, PARTS)):
            kind = kinds.get(parts[depth - 2]) if len(parts) >= depth else None
            owner = "/".join(parts[:depth])
            if kind and not self.present(owner):
                return f'no {kind.partition(" ")[2]} "{label(owner)}"'
        return ""

    def mistyped(self, relative: str) -> str:
        """Return which file may be meant by a path that leads to none, empty if none is like it."""
        import difflib

        directory, _, name = relative.rpartition("/")
        like = difflib.get_close_matches(name, self.listed(directory), n=1)
        return f"{relative}: no such file; did you mean {like[0]}? (ENOENT)" if like else ""

    def present(self, relative: str) -> bool:
        """Return whether a path exists, readable or not."""
        try:
            os.stat(self.join(relative))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN)
        return True


def own_agent(root: Root) -> str:
    """Return the name of the caller's own agent, empty outside of agents."""
    try:
        return label(os.readlink(root.join("self")))
    except OSError:
        return ""


def own_name(root: Root, option: str = "its NAME") -> str:
    """Return the name of the caller's own agent; fail outside of agents, where one is named with
    an option."""
    name = own_agent(root)
    if not name:
        raise Misuse(f"you are not in an agent: say which one with {option}")
    return name
