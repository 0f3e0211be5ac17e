"""Requests to the sockets of agents and of the daemon, and their answers."""

from __future__ import annotations

import errno
import os
import time

from client.exits import DENIED, FAILED, NOT_RUNNING, Failure
from client.files import BLOCK
from client.following import TICK_MS
from client.root import Root, agent, own_agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any


MESSAGE_CODES = {
    **dict.fromkeys(("EACCES", "EPERM"), DENIED),
    **dict.fromkeys(("ESRCH", "ENOTCONN", "ECONNREFUSED"), NOT_RUNNING),
}


def open_socket(root: Root, path: str) -> socket.socket:
    """Return a connection to a socket below the root; `OSError` if this fails."""
    import socket

    directory, name = os.path.split(root.join(path))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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


def connect(root: Root, name: str) -> socket.socket:
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
            status = root.field(name, "status") or "unknown"
            raise Failure(f"{name} is not running: its status is {status}", NOT_RUNNING) from None
        failure = root.failure(error, agent(name), began)
        raise Failure(str(failure), NOT_RUNNING, failure.number) from None


def connect_started(root: Root, name: str) -> socket.socket:
    """Return a connection to an agent that was just started, once it accepts one."""
    import select

    status = agent(name, "status")
    status_fd = root.open(status)
    poller = select.poll()
    poller.register(status_fd, select.POLLPRI)
    try:
        while True:
            state = root.call(status, lambda _: os.pread(status_fd, BLOCK, 0))
            try:
                return connect(root, name)
            except Failure as failure:
                if failure.status != NOT_RUNNING or state != b"starting\n":
                    raise
            poller.poll(TICK_MS)
    finally:
        os.close(status_fd)


def connect_daemon(root: Root) -> socket.socket:
    """Return a connection to the daemon's own socket, which is only for operators."""
    began = time.time()
    try:
        return open_socket(root, "ctxd.sock")
    except OSError as error:
        failure = root.failure(error, "ctxd.sock", began)
        denied = error.errno in (errno.EACCES, errno.EPERM)
        status = DENIED if denied else NOT_RUNNING
        raise Failure(str(failure), status, failure.number) from None


def frames(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the frames that arrive on a connection."""
    import json

    try:
        for line in connection.makefile("rb"):
            frame = json.loads(line)
            if isinstance(frame, dict):
                yield frame
    except (ConnectionResetError, ValueError, RecursionError):
        return  # the connection broke, or the frame is not valid


def refusal(frame: dict[str, Any], codes: dict[str, int]) -> Failure:
    """Return the failure in an error frame, with the exit status for its code."""
    code, field = str(frame.get("code") or ""), str(frame.get("field") or "")
    detail = str(frame.get("message") or frame.get("text") or "failed")
    detail = detail if field in detail else f"{field}: {detail}"
    return Failure(f"{detail} ({code})" if code else detail, codes.get(code, FAILED))


def ask(connection: socket.socket, **fields: object) -> None:
    """Send a request."""
    import json

    try:
        connection.sendall(json.dumps(fields).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return  # read what the peer sent before it closed


def connect_own(root: Root, name: str = "") -> socket.socket:
    """Return a connection for a request about `name`.

    In an agent, connect to the agent `name`, or to the own agent without a name. Outside of
    agents, connect to the daemon's own socket, which is only for operators.
    """
    own = own_agent(root)
    if not own and os.environ.get("CTX_AGENT"):  # an agent's, which the daemon knows while it lives
        raise Failure(f"no ctxd answers at {root.path}: try again later", NOT_RUNNING)
    return connect(root, name or own) if own else connect_daemon(root)


def answer(connection: socket.socket, **fields: object) -> dict[str, Any]:
    """Send a request and return its only answer; `Failure` if it is an error."""
    with connection:
        ask(connection, **fields)
        for frame in frames(connection):
            if frame.get("type") == "error":
                raise refusal(frame, MESSAGE_CODES)
            return frame
    raise Failure("the daemon did not answer", NOT_RUNNING)
