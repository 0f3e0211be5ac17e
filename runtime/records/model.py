"""The records that the daemon keeps: agents, sessions and spaces.

The first two are written as JSON rows (``runtime.records.store``) and changed through
``runtime.records.journal`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Self

from runtime.ids import (
    NO_SESSION,
    NO_WAIT_FILE,
    AgentIndex,
    Incarnation,
    SessionIndex,
    SpaceIndex,
    WaitFileName,
)
from runtime.records.lifecycle import LIVE, Status
from runtime.records.modes import MODES, Mode
from runtime.records.run import BETWEEN_RUNS, NOTHING, NOWHERE, Cell, Run, Said
from runtime.records.stored import dumped, loaded
from runtime.records.visits import Visit
from runtime.texts import policy


class Outcome(StrEnum):
    """How an agent ended."""

    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


class Profile(StrEnum):
    PRIVATE_CHILD = "private_child"
    PUBLIC_NAMED = "public_named"


LIVES: Final = ("owned", "temp", "detached")
HOMEDIRS: Final = ("private", "durable")
PROFILES: Final = tuple(p.value for p in Profile)
FAMILIES: Final = (
    "core",
    "local_environment",
    "agent_creation",
    "authority_expansion",
    "external_trigger",
)
_PRIVATE: Final = Profile.PRIVATE_CHILD.value
_PRIVATE_FAMILIES: Final = ("core", "local_environment", "external_trigger")

SESSION_STATES: Final = {
    Outcome.DONE: "done",
    Outcome.ERROR: "error",
    Outcome.CANCELLED: "cancelled",
    Outcome.INTERRUPTED: "cancelled",
}


@dataclass(slots=True, kw_only=True)
class AgentIdentity:
    """The identity of an agent: one incarnation of a name, its owner's, and somebody's child.

    Times are seconds since the epoch. ``parent`` is the index of the agent that it is a child
    of; ``lineage`` the text that says so and outlives it. ``creator_*`` are the ids with which
    an operator's paths are reached. ``maker`` is the uid of the operator who made it, None if that
    was an agent.
    """

    index: AgentIndex
    incarnation: Incarnation
    name: str
    owner: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    creator_uid: int = 0
    creator_gid: int = 0
    creator_groups: tuple[int, ...] = ()
    maker: int | None = None
    parent: AgentIndex | None = None
    parent_session: SessionIndex | None = None
    channel: str = ""
    lineage: str = ""
    created: float = 0.0
    wait_token: WaitFileName = NO_WAIT_FILE
    removed: bool = False
    #: whether it was reset: its documents then stay with its session
    archived: bool = False
    #: the incarnations that pay for what it uses of models, its own first; none of a root agent,
    #: and as older versions made it (``Registry.payers``)
    payers: tuple[Incarnation, ...] = ()
    #: what was counted of that, as of a while ago (``runtime.records.spent``)
    spent: tuple[int, ...] = ()
    #: the limits of that which it was told of, by payer and kind: their values
    limits_told: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class AgentConfiguration(AgentIdentity):
    """The configuration of an agent, which a reset keeps; limits as written."""

    life: str = "detached"
    profile: str = Profile.PUBLIC_NAMED
    label: str = ""
    policy: str = ""
    #: the rules of it that uid 0 wrote: they reach the agents of others, too
    policy_of_root: tuple[str, ...] = ()
    mount: str = ""
    root: str = ""
    #: what the paths in ``mount``, ``root`` and ``workspace`` led to when these were written,
    #: by file (``mounts.Sources``)
    sources: dict[str, Any] = field(default_factory=dict)
    iso: str = "sandbox"
    workspace: str = "inherit"
    cwd: str = ""
    env: str = ""
    path: str = ""
    context: str = "fresh"
    model: str = ""
    exec: str = ""
    mode: str = "once"
    #: the size at first of the terminal that its program has, ``COLSxROWS``; empty if it has none
    tty: str = ""
    #: where its processes are to run: a line ``node=NAME`` or ``node=PREFIX*``; empty for here
    placement: str = ""
    #: whether an operator wrote that, whom no policy bounds
    placed_freely: bool = False
    limits: dict[str, str] = field(default_factory=dict)
    restart: str = "no"
    homedir: str = "private"
    #: as whom git commits; empty for the owner's account
    author: str = ""
    meta: str = "{}"
    #: the file that declares it (``ctxfs.declared``), empty if none does, and what that said
    declared: str = ""
    declaration: dict[str, Any] = field(default_factory=dict)
    #: the worktree that was made for it (runtime.workspace)
    worktree: dict[str, Any] | None = None
    #: whether that was finished
    worktree_made: bool = False
    #: worktrees of removed handles that are still to be taken away
    discards: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True, kw_only=True)
class Agent(AgentConfiguration):
    """An agent: who it is, what it was told to be, and here its life, of which a reset begins
    another."""

    status: Status = Status.NEW
    #: when it got that; 0 if it was made so
    since: float = 0.0
    #: whether its making and its start are one (``Journal.starting``)
    made_to_start: bool = False
    outcome: str = ""
    reason: str = ""
    #: the last line of its log, of its end, which is in no file
    last_line: str = ""
    #: why it is ending, fixed when that begins: the first cause wins
    cause: tuple[str, str] | None = None
    #: who caused that, as in ``by`` of events
    caused_by: str = ""
    #: where it is, its run at hand, and what that says
    cell: Cell = NOWHERE
    run: Run = BETWEEN_RUNS
    said: Said = NOTHING
    session: SessionIndex = NO_SESSION
    #: when its life began, and that by CLOCK_BOOTTIME (``kernel.clock``)
    started: float = 0.0
    started_up: float = 0.0
    ended: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    #: what it was before it was paused, and whether it is frozen since
    paused_from: str = ""
    frozen: bool = False
    #: the durable tree for whose growth it was paused, until that has room again
    no_room: str = ""
    #: whether it ends with the client that made it (``runtime.life.windows``): ``end``, or
    #: ``remove`` if it is removed then; empty if not
    window: str = ""
    #: who looks at the terminal of its run
    viewers: tuple[Visit, ...] = ()
    #: how often it was restarted in a row, and when the next time is due, by both clocks
    restarts: int = 0
    restart_at: float = 0.0
    restart_up: float = 0.0
    #: its place among the children of its parent that wait to start, 0 of any other agent
    queued: int = 0
    #: sessions of this incarnation besides the current one
    other_sessions: tuple[SessionIndex, ...] = ()
    #: the durable trees that its cell has at their own places, with their modes
    trees: dict[str, str] = field(default_factory=dict)
    #: of a detached child: what its parent had when it started, as texts
    bound_policy: str | None = None
    bound_mount: str | None = None
    #: and whether the root of that one's view was the runtime's making (``runtime.cell.cell``)
    bound_root: bool = False
    #: the work item that it is at, which may be blocked
    focus: str = ""
    #: the node at which its processes are, of one that is placed elsewhere
    node: str = ""
    #: the registration that it belongs to (``runtime.peers``), at its lead and at its host; empty
    #: of any other agent
    peer: str = ""
    #: at its host, what its lead said of it beside the configuration
    guest: dict[str, Any] = field(default_factory=dict)
    #: at its lead, what its host told of it last, beside what is a field
    heard: dict[str, Any] = field(default_factory=dict)

    @property
    def away(self) -> bool:
        """Whether its processes are at a node, whose daemon is told what to do with them."""
        return bool(self.peer and self.node)

    @property
    def is_guest(self) -> bool:
        """Whether another machine's daemon has placed it here, and leads it."""
        return bool(self.peer and not self.node)

    @property
    def is_held(self) -> bool:
        """Whether it is frozen for something above it, which is paused where it is led from."""
        return bool(self.guest.get("held"))

    @property
    def live(self) -> bool:
        return self.status in LIVE

    @property
    def accepts_children(self) -> bool:
        """Whether something may be made or started below it."""
        return self.live and self.status is not Status.STOPPING

    @property
    def private(self) -> bool:
        return self.profile == _PRIVATE

    @property
    def visibility(self) -> str:
        return "private" if self.private else "public"

    @property
    def ownership(self) -> str:
        return "parent_supervised" if self.private else "self_owned"

    @property
    def ingress(self) -> str:
        return "supervisor_only" if self.private else "operators_and_policy"

    @property
    def owned(self) -> bool:
        """Whether it dies with its parent."""
        return self.parent is not None and self.life != "detached"

    @property
    def waits_to_run(self) -> bool:
        """Whether it is between two runs, or waits its turn: nothing of it runs."""
        return self.status is Status.STARTING and not self.cell.id

    @property
    def waits_its_turn(self) -> bool:
        """Whether it starts when enough of its siblings have ended."""
        return self.status is Status.STARTING and bool(self.queued)

    @property
    def runs_first(self) -> bool:
        """Whether the run at hand is the one that its cell began with."""
        return self.run.id == self.cell.id

    @property
    def how(self) -> Mode:
        """How its program is run."""
        return MODES[self.mode]

    @property
    def families(self) -> tuple[str, ...]:
        return _PRIVATE_FAMILIES if self.private else FAMILIES

    def renewed(self, **identity: Any) -> Agent:
        """This agent with another identity, before its life."""
        kept = {f.name: getattr(self, f.name) for f in fields(AgentConfiguration)}
        return Agent(**{**kept, **identity})

    def dump(self) -> dict[str, Any]:
        """All but the index, not copied: for serialising at once."""
        return dumped(self)

    @classmethod
    def load(cls, index: AgentIndex, values: dict[str, Any]) -> Self:
        written = policy.as_written(values.get("policy", ""))
        return loaded(cls, {**values, "policy": written}, index=index)


@dataclass(slots=True, kw_only=True)
class Session:
    """One session of an agent's name: its directory, state and event count."""

    index: SessionIndex
    owner: int
    agent: str
    name: str
    #: of the one incarnation of that name whose it is
    agent_index: AgentIndex
    state: str = "active"
    cwd: str = ""
    created: float = 0.0
    updated: float = 0.0
    events: int = 0
    messages: int = 0
    removed: bool = False
    #: bytes of ``events.jsonl`` that the store holds, which then has no file yet; None since it has
    held: int | None = None

    def dump(self) -> dict[str, Any]:
        """All but the index, not copied: for putting back at once."""
        return dumped(self)

    def record(self) -> dict[str, Any]:
        """The session as a row, in which ``agent_index`` has its first name: a daemon of an older
        version, or a newer one, reads it by that."""
        values = self.dump()
        values["incarnation"] = values.pop("agent_index")
        return values

    @classmethod
    def load(cls, index: SessionIndex, values: dict[str, Any]) -> Self:
        """The session that ``record`` gave."""
        return loaded(cls, {**values, "agent_index": values["incarnation"]}, index=index)


class SpaceState(StrEnum):
    """How far the tree of a space is, which others make and remove (``runtime.life.trees``)."""

    WANTED = "wanted"
    THERE = "there"
    #: whoever asks does not find the space any more
    REMOVED = "removed"


@dataclass(eq=False, slots=True, kw_only=True)
class Space:
    """A durable tree that users and agents share, as what was last known of it."""

    index: SpaceIndex
    name: str
    #: who made it, and on whose disk account it is: chown(2) of the tree does not change that
    owner: int
    made: float
    #: with which the tree is made
    gid: int = 0
    mode: int = 0o700
    #: of the tree
    state: SpaceState = SpaceState.THERE
    #: on the disk, and how many names there are below the tree's root
    bytes: int = 0
    entries: int = 0
    #: when that was; it is written with a change of the two
    measured: float = 0.0
    #: the same by CLOCK_BOOTTIME, if this daemon has measured it
    measured_up: float = 0.0

    def record(self) -> dict[str, Any]:
        """The fields of a row, beside the columns."""
        values = dumped(self)
        del values["name"], values["measured_up"]
        return values

    @classmethod
    def load(cls, index: SpaceIndex, name: str, values: dict[str, Any]) -> Self:
        """The space that ``record`` gave."""
        return loaded(cls, values, index=index, name=name)
