"""The cell: an agent's cgroup and namespaces, made inside its parent's.

This module only plans: it turns an agent into the steps that lead from the
daemon into the cell (``Plan``). Privileges are dropped on the host side, then
an unprivileged bubblewrap builds the view; a child's steps first enter its
parent's namespaces, so that what the parent cannot see cannot be named.
"""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.agents import Agents
from runtime.authority import mounts
from runtime.errors import MalformedError, WrongStateError
from runtime.model import Agent
from runtime.names import parse_env_line, quote, split_command
from runtime.workspace import WORKSPACE, Worktree, binds

#: below the agent's own /tmp, which every view has: a directory of the host cannot be made
HOME: Final = "/tmp/home"
_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_NATIVE: Final = Path(__file__).parent / "native"
#: descriptors as the steps find them (monitor.c)
#: a message in most cases, so that it is written at once
_INPUT_SIZE: Final = 1 << 20
_REPORT_FD, _SPEC_FD, _VIEW_FD, _FIRST_EXTRA_FD = 3, 4, 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the daemon's things are, on the host and, below ``shared``, in every view."""

    mount: Path
    state: Path
    runtime: Path

    @property
    def shared(self) -> Path:
        """The directory that all sandboxes see at the same path."""
        return self.runtime / "root"

    @property
    def fuse(self) -> Path:
        """Where the filesystem itself is mounted; ``mount`` shows it on the host."""
        return self.shared / "ctx"

    @property
    def waits(self) -> Path:
        return self.shared / "wait"

    @property
    def keeper(self) -> Path:
        return self.program("keeper")

    def program(self, name: str) -> Path:
        """The daemon's own copy of a compiled program: an upgrade must not change it.

        On the mount of its own, because ``/run`` is often mounted noexec.
        """
        return self.shared / "bin" / name

    @property
    def stage(self) -> Path:
        return self.runtime / "stage"

    @property
    def records(self) -> Path:
        """What monitors write of runs. Not on the disk of the state: a full one must not
        lose an end. Of no use after a reboot, which ends every run."""
        return self.runtime / "record"

    @property
    def inputs(self) -> Path:
        """Standard input of what stays: FIFOs, which survive the daemon."""
        return self.runtime / "input"

    @property
    def lifeline(self) -> Path:
        return self.runtime / "lifeline"


def native(name: str) -> Path:
    """One of the compiled programs of the package."""
    return _NATIVE / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the monitor is to run; ``describe`` tells it for the log."""

    steps: tuple[str, ...]
    spec: bytes
    view: tuple[str, ...]
    stage: bytes = b""

    def describe(self) -> str:
        return " ".join(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to run inside a cell that is there.

    ``open_input`` gives its standard input, None means none; ``out``, ``log`` and
    ``reply`` are what monitor.c calls OUT, LOG and REPLY. ``leads`` says that the cell
    ends with it when no daemon is there to lead that end.
    """

    words: tuple[str, ...]
    cwd: str
    run: str
    out: Path
    env: tuple[tuple[str, str], ...] = ()
    log: Path | None = None
    reply: Path | None = None
    open_input: Callable[[], int] | None = None
    leads: bool = False


def _strings(items: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(item) + b"\0" for item in items)


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def environment(agents: Agents, agent: Agent, places: Places) -> dict[str, str]:
    """All that a program is started with, besides descriptors 0 to 2."""
    try:
        user = pwd.getpwuid(agent.uid).pw_name
    except KeyError:
        user = str(agent.uid)
    session = agents.session(agent.session)
    root = str(places.mount)
    values = {
        "CTX_ROOT": root,
        "CTX_AGENT": agent.name,
        "CTX_SELF": f"{root}/agent/{agent.name}.d",
        "CTX_SESSION": session.name if session is not None else "",
        "CTX_RUN": agent.run,
        "CTX_HOME": f"{root}/home/{agent.owner}",
        "CTX_PATH": ":".join(_lines(agent.path)) or f"{root}/tool",
        "CTX_MODEL": agent.model,
        "HOME": HOME,
        "PATH": f"{_SYSTEM_PATH}:{root}/bin",
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    values.update(parse_env_line(line) for line in _lines(agent.env))
    return values


def workspace(agents: Agents, agent: Agent) -> str | None:
    """The workspace in force: the agent's own, or the nearest that it inherits."""
    for node in (agent, *reversed(agents.ancestors(agent))):
        if node.workspace.startswith("explicit_root:"):
            return node.workspace.removeprefix("explicit_root:")
        if node.workspace == "worktree":
            return WORKSPACE
    return None


def working_directory(agents: Agents, agent: Agent) -> str:
    """``cwd``, else the workspace in force, else the home.

    A detached child inherits mounts, but no workspace.
    """
    return agent.cwd or workspace(agents, agent) or HOME


def program(agent: Agent) -> list[str]:
    """The words of ``exec``; ``MalformedError`` if there are none."""
    words = split_command(agent.exec)
    if not words:
        raise MalformedError("exec is empty: write the program and its arguments there first")
    return words


def _base_view(agents: Agents, agent: Agent, places: Places) -> Iterator[str]:
    """Arguments for a root agent's base view, as configured."""
    source = str(places.stage / "0") if agent.root else "/"  # staged first: _own_mounts
    if agent.iso == "shared":
        yield from ("--bind", source, "/")
        yield from ("--ro-bind-try", "/sys/fs/cgroup", "/sys/fs/cgroup")
        yield from ("--tmpfs", str(places.state), "--tmpfs", str(places.runtime))
        return
    if agent.root:
        yield from ("--bind", source, "/")
        return
    for entry in agents.config.base_view:
        path = Path(entry)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), entry)
        else:
            yield from ("--ro-bind-try", entry, entry)
    yield from ("--dir", "/run", "--dir", "/var", "--symlink", "../run", "/var/run")
    yield from ("--tmpfs", "/var/tmp")


def _own_mounts(agents: Agents, agent: Agent) -> list[mounts.Mount]:
    """What the agent's own fields bind, in order: root, workspace, table."""
    found = []
    if agent.root:
        found.append(mounts.Mount(agent.root, "/", "rw"))
    return [*found, *_workspace_mounts(agent), *mounts.parse(agent.mount)]


def _workspace_mounts(agent: Agent) -> list[mounts.Mount]:
    """What its own workspace binds; nothing if that is inherited.

    ``WrongStateError`` if its worktree has not been made.
    """
    if agent.workspace == "worktree":
        if agent.worktree is None:
            raise WrongStateError(f"the worktree of {quote(agent.name)} has not been made")
        return binds(Worktree.load(agent.worktree))
    if agent.workspace.startswith("explicit_root:"):
        path = agent.workspace.removeprefix("explicit_root:")
        return [mounts.Mount(path, path, "rw")]
    return []


def hidden_paths(agents: Agents, agent: Agent) -> list[tuple[str, str, bool]]:
    """For each ``hide`` line its target, the path that will be there, and whether an
    earlier line gives it: before the view is made, its source is where to look."""
    found = []
    given: list[mounts.Mount] = []
    for mount in _own_mounts(agents, agent):
        if mount.mode != "hide":
            given.append(mount)
            continue
        path, is_given = mount.target, False
        for earlier in given:
            base = earlier.target.rstrip("/")
            if mount.target == earlier.target or mount.target.startswith(base + "/"):
                path, is_given = earlier.source.rstrip("/") + mount.target[len(base) :], True
        found.append((mount.target, path, is_given))
    return found


def _hidden(path: str, kind: str) -> Iterator[str]:
    if kind == "directory":
        yield from ("--perms", "0000", "--tmpfs", path, "--remount-ro", path)
    elif kind == "file":
        yield from ("--ro-bind", "/dev/null", path)


def _exec_rules(own: list[mounts.Mount]) -> list[str]:
    """The targets that the keeper is told about (keeper.c), in order.

    ``noexec`` is of the tree that a line mounts, not of what later lines mount below it.
    """
    forbidden: list[str] = []
    rules = []
    for number, mount in enumerate(own):
        covered = _inside(mount.target, (later.target for later in own[number + 1 :]))
        if covered or mount.mode == "hide":
            continue
        if "noexec" in mount.options:
            forbidden.append(mount.target)
            rules.append(f"x{mount.target}")
        elif _inside(mount.target, forbidden):
            rules.append(f"k{mount.target}")
    return rules


def _inside(path: str, directories: Iterable[str]) -> bool:
    return any(path == d or path.startswith(d + "/") for d in directories)


def network_allowed(agents: Agents, agent: Agent) -> bool:
    """Whether the effective policy opens the host's network."""
    return agents.authority.allows(agent, "network", "default", "connect")


def _network(agents: Agents, agent: Agent) -> str:
    """NETWORK of enter.c: who has a network has the host's, be it its parent's too or handed
    on by one without; to join that needs a right that an ordinary user's daemon lacks."""
    return "host" if network_allowed(agents, agent) else "cell"


def plan(agents: Agents, agent: Agent, places: Places, *, hidden: dict[str, str]) -> Plan:
    """The steps into the agent's cell.

    ``hidden`` tells for each target of a ``hide`` line what is there:
    ``directory``, ``file`` or ``none``.
    """
    parent = agents.parent_of(agent)
    nested = parent is not None and agent.owned
    fresh = ["/tmp"]
    own = _own_mounts(agents, agent)
    # what the parent had below the directories that are fresh for everyone
    kept = list(_kept_mounts(agents, agent, fresh))
    staged = [] if nested else [*kept, *(m for m in own if m.mode != "hide")]
    if parent is not None and not nested and not agent.root:
        staged.insert(0, mounts.Mount("/", "/", "rw"))
    view: list[str] = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    view += ["--unshare-cgroup-try", "--as-pid-1", "--new-session"]
    # not its parent's either, whose loopback it would share
    if not network_allowed(agents, agent):
        view.append("--unshare-net")

    if nested:
        view += ["--bind", agent.root or "/", "/"]
    elif parent is not None:
        view += ["--bind", str(places.stage / str(len(kept) if agent.root else 0)), "/"]
    else:
        view += list(_base_view(agents, agent, places))
    view += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    view += ["--perms", "0700", "--dir", HOME]

    def source_of(mount: mounts.Mount) -> str:
        return mount.source if nested else str(places.stage / str(staged.index(mount)))

    for mount in kept:
        view += ["--bind-try", source_of(mount), mount.target]
    view += ["--bind", str(places.shared), str(places.shared)]
    if agents.privilege.rootless:
        # What is there belongs to the agents' own uid: not its to change. The
        # filesystem, mounted below, is another mount and stays writable.
        view += ["--remount-ro", str(places.shared)]
    bare = parent is None or agent.root or _inside(str(places.mount), fresh)
    if bare and agent.iso != "shared":
        view += ["--symlink", str(places.fuse), str(places.mount)]
    for mount in own:
        if mount.target == "/":
            continue
        if mount.mode == "hide":
            view += list(_hidden(mount.target, hidden.get(mount.target, "none")))
            continue
        option = "--ro-bind" if mount.mode == "ro" else "--bind"
        view += [option, source_of(mount), mount.target]

    # staged mounts have it already; bubblewrap makes the others, and has no option for it
    rules = _exec_rules(own) if nested else []
    if rules:
        view += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    variables = environment(agents, agent, places)
    spec = [working_directory(agents, agent), str(len(variables))]
    spec += [f"{key}={value}" for key, value in variables.items()]
    spec += [str(len(rules)), *rules, *(() if agent.holds_cell else program(agent))]

    grace = str(int(agents.grace(agent) * 1000))
    steps = ["bwrap", "--args", str(_VIEW_FD), "--", str(places.keeper)]
    steps += [str(_SPEC_FD), str(_REPORT_FD), grace]
    privilege = agents.privilege
    if not nested:
        steps = [*privilege.drop(agent.uid, agent.gid, agent.groups), *steps]
    else:
        ids = [str(agent.uid), str(agent.gid), privilege.entering_groups(agent.groups)]
        ids.append(_network(agents, agent))
        steps = [str(places.program("enter")), str(_FIRST_EXTRA_FD), *ids, "--", *steps]
    stage = b""
    if staged:
        # after the specification comes the parent's cell, if there is a parent
        cell = str(_FIRST_EXTRA_FD + 1) if parent is not None else "-"
        steps = [str(places.program("stage")), str(_FIRST_EXTRA_FD), cell, "--", *steps]
        stage = _stage(agent, places, staged, optional=kept)
    return Plan(steps=tuple(steps), spec=_strings(spec), view=tuple(view), stage=stage)


def plan_inside(agents: Agents, agent: Agent, places: Places, command: Command) -> Plan:
    """The steps of a program that enters the agent's cell."""
    variables = {**environment(agents, agent, places), **dict(command.env)}
    variables["CTX_RUN"] = command.run
    spec = [command.cwd, str(len(variables))]
    spec += [f"{key}={value}" for key, value in variables.items()]
    spec += ["0", *command.words]
    groups = agents.privilege.entering_groups(agent.groups)
    # after the specification and an empty view comes the cell
    steps = [str(places.program("enter")), str(_FIRST_EXTRA_FD)]
    steps += [str(agent.uid), str(agent.gid), groups, _network(agents, agent), "--"]
    steps += [str(places.keeper), str(_SPEC_FD), str(_REPORT_FD), "-"]
    return Plan(steps=tuple(steps), spec=_strings(spec), view=())


def _kept_mounts(agents: Agents, agent: Agent, fresh: list[str]) -> Iterator[mounts.Mount]:
    """Mounts and workspaces of its parent below directories that a child has afresh."""
    parent = agents.parent_of(agent)
    if parent is None:
        return
    for mount in agents.authority.effective_mounts(parent):
        if mount.mode != "hide" and _inside(mount.target, fresh):
            yield mounts.Mount(mount.target, mount.target, mount.mode, mount.options)
    for owner in agents.ancestors(agent):
        for mount in _workspace_mounts(owner):
            if _inside(mount.target, fresh):
                yield mounts.Mount(mount.target, mount.target, mount.mode)


def _stage(
    agent: Agent,
    places: Places,
    staged: list[mounts.Mount],
    *,
    optional: list[mounts.Mount],
) -> bytes:
    uid, gid, groups = agent.creator_uid, agent.creator_gid, agent.creator_groups
    if agent.parent is not None:
        uid, gid, groups = agent.uid, agent.gid, agent.groups
    items = [str(places.stage), str(uid), str(gid), ",".join(str(g) for g in groups)]
    items.append(f"{places.state}:{places.runtime}")
    for mount in staged:
        letters = "" if "bind" in mount.options else "r"
        letters += "t" if mount in optional else ""
        letters += "".join(
            letter
            for option, letter in (("nosuid", "s"), ("nodev", "d"), ("noexec", "x"))
            if option in mount.options
        )
        items += [letters or "-", mount.source]
    return _strings(items)


def _memory_file(name: str, data: bytes) -> int:
    """A descriptor to read ``data`` from (memfd_create(2)): never on a disk or command line."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def sealed_file(name: str, data: bytes) -> int:
    """The same, changed by nobody who opens it anew (F_ADD_SEALS in fcntl(2))."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    return fd


def input_path(places: Places, agent: Agent, name: str) -> Path:
    """The FIFO that is the standard input of a resident run, or of a task; named like
    its record."""
    return places.inputs / f"{agent.incarnation}-{name}"


def remove_input(places: Places, record: Path) -> None:
    """Of a run, or task, whose record this is: nobody reads it any more."""
    path = places.inputs / record.name
    for each in (path, written_path(path)):
        each.unlink(missing_ok=True)


def written_path(path: Path) -> Path:
    """Beside a FIFO, what is known to be in it (``runtime.residents``)."""
    return path.with_name(f"{path.name}~")


def open_input(places: Places, agent: Agent, name: str) -> int:
    """A new one, open for what reads it: also for writing, so that it never sees an end,
    and what is in it stays, whatever becomes of the daemon (fifo(7))."""
    path = input_path(places, agent, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.geteuid() == 0:
        os.fchown(fd, agent.uid, -1)  # /dev/stdin opens it anew
    with suppress(OSError):  # more than a user may have in pipes (pipe(7))
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _INPUT_SIZE)
    return fd


@contextmanager
def passed_files(prepared: Plan, parent_cell: int | None) -> Iterator[list[int]]:
    """The descriptors that the steps find from 4 on, in order.

    ``parent_cell`` is a pidfd of the parent's keeper.
    """
    opened = [_memory_file("spec", prepared.spec), _memory_file("view", _strings(prepared.view))]
    if prepared.stage:
        opened.append(_memory_file("stage", prepared.stage))
    try:
        yield opened if parent_cell is None else [*opened, parent_cell]
    finally:
        for fd in opened:
            os.close(fd)
