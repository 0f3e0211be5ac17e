"""Programs find prepared for them in a cell what they would find on the host.

- the environment;
- what tells programs that they have no network, so that they do not try for minutes;
- git's system configuration: an identity, and whose repositories it may use;
- where links of ``/etc`` lead, such as ``/etc/resolv.conf`` into ``/run`` with systemd-resolved;
- a name and a home for its uid.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.agents.workspace import WORKSPACE
from runtime.cell import networks
from runtime.kernel import links, orders
from runtime.kernel.users import find_user
from runtime.records.model import Agent
from runtime.texts import mounts
from runtime.texts.names import parse_author, parse_env_line

#: below the agent's own /tmp, which every view has: a directory of the host cannot be made
HOME: Final = "/tmp/home"
_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_PASSWD: Final = "/etc/passwd"
_GROUP: Final = "/etc/group"
_ETC: Final = "/etc"
_RUN: Final = "/run"
#: what tools ask whether there is a network, and where they were told of one of their own
_OFFLINE: Final = {
    "npm_config_offline": ("true", ("npm_config_registry",)),
    "YARN_ENABLE_NETWORK": ("0", ("YARN_NPM_REGISTRY_SERVER",)),
    "PIP_NO_INDEX": ("1", ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")),
    "UV_OFFLINE": ("1", ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")),
    "CARGO_NET_OFFLINE": ("true", ()),
    "GOPROXY": ("off", ()),
    "COMPOSER_DISABLE_NETWORK": ("1", ()),
    "HF_HUB_OFFLINE": ("1", ("HF_ENDPOINT",)),
}
#: what reaches any of them
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
#: what a cell has of its own, and what is other people's
_CLOSED: Final = ("/home", "/root", "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/run/ctx")
#: the fewest parts of the path of a directory of one thing; one above has those of many
_DEEP: Final = {"/": 2, "/var/": 3}


def inside(path: str, directories: Iterable[str]) -> bool:
    """Whether a path is one of the directories, or below one."""
    return any(path == d or path.startswith(d.rstrip("/") + "/") for d in directories)


def spec(
    cwd: str,
    variables: dict[str, str],
    words: Sequence[str],
    terminal: tuple[int, int] | None = None,
    having: Mapping[str, int] | None = None,
) -> bytes:
    """The orders on what the keeper is to start; it keeps a cell without a program if there are no
    words."""
    environment = [f"{key}={value}" for key, value in variables.items()]
    screen = ("terminal", *terminal) if terminal else ()
    listens = networks.listened(having or {})
    return orders.message(cwd, environment, words, *screen, *([listens] if listens else []))


def environment(
    agents: Agents,
    agent: Agent,
    root: str,
    git: str,
    having: Mapping[str, int],
    terminal: tuple[int, int] | None = None,
) -> dict[str, str]:
    """All that a program is started with, besides descriptors 0 to 2, in a cell that has these
    networks; ``root`` is where it finds the filesystem, ``git`` what ``git`` says."""
    own = dict(parse_env_line(line) for line in _lines(agent.env))
    network = having or agents.authority.allows(agent, "network", networks.HOST, "connect")
    user = user_name(agents, agent)
    values = {
        "CTX_ROOT": root,
        "CTX_AGENT": agent.name,
        "CTX_SELF": f"{root}/agent/{agent.name}.d",
        "CTX_SESSION": agents.sessions.name_of(agent),
        "CTX_RUN": agent.run.id,
        "CTX_HOME": f"{root}/home/{agent.owner}",
        "CTX_PATH": ":".join(_lines(agent.path)) or f"{root}/tool",
        "CTX_MODEL": agent.model,
        "HOME": HOME,
        "PATH": f"{_SYSTEM_PATH}:{root}/bin",
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color" if terminal else "dumb",
        "GIT_CONFIG_SYSTEM": git,
        **({} if network else _offline(own)),
        **networks.variables(having),
        **(_proxied(own, networks.proxies(agents, having), having) if having else {}),
    }
    return {**values, **own}


def _offline(own: Iterable[str]) -> dict[str, str]:
    """Variables that tell tools of no network, but those that its ``env`` tells of one."""
    told = {name.upper() for name in own}
    if told.intersection(_PROXIES):
        return {}
    return {
        name: value
        for name, (value, places) in _OFFLINE.items()
        if told.isdisjoint(each.upper() for each in (name, *places))
    }


def _proxied(
    own: Iterable[str], proxies: Sequence[str], having: Mapping[str, int]
) -> dict[str, str]:
    """Variables that tell tools of a proxy, but those that its ``env`` has, in either case."""
    if not proxies:
        return {}
    told = {name.upper() for name in own}
    proxy = f"http://127.0.0.1:{having[proxies[0]]}"
    own_loopback = "127.0.0.1,localhost,::1"
    values = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": own_loopback}
    return {
        each: value
        for name, value in values.items()
        if name not in told
        for each in (name, name.lower())
    }


def safe(agents: Agents, agent: Agent) -> list[str]:
    """Directories where git in the cell may use a repository of another user: workspaces, and what
    mount tables show. Not spaces, where others may have made repositories whose configuration
    names programs."""
    found = [
        mount.target
        for mount in agents.authority.effective_mounts(agent)
        if mount.mode != "hide" and not mounts.space_of(mount.of or mount.source)
    ]
    for node in (agent, *agents.registry.ancestors(agent)):
        if node.workspace == "worktree":
            found.append(WORKSPACE)
        elif node.workspace.startswith(mounts.EXPLICIT_ROOT):
            found.append(node.workspace.removeprefix(mounts.EXPLICIT_ROOT))
    return found


def git(agent: Agent, safe: Iterable[str]) -> str:
    """The system configuration of git for a cell, which goes on with that of its view: who
    commits if nothing else says it, and repositories that may be another user's."""
    include = "[include]\n\tpath = /etc/gitconfig\n"
    account = find_user(agent.owner)
    login = f"uid{agent.owner}" if account is None else account.pw_name
    name = "" if account is None else account.pw_gecos.partition(",")[0]
    email = f"{login}@{os.uname().nodename}"
    if agent.author:
        name, email = parse_author(agent.author)
    user = f"[user]\n\tname = {_quoted(name or login)}\n\temail = {_quoted(email)}\n"
    # what is said of this agent wins over what the machine says, and that over the account
    parts = [include, user] if agent.author else [user, include]
    # the second form, for those below, is known since git 2.46
    for path in dict.fromkeys(safe):
        if path != "/":
            parts.append(f"[safe]\n\tdirectory = {_quoted(path)}\n")
            parts.append(f"\tdirectory = {_quoted(path.rstrip('/') + '/*')}\n")
    return "".join(parts)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def user_name(agents: Agents, agent: Agent) -> str:
    """The name of its uid, which it has in its cell if it has none on the host."""
    entry = find_user(agent.uid)
    if entry is not None:
        return entry.pw_name
    config = agents.settings.config
    return config.agent_user if agent.uid == config.agent_ids()[0] else f"uid{agent.uid}"


def users(agents: Agents, agent: Agent) -> Iterator[tuple[str, ...]]:
    """Operations for passwd(5) and group(5) as the host has them, but that the agent's uid has a
    name, and the home that it has in its cell."""
    entry, name = find_user(agent.uid), user_name(agents, agent)
    real = "" if entry is None else entry.pw_gecos
    yield _led(_PASSWD, f"{name}:x:{agent.uid}:{agent.gid}:{real}:{HOME}:/bin/sh\n")
    if entry is None:
        yield _led(_GROUP, f"{name}:x:{agent.gid}:\n")


def _led(path: str, line: str) -> tuple[str, ...]:
    """The host's file with a line at its head, which counts before all others."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        text = ""
    return "file", line + text, path


def led_to(
    base_view: Iterable[str], own: Sequence[str], *, network: bool
) -> Iterator[tuple[str, ...]]:
    """Operations that show where links of ``/etc`` lead, if the view has nothing there.

    A directory is shown and not its file, which may be replaced by another. Nothing is shown of
    what is the daemon's ``own``, and nothing below ``/run`` but in a cell with the host's network:
    services have their sockets there, and one that resolves names is a network.
    """
    view = tuple(base_view)
    closed = (*_CLOSED, *own, *(() if network else (_RUN,)))
    for top in (entry for entry in view if inside(entry, [_ETC])):
        yield from _reached(links.targets(top), view, closed)


@lru_cache(maxsize=64)
def _reached(
    targets: Sequence[str], view: Sequence[str], closed: Sequence[str]
) -> list[tuple[str, ...]]:
    """Those operations for some targets, of which there are hundreds, and mostly the same."""
    shown: set[tuple[str, ...]] = set()
    for target in targets:
        path = target.removeprefix("/var") if inside(target, ["/var/run"]) else target
        if inside(path, (*view, *closed)) or _holds(path, closed):
            continue
        directory = os.path.dirname(path)
        deep = _DEEP["/var/" if path.startswith("/var/") else "/"]
        whole = directory.count("/") >= deep and not _holds(directory, closed)
        shown.add(("reach", directory if whole else "-", path))
    return sorted(shown)


def _holds(directory: str, paths: Iterable[str]) -> bool:
    return any(inside(path, [directory]) for path in paths)
