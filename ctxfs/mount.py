"""Mounting: where the filesystem appears, and what may be in the way.

The filesystem itself is mounted below the shared runtime directory, where
living sandboxes see it again after a restart; the mount point that users know
is a bind of it. Without root, libfuse has fusermount3(1) mount, for the daemon's user alone,
and the mount point is a symbolic link.

The mount point is below a shared tmpfs that sandboxes bind, and the name that users know is a link
in sandboxes. So a filesystem that is mounted again after a crash reaches living sandboxes. The
FIFOs of ``wait`` are on that tmpfs: on the FUSE mount, waiters would hang when the daemon dies.

No thread of the daemon ever makes a request to its own mount: a daemon that was killed at that
moment could never exit. The guard asks it, as any caller would (guard.c). If no answer comes, a
thread of the daemon logs the pending requests and what every thread does. It looks while it has
Python's lock, so that no other thread runs: a handler of a signal would need no lock, but looked
at calls that went on meanwhile, and crashed. A daemon that then notices the end of the connection
executes itself again: the same process and a new mount.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import IO, Final

import pyfuse3
import trio

from ctxfs.handshake import Handshake
from ctxfs.operations import Operations
from runtime.cell.cell import Places
from runtime.errors import StartupError
from runtime.kernel import linux, orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.privilege import Privilege
from runtime.kernel.spawn import Spawner, run_alone
from runtime.runtime import Runtime
from runtime.texts.names import escape

log = logging.getLogger("ctxd.mount")

_FSNAME: Final = "ctxfs"
_SUBTYPE: Final = "ctxfs"
_ANSWER_SECONDS: Final = 5.0
#: between guards that end at once
_AGAIN_SECONDS: Final = 1.0
#: for the last words of who says what was being done
_FAREWELL_SECONDS: Final = 1.0
_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
#: what the kernel asks for in the background at once, reads ahead mostly: as many as it allows
_BACKGROUND_MAX: Final = (1 << 16) - 1
#: and as many as it allows to users other than root
_USER_BACKGROUND: Final = Path("/sys/module/fuse/parameters/max_user_bgreq")


def check_device(path: Path = Path("/dev/fuse")) -> None:
    """``StartupError`` if FUSE cannot be used here."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise StartupError(
            f"{path} is missing: load the module (modprobe fuse), or give it to the "
            "container (podman run --device /dev/fuse)"
        ) from None
    except OSError as error:
        raise StartupError(
            f"{path}: {error.strerror}: run ctxd as root, or open it to all (chmod 666 {path})"
        ) from None


def check_user(privilege: Privilege) -> None:
    """``StartupError`` if fusermount3 would not mount or unmount for this user."""
    if privilege.rootless:
        try:
            pwd.getpwuid(privilege.uid)
        except KeyError:
            raise StartupError(
                f"uid {privilege.uid} has no entry in passwd(5), which fusermount3 needs: add one"
            ) from None
        if not os.path.exists("/etc/mtab"):
            raise StartupError(
                "/etc/mtab is missing, without which fusermount3 unmounts nothing: as root, "
                "ln -s ../proc/self/mounts /etc/mtab"
            )


def _is_dead(path: Path) -> bool:
    """Whether the daemon behind a FUSE mount is gone. One that hangs counts as alive."""
    answers: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # never answered from a cache, unlike stat(2)
            answers.append(0)
        except OSError as error:
            answers.append(error.errno or 0)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return bool(answers) and answers[0] in (errno.ENOTCONN, errno.ECONNABORTED)


def _detach(point: Path, privilege: Privilege) -> None:
    """umount2(2) with MNT_DETACH; ``OSError``."""
    if not privilege.rootless:
        linux.unmount(point, linux.MNT_DETACH)
        return
    program = shutil.which("fusermount3") or "/usr/bin/fusermount3"
    status, said = run_alone([program, "-u", "-z", "--", point])
    if status != 0:
        raise OSError(errno.EPERM, said or "fusermount3 failed", str(point))


def clear_stale(point: Path, privilege: Privilege) -> None:
    """Detaches mounts of dead daemons of ours; ``StartupError`` for anything else there."""
    while (entry := linux.mount_at(point)) is not None:
        if entry.fstype != f"fuse.{_SUBTYPE}":
            what = f"a {entry.fstype} filesystem ({entry.source})"
            raise StartupError(f"{point}: {what} is mounted there; choose another --mount")
        if not _is_dead(point):
            raise StartupError(f"{point}: a running ctxd is mounted there")
        try:
            _detach(point, privilege)
        except OSError as error:
            raise StartupError(f"{point}: cannot detach a dead mount: {error.strerror}") from None


def check_own(places: Places, privilege: Privilege) -> None:
    """``StartupError`` if another user could put something else in place of what the daemon keeps.

    Who became a user by su(1) may have the environment of another one.
    """
    for place in (places.state, places.runtime, *([places.mount] if privilege.rootless else ())):
        # not through a link: a dead mount may be behind it
        there = next(path for path in (place, *place.parents) if os.path.lexists(path))
        for path in (there, there.parent.resolve()):
            if (owner := path.lstat().st_uid) not in (0, privilege.uid):
                raise StartupError(
                    f"{place}: {path} belongs to uid {owner}: choose a directory of your own "
                    "(XDG_RUNTIME_DIR, XDG_STATE_HOME, --runtime, --state)"
                )


def check_point(places: Places, privilege: Privilege) -> None:
    """``StartupError`` unless the mount point is an empty directory, or can be made."""
    point = places.mount
    if privilege.rootless:
        _check_link(places)
        return
    clear_stale(point, privilege)
    if not point.exists():
        if not point.parent.is_dir():
            raise StartupError(f"{point.parent}: no such directory")
        return
    if not point.is_dir() or point.is_symlink():
        raise StartupError(f"{point}: not a directory")
    if any(point.iterdir()):
        raise StartupError(f"{point}: not empty; mount on an empty directory")


def _check_link(places: Places) -> None:
    """``StartupError`` unless a link to the mount can be made: without root nobody can bind the
    filesystem to a second place."""
    point = places.mount
    # nobody else's, who could change it
    if (
        point.is_symlink()
        and os.readlink(point) == str(places.fuse)
        and point.lstat().st_uid == os.geteuid()
    ):
        return
    if point.is_symlink() or point.exists():
        raise StartupError(
            f"{point}: already exists; without root, ctxd makes a link there: remove it, "
            "or choose another --mount"
        )
    if not point.parent.is_dir():
        raise StartupError(f"{point.parent}: no such directory")


@contextmanager
def _bound(places: Places, *, taken: bool) -> Iterator[None]:
    """The mount point as a bind of the filesystem."""
    if not taken:
        linux.mount(str(places.fuse), places.mount, "none", linux.MS_BIND)
    try:
        yield
    finally:
        with suppress(OSError):
            linux.unmount(places.mount, linux.MNT_DETACH)


@contextmanager
def _linked(places: Places) -> Iterator[None]:
    """The mount point as a link, as it is in sandboxes."""
    try:
        places.mount.symlink_to(places.fuse)
    except FileExistsError:  # a daemon that was killed left it, or somebody was faster
        _check_link(places)
    try:
        yield
    finally:
        with suppress(OSError):
            places.mount.unlink()


@dataclass(eq=False)
class MountGuard:
    """A process that ends the connection to the kernel when the daemon cannot (guard.c)."""

    _spawner: Spawner
    _cgroup: Cgroup
    _words: Sequence[str | Path]
    _operations: Operations
    _ended: bool = False

    def __post_init__(self) -> None:
        with self._pipe() as tell:
            self._process = self._spawner.start_now(
                self._cgroup, self._words, fds=[None, tell, 2]
            )

    @contextmanager
    def _pipe(self) -> Iterator[int]:
        """Where a guard says that it asked in vain; it is listened to."""
        told, tell = os.pipe()
        said = os.fdopen(told, "rb")
        self._teller = threading.Thread(
            target=_tell_at_hand, args=(said, self._operations), daemon=True
        )
        self._teller.start()
        try:
            yield tell
        finally:
            os.close(tell)

    async def watch(self) -> None:
        """Starts another one when it is gone: a daemon that is killed without a guard may
        never end, held by processes that wait for it in the kernel."""
        while True:
            await self._process.wait()
            if self._ended:
                return
            log.warning("the guard is gone: starting another one")
            with self._pipe() as tell:
                self._process = await self._spawner.start(
                    self._cgroup, self._words, owner=os.getuid(), fds=[None, tell, 2]
                )
            await trio.sleep(_AGAIN_SECONDS)

    def end(self) -> None:
        """Before the daemon ends, or begins anew in the same process."""
        self._ended = True
        self._process.kill()
        self._process.wait_now()
        # it may have been held up by what held the loop; nobody else says what was being done
        self._teller.join(_FAREWELL_SECONDS)


def _mount_as_root(point: Path) -> str:
    """Mounts, and returns what libfuse is to serve. From version 3.17 on, libfuse would have
    mount(8) and umount(8) note it in /run/mount, among the daemon's own processes."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        linux.mount(
            _FSNAME, point, f"fuse.{_SUBTYPE}", linux.MS_NOSUID | linux.MS_NODEV,
            f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        )  # fmt: skip
    except OSError as error:
        raise StartupError(f"{point}: cannot mount: {error.strerror}") from None
    return f"/dev/fd/{device}"


@contextmanager
def mounted(
    operations: Operations, runtime: Runtime, handshake: Handshake
) -> Iterator[MountGuard]:
    """The filesystem, mounted in both places as long as the context lasts. With a ``handshake``
    that was taken over it is mounted already.

    Yields its guard, whose children are with the helpers. When the daemon has not answered for as
    long as the setting ``watchdog`` says, it is said what it was doing, and the connection to the
    kernel is aborted: then ``pyfuse3.main`` returns.
    """
    places, privilege = runtime.places, runtime.agents.privilege
    taken = handshake.taken
    if not taken:
        clear_stale(places.fuse, privilege)
        handshake.made_point = not privilege.rootless and not places.mount.exists()
        if handshake.made_point:
            places.mount.mkdir(mode=0o755)
    # where libfuse finds the connection, or is to mount
    if taken:
        place = handshake.take_over()
    elif privilege.rootless:
        place = str(places.fuse)
    else:
        place = _mount_as_root(places.fuse)
    # Of a mount without root: others than the daemon's user have no agents, and where root has not
    # allowed it in fuse.conf, allow_other would make it fail.
    names = {f"fsname={_FSNAME}", f"subtype={_SUBTYPE}"}
    options = {*pyfuse3.default_options, *names, "nosuid", "nodev"}
    try:
        pyfuse3.init(operations, place, options)
    except RuntimeError as error:
        raise StartupError(f"{places.fuse}: cannot mount: {error}") from None
    _mount_connections(privilege)
    connection = _connection(places)
    _open_background(connection, privilege)
    abort = str(connection / "abort")
    watchdog = ceil(runtime.config.watchdog)
    home = runtime.hierarchy.helpers.path
    arguments = orders.words(places.fuse, os.getpid(), abort, watchdog, home)
    cgroup = runtime.hierarchy.daemon
    guard = MountGuard(runtime.spawner, cgroup, [places.program("guard"), *arguments], operations)
    try:
        with _linked(places) if privilege.rootless else _bound(places, taken=taken):
            yield guard
    finally:
        # libfuse does not know where it is mounted, except without root
        pyfuse3.close(unmount=False)
        with suppress(OSError):
            if linux.mount_at(places.fuse) is not None:
                _detach(places.fuse, privilege)
        guard.end()
        if handshake.made_point:
            with suppress(OSError):
                places.mount.rmdir()


def _tell_at_hand(guard: IO[bytes], operations: Operations) -> None:
    """Says who holds the lock of agent/, and what was being done when the mount did not answer: by
    a thread, for it is the event loop that may be stuck. A handler of a signal would look at calls
    of threads that run meanwhile, which ended the daemon now and then."""
    with guard:
        while (said := guard.readline()) not in (b"", b"\n"):
            holder = escape(said[:-1].decode(errors="replace"))
            log.warning(
                "no new name in agent/ is answered: its lock is held by the process that lists it "
                "(getdents): %s: end it, and who serves its memory",
                holder,
            )
    if not said:
        return
    log.error("the mount does not answer: aborting its connection and mounting anew")
    for line in _calls():
        log.error("thread %s", line)
    for line in operations.at_hand():
        log.error("waiting: %s", line)


def _calls() -> list[str]:
    """The calls that each other thread is in, the innermost call first; those that do the same are
    one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    doing: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            calls = [
                f"{each.f_code.co_name} ({os.path.basename(each.f_code.co_filename)}:{line})"
                for each, line in traceback.walk_stack(frame)
            ]
            doing.setdefault(", ".join(calls), []).append(names.get(ident, "of a library"))
    return [f"{', '.join(threads)}: {calls}" for calls, threads in doing.items()]


def _connection(places: Places) -> Path:
    """Where the user who mounted the filesystem has its connection to the kernel (fusectl)."""
    # not by stat(2), which the daemon would have to answer to itself
    entry = linux.mount_at(places.fuse)
    number = entry.device.partition(":")[2] if entry is not None else ""
    return _CONNECTIONS / number


def _mount_connections(privilege: Privilege) -> None:
    """Mounts fusectl where it always is, unless somebody has: systemd does it at boot."""
    if privilege.rootless or any(entry.fstype == "fusectl" for entry in linux.read_mounts()):
        return
    with suppress(OSError):  # not in every container
        linux.mount("none", _CONNECTIONS, "fusectl", 0)


def _open_background(connection: Path, privilege: Privilege) -> None:
    """Lets the kernel send all that it asks for in the background.

    It holds back more than a dozen of them, of all users: a process that reads ahead without
    pause delays all others that read into pages. Here the owners are served in turn.
    """
    try:
        allowed = int(_USER_BACKGROUND.read_text()) if privilege.rootless else _BACKGROUND_MAX
        for name in ("max_background", "congestion_threshold"):
            (connection / name).write_text(f"{min(allowed, _BACKGROUND_MAX)}\n")
    except OSError as error:
        # a user cannot mount what is missing
        level = logging.DEBUG if privilege.rootless else logging.WARNING
        log.log(level, "%s: processes that read ahead delay others: %s", connection, error.strerror)
