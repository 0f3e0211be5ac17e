"""Callers: who asks for something, and what that makes it to one agent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import Final

from runtime.ids import NO_INCARNATION, AgentIndex, Incarnation


class Role(Flag):
    """The roles of a caller towards one agent."""

    NONE = 0
    #: outside every agent, and uid 0 or the agent's owner
    OPERATOR = auto()
    #: an operator with uid 0, or with the uid of a daemon without root
    ROOT = auto()
    #: the agent that made it and supervises it
    CREATOR = auto()
    #: an agent that it made and supervises
    CHILD = auto()
    #: the agent itself
    SELF = auto()
    #: an agent whose policy says read, start, stop or write on it
    READER = auto()
    STARTER = auto()
    STOPPER = auto()
    WRITER = auto()
    #: an agent whose policy opens its sessions
    SESSION_READER = auto()
    #: everybody, strangers included
    ANYONE = auto()
    #: the sender of the message that the request names: a role on the message, not the agent
    SENDER = auto()


OPERATORS: Final = Role.OPERATOR | Role.ROOT
CONTROLLERS: Final = OPERATORS | Role.CREATOR
PARTIES: Final = CONTROLLERS | Role.SELF
#: who sees a private agent, and the configuration of any
INSIDERS: Final = PARTIES | Role.READER
#: who reads a session
HISTORIANS: Final = OPERATORS | Role.SELF | Role.SESSION_READER


@dataclass(frozen=True, slots=True)
class Caller:
    """One resolved caller. ``agent`` is the index of its incarnation, None outside all.

    ``known`` is False for a process that could not be resolved. ``groups`` are those that
    it had when it connected; None for one that waits for its answer in the kernel, and so
    can still be asked for them.
    """

    uid: int
    gid: int
    pid: int
    agent: AgentIndex | None = None
    incarnation: Incarnation = NO_INCARNATION
    known: bool = True
    groups: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The key under which its last rejection is kept."""
        return self.incarnation or f"uid:{self.uid}"


NOBODY: Final = Caller(65534, 65534, 0, known=False)
