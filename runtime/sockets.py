"""The agents' sockets: JSON Lines over a Unix stream socket (ctxfs(5), Sockets).

The sockets are bound on the filesystem itself, by a process of its own
(``runtime.kernel.binder``), because the daemon serves the request that this makes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from runtime.agents.messages import SENDING, check_id
from runtime.agents.parts import Agents
from runtime.authority.accounts import Accounts, Hold, Payer, Resource
from runtime.authority.guard import Act, Facts, Guard, Unless
from runtime.authority.loop import Late, Timed, Turns
from runtime.caller import (
    CONTROLLERS,
    HISTORIANS,
    INSIDERS,
    OPERATORS,
    PARTIES,
    Caller,
    Role,
)
from runtime.cell.cell import Places
from runtime.errors import (
    CtxError,
    DeniedError,
    MalformedError,
    MissingError,
    NotRunningError,
    QuotaError,
    TooLongError,
    WrongStateError,
)
from runtime.kernel.binder import Binder
from runtime.life.streams import Stream, Streams
from runtime.records.change import Watching
from runtime.records.config import Config
from runtime.records.items import Message, MessageStatus
from runtime.records.lifecycle import Effect
from runtime.records.model import Agent
from runtime.texts import policy
from runtime.texts.names import check_known, dump_json, parse_json_object, quote

log = logging.getLogger("ctxd.sockets")

#: a peer that does not read its last frames is not waited for longer
_FAREWELL_SECONDS: Final = 5.0
#: operations of one connection that wait to be answered; each costs a task
_STAYING_MAX: Final = 16
#: characters of a reply in one frame
_DELTA_MAX: Final = 16 << 10
#: of a connection: its own, and the one by which its end is seen
_DESCRIPTORS: Final = 2
#: about what one costs in memory before anything is said, in bytes
_OWN_SIZE: Final = 16 << 10
#: frames up to this size are part of that
_SMALL: Final = 4 << 10
#: of a history that is sent in one piece, in bytes
_REPLAY: Final = 128 << 10
#: between two connections of one owner's agents, whatever becomes of them, and between two of
#: its followers that are told of more: each costs a dozen steps or two
_REST_SECONDS: Final = 0.004
#: who follows a session, of those that are told of more at once
_WOKEN_AT_ONCE: Final = 8
_EVENT_ID: Final = re.compile(r"e[0-9]{1,15}")

#: names under which sockets are bound; MKNOD knows them (ctxfs.tree)
DAEMON_BIND_NAME: Final = ".bind-ctxd"


def bind_name(agent: Agent) -> str:
    return f".bind-{agent.index}"


class Connection:
    """One accepted connection. Frames are sent whole, one at a time."""

    def __init__(
        self,
        stream: trio.SocketStream,
        caller: Caller,
        config: Config,
        accounts: Accounts,
        turns: Turns,
        who: Payer,
    ) -> None:
        self.stream = stream
        self.caller = caller
        self._time = accounts.time
        self._turns = turns
        self.who = who
        #: of the socket, as in reasons
        self.path = ""
        self._lock = trio.Lock()
        self._buffer = bytearray()
        self._frame_max = config.frame_max
        self._holds = tuple(
            Hold(accounts, who, resource)
            for resource in (Resource.CONNECTIONS, Resource.DESCRIPTORS, Resource.MEMORY)
        )
        self._memory = self._holds[-1]
        self._answering = 0

    def admit(self) -> None:
        """Charges the peer for the connection itself; ``QuotaError``."""
        for hold, amount in zip(self._holds, (1, _DESCRIPTORS, _OWN_SIZE), strict=True):
            hold.resize(amount)

    def hold(self, more: int) -> None:
        """Charges the peer for bytes that are kept for it; fewer than 0 are given back."""
        self._memory.resize(self._memory.amount + more)

    def release(self) -> None:
        """Gives back all that is charged, at the end of the connection."""
        for hold in self._holds:
            hold.release()

    def timed(self, coroutine: Coroutine[Any, Any, None]) -> Timed[None]:
        """Awaits it; what its steps take of the loop is charged to the peer's owner."""
        return Timed(coroutine, partial(self._time.pay, self.who))

    async def send(self, frame: dict[str, Any] | bytes) -> None:
        """Waits until the peer has room: a slow reader slows only itself, and what waits
        for it is charged to it. ``QuotaError``."""
        data = frame if isinstance(frame, bytes) else (dump_json(frame) + "\n").encode()
        held = len(data) if len(data) > _SMALL else 0
        self.hold(held)
        try:
            await self._turns.take(self.who)
            async with self._lock:
                await self.stream.send_all(data)
        finally:
            self.hold(-held)

    async def receive(self) -> str | None:
        """The next line, None at the end.

        Raises ``TooLongError``, ``MalformedError`` or ``QuotaError``.
        """
        # The line before this one was kept until it was answered.
        self.hold(-self._answering)
        self._answering = 0
        searched = 0
        self._drop_blanks()
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > self._frame_max:
                raise TooLongError(f"a frame may have at most {self._frame_max} bytes")
            data = await self._received()
            if not data:
                return None
            self.hold(len(data))
            self._buffer += data
            if not searched:
                self._drop_blanks()
        if end > self._frame_max:
            raise TooLongError(f"a frame may have at most {self._frame_max} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._answering = end + 1
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise MalformedError("a frame must be UTF-8") from None

    async def _received(self) -> bytes:
        """What came, in its turn; so are ends, which hundreds of connections may come to at
        once, and each of which costs as much as a frame."""
        try:
            return bytes(await self.stream.receive_some(65536))
        finally:
            await self._turns.take(self.who)

    def _drop_blanks(self) -> None:
        """Empty lines before a frame are nothing: very many must not be looked at one by one."""
        frames = self._buffer.lstrip()
        if len(frames) < len(self._buffer):
            self.hold(len(frames) - len(self._buffer))
            self._buffer = frames


class Server:
    """The listening socket of one agent, and its open connections."""

    def __init__(self) -> None:
        self.accepting = trio.CancelScope()
        self.refusing = False
        self.ended = trio.Event()


Handler = Callable[
    ["Sockets", Server, Agent, Connection, dict[str, Any]], Coroutine[Any, Any, None]
]
#: what a tool of this name answers to a caller's input
ToolCall = Callable[[Caller, str, Any], Awaitable[dict[str, Any]]]
#: keeps why something was refused to a caller, and where
Refused = Callable[[CtxError, Caller, str], None]
#: what was refused lately to a caller's agents, or about them; with an agent, to it and about it
Refusals = Callable[[Caller, Agent | None], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an operation is asked of: whether the agent is stopping, and the message meant."""

    stopping: bool
    #: it is the caller's own, which has been asked for before
    own: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the protocol. ``stays`` operations answer later, others at once; the ``id``
    of a request ``of_message`` is that of a message, which its sender may ask about."""

    name: str
    guard: Guard
    handler: Handler
    stays: bool = False
    of_message: bool = False


@dataclass(frozen=True, slots=True)
class DaemonOperation:
    """The same of ``ctxd.sock``: every process that may connect may ask for all of them."""

    name: str
    handler: Callable[[Sockets, Connection, dict[str, Any]], Coroutine[Any, Any, None]]
    stays: bool = False


class Sockets(Watching):
    """All sockets of the daemon."""

    def __init__(
        self,
        *,
        agents: Agents,
        places: Places,
        binder: Binder,
        nursery: trio.Nursery,
        streams: Streams,
        code: Callable[[CtxError], str],
        status: Callable[[], dict[str, str]],
        call_tool: ToolCall,
        refused: Refused,
        refusals: Refusals,
    ) -> None:
        self._agents = agents
        self._places = places
        self.binder = binder
        self._nursery = nursery
        self._code = code
        self._status = status
        self._call_tool = call_tool
        self._refused = refused
        self._refusals = refusals
        self._servers: dict[int, Server] = {}
        #: who follows a session, and who is told that there is more
        self._appended: dict[int, set[trio.Event]] = {}
        self._following: list[trio.Event] = []
        self._woken = trio.Event()
        self.streams = streams
        #: what agents want of their sockets costs others little at a time
        self._turns = Turns()
        #: of who connects, who may be anybody: they do not wait for what others say
        self._accepts = Turns()
        self._follows = Turns()
        self._late = Late(agents.accounts.time, self._turns)
        agents.journal.watch(self)

    # Watching

    def due(self, agent: Agent, effect: Effect) -> None:
        if effect is Effect.REFUSE:
            self.refuse(agent)
        elif effect is Effect.RELEASE:
            self.close(agent)

    def session_changed(self, index: int, names: Iterable[str]) -> None:
        waiting = self._appended.pop(index, None)
        if waiting is not None:
            self._following += waiting
            self._woken.set()

    async def run(self) -> None:
        """Tells those who follow sessions, a few at a time: others are served in between."""
        while True:
            await self._woken.wait()
            self._woken = trio.Event()
            waiting, self._following = self._following, []
            for begin in range(0, len(waiting), _WOKEN_AT_ONCE):
                for event in waiting[begin : begin + _WOKEN_AT_ONCE]:
                    event.set()
                await trio.lowlevel.checkpoint()

    # opening and closing

    async def open(self, agent: Agent) -> None:
        """Makes ``NAME.sock`` a socket that answers; returns when it does.

        Also after ``refuse``, for an agent that is started again: connections
        that stayed open go on.
        """
        listener = await self.binder.bind(self._places.fuse / "agent", bind_name(agent))
        server = self._servers.get(agent.index)
        if server is None:
            server = self._servers[agent.index] = Server()
        server.accepting = trio.CancelScope()
        server.refusing = False
        self._nursery.start_soon(self._accept, agent, server, listener)

    async def open_daemon(self) -> None:
        """The same for ``ctxd.sock``."""
        listener = await self.binder.bind(self._places.fuse, DAEMON_BIND_NAME)
        self._nursery.start_soon(self._accept, None, Server(), listener)

    def refuse(self, agent: Agent) -> None:
        """No new connections and operations; open ones stay until the end is recorded."""
        server = self._servers.get(agent.index)
        if server is not None:
            server.refusing = True
            server.accepting.cancel()  # who connects is told by the kernel

    def close(self, agent: Agent) -> None:
        """Answers those who wait, then ends every connection."""
        server = self._servers.pop(agent.index, None)
        if server is not None:
            server.accepting.cancel()
            server.ended.set()

    async def _accept(
        self, agent: Agent | None, server: Server, listener: socket.socket
    ) -> None:
        trio_listener = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        with server.accepting:
            async with trio_listener:
                while True:
                    try:
                        stream = await trio_listener.accept()
                        try:
                            if agent is not None:
                                await self._accepts.take(Payer(agent.owner))
                        except BaseException:
                            stream.socket.close()  # nobody accepts any more
                            raise
                        who = await self._admit(agent, server, stream)
                        if who is not None:
                            await self._accepts.rest(who, _REST_SECONDS)
                    except OSError as error:
                        log.warning("accept: %s", error)
                        await trio.sleep(0.1)
                    except Exception:
                        # One peer must not close the socket for all, nor end the daemon.
                        log.exception("accept")
                        await trio.sleep(0.1)

    async def _admit(
        self, agent: Agent | None, server: Server, stream: trio.SocketStream
    ) -> Payer | None:
        """Serves one more connection, or refuses it without a task of its own.

        Returns the account that pays for it, None if no connection is served any more.
        """
        begun = time.thread_time()
        raw = stream.socket
        if server.refusing:
            raw.close()
            return None
        try:
            caller = self._agents.identity.resolve_peer(raw._sock)  # type: ignore[attr-defined]
        except BaseException:
            raw.close()
            raise
        agents = self._agents
        who = agents.identity.payer(caller)
        agents.accounts.time.pay(who, time.thread_time() - begun)
        config = agents.settings.config
        connection = Connection(stream, caller, config, agents.accounts, self._turns, who)
        connection.path = f"agent/{agent.name}.sock" if agent is not None else "ctxd.sock"
        try:
            connection.admit()
        except QuotaError as error:
            connection.release()
            async with stream:
                with trio.move_on_after(1), contextlib.suppress(trio.BrokenResourceError):
                    await self._send_error(connection, error)
            return who
        self._nursery.start_soon(self._serve, agent, server, connection)
        return who

    # serving

    async def _serve(self, agent: Agent | None, server: Server, connection: Connection) -> None:
        key = connection.caller.key
        try:
            async with connection.stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._farewell, server, nursery.cancel_scope)
                await connection.timed(self._converse(agent, server, connection, nursery))
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer went away
        except* Exception:
            # Whatever it is, it ends this connection only.
            log.exception("a connection of %s", key)
        finally:
            connection.release()

    @staticmethod
    async def _farewell(server: Server, scope: trio.CancelScope) -> None:
        await server.ended.wait()
        scope.deadline = trio.current_time() + _FAREWELL_SECONDS

    async def _converse(
        self, agent: Agent | None, server: Server, connection: Connection, nursery: trio.Nursery
    ) -> None:
        # Its end waits for its tasks: what was asked for is answered, also to a peer
        # that shut down its sending side.
        async with trio.open_nursery() as staying:
            try:
                self._check_peer(agent, connection.caller)
                while (line := await self._next_line(server, connection)) is not None:
                    await self._late.wait(connection.who)
                    if line.strip():
                        await self._answer(agent, server, connection, line, staying)
            except CtxError as error:
                await self._send_error(connection, error)
                staying.cancel_scope.cancel()
            if staying.child_tasks:
                nursery.start_soon(_cancel_at_hangup, connection.stream, nursery.cancel_scope)

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
        if not roles or (agent.private and not roles & INSIDERS):
            raise DeniedError(f"{quote(agent.name)} is private: the caller may not use its socket")

    async def _answer(
        self,
        agent: Agent | None,
        server: Server,
        connection: Connection,
        line: str,
        staying: trio.Nursery,
    ) -> None:
        request: dict[str, Any] = {}
        try:
            request = parse_json_object(line)
            name = str(request.get("op"))
            if agent is None:
                asked = check_known(name, DAEMON_OPERATIONS, "operation")
                if not asked.stays:
                    await asked.handler(self, connection, request)
                    return
                answer = partial(asked.handler, self, connection, request)
                self._begin_staying(staying, connection, answer, request, len(line))
                return
            operation = check_known(name, OPERATIONS, "operation")
            self._check_peer(agent, connection.caller)
            self._check_operation(operation, server, agent, connection.caller, request)
            if not operation.stays:
                await operation.handler(self, server, agent, connection, request)
                return
            answer = partial(operation.handler, self, server, agent, connection, request)
            self._begin_staying(staying, connection, answer, request, len(line))
        except CtxError as error:
            await self._send_error(connection, error, request.get("id"))

    def _check_operation(
        self,
        operation: Operation,
        server: Server,
        agent: Agent,
        caller: Caller,
        request: dict[str, Any],
    ) -> None:
        name = request.get("id") if operation.of_message else None
        message = self._agents.messages.find(agent, name) if isinstance(name, str) else None
        own = message is not None and message.asked == caller.key
        roles = self._agents.identity.roles(caller, agent)
        operation.guard.check(
            Act.ASK,
            operation.name,
            self._agents,
            caller,
            roles | Role.SENDER if own else roles,
            agent,
            Asked(server.refusing, own),
        )

    def _begin_staying(
        self,
        staying: trio.Nursery,
        connection: Connection,
        answer: Callable[[], Coroutine[Any, Any, None]],
        request: dict[str, Any],
        size: int,
    ) -> None:
        """Answers in a task of its own; ``QuotaError``."""
        if len(staying.child_tasks) >= _STAYING_MAX:
            raise QuotaError(f"{_STAYING_MAX} operations of this connection are pending already")
        connection.hold(size)
        staying.start_soon(self._stay, connection, answer, request, size)

    async def _stay(
        self,
        connection: Connection,
        answer: Callable[[], Coroutine[Any, Any, None]],
        request: dict[str, Any],
        size: int,
    ) -> None:
        try:
            await connection.timed(answer())
        except CtxError as error:
            await self._send_error(connection, error, request.get("id"))
        finally:
            connection.hold(-size)

    async def _send_error(self, connection: Connection, error: CtxError, about: Any = None) -> None:
        self._refused(error, connection.caller, connection.path)
        frame = {"type": "error", "code": self._code(error), "message": error.sentence}
        if isinstance(about, str):
            frame["id"] = about
        await connection.send(frame)

    def _operated(self, connection: Connection, request: dict[str, Any]) -> Agent:
        """The agent that an operator names; ``MissingError`` if it is not this one's."""
        name = str(request.get("agent"))
        agent = self._agents.registry.named(name)
        if agent is None or not self._agents.identity.roles(connection.caller, agent) & OPERATORS:
            raise MissingError(f"{quote(name)}: the caller is not an operator of such an agent")
        return agent

    def _audit(self, caller: Caller, agent: Agent | None) -> dict[str, Any]:
        return {"type": "audit", "refusals": self._refusals(caller, agent)}

    # operations of the daemon

    async def _ping_daemon(self, connection: Connection, request: dict[str, Any]) -> None:
        await connection.send({"type": "pong"})

    async def _tell_status(self, connection: Connection, request: dict[str, Any]) -> None:
        await connection.send({"type": "status", **self._status()})

    async def _why_of(self, connection: Connection, request: dict[str, Any]) -> None:
        await connection.send(self._explain(self._operated(connection, request), request))

    async def _tell_all_refusals(self, connection: Connection, request: dict[str, Any]) -> None:
        subject = self._operated(connection, request) if "agent" in request else None
        await connection.send(self._audit(connection.caller, subject))

    async def _all_quotas(self, connection: Connection, request: dict[str, Any]) -> None:
        caller = connection.caller
        master = self._agents.identity.is_master(caller)
        owners = self._agents.accounts.owners() if master else [caller.uid]
        await connection.send(self._quota(owners))

    # operations of agents

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
            raise MalformedError(f"after: {quote(str(after))} is not an event id such as e17")
        session = self._agents.sessions.get(agent.session)
        if session is None:
            raise MissingError("the session was removed")
        last = int(after[1:]) if after else 0
        path = self._agents.sessions.directory(session) / "events.jsonl"
        offset: int | None = None
        while True:
            # very many may follow, and each looks at the file
            await self._follows.take(connection.who)
            appended = trio.Event()
            followers = self._appended.setdefault(session.index, set())
            followers.add(appended)
            ended = server.ended.is_set()
            try:
                file = open(path, "rb")  # noqa: SIM115 (closed below)
            except FileNotFoundError:
                raise MissingError("the session was removed") from None
            with file:
                if offset is None:
                    offset = find_event(file.fileno(), last)
                while lines := _read_lines(file.fileno(), offset):
                    offset += len(lines)
                    if _event_number(lines) <= last:
                        lines = b"".join(
                            line
                            for line in lines.splitlines(keepends=True)
                            if _event_number(line) > last
                        )
                    if lines:
                        await connection.send(lines)
            if ended:
                return
            try:
                await self._follows.rest(connection.who, _REST_SECONDS)
                async with trio.open_nursery() as nursery:
                    for event in (appended, server.ended):
                        nursery.start_soon(_cancel_after, event, nursery.cancel_scope)
            finally:
                followers.discard(appended)

    async def _send(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """Queues a message and sends its reply as it grows; a known id is told again."""
        caller = connection.caller
        name = request.get("id")
        text = request.get("input")
        if not isinstance(name, str):
            raise MalformedError("id: write a string that names this message")
        if not isinstance(text, str):
            raise MalformedError("input: write a string, the text of the message")
        message = self._agents.messages.find(agent, check_id(name))
        if message is None or message.asked != caller.key:
            priority = request.get("priority", "normal")
            message = self._agents.messages.send(
                caller, agent, text, priority=str(priority), name=name, asked=caller.key
            )
        await self._tell_reply(connection, message)

    async def _tell_reply(self, connection: Connection, message: Message) -> None:
        """``start``, ``delta``…, ``message``, ``done``."""
        name = message.name
        stream = self.streams.of(message.index) if not message.over else Stream()
        told, shown = False, 0
        while True:
            over = message.over
            if message.run and not told:
                told = True
                await connection.send({"type": "start", "id": name, "run": message.run})
            elif told and shown < len(stream.text):
                text = stream.text[shown : shown + _DELTA_MAX]
                shown += len(text)
                await connection.send({"type": "delta", "id": name, "text": text})
            elif over:
                break
            else:
                await stream.wait_changed()
        if message.status is MessageStatus.PROCESSED:
            await connection.send({"type": "message", "id": name, "text": message.reply})
        done = {"type": "done", "id": name, "status": message.status.value}
        if message.reason:
            done["reason"] = message.reason
        await connection.send(done)

    async def _cancel(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """Ends a message; permitted to its sender, and to all who may stop the agent."""
        name = str(request.get("id"))
        message = self._agents.messages.find(agent, name)
        if message is None:
            raise MissingError(f"there is no message {quote(name)} in this session")
        if message.over:
            raise NotRunningError(f"the message {quote(name)} is already {message.status}")
        with self._agents.journal.acting(connection.caller):
            self._agents.messages.cancel(agent, message)

    async def _tool(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """Calls a tool about the agent itself."""
        await self._answer_tool(connection, request)

    async def _answer_tool(self, connection: Connection, request: dict[str, Any]) -> None:
        name = request.get("name")
        if not isinstance(name, str):
            raise MalformedError("name: write the name of a tool")
        output = await self._call_tool(connection.caller, name, request.get("input", {}))
        frame = {"type": "tool", "output": output}
        if isinstance(request.get("id"), str):
            frame["id"] = request["id"]
        await connection.send(frame)

    async def _why(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """Which line of whose policy allows something, or what is missing."""
        await connection.send(self._explain(agent, request))

    async def _tell_refusals(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """What was refused to the agent, and, for operators, about it."""
        await connection.send(self._audit(connection.caller, agent))

    async def _own_quota(
        self, server: Server, agent: Agent, connection: Connection, request: dict[str, Any]
    ) -> None:
        """What the agent's owner has and may have."""
        await connection.send(self._quota([agent.owner]))

    def _quota(self, owners: Iterable[int]) -> dict[str, Any]:
        rows = [
            {
                "owner": row.owner,
                "account": row.resource,
                "use": row.use,
                "limit": row.limit,
                "reserve": row.reserve,
                "most": row.most,
                "held": row.held,
            }
            for owner in owners
            for row in self._agents.accounts.standings(owner)
        ]
        return {"type": "quota", "accounts": rows}

    def _explain(self, agent: Agent, request: dict[str, Any]) -> dict[str, Any]:
        perm, target = str(request.get("verb")), str(request.get("object"))
        cls, name = policy.parse_question(perm, target)
        allowed, lines = self._agents.authority.explain(agent, cls, name, perm)
        return {"type": "why", "agent": agent.name, "allowed": allowed, "lines": lines}


def _read_lines(fd: int, offset: int) -> bytes:
    """Complete lines of a history from an offset on, one at least if there is one."""
    size = _REPLAY
    while True:
        data = os.pread(fd, size, offset)
        lines = data[: data.rfind(b"\n") + 1]
        if lines or len(data) < size:
            return lines
        size *= 2


def find_event(fd: int, last: int) -> int:
    """An offset in a history, of a line's beginning, before which all ids are at most ``last``.

    Ids grow, so that few places of a long one are looked at.
    """
    low, high = 0, os.fstat(fd).st_size
    while high - low > _REPLAY:
        middle = (low + high) // 2
        block = os.pread(fd, _REPLAY, middle)
        begin = block.find(b"\n") + 1
        number = _event_number(block[begin:]) if begin else 0
        if not number:
            break  # a line longer than that: from here on all is looked at
        if number > last:
            high = middle
        else:
            low = middle + begin
    return low


def _event_number(line: bytes) -> int:
    match = re.match(rb'\{"id":"e([0-9]+)"', line)
    return int(match[1]) if match else 0


async def _cancel_at_hangup(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancels when the peer has closed both directions: nobody is left to be answered.

    The end of what it sends does not tell; an epoll that wants nothing tells of this only.
    """
    with select.epoll() as hangup:
        hangup.register(stream.socket.fileno(), 0)
        await trio.lowlevel.wait_readable(hangup.fileno())
    scope.cancel()


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _why_stopping(facts: Facts, caller: Caller, asked: Asked) -> str:
    return "the agent is stopping" if asked.stopping else ""


def _why_no_more(facts: Facts, caller: Caller, asked: Asked) -> str:
    return "the agent is stopping" if asked.stopping and not asked.own else ""


_STOPPING: Final = Unless("it is stopping", WrongStateError, _why_stopping)
_NO_MORE: Final = Unless("it is stopping and the id is a new one", WrongStateError, _why_no_more)


def _guard(who: Role) -> Guard:
    """Of what is answered at once, and not while the agent ends."""
    return Guard(who=who, unless=(_STOPPING,))


OPERATIONS: Final[dict[str, Operation]] = {
    operation.name: operation
    for operation in (
        Operation("ping", _guard(Role.ANYONE), Sockets._ping),
        Operation("wait", Guard(who=Role.ANYONE), Sockets._wait, stays=True),
        Operation("resume", Guard(who=HISTORIANS), Sockets._resume, stays=True),
        Operation("send", Guard(who=SENDING.who | Role.SENDER, unless=(_NO_MORE,), delegated=True),
                  Sockets._send, stays=True, of_message=True),
        Operation("cancel", _guard(CONTROLLERS | Role.STOPPER | Role.SENDER), Sockets._cancel,
                  of_message=True),
        Operation("tool", _guard(Role.SELF), Sockets._tool, stays=True),
        Operation("why", _guard(PARTIES), Sockets._why),
        Operation("audit", _guard(OPERATORS | Role.SELF), Sockets._tell_refusals),
        Operation("quota", _guard(PARTIES), Sockets._own_quota),
    )
}

DAEMON_OPERATIONS: Final[dict[str, DaemonOperation]] = {
    operation.name: operation
    for operation in (
        DaemonOperation("ping", Sockets._ping_daemon),
        DaemonOperation("status", Sockets._tell_status),
        DaemonOperation("tool", Sockets._answer_tool, stays=True),
        DaemonOperation("why", Sockets._why_of),
        DaemonOperation("audit", Sockets._tell_all_refusals),
        DaemonOperation("quota", Sockets._all_quotas),
    )
}
