"""The configuration: one YAML map, every key with a built-in default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from runtime.errors import MalformedError, StartupError
from runtime.kernel.users import find_user
from runtime.texts import limits, policy, yaml_marks
from runtime.texts.context import LIMIT_MIN
from runtime.texts.names import check_absolute, check_name, parse_duration, parse_size, quote
from runtime.texts.yaml_marks import Mistake

FALLBACK_AGENT_ID: Final = 61000
FALLBACK_RELAY_ID: Final = 61001
#: of a Unix socket (unix(7)), in bytes
_SOCKET_PATH_MAX: Final = 107
#: of quotas (quotactl(2))
_PROJECT_MAX: Final = (1 << 32) - 1
_PORTS: Final = range(1024, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A Unix socket of the operator's, and the port at which cells have it on their loopback."""

    socket: str
    port: int


def _size(value: Any) -> int:
    return parse_size(str(value))


def _fork_limit(value: Any) -> int:
    size = _size(value)
    if size < LIMIT_MIN:
        raise MalformedError(f"{value!r} is too small; use at least {LIMIT_MIN} bytes")
    return size


def _duration(value: Any) -> float:
    return parse_duration(str(value))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MalformedError(f"{value!r} is not a number")
    return value


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reads a setting that may also be none."""
    return lambda value: None if value is None else read(value)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise MalformedError(f"{value!r} is not a share; use a number up to 1, such as 0.5")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"{value!r} is not a string")
    return value


#: words that YAML 1.1 had for the two values
_FLAGS: Final = {"yes": True, "on": True, "no": False, "off": False}


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise MalformedError(f"{value!r} is not a boolean; use true or false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise MalformedError(f"{value!r} is not a list")
    return tuple(_text(item) for item in value)


def _policy(value: Any) -> tuple[str, ...]:
    lines = _texts(value)
    policy.parse(policy.default_root(lines, "agent_t"), "agent_t")
    return lines


def _networks(value: Any) -> dict[str, Network]:
    if not isinstance(value, dict):
        raise MalformedError(f"{value!r} is not a map of names to {{socket: PATH, port: NUMBER}}")
    if len(value) > limits.NETWORKS_MAX:
        raise MalformedError(f"{len(value)} networks are too many; use {limits.NETWORKS_MAX}")
    found: dict[str, Network] = {}
    for name, each in value.items():
        check_name(_text(name))
        if name == "default":
            raise MalformedError('"default" is the network of the host; use another name')
        network = _network(name, each)
        for other, known in found.items():
            if known.port == network.port:
                raise MalformedError(f"{name} has port {network.port}, which is that of {other}")
            if limits.variable(other) == limits.variable(name):
                what = f"{limits.variable(name)} stands for {other} and for {name}"
                raise MalformedError(f"{what}: rename one of them")
        found[name] = network
    return found


def _network(name: str, value: Any) -> Network:
    if not isinstance(value, dict) or set(value) != {"socket", "port"}:
        raise MalformedError(f"{name} is not {{socket: PATH, port: NUMBER}}")
    path, port = check_absolute(_text(value["socket"]), f"{name}: socket"), _count(value["port"])
    if len(path.encode()) > _SOCKET_PATH_MAX:
        what = f"{name}: socket {quote(path)} is longer than {_SOCKET_PATH_MAX} bytes"
        raise MalformedError(f"{what}, the most for a Unix socket")
    if port not in _PORTS:
        raise MalformedError(f"{name}: port {port} is not one from 1024 to 65535")
    return Network(socket=path, port=port)


def _projects(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedError(f"{value!r} is not [FIRST, COUNT]")
    first, count = map(_count, value)
    if not first or not count or first + count > _PROJECT_MAX:
        raise MalformedError(f"{first} and {count} more are not numbers of projects")
    return first, count


#: what a setting is, and how it is read
_Count = Annotated[int, _count]
_Size = Annotated[int, _size]
_Seconds = Annotated[float, _duration]
_Text = Annotated[str, _text]
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
    keep_ended: Annotated[float | None, _optional(_duration)] = None
    keep_sessions: Annotated[float | None, _optional(_duration)] = None
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
    owner_descriptors: Annotated[int | None, _optional(_count)] = None
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
    tmp_max: Annotated[int | None, _optional(_size)] = None
    tmp_files: _Count = 1 << 18
    owner_tmp_max: Annotated[int | None, _optional(_size)] = None
    owner_time: Annotated[float, _share] = 0.5
    owner_log_lines: _Count = 50
    grace: _Seconds = 5.0
    watchdog: _Seconds = 20.0
    timeout: Annotated[float | None, _optional(_duration)] = None
    agent_user: _Text = "ctxfs"
    relay_user: _Text = "ctxfs-relay"
    allow_root_agents: Annotated[bool, _flag] = False
    base_view: Annotated[_Texts, _texts] = (
        *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"),
        # what says which packages are there
        *("/var/lib/dpkg", "/var/lib/rpm", "/var/lib/pacman"),
    )
    #: of root agents; over what an agent makes it has the rights of its creator without a line
    policy: Annotated[_Texts, _policy] = ("agent:* create", "tool:* execute", "model:* use")
    networks: Annotated[Mapping[str, Network], _networks] = field(default_factory=dict)

    def cell_memory(self) -> int:
        """The most that one cell may have in memory."""
        return memory() // 5 if self.tmp_max is None else self.tmp_max

    def agent_ids(self) -> tuple[int, int]:
        """uid and gid of agents whose creator is root (passwd(5))."""
        entry = find_user(self.agent_user)
        if entry is None:
            return FALLBACK_AGENT_ID, FALLBACK_AGENT_ID
        return entry.pw_uid, entry.pw_gid

    def relay_ids(self) -> tuple[int, int, tuple[int, ...]]:
        """uid, gid and groups of relays, where root starts them: nobody else's."""
        entry = find_user(self.relay_user)
        if entry is None:
            return FALLBACK_RELAY_ID, FALLBACK_RELAY_ID, ()
        return entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))


#: how each setting is read
_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(Config, include_extras=True).items()
}


def load_config(path: Path, *, required: bool) -> Config:
    """The configuration in ``path``; the defaults if it need not exist.

    Raises ``StartupError`` with one sentence that names the file, the line and the key.
    """
    config, mistakes = read_config(path, required=required)
    if mistakes:
        raise StartupError(str(mistakes[0]))
    return config


def read_config(path: Path, *, required: bool) -> tuple[Config, list[Mistake]]:
    """The configuration in ``path``, and every mistake; the settings that are wrong have their
    defaults."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        wrong = [Mistake(str(path), 0, "", "no such configuration file")]
        return Config(), wrong if required else []
    except OSError as error:
        return Config(), [Mistake(str(path), 0, "", error.strerror or str(error))]
    except UnicodeError:
        return Config(), [Mistake(str(path), 0, "", "not UTF-8")]
    marked = yaml_marks.read(str(path), text)
    parsed: dict[str, Any] = {}
    for key, value in (yaml_marks.is_map(marked, "settings") or {}).items():
        if key not in _PARSERS:
            known = yaml_marks.nearest(key, _PARSERS)
            marked.mistake((key,), f"unknown setting; {known}")
        else:
            try:
                parsed[key] = _PARSERS[key](value)
            except MalformedError as error:
                marked.mistake((key,), error.sentence)
    return Config(**parsed), marked.in_order()
