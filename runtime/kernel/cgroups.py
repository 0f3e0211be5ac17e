"""The daemon's part of the cgroup v2 hierarchy: one safe file API (cgroups(7)).

Processes live in leaves only. Agents' processes are below ``user-UID/agent-NAME``, each program
in a cgroup ``own`` (``Cgroup.make_own``), the monitors of an owner's agents in
``user-UID/monitor``, what helps the daemon in ``helper``, and the daemon with its binder and
guard in its own cgroup, alone.

The cgroup ``own`` is the root of its program's cgroup namespace. The program can open directories
from there on and hold their locks, and if they belong to its uid, make others and change their
limits. The leaf itself it cannot reach: there the daemon bounds what is below to a dozen, freezes,
kills, and reads whether anybody lives. Nobody else can list the directories in which the daemon
makes cgroups (0711), so nobody holds their locks. The daemon enters no ``own``; a helper does
(``sweeper``). SIGKILL needs none: the daemon writes ``cgroup.kill``, first where nothing else is
asked for, else when the grace is over or the helper cannot tell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from runtime.errors import StartupError
from runtime.kernel import linux, spare
from runtime.kernel.privilege import ROOT, Privilege
from runtime.kernel.recent import Recent

_MADE_HERE: Final = "user.ctxfs.made"
#: it is gone; or of an agent's making, below longer names than a path may have
_UNREACHABLE: Final = (errno.ENOENT, errno.ENAMETOOLONG)
CONTROLLERS: Final = ("memory", "pids", "cpu")
#: monitors whose programs are over, and bytes of one with what it has not written to the disk
_MONITORS_ENDING: Final = 256
_MONITOR_MEMORY: Final = 256 << 10
#: that monitors take to end, after the programs that they monitored
_MONITOR_SECONDS: Final = 1.0
#: between two looks whether they have
_LOOK_SECONDS: Final = 0.005
#: of what /proc says of a thread's cgroups
_CGROUP_MAX: Final = 65536
#: threads whose files are kept open
_ASKERS_MAX: Final = 16
#: where a program is born, and how many cgroups, how deep, there may be below the one above it
_OWN: Final = "own"
#: who lists a directory holds its lock for as long as the memory is not there to list it into, and
#: nothing can be made in it meanwhile: so nobody else lists those in which the daemon makes some
_MODE: Final = 0o711
_OWN_MOST: Final = 13
#: how an ordinary user comes by a cgroup
DELEGATE: Final = "systemd-run --user --scope -p Delegate=yes ctxd (see ROOTLESS in ctxd(8))"


#: prefixes of the kernel's files, up to a dot; of later kernels too, as far as known
_KERNELS: Final = frozenset(
    {"cgroup", "cpu", "cpuset", "debug", "dmem", "hugetlb", "io", "irq", "memory", "misc"}
    | {"perf_event", "pids", "rdma"}
)


def leaf_name(name: str) -> str:
    """The name of a leaf for something with this name.

    Every cgroup has files with names such as ``cgroup.procs``. As systemd does, an
    underscore goes before such a name; none of our names begins with one.
    """
    before, dot, _ = name.partition(".")
    return f"_{name}" if dot and before in _KERNELS else name


class Cgroup:
    """One directory of the hierarchy."""

    # Ends of large trees are a matter of microseconds for each file; and a path in memory takes
    # several times as much as its text.
    __slots__ = ("_text",)

    def __init__(self, path: Path | str) -> None:
        self._text = str(path)

    @property
    def path(self) -> Path:
        return Path(self._text)

    def __repr__(self) -> str:
        return f"Cgroup({self._text!r})"

    def __str__(self) -> str:
        return self._text

    def child(self, *names: str) -> Cgroup:
        return Cgroup("/".join((self._text, *names)))

    def exists(self) -> bool:
        return os.path.isdir(self._text)

    def read(self, file: str) -> str | None:
        """The file's text; None if the cgroup, or the controller's file, is not there."""
        try:
            fd = os.open(f"{self._text}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _UNREACHABLE:
                return None
            raise
        try:
            data = part = os.read(fd, 65536)
            while part:  # of a long list each has as many lines as fit into a page
                part = os.read(fd, 65536)
                data += part
            return data.decode()
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        finally:
            os.close(fd)

    def write(self, file: str, text: str) -> None:
        """``FileNotFoundError`` if the cgroup is gone, ``OSError`` if the kernel refuses."""
        # os.write, because a buffered file reports the kernel's refusal at close
        fd = os.open(f"{self._text}/{file}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise FileNotFoundError(f"{self._text} was removed since it was opened") from None
            raise
        finally:
            os.close(fd)

    def create(self, controllers: tuple[str, ...]) -> None:
        """mkdir(2) of this node and its missing parents, with controllers passed down."""
        missing = []
        node = self._text
        while not os.path.isdir(node):
            missing.append(node)
            node = os.path.dirname(node)
        for path in reversed(missing):
            parent = Cgroup(os.path.dirname(path))
            for controller in controllers:
                parent.enable(controller)
            with suppress(FileExistsError):
                os.mkdir(path, _MODE)

    def holds(self, path: str) -> bool:
        """Whether a process's cgroup path is this one, or one below."""
        above = [path, *(str(each) for each in PurePosixPath(path).parents)]
        # an agent is never directly below the root
        return any(each.count("/") > 1 and self._text.endswith(each) for each in above)

    def own(self) -> Cgroup:
        """Where in this cgroup a program of an agent is."""
        return self.child(_OWN)

    def make_own(self, controllers: tuple[str, ...]) -> None:
        """Makes this cgroup for a program of an agent, and one below it, in which it is born.

        That one is the root of the program's cgroup namespace. The program can hold its lock,
        and if it belongs to the program's uid, make others there and change its limits. This one
        it cannot reach: here what it makes is bounded, and the daemon looks, freezes and kills.
        """
        self.create(controllers)
        for file in ("cgroup.max.descendants", "cgroup.max.depth"):
            self.write(file, str(_OWN_MOST))
        # some kernels (6.15) list a cgroup with a lock of all cgroups
        os.mkdir(str(self.own()), _MODE)

    def enable(self, controller: str) -> None:
        enabled = (self.read("cgroup.subtree_control") or "").split()
        if controller not in enabled:
            self.write("cgroup.subtree_control", f"+{controller}")

    def keys(self, file: str) -> dict[str, int]:
        """A flat-keyed file such as cgroup.events or cpu.stat; empty if absent."""
        pairs = (line.split() for line in (self.read(file) or "").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    def populated(self) -> bool:
        """Whether a live process is in this cgroup or below; False if it is gone."""
        return "populated 1" in (self.read("cgroup.events") or "")

    def number(self, file: str) -> int | None:
        """A file that holds one number; None if it is absent or ``max``."""
        text = (self.read(file) or "").strip()
        return int(text) if text.isdigit() else None

    def processes(self) -> list[int]:
        """Pids in this cgroup and below, without pids of other pid namespaces, which read as 0."""
        found = _pids((self.read("cgroup.procs") or "").encode())
        for below in self.children():
            found += below.processes()
        return found

    def children(self) -> list[Cgroup]:
        """The cgroups directly below; none if it is gone."""
        try:
            if not self.below():  # without more links there is nothing to list
                return []
            return [Cgroup(e.path) for e in os.scandir(self._text) if e.is_dir()]
        except OSError as error:
            if error.errno in _UNREACHABLE:
                return []
            raise

    def below(self) -> int:
        """How many cgroups are directly below; 0 if it is gone."""
        try:
            return os.stat(self._text).st_nlink - 2  # "." and the entry above
        except OSError as error:
            if error.errno in _UNREACHABLE:
                return 0
            raise

    def kill(self) -> None:
        """SIGKILL to everything here and below, forks in progress included."""
        try:
            self.write("cgroup.kill", "1")
        except FileNotFoundError:
            return

    def freeze(self, frozen: bool) -> None:
        """Freezes or thaws everything here and below; if it is gone, nothing is frozen."""
        try:
            self.write("cgroup.freeze", "1" if frozen else "0")
        except FileNotFoundError:
            if frozen:
                raise

    def remove(self) -> bool:
        """rmdir(2) of this cgroup and those below; False if a process is left in one."""
        removed = self._rmdir()
        if not removed and (below := self.children()):
            for each in below:
                each.remove()
            removed = self._rmdir()
        return removed

    def remove_when_empty(self, seconds: float) -> bool:
        """Removes this cgroup and those below; waits so long for processes that are ending. Blocks
        the caller."""
        deadline = time.monotonic() + seconds
        while self.populated() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return self.remove()

    def _rmdir(self) -> bool:
        try:
            os.rmdir(self._text)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY, errno.ENAMETOOLONG):
                return False
            raise
        return True


def _pids(listed: bytes) -> list[int]:
    return [int(word) for word in listed.split() if word != b"0"]


def mount_points() -> list[str]:
    """Where cgroups are mounted, of both versions."""
    return [each.point for each in linux.read_mounts() if each.fstype in ("cgroup", "cgroup2")]


def unified_mount() -> Path | None:
    """Where cgroup v2 is mounted, alone or beside v1 (hybrid)."""
    for entry in linux.read_mounts():
        if entry.fstype == "cgroup2":
            return Path(entry.point)
    return None


def _read_cgroup(pid: int) -> bytes:
    fd = linux.open_of_process(pid, "cgroup")
    try:
        return os.read(fd, _CGROUP_MAX)
    finally:
        os.close(fd)


def path_of(pid: int) -> str | None:
    """The v2 cgroup of a process or thread, from the hierarchy's root; None if it is gone.

    ``OSError`` if that cannot be known now, which is not the same.
    """
    try:
        text = spare.with_spare(lambda: _read_cgroup(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _path_in(text)


def _path_in(text: bytes) -> str | None:
    # A hybrid machine has v1 lines too.
    _, found, rest = (b"\n" + text).partition(b"\n0::")
    return os.fsdecode(rest.partition(b"\n")[0]).removesuffix(" (deleted)") if found else None


class Askers:
    """The v2 cgroups of threads that ask again and again; for one thread of the daemon.

    Their files in /proc stay open, since opening one takes longer than reading it. An open one
    belongs to the thread that it was opened for: it says where that is now, and that there is no
    such thread once it is gone, also when another one has its number (proc(5)).
    """

    def __init__(self) -> None:
        self._files = Recent[int, int](_ASKERS_MAX, os.close)

    def path_of(self, pid: int) -> str | None:
        """As ``path_of`` of the module."""
        fd = self._files.get(pid)
        if fd is not None:
            try:
                text = os.pread(fd, _CGROUP_MAX, 0)
            except ProcessLookupError:
                self._files.drop(pid)
            else:
                return _path_in(text)
        return self._begin(pid)

    def _begin(self, pid: int) -> str | None:
        try:
            fd = linux.open_of_process(pid, "cgroup")
        except OSError:  # it is gone, or there are no descriptors
            return path_of(pid)
        self._files.put(pid, fd)
        try:
            return _path_in(os.pread(fd, _CGROUP_MAX, 0))
        except ProcessLookupError:
            return None

    def close(self) -> None:
        self._files.clear()

    def __del__(self) -> None:
        # they go with the one part that asks here
        self.close()


def _has_mark(path: Path, attribute: str) -> bool:
    try:
        return os.getxattr(path, attribute) == b"1"
    except OSError:
        return False


def _is_delegated(path: Path, privilege: Privilege) -> bool:
    """Whether this cgroup was given to the daemon, to make others in it.

    systemd leaves a mark (systemd.resource-control(5)). To an ordinary user it is
    enough that the files are its own; other processes are looked for later.
    """
    if any(_has_mark(path, name) for name in ("trusted.delegate", "user.delegate")):
        return True
    wanted = (path, path / "cgroup.procs", path / "cgroup.subtree_control")
    return privilege.rootless and all(os.access(each, os.W_OK) for each in wanted)


class Hierarchy:
    """The root of the daemon's cgroups, held against a second daemon."""

    def __init__(self, root: Path, mount: Path) -> None:
        self.root = Cgroup(root)
        self.mount = mount
        # asked for every caller
        self._mount_text = str(mount)
        self.prefix = "/" + str(root.relative_to(mount)) if root != mount else ""
        try:
            if not root.is_dir():
                root.mkdir(mode=0o755)
                # a daemon that goes on after a crash must know, too
                os.setxattr(root, _MADE_HERE, b"1")
            self._lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"{root}: another ctxd uses this cgroup") from None
        except OSError as error:
            raise StartupError(
                f"{root}: not permitted to use this cgroup ({error.strerror}): run ctxd as root, "
                "or delegate a cgroup to it (Delegate=yes in its unit; in a container: podman run "
                "--cgroupns=private --security-opt unmask=ALL)"
            ) from None
        if not (root / "cgroup.kill").exists():
            raise StartupError(f"{root}: this kernel lacks cgroup.kill; use Linux 5.14 or later")
        available = (self.root.read("cgroup.controllers") or "").split()
        self.controllers = tuple(c for c in CONTROLLERS if c in available)
        #: those who start processes, and who look at operators' paths
        self.helpers = self.root.child("helper")
        #: the commands that lead to other machines
        self.links = self.root.child("link")
        #: where the daemon is
        self.daemon = Cgroup(self.mount / (path_of(os.getpid()) or "/").removeprefix("/"))
        self._came_from: Cgroup | None = None

    def prepare(self, privilege: Privilege = ROOT) -> None:
        """Makes the daemon's own leaves, and passes the controllers down.

        The daemon moves to a leaf if it shares its cgroup with others, who would be taken
        for it, and in a delegated cgroup, where it is a process of the root itself: that
        may then have no controllers below it.
        """
        here = {int(pid) for pid in (self.root.read("cgroup.procs") or "").split()}
        if privilege.rootless:
            self._check_contained(here)
        around = {int(pid) for pid in (self.daemon.read("cgroup.procs") or "").split()}
        if os.getpid() in here or around - {os.getpid()}:
            self._came_from, self.daemon = self.daemon, self.root.child("daemon")
            self.daemon.path.mkdir(exist_ok=True)
            self.daemon.write("cgroup.procs", "0")
        self.root.path.chmod(_MODE)
        self.helpers.create(self.controllers)
        for user in self.root.path.glob("user-*"):
            user.chmod(_MODE)
            for file in ("cgroup.max.descendants", "cgroup.max.depth"):
                Cgroup(user).write(file, "max")  # version 0.2 had bounds for all there

    def monitors(self, uid: int, most: int) -> Cgroup:
        """Where the monitors of one owner's agents are, ``most`` at once: not with an agent,
        which may be frozen or killed."""
        found = self.root.child(f"user-{uid}", "monitor")
        found.create(self.controllers)
        limits = {
            # each has two threads, and one that has recorded an end is there for a moment more
            "pids": ("pids.max", 2 * (_MONITORS_ENDING + most)),
            "memory": ("memory.max", (_MONITORS_ENDING + most) * _MONITOR_MEMORY),
        }
        for controller, (file, limit) in limits.items():
            if controller in self.controllers and found.number(file) != limit:
                found.write(file, str(limit))
        return found

    def holds_monitors(self, path: str) -> bool:
        """Whether a process's cgroup path is one where monitors are."""
        user, _, leaf = (self.agent_path(path) or "").partition("/")
        return user.startswith("user-") and leaf == "monitor"

    def waits_for(self, path: str) -> bool:
        """Whether who leads a process there waits for it: a monitor, or the command of a link."""
        return self.holds_monitors(path) or (self.agent_path(path) or "").startswith("link/")

    def is_own(self, path: str) -> bool:
        """Whether a cgroup path belongs to the daemon or its helpers."""
        if self.agent_path(path) is not None:
            return True
        return f"{self._mount_text}{path.rstrip('/')}" == str(self.daemon)

    def _check_contained(self, here: set[int]) -> None:
        """``StartupError`` unless an ordinary user can make cgroups here and start
        processes in them (Delegation Containment in the kernel's cgroup-v2.rst)."""
        if here - {os.getpid()}:
            raise StartupError(
                f"{self.root.path}: other processes are in this cgroup; start ctxd in its "
                f"own: {DELEGATE}"
            )
        own = self.mount / (path_of(os.getpid()) or "/").removeprefix("/")
        common = Path(os.path.commonpath([own, self.root.path]))
        if not os.access(common / "cgroup.procs", os.W_OK):
            raise StartupError(
                f"{self.root.path}: cannot move processes there from {own}, because "
                f"{common}/cgroup.procs does not belong to this user; start ctxd inside it, "
                f"for example in {self.root.path}/daemon"
            )

    def agent_path(self, path: str) -> str | None:
        """The part of a process's cgroup path below this root; None if it is not below."""
        if path == self.prefix or not path.startswith(self.prefix + "/"):
            return None
        return path[len(self.prefix) + 1 :]

    def close(self) -> None:
        """Removes what was made here, if nothing is left in it.

        A monitor records the end of a program, and then ends itself: it may still be there. So may
        a helper that was just killed.
        """
        for path in (*self.root.path.glob("user-*"), self.helpers.path, self.links.path):
            Cgroup(path).remove_when_empty(_MONITOR_SECONDS)
        made_here = _has_mark(self.root.path, _MADE_HERE)
        if self._came_from or (made_here and self.root.path in self.daemon.path.parents):
            # of a daemon that began anew in its leaf it is not known where it came from
            with suppress(OSError):  # that may be gone, or have cgroups below it now
                (self._came_from or Cgroup(self.root.path.parent)).write("cgroup.procs", "0")
            self.daemon.remove()
        if made_here:
            self.root.remove()
        os.close(self._lock)


def find_root(wanted: Path | None, privilege: Privilege = ROOT) -> tuple[Path, Path]:
    """(root for the daemon's cgroups, mount point of the hierarchy).

    ``wanted``, else the cgroup delegated to this process, else, for root, ``ctxfs``
    in the root of the v2 hierarchy. Raises ``StartupError``.
    """
    mount = unified_mount()
    if mount is None:
        raise StartupError(
            "no cgroup v2 hierarchy is mounted: boot with systemd.unified_cgroup_hierarchy=1, "
            "or mount one (mount -t cgroup2 none /sys/fs/cgroup/unified)"
        )
    own = path_of(os.getpid()) or "/"
    here = mount / own.removeprefix("/")
    if str(os.getpid()) not in (Cgroup(here).read("cgroup.procs") or "").split():
        raise StartupError(
            f"{own} in /proc/self/cgroup is not below {mount}, where the hierarchy is mounted, so "
            f"no caller would be known: umount {mount} and mount -t cgroup2 none {mount}; in a "
            "container: podman run --cgroupns=private"
        )
    if wanted is not None:
        if not wanted.is_absolute():
            wanted = mount / wanted
        if mount not in wanted.parents:
            raise StartupError(f"{wanted} is not inside the cgroup v2 hierarchy {mount}")
        if not wanted.parent.is_dir():
            raise StartupError(f"{wanted.parent}: no such cgroup")
        return wanted, mount
    if own != "/":
        delegated = here
        # a restarted daemon may already sit in its leaf
        if delegated.name == "daemon" and _is_delegated(delegated.parent, privilege):
            delegated = delegated.parent
        if _is_delegated(delegated, privilege):
            return delegated, mount
    if privilege.rootless:
        raise StartupError(f"no cgroup is delegated to this user: {DELEGATE}")
    return mount / "ctxfs", mount
