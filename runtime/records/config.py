"""The configuration: one YAML map, every key with a built-in default."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from runtime.errors import MalformedError, StartupError
from runtime.kernel.users import find_user
from runtime.records.nodes import (
    Node,
    Placed,
    check_alias,
    doubts,
    host_alias,
    read_nodes,
    read_placed,
)
from runtime.texts import limits, policy, yaml_marks
from runtime.texts.context import LIMIT_MIN
from runtime.texts.names import check_name, quote
from runtime.texts.yaml_marks import MisplacedError, Mistake
from runtime.texts.yaml_values import (
    choice,
    count,
    duration,
    flag,
    list_of,
    map_of,
    optional,
    read_settings,
    record,
    share,
    size,
    socket,
    text,
)

FALLBACK_AGENT_ID: Final = 61000
FALLBACK_RELAY_ID: Final = 61001
FALLBACK_LINK_ID: Final = 61002
#: of quotas (quotactl(2))
_PROJECT_MAX: Final = (1 << 32) - 1
_PORTS: Final = range(1024, 65536)
#: nothing; a header of the PROXY protocol with the incarnation; that, and the payers' counters
HEADERS: Final = ("none", "proxy", "counters")
#: one API; a forward proxy, which programs find in their environment
KINDS: Final = ("api", "http_proxy")

log = logging.getLogger(__name__)


def _port(value: Any) -> int:
    if count(value) not in _PORTS:
        raise MalformedError(f"{value} is not one from 1024 to 65535")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A Unix socket of the operator's, and the port at which cells have it on their loopback.

    ``header`` is what relays say there first, and ``kind`` what is behind it (HEADERS, KINDS).
    """

    socket: Annotated[str, socket]
    port: Annotated[int, _port]
    header: Annotated[str, choice(*HEADERS)] = "none"
    kind: Annotated[str, choice(*KINDS)] = "api"


_read_network: Final = record(Network)


def _network(value: Any) -> Network:
    network = _read_network(value)
    if network.header == "counters" and network.kind == "http_proxy":
        raise MalformedError("nothing can be counted behind kind: http_proxy")
    return network


def _network_name(name: str) -> None:
    check_name(name)
    if name == "default":
        raise MalformedError('"default" is the network of the host; use another name')


_read_networks: Final = map_of(
    _network_name, _network, "names to {socket: PATH, port: NUMBER}"
)


def _fork_limit(value: Any) -> int:
    found = size(value)
    if found < LIMIT_MIN:
        raise MalformedError(f"{value!r} is too small; use at least {LIMIT_MIN} bytes")
    return found


def _policy_line(value: Any) -> str:
    policy.parse(policy.default_root((text(value),), "agent_t"), "agent_t")
    return str(value)


def _networks(value: Any) -> dict[str, Network]:
    networks = _read_networks(value)
    if len(networks) > limits.NETWORKS_MAX:
        raise MalformedError(f"{len(networks)} networks are too many; use {limits.NETWORKS_MAX}")
    found: dict[str, Network] = {}
    for name, network in networks.items():
        for other, known in found.items():
            what = None
            if known.socket == network.socket:
                what = f"socket {network.socket} is that of {other}"
            elif known.port == network.port:
                what = f"port {network.port} is that of {other}"
            elif limits.variable(other) == limits.variable(name):
                what = f"{limits.variable(name)} stands for {other} too: rename one of them"
            if what:
                raise MisplacedError({(name,): what})
        found[name] = network
    return found


def _projects(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedError(f"{value!r} is not [FIRST, COUNT]")
    first, several = map(count, value)
    if not first or not several or first + several > _PROJECT_MAX:
        raise MalformedError(f"{first} and {several} more are not numbers of projects")
    return first, several


#: what a setting is, and how it is read
_Count = Annotated[int, count]
_Size = Annotated[int, size]
_Seconds = Annotated[float, duration]
_Text = Annotated[str, text]
_Texts = tuple[str, ...]


def memory() -> int:
    """That of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one daemon. Sizes are bytes, times seconds."""

    depth: _Count = 8
    children: _Count = 1024
    messages: _Count = 1024
    tasks: _Count = 1024
    work_items: _Count = 1024
    waits: _Count = 1024
    asks: _Count = 16
    ended: _Count = 4096
    keep_ended: Annotated[float | None, optional(duration)] = None
    keep_sessions: Annotated[float | None, optional(duration)] = None
    fork_limit: Annotated[int, _fork_limit] = 64 << 10
    agents: _Count = 20_000
    control_max: _Size = 64 << 10
    frame_max: _Size = 1 << 20
    document_max: _Size = 16 << 20
    artifact_max: _Size = 1 << 30
    files: _Count = 10_000
    spaces: _Count = 64
    restart_max: _Count = 10
    log_max: _Size = 64 << 20
    events_max: _Size = 16 << 20
    owner_descriptors: Annotated[int | None, optional(count)] = None
    owner_connections: _Count = 1024
    owner_memory_max: _Size = 128 << 20
    owner_tasks: _Count = 1024
    owner_monitors: _Count = 4096
    owner_asks: _Count = 1000
    #: first and count of the projects that owners get (quotactl(2))
    disk_projects: Annotated[tuple[int, int] | None, _projects] = None
    owner_disk_max: _Size = 16 << 30
    #: of what a cell has in memory; without a size a fifth of the machine's, and half for all cells
    #: of an owner
    tmp_max: Annotated[int | None, optional(size)] = None
    tmp_files: _Count = 1 << 18
    owner_tmp_max: Annotated[int | None, optional(size)] = None
    owner_time: Annotated[float, share] = 0.5
    owner_log_lines: _Count = 50
    grace: _Seconds = 5.0
    watchdog: _Seconds = 20.0
    timeout: Annotated[float | None, optional(duration)] = None
    agent_user: _Text = "ctxfs"
    relay_user: _Text = "ctxfs-relay"
    allow_root_agents: Annotated[bool, flag] = False
    base_view: Annotated[_Texts, list_of(text)] = (
        *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"),
        # what says which packages are there
        *("/var/lib/dpkg", "/var/lib/rpm", "/var/lib/pacman"),
    )
    #: of root agents; over what an agent makes it has the rights of its creator without a line
    policy: Annotated[_Texts, list_of(_policy_line)] = (
        *("agent:* create", "tool:* execute", "model:* use"),
    )
    networks: Annotated[Mapping[str, Network], _networks] = field(default_factory=dict)
    nodes: Annotated[Mapping[str, Node], read_nodes] = field(default_factory=dict)
    placed: Annotated[Placed, read_placed] = field(default_factory=Placed)
    #: what this daemon calls itself at nodes
    node_name: Annotated[str, check_alias] = field(default_factory=host_alias)
    links: _Count = 256
    #: an hour, of one node without root
    connections: _Count = 60
    placed_keep: _Seconds = 7 * 86400.0
    link_user: _Text = "ctxfs-link"

    def header_of(self, network: str) -> str:
        """The first that relays say at a network, which may be gone."""
        return self.networks[network].header if network in self.networks else HEADERS[0]

    def cell_memory(self) -> int:
        """The most that one cell may have in memory."""
        return memory() // 5 if self.tmp_max is None else self.tmp_max

    def agent_ids(self) -> tuple[int, int]:
        """uid and gid of agents whose creator is root (passwd(5))."""
        return _ids(self.agent_user, FALLBACK_AGENT_ID)[:2]

    def relay_ids(self) -> _Ids:
        """Those of relays, where root starts them: nobody else's."""
        return _ids(self.relay_user, FALLBACK_RELAY_ID)

    def link_ids(self) -> _Ids:
        """Those of the commands that lead to nodes, where root starts them: nobody else's."""
        return _ids(self.link_user, FALLBACK_LINK_ID)


#: uid, gid and groups
_Ids = tuple[int, int, tuple[int, ...]]


def _ids(user: str, fallback: int) -> _Ids:
    """The ids of a user, else those that are its own if it is not there."""
    entry = find_user(user)
    if entry is None:
        return fallback, fallback, ()
    return entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(user, entry.pw_gid))


def load_config(path: Path, *, required: bool) -> Config:
    """The configuration in ``path``; the defaults if it need not exist.

    Raises ``StartupError`` with one sentence that names the file, the line and the key. Doubts are
    logged.
    """
    config, mistakes, doubts = read_config(path, required=required)
    if mistakes:
        raise StartupError(str(mistakes[0]))
    for doubt in doubts:
        log.warning("%s", doubt)
    return config


def read_config(path: Path, *, required: bool) -> tuple[Config, list[Mistake], list[Mistake]]:
    """The configuration in ``path``, the defaults if it cannot be read; every mistake; and what is
    only likely to be one."""
    config, marked = read_settings(path, Config, required=required)
    networks = [*config.networks, "default"]
    for number, name in enumerate(config.placed.networks):
        if name not in networks:
            what = f"no network {quote(name)}; {yaml_marks.nearest(name, networks)}"
            marked.mistake(("placed", "networks", number), what)
    return config, marked.in_order(), [marked.at(*each) for each in doubts(config.nodes)]
