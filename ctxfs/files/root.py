"""The root of the filesystem, as rows (ctxfs(5), The root)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ctxfs.files import agent, session, spaces, tool, waiting
from ctxfs.tree.base import Base
from ctxfs.tree.layouts import Layout
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Making, Removing, Row, Shown, Socket, Target
from runtime.agents import births
from runtime.agents.removals import REMOVING, REMOVING_SESSIONS
from runtime.authority.accounts import Resource
from runtime.authority.guard import Facts, Guard, Unless
from runtime.caller import INSIDERS, OPERATORS, Caller, Role
from runtime.errors import (
    MalformedError,
    MissingError,
    NotEmptyError,
    QuotaError,
    TakenError,
)
from runtime.ids import NO_AGENT, AgentIndex, SessionIndex, TriggerToken
from runtime.records.model import Agent, Session
from runtime.sockets.server import DAEMON_BIND_NAME
from runtime.texts.names import check_name, quote

#: a user's uid, and the name of an agent that it had
_Key = tuple[int, str]

_UID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _status(base: Base, _: Base, caller: Caller) -> str:
    return "".join(f"{key}={value}\n" for key, value in base.runtime.status().items())


def _error(base: Base, _: Base, caller: Caller) -> str:
    return base.reasons.of_caller(caller)


def _metrics(base: Base, _: Base, caller: Caller) -> str:
    """The facts of ``status``, and the daemon's own, in the Prometheus text format."""
    status = base.runtime.status()
    lines = [
        "# HELP ctxfs_info Version and state of the daemon.",
        "# TYPE ctxfs_info gauge",
        f'ctxfs_info{{version="{status["version"]}",state="{status["state"]}"}} 1',
        "# HELP ctxfs_uptime_seconds Time since the daemon started.",
        "# TYPE ctxfs_uptime_seconds gauge",
        f"ctxfs_uptime_seconds {status['uptime']}",
        "# HELP ctxfs_agents Agents by status.",
        "# TYPE ctxfs_agents gauge",
    ]
    for key, value in status.items():
        if key.startswith("agents."):
            lines.append(f'ctxfs_agents{{status="{key.removeprefix("agents.")}"}} {value}')
    lines += [
        "# HELP ctxfs_account_used What all owners hold of a resource.",
        "# TYPE ctxfs_account_used gauge",
    ]
    accounts = base.runtime.accounts
    lines += [f'ctxfs_account_used{{account="{r}"}} {accounts.used(r)}' for r in Resource]
    lines += [
        "# HELP ctxfs_account_total What they may hold together.",
        "# TYPE ctxfs_account_total gauge",
    ]
    for resource in Resource:
        if (total := accounts.total(resource)) is not None:
            lines.append(f'ctxfs_account_total{{account="{resource}"}} {total}')
    loop = base.runtime.loop
    step, whole = loop.recent
    for name, kind, figure, doc in (
        ("requests_total", "counter", base.requests, "Requests of the kernel that were answered."),
        ("loop_steps_total", "counter", loop.steps, "Steps of the event loop."),
        ("loop_cpu_seconds_total", "counter", loop.total, "Processor time of these steps."),
        ("loop_step_longest_seconds", "gauge", loop.longest,
         "Processor time of the longest step since the start."),
        ("loop_step_recent_seconds", "gauge", step,
         "Processor time of the longest step of the last minute."),
        ("loop_lag_seconds", "gauge", whole,
         "The longest that the event loop did not look for requests in the last minute."),
    ):  # fmt: skip
        shown = f"{figure:.6f}" if isinstance(figure, float) else str(figure)
        lines += [f"# HELP ctxfs_{name} {doc}", f"# TYPE ctxfs_{name} {kind}"]
        lines.append(f"ctxfs_{name} {shown}")
    return "\n".join(lines) + "\n"


def _list_agents(base: Base, _: Base, call: Call) -> Iterator[str]:
    for found in base.runtime.agents.registry:
        if base.listed(found, call.caller):
            yield from (found.name, f"{found.name}.sock", f"{found.name}.d")


def _agent_entry(base: Base, name: str) -> RowNode[Agent] | None:
    """NAME, NAME.sock or NAME.d in ``/ctx/agent``."""
    suffix = next((suffix for suffix in (".d", ".sock") if name.endswith(suffix)), "")
    found = base.runtime.agents.registry.named(name.removesuffix(suffix))
    return agent.entry(base, found, suffix) if found is not None else None


def _find_agent(base: Base, _: Base, call: Call, name: str) -> Node | None:
    node = _agent_entry(base, name)
    return node if node is not None and base.visible(node.obj, call.caller) else None


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


def _homes(base: Base) -> set[int]:
    made = {
        int(name)
        for name in os.listdir(base.runtime.places.state / "home")
        if name.isdigit()
    }
    return made | set(base.runtime.agents.sessions.owners())


def _list_homes(base: Base, _: Base, call: Call) -> Iterator[str]:
    for uid in sorted(_homes(base)):
        yield str(uid)


def _find_home(base: Base, _: Base, call: Call, name: str) -> Node | None:
    if not _UID.fullmatch(name) or int(name) >= 2**32 - 1:
        return None
    uid = int(name)
    return RowNode(base, HOME, uid, uid) if uid == call.uid or uid in _homes(base) else None


def _spaces(base: Base) -> list[str]:
    return sorted(os.listdir(base.runtime.places.state / "shared"))


def _list_spaces(base: Base, _: Base, call: Call) -> Iterator[str]:
    yield from _spaces(base)


def _find_space(base: Base, _: Base, call: Call, name: str) -> Node | None:
    return base.root_of(spaces.SHARED, name) if name in _spaces(base) else None


def _check_spaces(base: Base, caller: Caller) -> None:
    limit = base.runtime.config.spaces
    if base.runtime.agents.identity.is_master(caller):
        return  # limits are against the others
    owners = [spaces.shared_owner(base.runtime, name) for name in _spaces(base)]
    if owners.count(caller.uid) >= limit:
        raise QuotaError(
            f"uid {caller.uid} has {limit} spaces, the configured maximum: remove one first (rmdir)"
        )


def _make_space(base: Base, _: Base, call: Call, name: str, mode: int) -> Node:
    path = spaces.shared_root(base.runtime, check_name(name))
    _check_spaces(base, call.caller)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise TakenError(f"the space {quote(name)} already exists") from None
    os.chown(path, call.uid, call.gid)
    os.chmod(path, mode & 0o1777)
    return base.root_of(spaces.SHARED, name)


def _space_target(base: Base, _: Base, caller: Caller, name: str) -> Target[Path]:
    if name not in _spaces(base):
        raise MissingError(f"there is no space {quote(name)}")
    owner = spaces.shared_owner(base.runtime, name)
    own = base.runtime.agents.identity.is_master(caller) or caller.uid == owner
    return Target(
        obj=spaces.shared_root(base.runtime, name),
        roles=base.root_roles(caller) & OPERATORS if own else Role.NONE,
    )


def _why_full(facts: Facts, caller: Caller, path: Path) -> str:
    return f"the space {quote(path.name)} is not empty" if any(path.iterdir()) else ""


def _remove_space(base: Base, _: Base, caller: Caller, path: Path) -> None:
    name = path.name
    node = base.root_of(spaces.SHARED, name)
    path.rmdir()
    base.durable.remove(node)
    base.durable.forget(node.inode, 0)
    base.spaces.drop([spaces.SHARED.place(name)])


_MAKING_SPACES: Final = Making(guard=Guard(who=OPERATORS), act=_make_space)
_REMOVING_SPACES: Final = Removing(
    guard=Guard(who=OPERATORS, unless=(Unless("it has files", NotEmptyError, _why_full),)),
    find=_space_target,
    act=_remove_space,
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
    """The same of ``NAME.sock``."""
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
        doc="key=value: version state uptime agents.STATUS cgroup controllers mount limits"),
    Shown(name="error", public=True, generated=True, render=_error,
        doc="the caller's own last rejection: TIME ERRNO PATH: SENTENCE"),
    Shown(name="metrics", public=True, generated=True, render=_metrics,
        doc="the same values and those of the event loop, as Prometheus text"),
    Socket(name="ctxd.sock", public=True,
        doc="the daemon's socket, for operators"),
    Directory(name="bin", public=True, doc="programs for sandboxes"),
    Shown(name="ctx", within="bin", mode=0o555, public=True, doc="the client",
        render=lambda base, _, caller: base.client_program),
    Directory(name="agent", mode=0o1777, public=True, entries=_list_agents,
        find=_find_agent, make=_MAKING_AGENTS, remove=_REMOVING_AGENTS, bind=_bind_agent,
        doc="every agent as NAME, NAME.sock and NAME.d"),
    Directory(name="tool", public=True,
        entries=tool.entries, find=tool.find,
        doc="every tool that the caller has, as NAME and NAME.d"),
    Directory(name="home", public=True, entries=_list_homes,
        find=_find_home, doc="per-user durable files: sessions, data"),
    Directory(name="shared", mode=0o1777, public=True, entries=_list_spaces,
        find=_find_space, make=_MAKING_SPACES, remove=_REMOVING_SPACES,
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


def _history_visible(base: Base, uid: int, name: str, call: Call) -> bool:
    found = base.runtime.agents.registry.named(name)
    if found is not None and found.owner == uid:
        roles = base.runtime.agents.identity.roles(call.caller, found)
        return not found.private or bool(roles & (INSIDERS | Role.SESSION_READER))
    # of removed agents: the names of other users' private ones are not told
    caller = call.caller
    return caller.known and (caller.agent is not None or caller.uid in (0, uid))


def _list_histories(base: Base, uid: int, call: Call) -> Iterator[str]:
    for name in base.runtime.agents.sessions.agents(uid):
        if _history_visible(base, uid, name, call):
            yield name


def _find_history(base: Base, uid: int, call: Call, name: str) -> Node | None:
    if not _history_visible(base, uid, name, call):
        return None
    first = base.runtime.agents.sessions.first(uid, name)
    return RowNode(base, HISTORY, first, (uid, name)) if first is not None else None


class _Homes(Layout[int]):
    """Of users, by uid."""

    def find(self, base: Base, index: int, row: Row[int]) -> int:
        return index

    def path(self, base: Base, uid: int) -> str:
        return f"home/{uid}"


HOME: Final = _Homes(
    number=5,
    name="home",
    rows=(
        Directory(name="", top=True, public=True),
        Directory(name="agent", public=True, entries=_list_histories,
            find=_find_history, doc="sessions by agent name"),
        Directory(name="data", mode=0o700, public=True, space=spaces.DATA,
            doc="files of the user's agents and the user"),
    ),
)  # fmt: skip


def _sessions(base: Base, key: _Key, call: Call) -> Iterator[str]:
    for name, _ in base.runtime.agents.sessions.of(*key):
        yield name


def _named_session(base: Base, key: _Key, name: str) -> Session | None:
    index = base.runtime.agents.sessions.named(*key, name)
    return base.runtime.agents.sessions.get(SessionIndex(index)) if index is not None else None


def _find_session(base: Base, key: _Key, call: Call, name: str) -> Node | None:
    found = _named_session(base, key, name)
    return RowNode(base, session.LAYOUT, found.index, found) if found is not None else None


def _session_target(
    base: Base, key: _Key, caller: Caller, name: str
) -> Target[Session]:
    found = _named_session(base, key, name)
    if found is None:
        raise MissingError(f"there is no session {quote(name)}")
    own = caller.uid in (0, key[0])
    return Target(obj=found, roles=base.root_roles(caller) & OPERATORS if own else Role.NONE)


def _remove_session(base: Base, key: _Key, caller: Caller, found: Session) -> None:
    base.runtime.agents.removals.remove_session(found)


_REMOVING_SESSIONS: Final = Removing(
    guard=REMOVING_SESSIONS,
    find=_session_target,
    act=_remove_session,
)


class _Histories(Layout[_Key]):
    """Names that users' agents had, by the first session of each."""

    def find(self, base: Base, index: int, row: Row[_Key]) -> _Key | None:
        first = base.runtime.agents.sessions.get(SessionIndex(index))
        return (first.owner, first.agent) if first is not None else None

    def path(self, base: Base, key: _Key) -> str:
        return f"home/{key[0]}/agent/{key[1]}"

    def asked(self, key: _Key, row: Row[_Key]) -> bool:
        return row.top


HISTORY: Final = _Histories(
    number=6,
    name="history",
    rows=(
        Directory(name="", top=True, public=True),
        Directory(name="session", mode=0o777, public=True, entries=_sessions,
            find=_find_session, remove=_REMOVING_SESSIONS,
            doc="sessions; operators may rmdir those of removed agents"),
    ),
)  # fmt: skip
