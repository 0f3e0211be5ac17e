"""The cell: an agent's cgroup and namespaces, made inside its parent's.

This module only plans: it turns an agent into the steps that lead from the
daemon into the cell (``Plan``). A program of our own drops privileges, then
builds the view (view.c); a child's steps first enter its parent's namespaces,
so that what the parent cannot see cannot be named. Whatever runs in there is
executed by descriptor: what lies at a path of the view is the parent's choice.

Nothing from the view runs in place of our programs, and no loader or library of it with more
rights than the agent's. Agents cannot read the files of ``view`` and ``keeper``, so that they
cannot trace the resulting processes. The kernel's structure, not a check that could be forgotten,
keeps a child within its parent: what the parent cannot see has no name in the child, read-only
stays read-only, no network stays no network, and when the parent's PID 1 exits, the kernel kills
the child's.

Parent and child do not share the root itself. It is a small filesystem made by the runtime, which
its agent may change, including the links through which programs start (``/lib64``). A child gets a
new root like its parent's, with the same mounts. A ``root`` that somebody configured is used
unchanged.

A view has the mounts that existed when it was built. A later mount would appear as on the host,
writable and with devices, even below a read-only path. There are two exceptions: the shared
directory, where the filesystem may be mounted again, and the host's tree with ``iso=shared``.

A detached child must outlive the parent's PID 1, so its view is staged: ``stage`` joins only the
mount namespace of the parent's keeper, clones there what the child is to have, and returns. From
then on the child starts like a root agent. The parent's policy and mount table of that moment are
recorded as the child's bound, since the parent may be gone later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from runtime.agents.parts import Agents
from runtime.agents.workspace import REPOSITORY, WORKSPACE, Worktree, binds
from runtime.cell import networks, prepared, trees
from runtime.cell.prepared import HOME, environment, inside
from runtime.errors import MalformedError, WrongStateError
from runtime.ids import RunId
from runtime.kernel import cgroups, linux, orders
from runtime.records.model import Agent
from runtime.records.spaces import tree_of
from runtime.texts import mounts
from runtime.texts.names import escape, quote, split_command

_NATIVE: Final = Path(__file__).parents[1] / "native"
#: descriptors as the steps find them (monitor.c); from ``_SPEC_FD`` on, those of ``Plan.passed``
_REPORT_FD, _SPEC_FD = 3, 4


class Places:
    """Where the daemon's things are, on the host and, below ``shared``, in every view."""

    def __init__(self, *, mount: Path, state: Path, runtime: Path) -> None:
        self.mount = mount
        self.state = state
        self.runtime = runtime
        #: the directory that all sandboxes see at the same path
        self.shared = shared = runtime / "root"
        #: where the filesystem itself is mounted; ``mount`` shows it on the host
        self.fuse = shared / "ctx"
        self.waits = shared / "wait"
        #: where FIFOs of ``wait`` go at the end, on the same filesystem
        self.released = shared / "released"
        #: the daemon's own copies of the compiled programs: an upgrade must not change them;
        #: on the mount of its own, because ``/run`` is often mounted noexec
        self.programs = shared / "bin"
        #: an empty file, which each cell's own configuration of git covers
        self.git = shared / "gitconfig"
        #: the durable trees, as they lie in the state
        self.trees = state / "tree"
        #: where all find them; not below ``shared``: what is mounted there appears in every cell
        #: that lives
        self.tree = runtime / "tree"
        #: the daemon's own directories, which no agent is given
        self.own = state, runtime
        self.stage = runtime / "stage"
        #: what monitors write of runs; not on the disk of the state: a full one must not lose an
        #: end. Of no use after a reboot, which ends every run
        self.records = runtime / "record"
        #: where monitors are spoken to, by the names of their records (inlet.h)
        self.monitors = runtime / "monitor"
        #: FIFOs that version 0.2 made (``runtime.cell.oldinputs``)
        self.inputs = runtime / "input"
        #: what is shared with relays (``runtime.cell.networks``)
        self.networks = runtime / "net"
        #: what is shared with monitors (``runtime.kernel.rooms``)
        self.rooms = runtime / "room"
        #: what is shared with monitors, too (``runtime.cell.leases``)
        self.leases = runtime / "lease"
        #: what of it is nobody else's
        self.hidden = (
            *(self.records, self.monitors, self.networks, self.rooms, self.leases),
            self.released,
        )
        #: the daemon's socket outside of the mount, where no lock of an inode is in the way
        self.socket = runtime / "ctxd.sock"
        self.lifeline = runtime / "lifeline"

    @cached_property
    def real_tree(self) -> Path:
        """``tree`` without a link, which is there without root."""
        return self.tree.resolve()

    def program(self, name: str) -> Path:
        return self.programs / name


def native(name: str) -> Path:
    """One of the compiled programs of the package."""
    return _NATIVE / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that the monitor is to run; ``describe`` tells them for the log.

    ``steps`` is the first program with its arguments, the next with its own among them, and so on;
    ``spec``, ``view``, ``stage`` and ``lend`` are the orders that keeper, view, stage and lend
    find in files. ``networks`` are those that the keeper listens for, and hands out at a socket.
    ``view`` are operations of view.c. ``passed`` names what the steps find as descriptors, in
    their order: these orders, the ``cell`` that they enter, and programs that are executed after
    they have left the host's view.
    """

    steps: tuple[str, ...]
    spec: bytes
    view: tuple[tuple[str, ...], ...] = ()
    stage: bytes = b""
    lend: bytes = b""
    networks: Mapping[str, int] = field(default_factory=dict)
    passed: tuple[str, ...] = ("spec", "keeper", "cell")

    def describe(self) -> str:
        return " ".join(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to run inside a cell that is there.

    ``open_input`` gives its standard input, None means none; what is ``fed`` has what its
    monitor is handed (``runtime.cell.inlet``) instead, and with a ``terminal``, of so many columns
    and rows, that is input and output. ``out``, ``log`` and ``reply`` are what
    monitor.c calls OUT, LOG and REPLY; of OUT ``most`` bytes are kept in one file, or as much as of
    any output if that is 0. ``leads`` says that the cell ends with it when no daemon is there to
    lead that end.
    """

    words: tuple[str, ...]
    cwd: str
    run: RunId
    out: Path
    env: tuple[tuple[str, str], ...] = ()
    log: Path | None = None
    reply: Path | None = None
    open_input: Callable[[], int] | None = None
    fed: bool = False
    terminal: tuple[int, int] | None = None
    leads: bool = False
    most: int = 0


def workspace(agents: Agents, agent: Agent) -> str | None:
    """The workspace in force: the agent's own, or the nearest that it inherits."""
    for node in (agent, *reversed(agents.registry.ancestors(agent))):
        if node.workspace.startswith(mounts.EXPLICIT_ROOT):
            return node.workspace.removeprefix(mounts.EXPLICIT_ROOT)
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


def bind(source: str, target: str, options: str = "", identity: str = "-") -> tuple[str, ...]:
    """A bind of ``view`` (view.c). ``identity`` is the same as in ``mounts.Mount``."""
    return ("bind", options or "-", identity, source, target)


def _base_view(
    agents: Agents, agent: Agent, places: Places, mode: str
) -> Iterator[tuple[str, ...]]:
    """Operations for a root agent's base view, as configured, or of its ``root`` in a mode."""
    source = str(places.stage / "0") if agent.root else "/"  # staged first: _own_mounts
    if agent.iso == "shared":
        # with the mount of the filesystem, which may be another one later
        yield bind(source, "/", "s")
        # who lists a cgroup holds, since Linux 6.15, the lock with which the daemon makes others
        yield from (("hide", point) for point in cgroups.mount_points())
        yield from (("tmpfs", "0755", str(path)) for path in places.own)
        return
    if agent.root:
        yield bind(source, "/", "r" if mode == "ro" else "")
        return
    for entry in agents.settings.config.base_view:
        try:
            yield ("symlink", os.readlink(entry), entry)
        except OSError:  # it is no link, or not there
            yield bind(entry, entry, "rt")
    own = [str(path) for path in (*places.own, places.mount)]
    network = network_allowed(agents, agent)
    yield from prepared.led_to(agents.settings.config.base_view, own, network=network)
    yield from prepared.users(agents, agent)
    yield from (("dir", "0755", "/run"), ("dir", "0755", "/var"))
    yield from (("symlink", "../run", "/var/run"), ("tmpfs", "0755", "/var/tmp"))


def has_own_root(agents: Agents, agent: Agent) -> bool:
    """Whether the root of its view is of the runtime's making, and not the host's, nor one
    that somebody named.

    Those who live in it may change it, and with it the links by which programs are started.
    So no two views share such a root: a child's is made anew, like its parent's.
    """
    family = [*agents.registry.ancestors(agent), agent]
    if any(each.root or each.iso == "shared" for each in family):
        return False
    return family[0].parent is None or family[0].bound_root


def _own_mounts(agents: Agents, agent: Agent) -> list[mounts.Mount]:
    """The mounts that the agent's own fields bind, in order: root, workspace, table."""
    table = agents.authority.narrowed_mounts(agent)
    return [*_root_mount(agents, agent), *_workspace_mounts(agents, agent, agent), *table]


def _root_mount(agents: Agents, agent: Agent) -> list[mounts.Mount]:
    """Its ``root``, as it was when it was written."""
    return [_found(agents, agent, "root", agent.root, "/")] if agent.root else []


def _found(agents: Agents, agent: Agent, name: str, path: str, target: str) -> mounts.Mount:
    """The path that a file names, as it was when it was written."""
    sources = mounts.Sources.load(agent.sources.get(name))
    mode = agents.authority.path_mode(agent, sources.path(path))
    return sources.resolve(mounts.Mount(path, target, mode), linux.boot_id())


def _workspace_mounts(agents: Agents, owner: Agent, agent: Agent) -> list[mounts.Mount]:
    """The mounts of a workspace, of the agent that it is from, who may be the same; none if that
    is inherited.

    Of what lies at the own place of a durable tree, an agent has what the tree gives it, and the
    worktree. ``WrongStateError`` if its worktree has not been made.
    """
    if owner.workspace == "worktree" and not owner.is_guest:
        if owner.worktree is None:
            raise WrongStateError(f"the worktree of {quote(owner.name)} does not exist yet")
        found = binds(Worktree.load(owner.worktree))
        return [mount for mount in found if not _pins_tree(agents, agent, mount)]
    if owner.workspace.startswith(mounts.EXPLICIT_ROOT):
        path = owner.workspace.removeprefix(mounts.EXPLICIT_ROOT)
        mount = _found(agents, owner, "workspace", path, path)
        return [] if agents.authority.places.tree(mount.source) else [mount]
    return []


def _pins_tree(agents: Agents, agent: Agent, mount: mounts.Mount) -> bool:
    """Whether a mount that only keeps a directory from being renamed (``workspace.binds``) would
    give more of a durable tree than the agent has. Where it has it read-only, nothing is renamed.
    """
    places, path = agents.authority.places, mount.target
    if mount.source != path or mount.mode != "rw":
        return False
    tree = places.tree(path)
    if tree:
        return path == places.place(tree) or agent.trees.get(tree) != "rw"
    above = mounts.Index(now for _, now in agents.authority.inherited_mounts(agent))
    cover = above.covering(path)
    less = cover is not None and cover.of != "" and cover.mode != "rw"
    return less or inside(places.directory, [path]) or inside(path, [places.directory])


def _carried(agents: Agents, agent: Agent, mount: mounts.Mount) -> Iterator[mounts.Mount]:
    """The durable trees that come along with a directory of the parent's view, and are less for
    this agent."""
    if mount.mode == "hide" or mount.tree or agent.parent is None:
        return
    target = mount.target.rstrip("/")
    table = agents.authority.inherited_mounts(agent)
    above = mounts.Index(had for had, _ in table)
    for had, now in table:
        below = _below(had.target, mount.source)
        if below and now.mode != had.mode and above.covering(had.target) is had:
            yield mounts.Mount(had.target, target + below, now.mode, now.options)
    trees = agents.authority.places.directory
    below = _below(trees, mount.source)
    if below and target + below != trees:
        yield mounts.Mount("-", target + below, "hide")


def _below(path: str, directory: str) -> str:
    """The rest of a path that is in a directory; empty if it is not, or is the directory."""
    directory = directory.rstrip("/")
    return path.removeprefix(directory) if path.startswith(directory + "/") else ""


def network_allowed(agents: Agents, agent: Agent) -> bool:
    """Whether the effective policy opens the host's network."""
    return agents.authority.allows(agent, "network", "default", "connect")


def _network(agents: Agents, agent: Agent) -> str:
    """NETWORK of enter.c: who has a network has the host's, be it its parent's too or handed
    on by one without; to join that needs a right that an ordinary user's daemon lacks."""
    return "host" if network_allowed(agents, agent) else "cell"


@dataclass(frozen=True, slots=True)
class _Lent:
    """A durable tree that lend.c hands in: its path below the directory of all trees, and how
    reasons call it."""

    path: str
    target: str
    name: str
    mode: str = "rw"
    options: tuple[str, ...] = ()

    def order(self) -> tuple[str, str, str]:
        letters = ("r" if self.mode == "ro" else "") + ("x" if "noexec" in self.options else "")
        return letters or "-", self.path, self.name


def plan(
    agents: Agents,
    agent: Agent,
    places: Places,
    terminal: tuple[int, int] | None = None,
    command: Command | None = None,
) -> Plan:
    """The steps into the agent's cell; ``CtxError`` if it cannot have one as it is. With a
    ``command`` into one that has its view and no network, for that alone."""
    parent = agents.registry.parent_of(agent)
    nested = parent is not None and agent.owned
    trees_at = agents.authority.places
    #: what no view has from its parent's
    fresh = ["/tmp", trees_at.directory]
    own_root = parent is not None and has_own_root(agents, agent)
    anew = ["/var/tmp"] if own_root else []
    if own_root and not network_allowed(agents, agent):
        anew.append("/run")  # where its parent may have services of a network (prepared.py)
    fresh += anew
    whole = mounts.Mount("/", "/", "rw")
    fields = _own_mounts(agents, agent)
    trees.check(agents.spaces, [mount for mount in fields if mount.tree])
    # what the parent had below the directories that are fresh for everyone, and what comes along
    # with the rest of its view, or with a part of that
    kept = list(_kept_mounts(agents, agent, fresh))
    if not agent.root:
        kept += _carried(agents, agent, whole)
    carried = {mount: list(_carried(agents, agent, mount)) for mount in fields}
    own = [each for mount in fields for each in (mount, *carried[mount])]
    optional = frozenset([*kept, *(each for found in carried.values() for each in found)])
    placed = [
        _Lent(tree_of(tree), trees_at.place(tree), tree, mode) for tree, mode in agent.trees.items()
    ]
    home = _Lent(agents.sessions.home(agent), HOME, "homedir")
    lines = {
        mount: _Lent(tree_of(mount.of), mount.target, mount.source, mount.mode, mount.options)
        for mount in own
        if mount.tree
    }
    own_trees = [home] if agent.homedir == "durable" else []
    if agent.is_guest and agent.workspace == "worktree":
        tree = agents.sessions.worktree(agent)
        own_trees.append(_Lent(f"{tree}/work", WORKSPACE, "workspace"))
        own_trees.append(_Lent(f"{tree}/git", REPOSITORY, "workspace"))
    lent = [*placed, *lines.values(), *own_trees]
    staged = [] if nested else [m for m in (*kept, *own) if m.mode != "hide" and not m.tree]
    if parent is not None and not nested and not agent.root:
        staged.insert(0, whole)
    places_of: dict[mounts.Mount, int] = {}
    for number, mount in enumerate(staged):
        places_of.setdefault(mount, number)
    config = agents.settings.config
    view: list[tuple[str, ...]] = [
        ("memory", str(config.cell_memory()), str(config.tmp_files))
    ]
    # not its parent's either, whose loopback it would share
    if not network_allowed(agents, agent):
        view.append(("network",))

    def source_of(mount: mounts.Mount) -> str:
        return mount.source if nested else str(places.stage / str(places_of[mount]))

    root = own[0] if agent.root else whole
    if own_root:
        view += [("root", source_of(root)), *(("tmpfs", "0755", path) for path in anew)]
    elif parent is not None:
        options = ("" if agent.root else "s") + ("r" if root.mode == "ro" else "")
        view.append(bind(source_of(root), "/", options, root.identity if nested else "-"))
    else:
        view += _base_view(agents, agent, places, root.mode)
    view += [("proc", "/proc"), ("dev", "/dev"), ("tmpfs", "0755", "/tmp"), ("dir", "0700", HOME)]
    having = networks.wanted(agents, agent) if command is None else {}
    passed = ["spec", *(["networks"] if having else []), "keeper", "view"]
    # what builds the view, or what is staged
    passed += ["builder"] if nested else ["stage"] if staged else []
    passed += ["cell"] if parent is not None else []
    passed += ["lend"] if lent else []
    at = {name: _SPEC_FD + number for number, name in enumerate(passed)}

    def lend(tree: _Lent) -> tuple[str, ...]:
        """The operation that attaches a tree; all trees come after what is passed."""
        number = next(n for n, each in enumerate(lent) if each is tree)
        return ("lent", str(_SPEC_FD + len(passed) + number), tree.target)

    def put(mount: mounts.Mount) -> tuple[str, ...]:
        if mount.mode == "hide":
            return ("hide", mount.target)
        if mount.tree:
            return lend(lines[mount])
        options = "t" if mount in optional else ""
        if mount.mode == "ro":
            options += "R" if mount in optional else "r"
        # staged mounts have it already
        options += "x" if nested and "noexec" in mount.options else ""
        return bind(source_of(mount), mount.target, options, mount.identity if nested else "-")

    view += map(lend, own_trees)
    hidden = [mount for mount in kept if mount.mode == "hide"]
    kept = [mount for mount in kept if mount.mode != "hide"]
    # a worktree may be in a tree that its agent has not
    within = [m for m in (*kept, *own) if inside(m.target, [trees_at.directory])]
    if placed or within:
        view.append(("tmpfs", "0755", trees_at.directory))
        view += map(lend, placed)
    elif parent is not None:
        view.append(("hide", trees_at.directory))
    view += map(put, kept)
    # Without root, what is there belongs to the agents' own uid: not its to change. The
    # filesystem, mounted below, is another mount and stays writable. After a crash it is a
    # new one, which is to come along.
    shared, rootless = str(places.shared), agents.privilege.rootless
    view.append(bind(shared, shared, "sR" if rootless else "s"))
    view += [("hide", str(places.released))] if rootless else []
    view.append(("file", prepared.git(agent, prepared.safe(agents, agent)), str(places.git)))
    bare = parent is None or agent.root or inside(str(places.mount), fresh)
    if bare and agent.iso != "shared":
        view.append(("symlink", str(places.fuse), str(places.mount)))
    view += [put(mount) for mount in (*hidden, *own) if mount.target != "/"]
    view += [
        ("expect", mount.target, _unwritable(agent, mount))
        for mount in agents.authority.narrowed_mounts(agent)
        if mount.mode == "rw" and not mount.tree
    ]
    if placed or within:
        # a directory that is made there would be no tree
        view.append(("fix", trees_at.directory))

    # last, so that nothing covers it; and no cell has that of its parent
    if having:
        view.append(("tmpfs", "0755", networks.DIRECTORY))
    elif parent is not None:
        view.append(("hide", networks.DIRECTORY))

    privilege = agents.privilege
    groups = privilege.groups_of(agent.groups)
    ids = (agent.uid, agent.gid)
    grace = int(agents.settings.grace(agent) * 1000)
    hand = [str(at["networks"])] if having else []
    keeper = [*orders.words("keeper", _SPEC_FD, _REPORT_FD, grace), *hand]
    if nested:
        # it has its groups by then
        inner = orders.words("view", _REPORT_FD, at["view"], at["keeper"], *ids, "=", keeper)
        enter, network = places.program("enter"), _network(agents, agent)
        steps = orders.words(enter, at["cell"], at["builder"], *ids, groups, network, inner)
    else:
        builder = places.program("view")
        steps = orders.words(builder, _REPORT_FD, at["view"], at["keeper"], *ids, groups, keeper)
    stage = b""
    if staged:
        cell = "-" if parent is None else at["cell"]
        steps = orders.words(places.program("stage"), at["stage"], cell, steps)
        stage = _stage(agents, agent, places, staged, optional=optional)
    if lent:
        steps = orders.words(places.program("lend"), at["lend"], at["lend"] + 1, steps)
    return Plan(
        steps=tuple(steps),
        spec=prepared.spec(
            working_directory(agents, agent),
            environment(agents, agent, str(places.mount), str(places.git), having, terminal),
            command.words if command else () if agent.how.holds_cell else program(agent),
            terminal,
            having,
        ),
        view=tuple(view),
        stage=stage,
        lend=orders.message(places.trees, [each.order() for each in lent]) if lent else b"",
        networks=having,
        passed=tuple(passed),
    )


def plan_inside(agents: Agents, agent: Agent, places: Places, command: Command) -> Plan:
    """The steps of a program that enters the agent's cell."""
    having = networks.of_cell(places.networks, agent)
    root, git, terminal = str(places.mount), str(places.git), command.terminal
    variables = environment(agents, agent, root, git, having, terminal)
    variables.update(command.env, CTX_RUN=command.run)
    groups = agents.privilege.groups_of(agent.groups)
    enter, ids, network = places.program("enter"), (agent.uid, agent.gid), _network(agents, agent)
    # the keeper needs no view
    keeper = orders.words("keeper", _SPEC_FD, _REPORT_FD, "-")
    steps = orders.words(enter, _SPEC_FD + 2, _SPEC_FD + 1, *ids, groups, network, keeper)
    spec = prepared.spec(command.cwd, variables, command.words, terminal)
    return Plan(steps=tuple(steps), spec=spec)


def _unwritable(agent: Agent, mount: mounts.Mount) -> str:
    """A sentence for the log, if the agent may not write what is mounted ``rw``."""
    uid, source = agent.uid, escape(mount.source)
    return (
        f"mount: {escape(mount.target)} is rw, but uid {uid} may not write {source}: "
        f"chown it, or give it to this uid with setfacl -m u:{uid}:rwx"
    )


def _kept_mounts(agents: Agents, agent: Agent, fresh: list[str]) -> Iterator[mounts.Mount]:
    """Mounts and workspaces of its parent below directories that a child has afresh, ``rw``: as
    they are there. What the parent's lines hide in durable trees is hidden anew."""
    if agent.parent is None:
        return
    places = agents.authority.places
    for had, mount in agents.authority.inherited_mounts(agent):
        if had.mode == "hide":
            if places.holds(had.target):
                yield had
        elif inside(had.target, fresh) and mount.mode != "hide":
            mode = "rw" if mount.mode == had.mode else mount.mode
            yield mounts.Mount(had.target, had.target, mode, mount.options)
    for owner in agents.registry.ancestors(agent):
        for mount in _workspace_mounts(agents, owner, agent):
            if inside(mount.target, fresh):
                yield mounts.Mount(mount.target, mount.target, "rw")


def _stage(
    agents: Agents,
    agent: Agent,
    places: Places,
    staged: list[mounts.Mount],
    *,
    optional: frozenset[mounts.Mount],
) -> bytes:
    uid, gid, groups = agent.creator_uid, agent.creator_gid, agent.creator_groups
    if agent.parent is not None:
        uid, gid, groups = agent.uid, agent.gid, agent.groups
    wanted = []
    trees_at = agents.authority.places
    for mount in staged:
        letters = "" if "bind" in mount.options else "r"
        letters += "t" if mount in optional else ""
        letters += "".join(
            letter
            for option, letter in (("nosuid", "s"), ("nodev", "d"), ("noexec", "x"))
            if option in mount.options
        )
        source = mount.source
        tree = trees_at.tree(source)
        if agent.parent is None and tree:
            real = tree_of(tree) if agents.privilege.rootless else mounts.place_of(tree)
            source = f"{places.real_tree}/{real}{source.removeprefix(trees_at.place(tree))}"
        wanted.append((letters or "-", mount.identity, source))
    groups_word = agents.privilege.groups_of(groups)
    permitted = [places.tree, places.trees]
    return orders.message(places.stage, uid, gid, groups_word, places.own, permitted, wanted)
