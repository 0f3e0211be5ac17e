"""Requests to the sockets of agents and of the daemon, and their answers."""

from __future__ import annotations

import _socket  # socket itself takes as long to import as all of this program
import errno
import os
import sys
import time

from client.exits import DENIED, FAILED, NOT_RUNNING, Failure
from client.files import BLOCK
from client.following import TICK
from client.loop import POLLPRI, Lines, Loop, encode, parse_object
from client.root import DEFAULT_ROOT, Root, agent, label, own_agent
from client.types import Any, Iterator

TYPE = "fuse.ctxfs"  # of the filesystem, as the kernel tells
NO_ANSWER = "the daemon did not answer"
PLACE = "/root/ctx"  # where it is mounted in the daemon's runtime directory
DEFAULT_PLACE = f"/run/ctxfs{PLACE}"  # of the machine's own ctxd
MESSAGE_CODES = {
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    **dict.fromkeys(("ESRCH", "ENOTCONN", "ECONNREFUSED"), NOT_RUNNING),
}


class Connection(_socket.socket):
    """A connection, closed at the end of a `with` statement."""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socket_beside(root: Root) -> str:
    """Return the path of the daemon's socket outside of the filesystem, empty if not known.

    The filesystem is asked for nothing, for it may not answer. It is mounted at root/ctx in the
    daemon's runtime directory; where else it is seen, the kernel tells, or a link.
    """
    try:
        places = [os.readlink(root.path)]
    except OSError:  # not a link
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            entries = [line.split(" ") for line in mounts]
        seen = [entry[2] for entry in entries if entry[4] == root.path and TYPE in entry]
        places = [entry[4] for entry in entries if entry[2] in seen[-1:]]
        places += [DEFAULT_PLACE] if root.path == DEFAULT_ROOT else []
    own = [place.removesuffix(PLACE) for place in places if place.endswith(PLACE)]
    return f"{own[0]}/ctxd.sock" if own else ""


def open_beside(root: Root) -> Connection:
    """Return a connection to the daemon by that socket; `OSError` if this fails."""
    path = socket_beside(root)
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return open_socket(Root("/"), path)


def open_socket(root: Root, path: str) -> Connection:
    """Return a connection to a socket below the root; `OSError` if this fails."""
    directory, name = os.path.split(root.join(path))
    connection = Connection(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:  # through the directory's descriptor: a socket address has at most 107 bytes
        directory_fd = os.open(directory, os.O_PATH)
        try:
            connection.connect(f"/proc/self/fd/{directory_fd}/{name}")
        finally:
            os.close(directory_fd)
    except OSError:
        connection.close()
        raise
    return connection


def not_running(root: Root, name: str, status: str, *, by_message: bool = True) -> Failure:
    """Return the failure to reach an agent in a status, with what to do about it."""
    remedy = {"new": f"; start it: ctx start {name}", "dead": f"; see: ctx log {name}"}
    said = f"{name} is not running: its status is {status}{remedy.get(status, '')}"
    if by_message and status == "new" and root.field(name, "mode") == "once":
        said += f" (a once agent takes no messages: ctx set {name} mode=turn)"
    return Failure(said, NOT_RUNNING)


def connect(root: Root, name: str) -> Connection:
    """Return a connection to an agent; a failure says if it is missing, not running or denied."""
    began = time.time()
    try:
        return open_socket(root, f"agent/{name}.sock")
    except OSError as error:
        number = error.errno or errno.EIO
        if number in (errno.EACCES, errno.EPERM):
            reason = root.rejection(number, f"agent/{name}.sock", began)
            raise Failure(
                reason or f"{name}: you may not send messages to it (EACCES)", DENIED
            ) from None
        if number in (errno.ENOENT, errno.ECONNREFUSED) and root.present(agent(name)):
            raise not_running(root, name, root.field(name, "status") or "unknown") from None
        failure = root.failure(error, agent(name), began)
        raise Failure(str(failure), NOT_RUNNING, failure.number) from None


def connect_started(root: Root, name: str) -> Connection:
    """Return a connection to an agent that was just started, once it accepts one."""
    status = agent(name, "status")
    status_fd = root.open(status)
    loop = Loop()
    loop.watch(status_fd, lambda: None, POLLPRI)
    try:
        while True:
            state = root.call(status, lambda _: os.pread(status_fd, BLOCK, 0))
            try:
                return connect(root, name)
            except Failure as failure:
                if failure.status != NOT_RUNNING or state != b"starting\n":
                    raise
            loop.step(most=TICK)
    finally:
        os.close(status_fd)


def connect_daemon(root: Root) -> Connection:
    """Return a connection to the daemon's own socket, which is only for operators."""
    began = time.time()
    try:
        try:
            return open_beside(root)
        except OSError:
            return open_socket(root, "ctxd.sock")
    except OSError as error:
        failure = root.failure(error, "ctxd.sock", began)
        denied = error.errno in (errno.EACCES, errno.EPERM)
        status = DENIED if denied else NOT_RUNNING
        raise Failure(str(failure), status, failure.number) from None


def frames(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield the frames that arrive on a connection, until it breaks or has something else."""
    arriving = Lines(connection.fileno())
    while (lines := arriving.read()) is not None:
        for line in lines:
            frame = parse_object(line)
            if frame is None:
                return
            yield frame


def refusal(frame: dict[str, Any], codes: dict[str, int]) -> Failure:
    """Return the failure in an error frame, with the exit status for its code."""
    code, field = str(frame.get("code") or ""), str(frame.get("field") or "")
    detail = str(frame.get("message") or frame.get("text") or "failed")
    detail = detail if field in detail else f"{field}: {detail}"
    said = f"{detail} ({code})" if code else detail
    return Failure(said, codes.get(code, FAILED), getattr(errno, code, 0))


def ask(connection: Connection, **fields: object) -> None:
    """Send a request."""
    try:
        connection.sendall(encode(fields))
    except (BrokenPipeError, ConnectionResetError):
        return  # read what the peer sent before it closed


def connect_own(root: Root, name: str = "") -> Connection:
    """Return a connection for a request about `name`.

    In an agent, connect to the agent `name`, or to the own agent without a name. Outside of
    agents, connect to the daemon's own socket, which is only for operators.
    """
    own = own_agent(root)
    if not own and os.environ.get("CTX_AGENT"):  # an agent's, which the daemon knows while it lives
        raise Failure(f"no ctxd answers at {root.path}: try again later", NOT_RUNNING)
    return connect(root, name or own) if own else connect_daemon(root)


def only_frame(connection: Connection, lost: str, fields: dict[str, object]) -> dict[str, Any]:
    """Send a request and return its only answer, which may be an error; a `Failure` if `lost`."""
    with connection:
        ask(connection, **fields)
        for frame in frames(connection):
            if frame.get("type") == "error" or frame.get("id") is None:  # as the request
                return frame
    raise Failure(lost, NOT_RUNNING, errno.ENOTCONN)


def answer(
    connection: Connection,
    /,
    codes: dict[str, int] = MESSAGE_CODES,
    lost: str = NO_ANSWER,
    **fields: object,
) -> dict[str, Any]:
    """Send a request and return its only answer; `Failure` if it is an error, or `lost`."""
    frame = only_frame(connection, lost, fields)
    if frame.get("type") == "error":
        raise refusal(frame, codes)
    return frame


def handed_over(root: Root, codes: dict[str, int] = MESSAGE_CODES, **fields: object) -> int:
    """Send a request whose answer comes with a descriptor, and return that."""
    with connect_own(root) as connection:
        ask(connection, **fields)
        data, rights, _, _ = connection.recvmsg(
            BLOCK, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC
        )
    frame = parse_object(data)
    if frame is None:
        raise Failure(NO_ANSWER, NOT_RUNNING, errno.ENOTCONN)
    if rights:
        return int.from_bytes(rights[0][2], sys.byteorder)
    raise refusal(frame, codes)


def open_window(root: Root, owner: str) -> int:
    """Have a new agent end, and be removed, once the returned descriptor is closed, as the kernel
    does when this process ends, whatever ends it; -1 if a ctxd of an earlier version has no such
    thing."""
    try:
        return handed_over(root, op="window", agent=label(owner), remove=True)
    except Failure as failure:
        if failure.number == errno.EINVAL:
            return -1
        raise


def say(root: Root, owner: str, line: str) -> bool:
    """Say a verb to an agent or a task at a socket; return False if its `ctl` has to be written.

    An agent has its own socket, others the daemon's. Whom that refuses may be an agent that does
    not know of itself, and the file judges.
    """
    own = os.environ.get("CTX_AGENT")
    try:
        connection = open_socket(root, f"agent/{own}.sock") if own else open_beside(root)
    except OSError:
        return False
    _, name, *of_task = owner.split("/")
    task = of_task[-1] if of_task else ""
    fields: dict[str, object] = {"op": "ctl", "agent": label(name), "task": task, "line": line}
    frame = only_frame(connection, NO_ANSWER, fields)
    if frame.get("type") != "error":
        return True
    code, file = str(frame.get("code")), f"{owner}/ctl"
    number = getattr(errno, code, 0)
    if number == errno.EACCES:
        return False
    missing = root.missing(file) if number == errno.ENOENT else ""
    raise Failure(missing or f"{file}: {frame.get('message')} ({code})", number=number)
