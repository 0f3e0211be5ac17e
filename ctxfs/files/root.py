"""The root of the filesystem, as rows (ctxfs(5), The root)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ctxfs.files import tool, waiting
from ctxfs.nodes import Call, Node
from ctxfs.rows import Kind, Plane, Row, Table
from runtime.accounts import Resource
from runtime.caller import Caller, Role
from runtime.errors import DeniedError, MissingError
from runtime.names import quote

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
    for agent in fs.runtime.agents.registry:
        if fs.listed(agent, call):
            yield from (agent.name, f"{agent.name}.sock", f"{agent.name}.d")


def _find_agent(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    node = fs.agent_entry(name)
    if node is None or node.agent is None or not fs.visible(node.agent, call):
        return None
    return node


def _make_agent(fs: Filesystem, _: Any, call: Call, name: str, mode: int) -> Node:
    return fs.make_agent(call, name)


def _remove_agent(fs: Filesystem, _: Any, call: Call, name: str) -> None:
    fs.remove_agent(call, name)


def _list_homes(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    uids = {*fs.runtime.agents.sessions.owners(), *fs.homes()}
    for uid in sorted(uids):
        yield str(uid)


def _find_home(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    if not _UID.fullmatch(name) or int(name) >= 2**32 - 1:
        return None
    uid = int(name)
    if uid == call.uid or uid in fs.homes() or uid in fs.runtime.agents.sessions.owners():
        return fs.home(uid)
    return None


def _list_spaces(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    yield from fs.spaces()


def _find_space(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    return fs.space(name) if name in fs.spaces() else None


def _make_space(fs: Filesystem, _: Any, call: Call, name: str, mode: int) -> Node:
    if call.caller.agent is not None or not call.caller.known:
        raise DeniedError("only operators may create spaces")
    return fs.make_space(call, name, mode)


def _remove_space(fs: Filesystem, _: Any, call: Call, name: str) -> None:
    if call.caller.agent is not None or not call.caller.known:
        raise DeniedError("only operators may remove spaces")
    if name not in fs.spaces():
        raise MissingError(f"there is no space {quote(name)}")
    master = fs.runtime.agents.identity.is_master(call.caller)
    if not master and fs.space_owner(name) != call.caller.uid:
        raise DeniedError(f"the caller may not remove the space {quote(name)}")
    fs.remove_space(name)


def _find_token(fs: Filesystem, _: Any, call: Call, name: str) -> Node | None:
    wait = fs.runtime.agents.waiting.with_token(name)
    return waiting.token_node(fs, wait) if wait is not None else None


def _nothing(fs: Filesystem, _: Any, call: Call) -> Iterator[str]:
    yield from ()


ROWS: Final = (
    Row(name="/", within="/", kind=Kind.DIRECTORY, mode=0o755, public=True),
    Row(name="status", public=True, generated=True, render=_status,
        doc="key=value: version state uptime agents.STATUS cgroup controllers mount limits"),
    Row(name="error", public=True, generated=True, render=_error,
        doc="the caller's own last rejection: TIME ERRNO PATH: SENTENCE"),
    Row(name="metrics", public=True, generated=True, render=_metrics,
        doc="the same values and those of the event loop, as Prometheus text"),
    Row(name="ctxd.sock", kind=Kind.SOCKET, mode=0o666, public=True,
        doc="the daemon's socket, for operators"),
    Row(name="bin", kind=Kind.DIRECTORY, mode=0o755, public=True, doc="programs for sandboxes"),
    Row(name="ctx", within="bin", mode=0o555, public=True, doc="the client",
        render=lambda fs, _, caller: fs.client_program),
    Row(name="agent", kind=Kind.DIRECTORY, mode=0o1777, public=True, entries=_list_agents,
        find=_find_agent, make=_make_agent, remove=_remove_agent,
        doc="every agent as NAME, NAME.sock and NAME.d"),
    Row(name="tool", kind=Kind.DIRECTORY, mode=0o755, public=True,
        entries=tool.entries, find=tool.find,
        doc="every tool that the caller has, as NAME and NAME.d"),
    Row(name="home", kind=Kind.DIRECTORY, mode=0o755, public=True, entries=_list_homes,
        find=_find_home, doc="per-user durable files: sessions, data"),
    Row(name="shared", kind=Kind.DIRECTORY, mode=0o1777, public=True, entries=_list_spaces,
        find=_find_space, make=_make_space, remove=_remove_space,
        doc="durable spaces, owned by their creators; created and removed by operators"),
    Row(name="trigger", kind=Kind.DIRECTORY, mode=0o311, public=True, read=Role.NONE,
        entries=_nothing, find=_find_token, secret=True,
        doc="tokens of waits: to fire a wait, write to its token; cannot be listed"),
)

TABLE: Final = Table(Plane.ROOT, ROWS)
ROOT_NUMBER: Final = TABLE.number("/", "/")


def _home_entries(fs: Filesystem, uid: int, call: Call) -> Iterator[str]:
    for name in fs.runtime.agents.sessions.agents(uid):
        if fs.history_visible(uid, name, call):
            yield name


def _find_history(fs: Filesystem, uid: int, call: Call, name: str) -> Node | None:
    return fs.history_of(uid, name) if fs.history_visible(uid, name, call) else None


HOME_TABLE: Final = Table(
    Plane.HOME,
    (
        Row(name="", within="home", kind=Kind.DIRECTORY, mode=0o755, public=True),
        Row(name="agent", kind=Kind.DIRECTORY, mode=0o755, public=True, entries=_home_entries,
            find=_find_history, doc="sessions by agent name"),
        Row(name="data", kind=Kind.DIRECTORY, mode=0o700, public=True,
            doc="files of the user's agents and the user"),
    ),
)


def _sessions(fs: Filesystem, key: tuple[int, str], call: Call) -> Iterator[str]:
    for name, _ in fs.runtime.agents.sessions.of(*key):
        yield name


def _find_session(
    fs: Filesystem, key: tuple[int, str], call: Call, name: str
) -> Node | None:
    index = fs.runtime.agents.sessions.named(*key, name)
    return fs.session_node(index) if index is not None else None


def _remove_session(fs: Filesystem, key: tuple[int, str], call: Call, name: str) -> None:
    fs.remove_session(key, call, name)


HISTORY_TABLE: Final = Table(
    Plane.HISTORY,
    (
        Row(name="", within="history", kind=Kind.DIRECTORY, mode=0o755, public=True),
        Row(name="session", kind=Kind.DIRECTORY, mode=0o777, public=True, entries=_sessions,
            find=_find_session, remove=_remove_session,
            doc="sessions; operators may rmdir those of removed agents"),
    ),
)
