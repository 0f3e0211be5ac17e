"""A request at a socket: the fields of its frame, and the objects that its handler works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from runtime.agents.parts import Agents
from runtime.caller import Caller
from runtime.errors import MalformedError
from runtime.ids import CallId, MessageId
from runtime.life.streams import Streams
from runtime.life.windows import Windows
from runtime.peers.hosting import Hosting
from runtime.peers.links import Links
from runtime.records.model import Agent
from runtime.sockets.connection import Asked, Connection, Server
from runtime.sockets.replay import Replays
from runtime.texts.names import parse_screen

#: what a tool of this name answers to a caller's input; with an id, once. It notes its progress
ToolCall = Callable[
    [Caller, str, Any, CallId | None, dict[str, Any]], Awaitable[dict[str, Any]]
]
#: what a caller says to an agent or its task: its name, the task's or nothing, and the verb
Say = Callable[[Caller, str, str, str], Awaitable[None]]
#: what was refused lately to a caller's agents, or about them; with an agent, to it and about it
Refusals = Callable[[Caller, Agent | None], list[dict[str, Any]]]

#: has the daemon execute itself again; returns only if it did not, by raising ``CtxError``
Reexecute = Callable[[], Awaitable[None]]


class Calls:
    """The calls of tools with an id that are not answered yet."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], list[trio.CancelScope]] = {}

    @contextmanager
    def pending(self, caller: Caller, name: CallId | None) -> Iterator[trio.CancelScope]:
        """While a call is pending; the scope is that of whoever waits for it."""
        with trio.CancelScope() as scope:
            if name is None:
                yield scope
                return
            scopes = self._pending.setdefault((caller.key, name), [])
            scopes.append(scope)
            try:
                yield scope
            finally:
                scopes.remove(scope)
                if not scopes and self._pending.get((caller.key, name)) is scopes:
                    del self._pending[caller.key, name]

    def has(self, caller: Caller, name: Any) -> bool:
        return isinstance(name, str) and (caller.key, name) in self._pending

    def cancel(self, caller: Caller, name: str) -> None:
        """Nobody is answered, and nothing is pending any more; what the call has begun goes on."""
        for scope in self._pending.pop((caller.key, name), ()):
            scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects that the handlers work with."""

    agents: Agents
    streams: Streams
    windows: Windows
    replays: Replays
    links: Links
    hosting: Hosting
    status: Callable[[], dict[str, str]]
    call_tool: ToolCall
    say: Say
    refusals: Refusals
    reexecute: Reexecute
    complaints: Callable[[], Awaitable[list[str]]]
    version: str
    calls: Calls = field(default_factory=Calls)


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Asked):
    """One frame that asks for something, by a connection."""

    services: Services
    connection: Connection

    @property
    def server(self) -> Server:
        """The socket at which it is asked for."""
        return self.connection.server

    @property
    def about(self) -> Agent | None:
        """The agent whose socket it is, or who is named at that of the daemon."""
        return self.server.agent or self.named

    @property
    def agent(self) -> Agent:
        """The agent that the request is about, of whom the guard knows that there is one."""
        assert self.about is not None
        return self.about

    @property
    def name(self) -> str | None:
        """The name of an agent that is given at the socket of the daemon."""
        return str(self.fields["agent"]) if "agent" in self.fields else None

    @property
    def named(self) -> Agent | None:
        return self.agents.registry.named(self.name) if self.name is not None else None

    @property
    def caller(self) -> Caller:
        return self.connection.caller

    @property
    def agents(self) -> Agents:
        return self.services.agents

    @property
    def own(self) -> bool:
        """Whether the message or call that it means is the caller's, which was asked for before."""
        agent, name = self.server.agent, self.fields.get("id")
        if agent is None or not isinstance(name, str):
            return False
        message = self.agents.messages.meant(self.caller, agent, MessageId(name))
        asked = message is not None and message.asked == self.caller.key
        return asked or self.services.calls.has(self.caller, name)

    def text(self, field: str, meaning: str) -> str:
        """A field that has to be a string; ``MalformedError``."""
        value = self.fields.get(field)
        if not isinstance(value, str):
            raise MalformedError(f"{field}: write {meaning}")
        return value

    def flag(self, field: str) -> bool:
        """A field that has to be true or false, and need not be there; ``MalformedError``."""
        value = self.fields.get(field, False)
        if not isinstance(value, bool):
            raise MalformedError(f"{field}: write true or false")
        return value

    @property
    def screen(self) -> tuple[int, int] | None:
        """The columns and rows of the terminal of who asks, if it says them."""
        if "size" not in self.fields:
            return None
        return parse_screen(self.text("size", "COLSxROWS, such as 80x24"))

    async def answer(self, frame: dict[str, Any]) -> None:
        await self.connection.send(frame)

    async def finish(self, frame: dict[str, Any]) -> None:
        """The last answer: a daemon that is executed again while it is sent has nothing to do."""
        self.progress["done"] = True
        await self.connection.send(frame)
