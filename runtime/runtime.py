"""The runtime as one object: built from the configuration, run inside one nursery."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from runtime.agents.parts import Agents
from runtime.authority.accounts import Accounts
from runtime.authority.loop import Gentle, LoopMeter
from runtime.cell import cell, networks, treework
from runtime.cell.cell import Places
from runtime.cell.port import Host, Port
from runtime.cell.sources import Looker
from runtime.cell.starting import Starter
from runtime.errors import KernelError, StartupError
from runtime.kernel import cgroups, linux, orders, spare
from runtime.kernel.binder import Binder
from runtime.kernel.handover import Descriptors
from runtime.kernel.helpers import Helpers
from runtime.kernel.inotify import Watcher
from runtime.kernel.privilege import Privilege
from runtime.kernel.processes import Census
from runtime.kernel.quotas import Quotas, are_enforced
from runtime.kernel.spawn import Spawner
from runtime.kernel.sweeper import Sweeper
from runtime.kernel.waitfiles import WaitFiles
from runtime.kernel.walker import Walker
from runtime.life.streams import Streams
from runtime.life.supervisor import Supervisor
from runtime.peers.guests import Guests
from runtime.peers.hosting import Hosting
from runtime.peers.leading import Leading
from runtime.peers.links import Links
from runtime.peers.post import Post
from runtime.peers.registrations import Registrations
from runtime.records.config import HEADERS, KINDS, Config
from runtime.records.lifecycle import Status
from runtime.records.spaces import Spaces
from runtime.records.store import Store

log = logging.getLogger("ctxd.runtime")

_PROGRAMS = (
    *("binder", "carry", "census", "enter", "feed", "gather", "guard", "keeper"),
    *("launcher", "lend", "link", "look", "monitor", "relay", "release", "stage", "sweep"),
    *("tree", "view", "walk"),
)

VERSION = "0.2.0"
#: what containers and chroot(8) take from it
_UNMASK: Final = (
    "in a chroot(8), mount the directory on itself and enter it by unshare --mount and "
    "pivot_root(8); in a container, show all of /proc: podman run --security-opt unmask=ALL"
)
#: what ctxd and its helpers need, by number (linux/capability.h). CAP_SYS_PTRACE enters the cell of
#: a parent, and CAP_DAC_READ_SEARCH measures trees
_CAPABILITIES: Final = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "KILL": 5, "SETGID": 6,
    "SETUID": 7, "SETPCAP": 8, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_ADMIN": 21,
}  # fmt: skip
#: that those who wait for an end are let go within, at the end of the daemon
_LET_GO_SECONDS: Final = 1.0
#: of directories that cells see: who lists one into memory that is not there holds its lock, and
#: the next start would wait for him
_MODE: Final = 0o711
#: of the daemon, as ``state`` of /ctx/status
STATES: Final = ("starting", "ready", "stopping")


@dataclass(kw_only=True, eq=False)
class Runtime:
    """The runtime, of which the filesystem is a view."""

    places: Places
    agents: Agents
    supervisor: Supervisor
    looker: Looker
    streams: Streams
    hierarchy: cgroups.Hierarchy
    spawner: Spawner
    helpers: Helpers
    trees: treework.Trees
    binder: Binder
    links: Links
    guests: Guests
    hosting: Hosting
    #: descriptors that are open as long as the daemon lives
    held: dict[str, int]
    loop: LoopMeter = field(default_factory=LoopMeter)
    state: str = "starting"
    started: float = field(default_factory=time.monotonic)

    @property
    def accounts(self) -> Accounts:
        return self.agents.accounts

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.agents.settings.config

    def reconfigure(self, config: Config) -> None:
        """New settings for what is decided from now on."""
        self.agents.settings.config = config
        self.accounts.configure(config)
        self.supervisor.networks.configured()

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """For the next daemon: since when there is one, and what is never closed."""
        held = {name: descriptors.keep(fd) for name, fd in self.held.items()}
        return {"started": self.started, "held": held}

    def restore(self, saved: dict[str, Any]) -> None:
        self.started = saved["started"]

    def status(self) -> dict[str, str]:
        """The facts of ``/ctx/status``."""
        counts = dict.fromkeys(Status, 0)
        for agent in self.agents.registry:
            counts[agent.status] += 1
        config = self.config
        privilege = self.agents.privilege
        relay = privilege.uid if privilege.rootless else config.relay_ids()[0]
        limits = (
            f"depth={config.depth},children={config.children},agents={config.agents},"
            f"document_max={config.document_max},log_max={config.log_max},grace={config.grace:g}s"
        )
        return {
            "version": VERSION,
            "state": self.state,
            "uptime": f"{time.monotonic() - self.started:.3f}",
            **{f"agents.{status}": str(count) for status, count in counts.items()},
            "cgroup": str(self.hierarchy.root.path),
            "controllers": ",".join(self.hierarchy.controllers),
            "mount": str(self.places.mount),
            "trees": "soft" if self.agents.disk.quotas is None else "hard",
            "limits": limits,
            **{
                f"network.{name}": f"{network.port} {relay} {network.socket}"
                for name, network in sorted(config.networks.items())
            },
            **{
                f"header.{name}": network.header
                for name, network in sorted(config.networks.items())
                if network.header != HEADERS[0]
            },
            **{
                f"kind.{name}": network.kind
                for name, network in sorted(config.networks.items())
                if network.kind != KINDS[0]
            },
        }


def _private_directory(path: Path, mode: int = _MODE) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        # whoever else may make names there may have been faster, with a link of theirs
        if (owner := path.lstat().st_uid) not in (0, os.geteuid()):
            raise StartupError(
                f"{path}: {path} belongs to uid {owner}: choose a directory of your own"
            )
        os.chmod(path, mode)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None


def _check_machine(privilege: Privilege) -> None:
    if privilege.rootless and shutil.which("fusermount3") is None:
        raise StartupError("fusermount3 is missing: apt-get install fuse3")
    lacking = [] if privilege.rootless else linux.lacking(_CAPABILITIES)
    if lacking:
        raise StartupError(
            f"root has no {', '.join(lacking)} here (capabilities(7)): start ctxd with them; in a "
            f"container: podman run --cap-add {','.join(lacking)}"
        )
    if linux.mount_at(Path("/")) is None:
        raise StartupError(
            "/ is not a mount point, as in a chroot(8): the kernel refuses sandboxes there; "
            "mount the directory on itself and start ctxd by unshare --mount with pivot_root(8), "
            "or in a container"
        )


def _check_namespaces(privilege: Privilege, spawner: Spawner) -> None:
    """``StartupError`` unless an ordinary user can make a cell, as every agent's is made;
    kernels and their security modules have several ways to refuse, so it is tried."""
    uid, gid = (privilege.uid, privilege.gid) if privilege.rootless else (65534, 65534)
    view = [("memory", "1048576", "100"), cell.bind("/", "/"), ("proc", "/proc"), ("dev", "/dev")]
    true = shutil.which("true", path="/usr/bin:/bin") or "/bin/true"
    with ExitStack() as stack:
        plan = orders.memory_file("view", orders.message(view))
        stack.callback(os.close, plan)
        program = os.open(true, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, program)
        groups = privilege.groups_of(())
        command = orders.words(cell.native("view"), 2, 3, 4, uid, gid, groups, ["true"])
        try:
            spawner.run_now(command, plan, program)
        except KernelError as error:
            why = f"cannot make a sandbox here ({error.sentence})"
            raise StartupError(f"{why}: {_UNMASK}") from None


def _check_reachable(path: Path) -> None:
    """Agents, with their own ids, must get to what they share with the daemon."""
    for parent in path.parents:
        if parent.is_dir() and not parent.stat().st_mode & 0o001:
            raise StartupError(
                f"{path}: agents cannot reach it, because others may not search {parent}; "
                f"choose another --runtime, or chmod o+x {parent}"
            )


def _lock(path: Path) -> int:
    """Holds the state against a second daemon until the process ends."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StartupError(f"{path}: another ctxd uses this state directory") from None
    return fd


def _prepare_shared(places: Places, privilege: Privilege) -> None:
    """The directory that every sandbox sees: a shared mount, so that a filesystem
    mounted below it anew reaches the sandboxes that live (mount_namespaces(7))."""
    _private_directory(places.shared)
    if privilege.rootless:
        # nothing but FUSE is an ordinary user's to mount: it is as the machine has it
        around = linux.mount_of(places.shared.resolve())
        if "noexec" in around.options.split(","):
            raise StartupError(
                f"{places.runtime}: cannot execute programs there ({around.point} is mounted "
                "noexec); choose another --runtime"
            )
        if not around.shared:
            log.warning(
                "%s is not on a shared mount (%s): if ctxd dies, its next start cannot give "
                "the filesystem to agents that still live",
                places.shared,
                around.point,
            )
    elif linux.mount_at(places.shared) is None:
        flags = linux.MS_NOSUID | linux.MS_NODEV
        try:
            linux.mount("ctxfs", places.shared, "tmpfs", flags, f"mode={_MODE:o},size=64m")
        except OSError as error:
            raise StartupError(
                f"{places.shared}: cannot mount there ({error.strerror}): a security module "
                "refuses it; in a container: podman run --security-opt apparmor=unconfined"
            ) from None
        linux.mount("none", places.shared, "none", linux.MS_SHARED)
    for path in (places.waits, places.programs, places.fuse):
        if path != places.fuse or linux.mount_at(path) is None:
            _private_directory(path)
    if not privilege.rootless:
        # for the networks of cells that have the root of the host, where no agent can make it
        sockets = Path(networks.DIRECTORY)
        with suppress(StartupError):
            _private_directory(sockets.parent)
            _private_directory(sockets)
    places.git.touch(0o444)
    for path in places.hidden:
        _private_directory(path, 0o700)
    for name in _PROGRAMS:
        _install(cell.native(name), places.program(name))


def _install(source: Path, target: Path) -> None:
    """A copy of a program, renamed into place: a running one cannot be written."""
    temporary = target.with_name(f".{target.name}.new")
    try:
        shutil.copyfile(source, temporary)
    except FileNotFoundError:
        raise StartupError(f"{source} is missing: run make setup") from None
    # not readable: an agent could trace what a readable one becomes (PR_SET_DUMPABLE)
    os.chmod(temporary, 0o711)
    os.replace(temporary, target)


def _open_lifeline(path: Path) -> int:
    """A FIFO held open for writing: monitors see the daemon's death as its hang-up."""
    if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
        path.unlink()
    if not path.exists():
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _open_quotas(state: Path, projects: tuple[int, int]) -> Quotas | None:
    if not are_enforced(state):
        log.warning(
            "disk_projects: the filesystem of %s is not mounted with prjquota: what durable trees "
            "have is measured, and agents that fill them are paused",
            state,
        )
        return None
    return Quotas(state, *projects)


@asynccontextmanager
async def open_runtime(
    *,
    config: Config,
    places: Places,
    cgroup: Path | None,
    privilege: Privilege,
    inherited: Mapping[str, int] | None = None,
) -> AsyncIterator[Runtime]:
    """Everything below the filesystem, opened in order and closed in reverse. What is never
    closed may be ``inherited`` from the daemon before in the same process (``Runtime.save``).

    Raises ``StartupError``, having changed nothing that it does not undo.
    """
    _check_machine(privilege)
    if not privilege.rootless:
        _check_reachable(places.runtime)
    with ExitStack() as stack:
        # the cgroups, removed last: everything above ends processes in them
        hierarchy = cgroups.Hierarchy(*cgroups.find_root(cgroup, privilege))
        stack.callback(hierarchy.close)
        # the state, held against a second daemon
        _private_directory(places.state, 0o700)
        held = dict(inherited or {})
        if "lock" not in held:
            held["lock"] = _lock(places.state)
        stack.callback(os.close, held["lock"])
        try:
            hierarchy.prepare(privilege)
        except OSError as error:
            raise StartupError(
                f"{hierarchy.root.path}: cannot create cgroups there ({error.strerror})"
            ) from None
        spare.keep()
        stack.callback(spare.release)
        # what sandboxes see of the daemon; without root all are the user's
        _private_directory(places.runtime, 0o700 if privilege.rootless else _MODE)
        _private_directory(places.stage)
        stack.callback(_remove_runtime, places)
        _prepare_shared(places, privilege)
        spawner = Spawner(places.program("launcher"), hierarchy.helpers)
        stack.callback(spawner.close)
        _check_namespaces(privilege, spawner)
        if "lifeline" not in held:
            held["lifeline"] = _open_lifeline(places.lifeline)
        stack.callback(os.close, held["lifeline"])
        # the records
        store = Store(places.state / "ctxfs.db")
        stack.callback(store.close)
        for name in ("agent", "home", "trash"):
            (places.state / name).mkdir(exist_ok=True, mode=0o700)
        spaces = Spaces(store)
        # what all agents of all users have written, whatever their policy, is root's to sort out
        closed = [] if privilege.rootless else [config.agent_ids()[0]]
        treework.adopt(places, spawner, spaces, closed)
        treework.show(places, privilege, spawner, spaces)
        wait_files = WaitFiles(places.waits, places.released, places.program("release"))
        stack.callback(_let_go, wait_files, spawner)
        agents = Agents(
            config=config,
            store=store,
            spaces=spaces,
            hierarchy=hierarchy,
            wait_files=wait_files,
            state=places.state,
            rooms=places.rooms,
            mount=places.mount,
            fuse=places.fuse,
            tree=places.tree,
            privilege=privilege,
        )
        watcher = Watcher()
        stack.callback(watcher.close)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.run)
            if config.disk_projects is not None and not privilege.rootless:
                agents.disk.quotas = _open_quotas(places.state, config.disk_projects)
            helpers = Helpers(spawner, nursery)
            walker = Walker(helpers, places.program("walk"), places.state)
            nursery.start_soon(agents.run, walker, helpers)
            trees = treework.Trees(
                places, places.program("tree"), helpers, spaces, agents.disk.look
            )
            nursery.start_soon(trees.run)
            binder = Binder(places.program("binder"), spawner, hierarchy.daemon)
            stack.callback(binder.close)
            streams = Streams(Gentle(agents.accounts.time))
            agents.journal.subscribe(streams)
            sweeper = Sweeper(places.program("sweep"), helpers, nursery)
            host = Host(
                agents=agents,
                places=places,
                port=Port(hierarchy, watcher, spawner, sweeper, places),
                nursery=nursery,
            )
            looker = Looker(host, helpers)
            starter = Starter(host, looker, trees)
            registrations = Registrations(places.state)
            post = Post(store)
            leading = Leading(host, post, streams)
            agents.journal.subscribe(post)  # after those who add to what is said
            census = Census(places.program("census"), helpers)
            agents.nodes.ways = links = Links(host, registrations, post, leading)
            supervisor = Supervisor(host, starter, census, streams, leading)
            guests = Guests(host, post, supervisor)
            runtime = Runtime(
                places=places,
                agents=agents,
                supervisor=supervisor,
                looker=looker,
                streams=streams,
                hierarchy=hierarchy,
                spawner=spawner,
                helpers=helpers,
                trees=trees,
                binder=binder,
                links=links,
                guests=guests,
                hosting=Hosting(
                    agents, registrations, post, guests, boot=host.port.boot, product=VERSION
                ),
                held=held,
            )
            trio.lowlevel.add_instrument(runtime.loop)
            stack.callback(trio.lowlevel.remove_instrument, runtime.loop)
            nursery.start_soon(runtime.hosting.run)
            try:
                yield runtime
            finally:
                nursery.cancel_scope.cancel()


def _let_go(wait_files: WaitFiles, spawner: Spawner) -> None:
    """Whoever waits for an end that has come just now."""
    until = time.monotonic() + _LET_GO_SECONDS
    with suppress(OSError):
        words = map(partial(wait_files.command, kept=0), wait_files.released())
        for program in [spawner.start_now(spawner.home, each) for each in words]:
            program.wait_now(max(0.0, until - time.monotonic()))


def _remove_runtime(places: Places) -> None:
    """Takes the runtime directory's mount away, if no filesystem is left below it."""
    if linux.mount_at(places.fuse) is not None:
        return
    treework.hide(places)
    if linux.mount_at(places.shared) is not None:
        linux.unmount(places.shared, linux.MNT_DETACH)
    for path in (places.lifeline, places.socket, places.git):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        places.waits.chmod(0o700)  # nobody lists it while there are agents
    for directory in (places.programs, places.inputs, places.waits, *places.hidden):
        shutil.rmtree(directory, ignore_errors=True)
    for path in (places.fuse, places.shared, places.stage, places.runtime):
        try:
            path.rmdir()
        except OSError:
            continue
