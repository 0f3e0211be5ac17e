"""The root of the filesystem, as rows (ctxfs(5), The root)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ctxfs.files import agent, agents, ask, home, metrics, placement, shared, tool, waiting
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Attributes, Call, Node
from ctxfs.tree.rownodes import RowNode, found, node_of
from ctxfs.tree.rows import Directory, Making, Removing, Row, Shown, Socket, Target
from runtime.agents import births
from runtime.agents.removals import REMOVING
from runtime.caller import OPERATORS, Caller, Role
from runtime.errors import MalformedError, MissingError
from runtime.ids import NO_AGENT, AgentIndex, TriggerToken
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.sockets.server import DAEMON_BIND_NAME
from runtime.texts.names import quote

#: bytes of what ``events`` shows
_EVENTS_SHOWN: Final = 256 << 10


def reader_of(owner: int | None) -> int:
    """The number of those who read the events of one owner's agents; 0 of who reads all."""
    return 0 if owner is None else owner + 1


def _followed(base: Base, caller: Caller) -> tuple[int, int]:
    owner = base.agents.identity.whose(caller)
    return reader_of(owner), base.agents.fleet.last(owner)


def _status(base: Base, _: Base, caller: Caller) -> str:
    return "".join(f"{key}={value}\n" for key, value in base.runtime.status().items())


def _list_agents(base: Base, _: Base, call: Call) -> Iterator[str]:
    view = base.view(call.caller)
    for there in base.agents.registry:
        if view.lists(there):
            yield from (there.name, f"{there.name}.sock", f"{there.name}.d")


def _agent_of(base: Base, name: str) -> tuple[Agent | None, str]:
    """Whose NAME, NAME.sock or NAME.d in ``/ctx/agent`` it is, and which of these."""
    stem, _, last = name.rpartition(".")
    suffix = f".{last}" if stem and last in ("d", "sock") else ""
    return base.agents.registry.named(stem if suffix else name), suffix


def _agent_entry(base: Base, name: str) -> RowNode[Agent] | None:
    there, suffix = _agent_of(base, name)
    return agent.entry(base, there, suffix) if there is not None else None


def _tell_agents(base: Base) -> Callable[[str], Attributes | None]:
    """Tells the attributes of public agents, which everybody finds: those with the same owner and
    ids are alike."""
    alike: dict[tuple[str, int, int, int, bool], Attributes] = {}

    def tell(name: str) -> Attributes | None:
        there, suffix = _agent_of(base, name)
        if there is None or there.private:
            return None
        key = suffix, there.owner, there.uid, there.gid, there.status is Status.NEW
        like = alike.get(key)
        if like is None:
            like = alike[key] = agent.entry(base, there, suffix).attributes()
        return Attributes(
            agent.entry_inode(there, suffix),
            like.mode,
            like.uid,
            like.gid,
            like.size,
            like.links,
            there.created,
            None,
            like.entry_timeout,
            like.attr_timeout,
        )

    return tell


def _find_agent(base: Base, _: Base, call: Call, name: str) -> Node | None:
    node = _agent_entry(base, name)
    if node is None or base.visible(node.obj, call.caller):
        return node
    roles = base.agents.identity.roles(call.caller, node.obj)
    if name.endswith(".d") and roles & Role.CHILD:
        return found(base, agent.SUPERVISOR, node.obj)
    return None


def _make_agent(base: Base, _: Base, call: Call, name: str, mode: int) -> Node:
    if not name.endswith(".d"):
        raise MalformedError(f"{quote(name)}: create an agent with mkdir agent/NAME.d")
    made = base.agents.births.create(call.caller, name.removesuffix(".d"))
    return agent.entry(base, made, ".d")


def _agent_target(base: Base, _: Base, caller: Caller, name: str) -> Target[Agent]:
    there = base.agents.registry.named(name.removesuffix(".d")) if name.endswith(".d") else None
    if there is None or not base.visible(there, caller):
        raise MissingError(f"there is no agent directory {quote(name)}")
    return Target(obj=there, agent=there)


_REMOVING_AGENTS: Final = Removing(
    guard=REMOVING,
    find=_agent_target,
    act=lambda base, _, caller, agent: base.agents.removals.remove(agent),
)


def _find_self(base: Base, _: Base, call: Call, name: str) -> Node | None:
    own = base.agents.registry.calling(call.caller) if name == "self" else None
    return agent.entry(base, own, "self") if own is not None else None


def _find_token(base: Base, _: Base, call: Call, name: str) -> Node | None:
    wait = base.agents.waiting.with_token(TriggerToken(name))
    return waiting.token_node(base, wait) if wait is not None else None


def _bind_daemon(base: Base, _: Base, name: str) -> Node | None:
    """``ctxd.sock``, by the name that the binder binds it under."""
    if name != DAEMON_BIND_NAME:
        return None
    return node_of(base, LAYOUT, 0, base, LAYOUT.number_of("ctxd.sock"))


def _bind_agent(base: Base, _: Base, name: str) -> Node | None:
    """``NAME.sock`` of an agent, by the name that the binder binds it under."""
    word = name.removeprefix(".bind-")
    index = AgentIndex(int(word)) if word.isdigit() else NO_AGENT
    there = base.agents.registry.get(index)
    return agent.entry(base, there, ".sock") if there is not None else None


ROWS: Final[tuple[Row[Base], ...]] = (
    Directory(name="/", top=True, public=True,
        entries=lambda base, _, call: () if call.caller.agent is None else ("self",),
        find=_find_self, bind=_bind_daemon, instead="agent/NAME.d"),
    Shown(name="status", public=True, generated=True, render=_status,
        doc="key=value: version state uptime agents.STATUS cgroup controllers mount trees limits, "
        "and network.NAME: the port, the uid of relays, the socket; header.NAME, if relays say "
        "something first there; and kind.NAME, if it is not api"),
    Shown(name="error", public=True, generated=True,
        render=lambda base, _, caller: base.reasons.of_caller(caller),
        doc="the caller's own last rejection: TIME ERRNO PATH: SENTENCE"),
    Shown(name="metrics", public=True, generated=True,
        render=lambda base, _, caller: metrics.text(base),
        doc="the same values, and those of accounts and the event loop, as Prometheus text; each "
            "is there from the start, at 0 if there is nothing"),
    agents.ROW,
    placement.LIST,
    ask.LIST,
    Shown(name="events", read=OPERATORS, generated=True, polled=True, followed=_followed,
        render=lambda base, _, caller: base.agents.fleet.tail(
            base.agents.identity.whose(caller), _EVENTS_SHOWN
        ),
        doc="the last events of all agents of the reader, to root of all, about "
            f"{_EVENTS_SHOWN >> 10} KiB: {{seq, owner, session, id, ts, type, agent, ...}} per "
            "line, as in their sessions' events.jsonl, in the order of seq"),
    Socket(name="ctxd.sock", public=True,
        doc="the daemon's socket, for operators"),
    Directory(name="bin", public=True, doc="programs for sandboxes"),
    Shown(name="ctx", within="bin", mode=0o555, public=True, doc="the client",
        render=lambda base, _, caller: base.client_program),
    Directory(name="agent", mode=0o1777, public=True, entries=_list_agents,
        find=_find_agent, tell=_tell_agents, bind=_bind_agent,
        make=Making(guard=births.MAKING, act=_make_agent), remove=_REMOVING_AGENTS,
        doc="every agent as NAME, NAME.sock and NAME.d"),
    Directory(name="tool", public=True,
        entries=tool.entries, find=tool.find,
        doc="every tool that the caller has, as NAME and NAME.d"),
    Directory(name="home", public=True, entries=home.entries,
        find=home.find, doc="per-user durable files: sessions, data"),
    Directory(name="shared", mode=0o1777, public=True,
        entries=lambda base, _, call: (space.name for space in base.agents.spaces),
        find=shared.find, make=shared.MAKING, remove=shared.REMOVING, instead="SPACE/data",
        doc="durable spaces, owned by their creators; created and removed by operators"),
    # writable, so that who opens a token that was used hears that it is gone
    Directory(name="trigger", mode=0o333, public=True, read=Role.NONE, listed=False,
        find=_find_token, secret=True,
        doc="tokens of waits: to fire a wait, write to its token; cannot be listed, and is there "
        "by name only"),
)

LAYOUT: Final[Layout[Base]] = Layout(
    number=0, name="root", rows=ROWS,
    find=lambda base, index, row: base, path=lambda base, _: "",
)  # fmt: skip
