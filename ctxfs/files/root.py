"""The root of the filesystem, as rows (ctxfs(5), The root)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxfs.files import agent, session, spaces, tool, waiting
from ctxfs.tree.nodes import Call, Node
from ctxfs.tree.planes import Plane
from ctxfs.tree.rownodes import RowNode
from ctxfs.tree.rows import Directory, Making, Removing, Row, Shown, Socket, Target
from runtime.authority.accounts import Resource
from runtime.authority.guard import Facts, Guard, Unless
from runtime.caller import CONTROLLERS, INSIDERS, OPERATORS, Caller, Role
from runtime.errors import (
    MalformedError,
    MissingError,
    NotEmptyError,
    QuotaError,
    TakenError,
    WrongStateError,
)
from runtime.records.model import Agent, Session
from runtime.texts.names import check_name, quote

if TYPE_CHECKING:
    from ctxfs.filesystem import Filesystem

_UID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _status(fs: Filesystem, _: Any, caller: Caller) -> str:
    return "".join(f"{key}={value}\n" for key, value in fs.runtime.status().items())


def _error(fs: Filesystem, _: Any, caller: Caller) -> str:
    return fs.reasons.of_caller(caller)


def _metrics(fs: Filesystem, _: Any, caller: Caller) -> str:
    """The facts of ``status``, and the daemon's own, in the Prometheus text format."""
    status = fs.runtime.status()
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
    accounts = fs.runtime.accounts
    lines += [f'ctxfs_account_used{{account="{r}"}} {accounts.used(r)}' for r in Resource]
    lines += [
        "# HELP ctxfs_account_total What they may hold together.",
        "# TYPE ctxfs_account_total gauge",
    ]
    for resource in Resource:
        if (total := accounts.total(resource)) is not None:
            lines.append(f'ctxfs_account_total{{account="{resource}"}} {total}')
    loop = fs.runtime.loop
    step, whole = loop.recent
    for name, kind, figure, doc in (
        ("requests_total", "counter", fs.requests, "Requests of the kernel that were answered."),
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


def _list_agents(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    for found in fs.runtime.agents.registry:
        if fs.listed(found, call):
            yield from (found.name, f"{found.name}.sock", f"{found.name}.d")


def _agent_entry(fs: Filesystem, name: str) -> RowNode | None:
    """NAME, NAME.sock or NAME.d in ``/ctx/agent``."""
    suffix = next((suffix for suffix in (".d", ".sock") if name.endswith(suffix)), "")
    found = fs.runtime.agents.registry.named(name.removesuffix(suffix))
    return agent.entry(fs, found, suffix) if found is not None else None


def _find_agent(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    node = _agent_entry(fs, name)
    return node if node is not None and fs.visible(node.obj, call) else None


def _make_agent(fs: Filesystem, _: Any, call: Call, name: str, mode: int) -> Node:
    if not name.endswith(".d"):
        raise MalformedError(f"{quote(name)}: create an agent with mkdir agent/NAME.d")
    made = fs.runtime.agents.births.create(call.caller, name.removesuffix(".d"))
    return agent.entry(fs, made, ".d")


def _agent_target(fs: Filesystem, _: Any, caller: Caller, name: str) -> Target:
    agents = fs.runtime.agents
    found = agents.registry.named(name.removesuffix(".d")) if name.endswith(".d") else None
    if found is None or not fs.visible(found, Call.of(fs, caller)):
        raise MissingError(f"there is no agent directory {quote(name)}")
    return Target(obj=found, roles=agents.identity.roles(caller, found), agent=found)


def _why_alive(facts: Facts, caller: Caller, found: Agent) -> str:
    for member in (found, *facts.registry.descendants(found)):
        if member.live:
            return f"{quote(member.name)} is {member.status}: stop it, wait, then remove"
    return ""


def _remove_agent(fs: Filesystem, _: Any, caller: Caller, found: Agent) -> None:
    fs.runtime.agents.removals.remove(found)


_MAKING_AGENTS: Final = Making(guard=Guard(who=Role.ANYONE), act=_make_agent)
_REMOVING_AGENTS: Final = Removing(
    guard=Guard(
        who=CONTROLLERS,
        unless=(Unless("it, or what is below it, lives", WrongStateError, _why_alive),),
    ),
    find=_agent_target,
    act=_remove_agent,
)


def _homes(fs: Filesystem) -> set[int]:
    base = fs.runtime.places.state / "home"
    made = {int(name) for name in os.listdir(base) if name.isdigit()}
    return made | set(fs.runtime.agents.sessions.owners())


def _list_homes(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    for uid in sorted(_homes(fs)):
        yield str(uid)


def _find_home(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    if not _UID.fullmatch(name) or int(name) >= 2**32 - 1:
        return None
    uid = int(name)
    return HOME.node(fs, uid, uid) if uid == call.uid or uid in _homes(fs) else None


def _spaces(fs: Filesystem) -> list[str]:
    return sorted(os.listdir(fs.runtime.places.state / "shared"))


def _list_spaces(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    yield from _spaces(fs)


def _find_space(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    return fs.tree(spaces.SHARED, name) if name in _spaces(fs) else None


def _check_spaces(fs: Filesystem, caller: Caller) -> None:
    limit = fs.runtime.config.spaces
    if fs.runtime.agents.identity.is_master(caller):
        return  # limits are against the others
    if sum(spaces.shared_owner(fs, name) == caller.uid for name in _spaces(fs)) >= limit:
        raise QuotaError(f"uid {caller.uid} has {limit} spaces, the configured maximum")


def _make_space(fs: Filesystem, _: Any, call: Call, name: str, mode: int) -> Node:
    path = spaces.shared_root(fs, check_name(name))
    _check_spaces(fs, call.caller)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise TakenError(f"the space {quote(name)} already exists") from None
    os.chown(path, call.uid, call.gid)
    os.chmod(path, mode & 0o1777)
    return fs.tree(spaces.SHARED, name)


def _space_target(fs: Filesystem, _: Any, caller: Caller, name: str) -> Target:
    if name not in _spaces(fs):
        raise MissingError(f"there is no space {quote(name)}")
    owner = spaces.shared_owner(fs, name)
    own = fs.runtime.agents.identity.is_master(caller) or caller.uid == owner
    return Target(
        obj=spaces.shared_root(fs, name),
        roles=fs.root_roles(caller) & OPERATORS if own else Role.NONE,
    )


def _why_full(facts: Facts, caller: Caller, path: Path) -> str:
    return f"the space {quote(path.name)} is not empty" if any(path.iterdir()) else ""


def _remove_space(fs: Filesystem, _: Any, caller: Caller, path: Path) -> None:
    name = path.name
    node = fs.tree(spaces.SHARED, name)
    path.rmdir()
    fs.durable.remove(node)
    fs.durable.forget(node.inode, 0)
    fs.spaces.drop_shared(name)


_MAKING_SPACES: Final = Making(guard=Guard(who=OPERATORS), act=_make_space)
_REMOVING_SPACES: Final = Removing(
    guard=Guard(who=OPERATORS, unless=(Unless("it has files", NotEmptyError, _why_full),)),
    find=_space_target,
    act=_remove_space,
)


def _own_agent(fs: Filesystem, call: Call) -> Agent | None:
    caller = call.caller
    return fs.runtime.agents.registry.get(caller.agent) if caller.agent is not None else None


def _list_self(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    if call.caller.agent is not None:
        yield "self"


def _find_self(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    own = _own_agent(fs, call) if name == "self" else None
    return agent.entry(fs, own, "self") if own is not None else None


def _find_token(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    wait = fs.runtime.agents.waiting.with_token(name)
    return waiting.token_node(fs, wait) if wait is not None else None


def _nothing(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    yield from ()


ROWS: Final[tuple[Row, ...]] = (
    Directory(name="/", top=True, public=True,
        entries=_list_self, find=_find_self),
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
        render=lambda fs, _, caller: fs.client_program),
    Directory(name="agent", mode=0o1777, public=True, entries=_list_agents,
        find=_find_agent, make=_MAKING_AGENTS, remove=_REMOVING_AGENTS,
        doc="every agent as NAME, NAME.sock and NAME.d; agents make those that their policy lets "
        "them create"),
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


class _Root(Plane):
    def find(self, fs: Filesystem, index: int, row: Row) -> Filesystem:
        return fs

    def path(self, fs: Filesystem, obj: Any) -> str:
        return ""


PLANE: Final = _Root(number=0, name="root", rows=ROWS)


def _history_visible(fs: Filesystem, uid: int, name: str, call: Call) -> bool:
    found = fs.runtime.agents.registry.named(name)
    if found is not None and found.owner == uid:
        roles = fs.runtime.agents.identity.roles(call.caller, found)
        return not found.private or bool(roles & (INSIDERS | Role.SESSION_READER))
    # of removed agents: the names of other users' private ones are not told
    caller = call.caller
    return caller.known and (caller.agent is not None or caller.uid in (0, uid))


def _list_histories(fs: Filesystem, uid: int, call: Call) -> Iterator[str]:
    for name in fs.runtime.agents.sessions.agents(uid):
        if _history_visible(fs, uid, name, call):
            yield name


def _find_history(fs: Filesystem, uid: int, call: Call, name: str) -> Node | None:
    if not _history_visible(fs, uid, name, call):
        return None
    first = fs.runtime.agents.sessions.first(uid, name)
    return HISTORY.node(fs, first, (uid, name)) if first is not None else None


class _Homes(Plane):
    """Of users, by uid."""

    def find(self, fs: Filesystem, index: int, row: Row) -> int:
        return index

    def path(self, fs: Filesystem, uid: int) -> str:
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


def _sessions(fs: Filesystem, key: tuple[int, str], call: Call) -> Iterator[str]:
    for name, _ in fs.runtime.agents.sessions.of(*key):
        yield name


def _named_session(fs: Filesystem, key: tuple[int, str], name: str) -> Session | None:
    index = fs.runtime.agents.sessions.named(*key, name)
    return fs.runtime.agents.sessions.get(index) if index is not None else None


def _find_session(fs: Filesystem, key: tuple[int, str], call: Call, name: str) -> Node | None:
    found = _named_session(fs, key, name)
    return session.PLANE.node(fs, found.index, found) if found is not None else None


def _session_target(fs: Filesystem, key: tuple[int, str], caller: Caller, name: str) -> Target:
    found = _named_session(fs, key, name)
    if found is None:
        raise MissingError(f"there is no session {quote(name)}")
    own = caller.uid in (0, key[0])
    return Target(obj=found, roles=fs.root_roles(caller) & OPERATORS if own else Role.NONE)


def _why_present(facts: Facts, caller: Caller, found: Session) -> str:
    there = facts.registry.get(found.incarnation)
    return f"the agent {quote(there.name)} of this session still exists" if there else ""


def _remove_session(fs: Filesystem, key: tuple[int, str], caller: Caller, found: Session) -> None:
    fs.runtime.agents.removals.remove_session(found)


_REMOVING_SESSIONS: Final = Removing(
    guard=Guard(
        who=OPERATORS,
        unless=(Unless("its agent still exists", WrongStateError, _why_present),),
    ),
    find=_session_target,
    act=_remove_session,
)


class _Histories(Plane):
    """Names that users' agents had, by the first session of each."""

    def find(self, fs: Filesystem, index: int, row: Row) -> tuple[int, str] | None:
        first = fs.runtime.agents.sessions.get(index)
        return (first.owner, first.agent) if first is not None else None

    def path(self, fs: Filesystem, key: tuple[int, str]) -> str:
        return f"home/{key[0]}/agent/{key[1]}"

    def asked(self, key: tuple[int, str], row: Row) -> bool:
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
