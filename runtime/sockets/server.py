"""The agents' sockets: JSON Lines over a Unix stream socket (ctxfs-tools(5), Sockets).

The sockets are bound on the filesystem itself, by a process of its own
(``runtime.kernel.binder``), because the daemon serves the request that this makes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import trio

from runtime.authority.accounts import Payer
from runtime.authority.guard import Act
from runtime.authority.loop import Holding, Late, Turns
from runtime.caller import Caller, Role
from runtime.cell.cell import Places
from runtime.errors import CtxError, QuotaError
from runtime.ids import AgentIndex
from runtime.kernel import linux, unixsockets
from runtime.kernel.binder import Binder
from runtime.kernel.handover import Descriptors, unpack_caller
from runtime.records.change import Subscriber
from runtime.records.lifecycle import Effect
from runtime.records.model import Agent
from runtime.sockets.connection import REST_SECONDS, Connection, Server
from runtime.sockets.operations import DAEMON_OPERATIONS, OPERATIONS, Operation, connecting
from runtime.sockets.request import Request, Services
from runtime.texts.names import check_known, parse_json_object

log = logging.getLogger("ctxd.sockets")

#: a peer that does not read its last frames is not waited for longer
_FAREWELL_SECONDS: Final = 5.0
#: operations of one connection that wait to be answered; each costs a task
_STAYING_MAX: Final = 16
#: about what such a task takes, in bytes
_STAYING_SIZE: Final = 10 << 10

#: names under which sockets are bound; MKNOD knows them (ctxfs.tree)
DAEMON_BIND_NAME: Final = ".bind-ctxd"

#: keeps why something was refused to a caller, and where
Refused = Callable[[CtxError, Caller, str], None]


def bind_name(agent: Agent) -> str:
    return f".bind-{agent.index}"


class Sockets(Subscriber):
    """All sockets of the daemon."""

    def __init__(
        self,
        services: Services,
        *,
        places: Places,
        binder: Binder,
        nursery: trio.Nursery,
        code: Callable[[CtxError], str],
        refused: Refused,
    ) -> None:
        self._services = services
        self._agents = agents = services.agents
        self._places = places
        self.binder = binder
        self._nursery = nursery
        self._code = code
        self._refused = refused
        self._servers: dict[AgentIndex, Server] = {}
        self._replays = services.replays
        self._daemons = Server()
        #: the same outside of the mount
        self._beside = Server()
        #: those of agents that have ended, as long as anybody is connected
        self._ended: set[Server] = set()
        #: what is asked, while nothing is to be begun
        self.beginning = Holding()
        #: what agents want of their sockets costs others little at a time
        self._turns = Turns()
        #: anybody may connect, and does not wait for what others say
        self._accepts = Turns()
        self._late = Late(agents.accounts.time, self._turns)
        agents.journal.subscribe(self)
        agents.journal.subscribe(self._replays)

    # Subscriber

    def due(self, agent: Agent, effect: Effect) -> None:
        if effect is Effect.REFUSE:
            self.refuse(agent)
        elif effect is Effect.RELEASE:
            self.close(agent)

    async def run(self) -> None:
        """Does what goes on beside connections."""
        await self._replays.run()

    # opening and closing

    async def open(self, agent: Agent) -> None:
        """Makes ``NAME.sock`` a socket that answers; returns when it does.

        Also after ``refuse``, for an agent that is started again: connections
        that stayed open go on.
        """
        server = self._servers.get(agent.index)
        if server is not None and server.restored:
            server.restored = False  # as the daemon before had it
            return
        listener = await self.binder.bind(self._places.fuse / "agent", bind_name(agent))
        server = self._servers.get(agent.index)
        if server is None:
            server = self._servers[agent.index] = Server(agent)
        server.accepting = trio.CancelScope()
        server.refusing = False
        self._listen(server, listener)

    def _listen(self, server: Server, listener: socket.socket) -> None:
        server.listener = listener
        linux.refuse_descriptors(listener)
        self._nursery.start_soon(self._accept, server, listener)

    async def open_daemon(self) -> None:
        """Makes ``ctxd.sock`` a socket that answers, in the mount and beside it."""
        if self._beside.listener is None:
            # in a directory that is the daemon's alone, for all to connect to
            self._listen(self._beside, unixsockets.listen(self._places.socket))
            self._places.socket.chmod(0o666)
        if self._daemons.listener is None:
            listener = await self.binder.bind(self._places.fuse, DAEMON_BIND_NAME)
            self._listen(self._daemons, listener)

    def refuse(self, agent: Agent) -> None:
        """No new connections and operations; open ones stay until the end is recorded."""
        server = self._servers.get(agent.index)
        if server is not None:
            server.refusing = True
            server.accepting.cancel()  # the kernel refuses new connections

    def close(self, agent: Agent) -> None:
        """Answers those who wait, then ends every connection."""
        server = self._servers.pop(agent.index, None)
        if server is not None:
            server.end()
            if server.connections:
                self._ended.add(server)

    # in the next daemon

    def save(self, descriptors: Descriptors) -> list[dict[str, Any]]:
        """All sockets and connections, as JSON values."""
        servers = [self._daemons, self._beside, *self._servers.values(), *self._ended]
        return [
            {
                "agent": server.agent.index if server.agent is not None else None,
                "beside": server is self._beside,
                "listener": descriptors.keep(server.listener.fileno())
                if server.listener is not None
                else None,
                "refusing": server.refusing,
                "ended": server.ended.is_set(),
                "arriving": [descriptors.keep(each.fileno()) for each in server.arriving],
                "connections": [each.save(descriptors) for each in server.connections],
            }
            for server in servers
        ]

    def take_over(self, saved: list[dict[str, Any]]) -> None:
        """Serves them on; what was asked waits while it is held."""
        for each in saved:
            # not in a version before
            server = self._beside if each.get("beside") else self._daemons
            if each["agent"] is not None:
                agent = self._agents.registry.recall(AgentIndex(each["agent"]))
                if agent is None:
                    continue  # its connections end with the descriptors
                server = Server(agent)
                if each["ended"]:
                    self._ended.add(server)
                else:
                    self._servers[agent.index] = server
                server.restored = each["listener"] is not None or each["refusing"]
            server.refusing = each["refusing"]
            if each["ended"]:
                server.ended.set()
            if each["listener"] is not None:
                self._listen(server, socket.socket(fileno=each["listener"]))
            for fd in each["arriving"]:
                self._nursery.start_soon(self._arrived, server, socket.socket(fileno=fd))
            for connection in each["connections"]:
                self._reconnect(server, connection)

    async def _arrived(self, server: Server, peer: socket.socket) -> None:
        try:
            await self._admit(server, _stream_of(peer))
        except Exception as error:
            log.warning("accept: %s", error)

    def _reconnect(self, server: Server, saved: dict[str, Any]) -> None:
        stream = _stream_of(socket.socket(fileno=saved["fd"]))
        connection = self._connection(server, stream, unpack_caller(saved["caller"]))
        connection.restore(saved)
        self._begin_serving(connection)

    def _connection(
        self, server: Server, stream: trio.SocketStream, caller: Caller
    ) -> Connection:
        agents = self._agents
        who, config = agents.identity.payer(caller), agents.settings.config
        return Connection(server, stream, caller, config, agents.accounts, self._turns, who)

    async def _accept(self, server: Server, listener: socket.socket) -> None:
        try:
            with server.accepting:
                while True:
                    try:
                        await self._accept_one(server, listener)
                    except OSError as error:
                        log.warning("accept: %s", error)
                        await trio.sleep(0.1)
                    except Exception:
                        # One peer must not close the socket for all, nor end the daemon.
                        log.exception("accept")
                        await trio.sleep(0.1)
        finally:
            _close(listener)
            if server.listener is listener:
                server.listener = None

    async def _accept_one(self, server: Server, listener: socket.socket) -> None:
        arrived = await _accepted(listener)
        server.arriving.append(arrived)
        stream = _stream_of(arrived)
        try:
            if server.agent is not None:
                await self._accepts.take(Payer(server.agent.owner))
        except BaseException:
            _close(stream.socket)  # the listener is closed
            raise
        finally:
            server.arriving.remove(arrived)
        who = await self._admit(server, stream)
        if who is not None:
            await self._accepts.rest(who, REST_SECONDS)

    async def _admit(self, server: Server, stream: trio.SocketStream) -> Payer | None:
        """Serves one more connection, or refuses it without a task of its own.

        Returns the account that pays for it, None if no connection is served any more.
        """
        begun = time.thread_time()
        raw = stream.socket
        if server.refusing:
            _close(raw)
            return None
        try:
            caller = self._agents.identity.resolve_peer(raw._sock)  # type: ignore[attr-defined]
        except BaseException:
            _close(raw)
            raise
        connection = self._connection(server, stream, caller)
        who = connection.who
        self._agents.accounts.time.pay(who, time.thread_time() - begun)
        try:
            connection.admit()
        except QuotaError as error:
            connection.release()
            try:
                with trio.move_on_after(1), contextlib.suppress(trio.BrokenResourceError):
                    await self._send_error(connection, error)
            finally:
                _close(raw)
            return who
        self._begin_serving(connection)
        return who

    # serving

    def _begin_serving(self, connection: Connection) -> None:
        # known in the same step: the task begins in a later one
        connection.server.connections.append(connection)
        self._nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        server, key = connection.server, connection.caller.key
        try:
            async with connection.stream:
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._farewell, server, nursery.cancel_scope)
                        await connection.timed(self._converse(connection, nursery))
                        nursery.cancel_scope.cancel()
                finally:
                    # in the step that closes it: no closed one is saved
                    connection.release()
                    server.connections.remove(connection)
                    if not server.connections:
                        self._ended.discard(server)
                    _close(connection.stream.socket)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer went away
        except* Exception:
            # A bug ends this connection only.
            log.exception("a connection of %s", key)

    @staticmethod
    async def _farewell(server: Server, scope: trio.CancelScope) -> None:
        await server.ended.wait()
        scope.deadline = trio.current_time() + _FAREWELL_SECONDS

    async def _converse(self, connection: Connection, nursery: trio.Nursery) -> None:
        # Its end waits for its tasks: what was asked for is answered, also to a peer
        # that shut down its sending side.
        async with trio.open_nursery() as staying:
            try:
                await self._go_on(connection, staying)
                if connection.ending:
                    return
                self._check_peer(connection)
                while await connection.next_line() is not None:
                    await self._late.wait(connection.who)
                    await self.beginning.passed()
                    await self._answer(connection, staying)
            except CtxError as error:
                connection.ending = True
                connection.pending.clear()
                # without what was received, which its traceback has
                await self._send_error(connection, error.with_traceback(None))
                staying.cancel_scope.cancel()
            if staying.child_tasks:
                nursery.start_soon(_cancel_at_hangup, connection.stream, nursery.cancel_scope)

    async def _go_on(self, connection: Connection, staying: trio.Nursery) -> None:
        """With what the daemon before had yet to send, and operations that it was asked for, and
        allowed."""
        if connection.left_unsent:
            # frames that are said meanwhile come after it
            staying.start_soon(connection.send, connection.left_unsent)
            await trio.lowlevel.checkpoint()
        table, asked = _operations_of(connection.server), []
        for fields, progress in connection.left_pending:
            operation = table.get(str(fields.get("op")))
            if operation is not None:
                request = self._request(connection, fields, progress)
                asked.append((operation, request))
                connection.pending.append(request)
        await self.beginning.passed()
        for operation, request in asked:
            size = _STAYING_SIZE + len(json.dumps(request.fields))
            connection.charge(size)
            staying.start_soon(self._stay, operation, request, size)

    def _request(
        self, connection: Connection, fields: dict[str, Any], progress: dict[str, Any]
    ) -> Request:
        return Request(
            services=self._services, connection=connection, fields=fields, progress=progress
        )

    def _check_peer(self, connection: Connection) -> Role:
        """The roles of the peer; ``DeniedError`` if it may not use the socket at all."""
        identity, agent = self._agents.identity, connection.server.agent
        if agent is None:
            roles = identity.root_roles(connection.caller)
        else:
            roles = identity.roles(connection.caller, agent)
        connecting(agent).check_who(Act.USE, connection.server.path, self._agents, roles, agent)
        return roles

    async def _answer(self, connection: Connection, staying: trio.Nursery) -> None:
        fields: dict[str, Any] = {}
        try:
            await self._obey(connection, fields, staying)
        except CtxError as error:
            # whoever takes no answer keeps nothing else of what it sent
            refused, identifier = error.with_traceback(None), fields.get("id")
        else:
            return
        fields.clear()
        await self._send_error(connection, refused, identifier)

    async def _obey(
        self, connection: Connection, fields: dict[str, Any], staying: trio.Nursery
    ) -> None:
        """Does what the line at hand asks for, which ``fields`` get."""
        fields |= parse_json_object(connection.take_line())
        table = _operations_of(connection.server)
        operation = check_known(str(fields.get("op")), table, "operation")
        request = self._request(connection, fields, {})
        self._check(operation, request)
        connection.ending |= operation.last
        if operation.stays:
            size = _STAYING_SIZE + connection.answering
            self._begin_staying(staying, operation, request, size)
        else:
            await operation.handler(request)

    def _check(self, operation: Operation, request: Request) -> None:
        """Whether the peer may ask for this now; raises what the guards refuse it with."""
        agent, caller = request.server.agent, request.caller
        roles = self._check_peer(request.connection)
        if operation.of_message and request.own:
            roles |= Role.SENDER
        what = operation.name
        operation.guard.check(Act.ASK, what, self._agents, caller, agent, request, roles)

    def _begin_staying(
        self, staying: trio.Nursery, operation: Operation, request: Request, size: int
    ) -> None:
        """Answers in a task of its own; ``QuotaError``."""
        if len(staying.child_tasks) >= _STAYING_MAX:
            raise QuotaError(
                f"{_STAYING_MAX} operations of this connection are pending: "
                "read an answer first"
            )
        request.connection.charge(size)
        request.connection.pending.append(request)
        staying.start_soon(self._stay, operation, request, size)

    async def _stay(self, operation: Operation, request: Request, size: int) -> None:
        connection = request.connection
        try:
            await connection.timed(operation.handler(request))
        except CtxError as error:
            request.progress["done"] = True
            await self._send_error(connection, error, request.fields.get("id"))
        finally:
            connection.charge(-size)
            with contextlib.suppress(ValueError):  # of a connection that is ended
                connection.pending.remove(request)

    async def _send_error(self, connection: Connection, error: CtxError, about: Any = None) -> None:
        self._refused(error, connection.caller, connection.server.path)
        frame = {"type": "error", "code": self._code(error), "message": error.sentence}
        if isinstance(about, str):
            frame["id"] = about
        await connection.send(frame)


def _operations_of(server: Server) -> dict[str, Operation]:
    return OPERATIONS if server.agent is not None else DAEMON_OPERATIONS


def _stream_of(peer: socket.socket) -> trio.SocketStream:
    linux.refuse_descriptors(peer)  # an older daemon's listener may have accepted it
    return trio.SocketStream(trio.socket.from_stdlib_socket(peer))


def _close(made: socket.socket | trio.socket.SocketType) -> None:
    """With all that was sent there and not received."""
    with linux.hurried():
        made.close()


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection, in the step in which it is accepted: trio tells of some a step later."""
    listener.setblocking(False)
    while True:
        await trio.lowlevel.wait_readable(listener)
        with contextlib.suppress(BlockingIOError):
            return listener.accept()[0]


async def _cancel_at_hangup(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancels when the peer has closed both directions: no answer can reach it.

    The end of what it sends does not tell; an epoll that wants nothing tells of this only.
    """
    with select.epoll() as hangup:
        hangup.register(stream.socket.fileno(), 0)
        await trio.lowlevel.wait_readable(hangup.fileno())
    scope.cancel()
