"""The agents' sockets: JSON Lines over a Unix stream socket (ABI section 6).

The sockets are bound on the filesystem itself, by a process of its own
(``runtime.binder``), because the daemon serves the request that this makes.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import trio

from runtime.agents import Agents
from runtime.authority.identity import CONTROLLERS, PARTIES, Caller, Role
from runtime.binder import Binder
from runtime.cell import Places
from runtime.errors import (
    CtxError,
    DeniedError,
    MalformedError,
    MissingError,
    TooLongError,
    UnsupportedError,
    WrongStateError,
)
from runtime.model import Agent
from runtime.names import dump_json, parse_json_object, quote

log = logging.getLogger("ctxd.sockets")

#: a peer that does not read its last frames is not waited for longer
_FAREWELL_SECONDS: Final = 5.0
_CONNECTIONS: Final = 1024
_EVENT_ID: Final = re.compile(r"e[0-9]{1,15}")

#: names under which sockets are bound; MKNOD knows them (ctxfs.tree)
DAEMON_BIND_NAME: Final = ".bind-ctxd"


def bind_name(agent: Agent) -> str:
    return f".bind-{agent.index}"


class Connection:
    """One accepted connection. Frames are sent whole, one at a time."""

    def __init__(self, stream: trio.SocketStream, caller: Caller, frame_max: int) -> None:
        self.caller = caller
        self._stream = stream
        self._lock = trio.Lock()
        self._buffer = bytearray()
        self._frame_max = frame_max

    async def send(self, frame: dict[str, Any] | bytes) -> None:
        """Waits until the peer has room: a slow reader slows only itself."""
        data = frame if isinstance(frame, bytes) else (dump_json(frame) + "\n").encode()
        async with self._lock:
            await self._stream.send_all(data)

    async def receive(self) -> str | None:
        """The next line, None at the end; ``TooLongError`` or ``MalformedError``."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > self._frame_max:
                raise TooLongError(f"a frame is at most {self._frame_max} bytes")
            data = await self._stream.receive_some(65536)
            if not data:
                return None
            self._buffer += data
        if end > self._frame_max:
            raise TooLongError(f"a frame is at most {self._frame_max} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise MalformedError("a frame is UTF-8") from None


class Server:
    """The listening socket of one agent, and its open connections."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.accepting = trio.CancelScope()
        self.refusing = False
        self.ended = trio.Event()
        self.connections = 0


Handler = Callable[["Sockets", Server, Agent, Connection, dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the protocol. ``stays`` operations answer later, others at once."""

    name: str
    who: Role
    handler: Handler
    stays: bool = False


class Sockets:
    """All sockets of the daemon."""

    def __init__(
        self,
        *,
        agents: Agents,
        places: Places,
        binder: Binder,
        nursery: trio.Nursery,
        code: Callable[[CtxError], str],
        status: Callable[[], dict[str, str]],
    ) -> None:
        self._agents = agents
        self._places = places
        self.binder = binder
        self._nursery = nursery
        self._code = code
        self._status = status
        self._servers: dict[int, Server] = {}
        self._appended: dict[int, trio.Event] = {}
        agents.watching.append(self)

    # Watching

    def agent_changed(self, index: int, names: Iterable[str]) -> None:
        pass

    def agent_listed(self, agent: Agent) -> None:
        pass

    def session_changed(self, index: int, names: Iterable[str]) -> None:
        waiting = self._appended.pop(index, None)
        if waiting is not None:
            waiting.set()

    # opening and closing

    async def open(self, agent: Agent) -> None:
        """Makes ``NAME.sock`` a socket that answers; returns when it does."""
        listener = await self.binder.bind(self._places.fuse / "agent", bind_name(agent))
        server = self._servers[agent.index] = Server(listener)
        self._nursery.start_soon(self._accept, agent, server)

    async def open_daemon(self) -> None:
        """The same for ``ctxd.sock``."""
        listener = await self.binder.bind(self._places.fuse, DAEMON_BIND_NAME)
        self._nursery.start_soon(self._accept, None, Server(listener))

    def refuse(self, agent: Agent) -> None:
        """No new connections and operations; open ones stay until the end is recorded."""
        server = self._servers.get(agent.index)
        if server is not None:
            server.refusing = True
            server.accepting.cancel()

    def close(self, agent: Agent) -> None:
        """Answers those who wait, then ends every connection."""
        server = self._servers.pop(agent.index, None)
        if server is not None:
            server.accepting.cancel()
            server.ended.set()

    async def _accept(self, agent: Agent | None, server: Server) -> None:
        trio_listener = trio.SocketListener(trio.socket.from_stdlib_socket(server.listener))
        with server.accepting:
            async with trio_listener:
                while True:
                    try:
                        stream = await trio_listener.accept()
                    except OSError as error:
                        log.warning("accept: %s", error)
                        await trio.sleep(0.1)
                        continue
                    if server.connections >= _CONNECTIONS:
                        await stream.aclose()
                        continue
                    server.connections += 1
                    self._nursery.start_soon(self._serve, agent, server, stream)

    # serving

    async def _serve(self, agent: Agent | None, server: Server, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                raw = stream.socket
                caller = self._agents.identity.resolve_peer(raw._sock)  # type: ignore[attr-defined]
                connection = Connection(stream, caller, self._agents.config.frame_max)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._farewell, server, nursery.cancel_scope)
                    await self._converse(agent, server, connection, nursery)
                    nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        finally:
            server.connections -= 1

    @staticmethod
    async def _farewell(server: Server, scope: trio.CancelScope) -> None:
        await server.ended.wait()
        scope.deadline = trio.current_time() + _FAREWELL_SECONDS

    async def _converse(
        self, agent: Agent | None, server: Server, connection: Connection, nursery: trio.Nursery
    ) -> None:
        staying: list[trio.Event] = []
        try:
            self._check_peer(agent, connection.caller)
            while True:
                line = await self._next_line(server, connection)
                if line is None:
                    break
                if line.strip():
                    await self._answer(agent, server, connection, line, nursery, staying)
        except CtxError as error:
            await self._send_error(connection, error)
            return
        # What was asked for is answered, also to a peer that shut down its sending side.
        for event in staying:
            await event.wait()

    @staticmethod
    async def _next_line(server: Server, connection: Connection) -> str | None:
        line: str | None = None
        failure: CtxError | None = None
        async with trio.open_nursery() as nursery:

            async def until_ended() -> None:
                await server.ended.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_ended)
            try:
                line = await connection.receive()
            except CtxError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return line

    def _check_peer(self, agent: Agent | None, caller: Caller) -> None:
        if agent is None:
            if caller.agent is not None or not caller.known:
                raise DeniedError("ctxd.sock answers operators only; an agent has its own socket")
            return
        roles = self._agents.identity.roles(caller, agent)
        if not roles or (agent.private and not roles & PARTIES):
            raise DeniedError(f"the agent {quote(agent.name)} is private: its socket is not yours")

    async def _answer(
        self,
        agent: Agent | None,
        server: Server,
        connection: Connection,
        line: str,
        nursery: trio.Nursery,
        staying: list[trio.Event],
    ) -> None:
        request: dict[str, Any] = {}
        try:
            request = parse_json_object(line)
            name = request.get("op")
            if agent is None:
                await self._answer_operator(connection, name, request)
                return
            operation = OPERATIONS.get(name) if isinstance(name, str) else None
            if operation is None:
                raise MalformedError(f"{quote(str(name))} is none of: {', '.join(OPERATIONS)}")
            self._check_peer(agent, connection.caller)
            if not self._agents.identity.roles(connection.caller, agent) & operation.who:
                raise DeniedError(f"{operation.name} is not yours to ask of {quote(agent.name)}")
            if server.refusing and not operation.stays:
                raise WrongStateError(f"the agent {quote(agent.name)} is stopping")
            if not operation.stays:
                await operation.handler(self, server, agent, connection, request)
                return
            done = trio.Event()
            staying.append(done)
            nursery.start_soon(self._stay, operation, server, agent, connection, request, done)
        except CtxError as error:
            await self._send_error(connection, error, request.get("id"))

    async def _stay(
        self,
        operation: Operation,
        server: Server,
        agent: Agent,
        connection: Connection,
        request: dict[str, Any],
        done: trio.Event,
    ) -> None:
        try:
            await operation.handler(self, server, agent, connection, request)
        except CtxError as error:
            await self._send_error(connection, error, request.get("id"))
        finally:
            done.set()

    async def _send_error(self, connection: Connection, error: CtxError, about: Any = None) -> None:
        frame = {"type": "error", "code": self._code(error), "message": error.sentence}
        if isinstance(about, str):
            frame["id"] = about
        await connection.send(frame)

    async def _answer_operator(
        self, connection: Connection, name: Any, request: dict[str, Any]
    ) -> None:
        if name == "ping":
            await connection.send({"type": "pong"})
        elif name == "status":
            await connection.send({"type": "status", **self._status()})
        elif name == "tool":
            raise UnsupportedError("this version has no tools")
        else:
            raise MalformedError(f"{quote(str(name))} is none of: ping, status, tool")

    # operations

    async def _ping(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        await connection.send({"type": "pong"})

    async def _wait(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        await server.ended.wait()
        await connection.send(
            {
                "type": "wait",
                "agent": agent.name,
                "status": str(agent.status),
                "outcome": agent.outcome,
                "reason": agent.reason,
            }
        )

    async def _resume(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """Replays the session's events after an id, then sends new ones until the end."""
        after = request.get("after")
        if after is not None and not (isinstance(after, str) and _EVENT_ID.fullmatch(after)):
            raise MalformedError(f"after: {quote(str(after))} is no event id such as e17")
        session = self._agents.session(agent.session)
        if session is None:
            raise MissingError("the session was removed")
        last = int(after[1:]) if after else 0
        path = self._agents.session_directory(session) / "events.jsonl"
        offset = 0
        while True:
            appended = self._appended.setdefault(session.index, trio.Event())
            ended = server.ended.is_set()
            with open(path, "rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    if _event_number(line) > last:
                        await connection.send(line)
            if ended:
                return
            async with trio.open_nursery() as nursery:
                for event in (appended, server.ended):
                    nursery.start_soon(_cancel_after, event, nursery.cancel_scope)

    async def _send(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        raise WrongStateError(
            f"{quote(agent.name)} is a once agent: it reads handoff.md, no messages; "
            "write the handoff before its start, or make another agent"
        )

    async def _cancel(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        raise MissingError(f"{quote(str(request.get('id')))}: no such message is known here")

    async def _tool(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        raise UnsupportedError("this version has no tools")


def _event_number(line: bytes) -> int:
    match = re.match(rb'\{"id":"e([0-9]+)"', line)
    return int(match[1]) if match else 0


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


_READERS: Final = Role.OPERATOR | Role.ROOT | Role.SELF

OPERATIONS: Final[dict[str, Operation]] = {
    operation.name: operation
    for operation in (
        Operation("ping", Role.ANYONE, Sockets._ping),
        Operation("wait", Role.ANYONE, Sockets._wait, stays=True),
        Operation("resume", _READERS, Sockets._resume, stays=True),
        Operation("send", Role.ANYONE, Sockets._send),
        Operation("cancel", CONTROLLERS, Sockets._cancel),
        Operation("tool", Role.SELF, Sockets._tool),
    )
}
