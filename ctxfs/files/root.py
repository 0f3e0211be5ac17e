"""The root of the filesystem, as rows (ctxfs(5), The root)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ctxfs.files import agent, agents, home, metrics, shared, tool, waiting
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Attributes, Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Making, Removing, Row, Shown, Socket, Target
from runtime.agents import births
from runtime.agents.removals import REMOVING
from runtime.caller import Caller, Role
from runtime.errors import (
    MalformedError,
    MissingError,
)
from runtime.ids import NO_AGENT, AgentIndex, TriggerToken
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.sockets.server import DAEMON_BIND_NAME
from runtime.texts.names import quote


def _status(base: Base, _: Base, caller: Caller) -> str:
    return "".join(f"{key}={value}\n" for key, value in base.runtime.status().items())


def _error(base: Base, _: Base, caller: Caller) -> str:
    return base.reasons.of_caller(caller)


def _metrics(base: Base, _: Base, caller: Caller) -> str:
    return metrics.text(base)


def _list_agents(base: Base, _: Base, call: Call) -> Iterator[str]:
    view = base.view(call.caller)
    for found in base.runtime.agents.registry:
        if view.lists(found):
            yield from (found.name, f"{found.name}.sock", f"{found.name}.d")


def _agent_of(base: Base, name: str) -> tuple[Agent | None, str]:
    """Whose NAME, NAME.sock or NAME.d in ``/ctx/agent`` it is, and which of these."""
    stem, _, last = name.rpartition(".")
    suffix = f".{last}" if stem and last in ("d", "sock") else ""
    return base.runtime.agents.registry.named(stem if suffix else name), suffix


def _agent_entry(base: Base, name: str) -> RowNode[Agent] | None:
    found, suffix = _agent_of(base, name)
    return agent.entry(base, found, suffix) if found is not None else None


def _tell_agents(base: Base) -> Callable[[str], Attributes | None]:
    """Tells the attributes of public agents, which everybody finds: those with the same owner and
    ids are alike."""
    alike: dict[tuple[str, int, int, int, bool], Attributes] = {}

    def tell(name: str) -> Attributes | None:
        found, suffix = _agent_of(base, name)
        if found is None or found.private:
            return None
        key = suffix, found.owner, found.uid, found.gid, found.status is Status.NEW
        like = alike.get(key)
        if like is None:
            like = alike[key] = agent.entry(base, found, suffix).attributes()
        return Attributes(
            agent.entry_inode(found, suffix),
            like.mode,
            like.uid,
            like.gid,
            like.size,
            like.links,
            found.created,
            None,
            like.entry_timeout,
            like.attr_timeout,
        )

    return tell


def _find_agent(base: Base, _: Base, call: Call, name: str) -> Node | None:
    node = _agent_entry(base, name)
    if node is None or base.visible(node.obj, call.caller):
        return node
    roles = base.runtime.agents.identity.roles(call.caller, node.obj)
    if name.endswith(".d") and roles & Role.CHILD:
        return agent.supervisor_entry(base, node.obj)
    return None


def _make_agent(base: Base, _: Base, call: Call, name: str, mode: int) -> Node:
    if not name.endswith(".d"):
        raise MalformedError(f"{quote(name)}: create an agent with mkdir agent/NAME.d")
    made = base.runtime.agents.births.create(call.caller, name.removesuffix(".d"))
    return agent.entry(base, made, ".d")


def _agent_target(base: Base, _: Base, caller: Caller, name: str) -> Target[Agent]:
    agents = base.runtime.agents
    found = agents.registry.named(name.removesuffix(".d")) if name.endswith(".d") else None
    if found is None or not base.visible(found, caller):
        raise MissingError(f"there is no agent directory {quote(name)}")
    return Target(obj=found, roles=agents.identity.roles(caller, found), agent=found)


def _remove_agent(base: Base, _: Base, caller: Caller, found: Agent) -> None:
    base.runtime.agents.removals.remove(found)


_MAKING_AGENTS: Final = Making(guard=births.MAKING, act=_make_agent)
_REMOVING_AGENTS: Final = Removing(
    guard=REMOVING,
    find=_agent_target,
    act=_remove_agent,
)


def _own_agent(base: Base, call: Call) -> Agent | None:
    caller = call.caller
    return base.runtime.agents.registry.get(caller.agent) if caller.agent is not None else None


def _list_self(base: Base, _: Base, call: Call) -> Iterator[str]:
    if call.caller.agent is not None:
        yield "self"


def _find_self(base: Base, _: Base, call: Call, name: str) -> Node | None:
    own = _own_agent(base, call) if name == "self" else None
    return agent.entry(base, own, "self") if own is not None else None


def _find_token(base: Base, _: Base, call: Call, name: str) -> Node | None:
    wait = base.runtime.agents.waiting.with_token(TriggerToken(name))
    return waiting.token_node(base, wait) if wait is not None else None


def _bind_daemon(base: Base, _: Base, name: str) -> Node | None:
    """``ctxd.sock``, by the name that the binder binds it under."""
    if name != DAEMON_BIND_NAME:
        return None
    return RowNode(base, LAYOUT, 0, base, LAYOUT.number_of("ctxd.sock"))


def _bind_agent(base: Base, _: Base, name: str) -> Node | None:
    """``NAME.sock`` of an agent, by the name that the binder binds it under."""
    word = name.removeprefix(".bind-")
    index = AgentIndex(int(word)) if word.isdigit() else NO_AGENT
    found = base.runtime.agents.registry.get(index)
    return agent.entry(base, found, ".sock") if found is not None else None


def _nothing(base: Base, _: Base, call: Call) -> Iterator[str]:
    yield from ()


ROWS: Final[tuple[Row[Base], ...]] = (
    Directory(name="/", top=True, public=True,
        entries=_list_self, find=_find_self, bind=_bind_daemon),
    Shown(name="status", public=True, generated=True, render=_status,
        doc="key=value: version state uptime agents.STATUS cgroup controllers mount trees limits, "
        "and network.NAME: the port, the uid of relays, the socket"),
    Shown(name="error", public=True, generated=True, render=_error,
        doc="the caller's own last rejection: TIME ERRNO PATH: SENTENCE"),
    Shown(name="metrics", public=True, generated=True, render=_metrics,
        doc="the same values, and those of accounts and the event loop, as Prometheus text; each "
            "is there from the start, at 0 if there is nothing"),
    agents.ROW,
    Socket(name="ctxd.sock", public=True,
        doc="the daemon's socket, for operators"),
    Directory(name="bin", public=True, doc="programs for sandboxes"),
    Shown(name="ctx", within="bin", mode=0o555, public=True, doc="the client",
        render=lambda base, _, caller: base.client_program),
    Directory(name="agent", mode=0o1777, public=True, entries=_list_agents,
        find=_find_agent, tell=_tell_agents, make=_MAKING_AGENTS, remove=_REMOVING_AGENTS,
        bind=_bind_agent,
        doc="every agent as NAME, NAME.sock and NAME.d"),
    Directory(name="tool", public=True,
        entries=tool.entries, find=tool.find,
        doc="every tool that the caller has, as NAME and NAME.d"),
    Directory(name="home", public=True, entries=home.entries,
        find=home.find, doc="per-user durable files: sessions, data"),
    Directory(name="shared", mode=0o1777, public=True, entries=shared.entries,
        find=shared.find, make=shared.MAKING, remove=shared.REMOVING,
        doc="durable spaces, owned by their creators; created and removed by operators"),
    Directory(name="trigger", mode=0o311, public=True, read=Role.NONE,
        entries=_nothing, find=_find_token, secret=True,
        doc="tokens of waits: to fire a wait, write to its token; cannot be listed"),
)


class _Root(Layout[Base]):
    def find(self, base: Base, index: int, row: Row[Base]) -> Base:
        return base

    def path(self, base: Base, obj: Base) -> str:
        return ""


LAYOUT: Final = _Root(number=0, name="root", rows=ROWS)
