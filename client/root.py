"""A mounted ctxfs: where it is, the paths in it, and why something failed there."""

from __future__ import annotations

import errno
import os
import time

from client.exits import USAGE, Failure
from client.files import read_control, read_file, timestamp, write_file
from client.output import decode, escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Result = TypeVar("Result")


DEFAULT_ROOT = "/ctx"
START_HINT = "start it as root with: systemctl start ctxd (or: ctxd)"
CLOCK_SLACK = 0.25  # seconds; rejections are stamped in whole milliseconds
HINTS = {
    errno.EACCES: "you are not allowed to do this",
    errno.EBUSY: "not possible in its present state",
    errno.EDQUOT: "a limit is reached",
    errno.EEXIST: "exists already",
    errno.EINVAL: "not accepted",
    errno.EIO: "ctxd met a bug of its own; its log says more",
    errno.EMSGSIZE: "too long",
    errno.EOPNOTSUPP: "this machine or set-up cannot do that; see: ctx doctor",
    errno.EPERM: "nobody is allowed to do this",
    errno.ESRCH: "nothing is running",
    errno.ESTALE: "it has been replaced meanwhile",
}
#: what is in a directory, by the directory's name: at the root and in an agent
KINDS = {"agent": "an agent", "tool": "a tool"}
PARTS = {"task": "a task", "work": "a work item", "waiting": "a wait"}


def user_directory(uid: int) -> str:
    """Return where a user's ctxd, run without root, keeps what does not survive a reboot."""
    return os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"


def default_root() -> str:
    """Return where the file system is if nothing says so: a user's own, else the machine's."""
    own = os.path.join(user_directory(os.getuid()), "ctx")
    return own if os.path.lexists(own) else DEFAULT_ROOT


def below(owner: str, file: str) -> str:
    """Return the path of a file of something, given the path of that."""
    if any(part in ("", ".", "..") for part in file.split("/")):
        raise Failure(f'"{file}" is not a file of "{label(owner)}"', USAGE)
    return f"{owner}/{file}"


def object_path(directory: str, name: str, file: str = "") -> str:
    """Return the path of an agent or a tool, or of a file in it, relative to the root."""
    if not name or "/" in name:
        raise Failure(f'"{name}" cannot be the name of {KINDS[directory]}', USAGE)
    owner = f"{directory}/{name}.d"
    return below(owner, file) if file else owner


def agent(name: str, file: str = "") -> str:
    """Return the path of an agent, or of a file in it, relative to the root."""
    return object_path("agent", name, file)


def tool(name: str, file: str = "") -> str:
    """Return the path of a tool's directory, or of a file in it, relative to the root."""
    return object_path("tool", name, file)


def label(owner: str) -> str:
    """Return the name of the agent, task, work item or wait whose path is given."""
    return owner.rpartition("/")[2].removesuffix(".d")


class Root:
    """A mounted ctxfs, whose failures come with the reason that the daemon left."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def join(self, relative: str) -> str:
        """Return the absolute path of something below the root."""
        return os.path.join(self.path, relative)

    def call(self, relative: str, operation: Callable[[str], Result]) -> Result:
        """Apply a file operation; an `OSError` becomes a `Failure` with the best known reason."""
        began = time.time()
        try:
            return operation(self.join(relative))
        except OSError as error:
            number = error.errno or errno.EIO
            message = self.rejection(number, relative, began) or self.guess(number, relative)
            raise Failure(message, number=number) from None

    def read(self, relative: str) -> bytes:
        """Return the contents of a file."""
        return self.call(relative, read_file)

    def write(self, relative: str, data: bytes) -> None:
        """Write a control file."""
        self.call(relative, lambda path: write_file(path, data))

    def open(self, relative: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor for a file."""
        return self.call(relative, lambda path: os.open(path, flags))

    def remove(self, owner: str) -> None:
        """Remove an agent, or a task, work item or wait of one."""
        self.call(owner, os.rmdir)

    def names(self, directory: str) -> list[str]:
        """Return the names of all agents, or of all tools, that the caller may see."""
        names = self.call(directory, os.listdir)
        return sorted(name[:-2] for name in names if name.endswith(".d"))

    def value(self, relative: str) -> str:
        """Return a control, empty when it is kept from the caller or just went away."""
        try:
            return decode(self.call(relative, read_control)).rstrip("\n")
        except Failure as failure:
            if failure.number in (errno.EACCES, errno.ENOENT, errno.EPERM, errno.ESTALE):
                return ""
            raise

    def field(self, name: str, file: str) -> str:
        """Return a control of an agent, empty like `value`."""
        return self.value(agent(name, file))

    def rejection(self, number: int, relative: str, began: float) -> str | None:
        """Return the daemon's sentence about an operation that just failed, if it is about that."""
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
        """Return a sentence about a failure that the daemon gave no reason for."""
        code = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, "?")
        if number == errno.ENOTCONN:
            return f"the ctxd of {self.path} has died ({code}); {START_HINT}"
        if not self.present("agent"):
            return f"no ctxd answers at {self.path}; {START_HINT}"
        missing = self.missing(relative) if number == errno.ENOENT else ""
        return missing or f"{relative}: {HINTS.get(number) or os.strerror(number)} ({code})"

    def missing(self, relative: str) -> str:
        """Return which object on the way to a file is not there, empty if all are."""
        parts = relative.split("/")
        for depth, kinds in ((2, KINDS), (4, PARTS)):
            kind = kinds.get(parts[depth - 2]) if len(parts) >= depth else None
            owner = "/".join(parts[:depth])
            if kind and not self.present(owner):
                return f'no {kind.partition(" ")[2]} "{label(owner)}"'
        return ""

    def present(self, relative: str) -> bool:
        """Return whether something is there, visible or not."""
        try:
            os.stat(self.join(relative))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN)
        return True


def own_agent(root: Root) -> str:
    """Return the name of the agent that the caller runs in, empty if it is in none."""
    try:
        return label(os.readlink(root.join("self")))
    except OSError:
        return ""


def own_name(root: Root) -> str:
    """Return the name of the agent that the caller runs in, which there must be."""
    name = own_agent(root)
    if not name:
        raise Failure("you are in no agent: name one", USAGE)
    return name
