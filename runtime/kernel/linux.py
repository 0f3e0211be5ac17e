"""The few system calls that Python 3.11 has no wrapper for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.ids import BootId

_libc: Final = ctypes.CDLL(None, use_errno=True)

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_BIND: Final = 4096
MS_PRIVATE: Final = 1 << 18
MS_SHARED: Final = 1 << 20
MNT_DETACH: Final = 2

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_FSCONFIG_CMD_CREATE: Final = 6
_FSMOUNT_CLOEXEC: Final = 1
_OPENAT2: Final = 437
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08

IN_MODIFY: Final = 0x2
IN_Q_OVERFLOW: Final = 0x4000
IN_IGNORED: Final = 0x8000
_IN_NONBLOCK: Final = os.O_NONBLOCK
_IN_CLOEXEC: Final = os.O_CLOEXEC

SO_PEERPIDFD: Final = 77
SO_PEERGROUPS: Final = 59
#: of Linux 6.16
SO_PASSRIGHTS: Final = 83
SO_SNDBUFFORCE: Final = 32
_UCRED: Final = struct.Struct("iII")
#: seconds that the close of somebody's descriptors may take
_HURRY: Final = 0.005

#: in the flags of a process (include/linux/sched.h)
_PF_EXITING: Final = 0x4


def _check(result: int, path: str | Path | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path) if path is not None else None)
    return result


def syscall(number: int, *arguments: Any) -> int:
    """syscall(2)."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments))


def lacking(wanted: Mapping[str, int]) -> list[str]:
    """The capabilities, given by name and number, that this process does not have."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = int(text.partition("\nCapEff:")[2].split(maxsplit=1)[0], 16)
    return [name for name, number in wanted.items() if not effective >> number & 1]


def mount(source: str, target: Path, fstype: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            fstype.encode(),
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        target,
    )


def unmount(target: Path, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), target)


def rename(fd: int, name: str, new_name: str, flags: int = 0) -> None:
    """renameat2(2) within a directory."""
    old, new = os.fsencode(name), os.fsencode(new_name)
    _check(_libc.renameat2(fd, old, fd, new, ctypes.c_uint(flags)), name)


class _OpenHow(ctypes.Structure):
    """``struct open_how`` (openat2(2))."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


def open_beneath(fd: int, path: str, flags: int) -> int:
    """openat2(2) of what is below a directory, however far: no link is followed on the way."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    return syscall(_OPENAT2, fd, os.fsencode(path), ctypes.byref(how), size)


def inotify_init() -> int:
    """inotify_init1(2), non-blocking and closed on exec."""
    return _check(_libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))


def inotify_add_watch(fd: int, path: Path | str, mask: int) -> int:
    """inotify_add_watch(2)."""
    return _check(_libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask)), path)


def inotify_rm_watch(fd: int, watch: int) -> None:
    """inotify_rm_watch(2)."""
    _check(_libc.inotify_rm_watch(fd, watch))


def parse_inotify(data: bytes) -> list[tuple[int, int]]:
    """(watch descriptor, mask) of each event in a buffer read from inotify(7)."""
    events = []
    offset = 0
    while offset + 16 <= len(data):
        watch, mask, _cookie, length = struct.unpack_from("iIII", data, offset)
        events.append((watch, mask))
        offset += 16 + length
    return events


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo (proc(5))."""

    root: str
    point: str
    options: str
    fstype: str
    source: str
    super_options: str
    #: MAJOR:MINOR of its filesystem
    device: str
    #: whether what is mounted below it reaches those who have a copy of it
    shared: bool


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def read_mounts() -> list[MountEntry]:
    """The mounts of this process's namespace, oldest first."""
    entries = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.rstrip("\n").partition(" - ")
            fields = left.split(" ")
            fstype, source, super_options = [*right.split(" "), "", ""][:3]
            entries.append(
                MountEntry(
                    _unescape(fields[3]),
                    _unescape(fields[4]),
                    fields[5],
                    fstype,
                    _unescape(source),
                    super_options,
                    fields[2],
                    any(field.startswith("shared:") for field in fields[6:]),
                )
            )
    return entries


def mount_at(path: Path) -> MountEntry | None:
    """The topmost mount on exactly this path."""
    found = None
    for entry in read_mounts():
        if entry.point == str(path):
            found = entry
    return found


def mount_of(path: Path) -> MountEntry:
    """The mount that a path is on."""
    around = {str(path), *map(str, path.parents)}
    found = [entry for entry in read_mounts() if entry.point in around]
    longest = max(len(entry.point) for entry in found)
    return [entry for entry in found if len(entry.point) == longest][-1]


@cache
def boot_id() -> BootId:
    return BootId(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def sync_filesystem(path: Path) -> None:
    """syncfs(2) of the filesystem that a directory is on."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(_libc.syncfs(fd), path)
    finally:
        os.close(fd)


def descriptors() -> tuple[int, int]:
    """How many this process holds, and how many it may; since Linux 6.2 without a look at each."""
    held = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    return held, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@cache
def _procfs() -> int:
    """A procfs that nobody else has, where this process may mount one.

    Whoever lists /proc into memory that is not there, and makes a name in it, has everybody wait
    who looks for a process there. Each mount of procfs has locks of its own (Linux 5.8).
    """
    made = _libc.syscall(_FSOPEN, b"proc", 1)
    if made < 0:
        return os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    try:
        _libc.syscall(_FSCONFIG, made, _FSCONFIG_CMD_CREATE, None, None, 0)
        mounted = _libc.syscall(_FSMOUNT, made, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(made)
    return mounted if mounted >= 0 else os.open("/proc", os.O_PATH | os.O_CLOEXEC)


def open_of_process(pid: int, file: str) -> int:
    """A file of /proc/PID, or of a thread; ``OSError``."""
    return os.open(f"{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=_procfs())


def is_alive(pid: int) -> bool:
    """Whether a process runs: not a zombie, and not on its way there (proc(5)).

    PID 1 of a namespace, killed, waits for all that is in it before it is a zombie.
    """
    fields = _stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X") and not int(fields[6]) & _PF_EXITING


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 if it is gone (proc(5))."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _read_proc(pid: int, file: str) -> bytes:
    """A file of /proc/PID; empty if the process is gone."""
    # a file object would make four system calls more
    data = b""
    try:
        fd = open_of_process(pid, file)
        try:
            while part := os.read(fd, 65536):
                data += part
        finally:
            os.close(fd)
    except OSError:
        return b""
    return data


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name, which may hold anything; none if it is gone."""
    return _read_proc(pid, "stat").rpartition(b")")[2].split()


def groups_of(pid: int) -> tuple[int, ...]:
    """The supplementary groups of a process; none if it is gone (proc(5))."""
    _, _, rest = _read_proc(pid, "status").partition(b"\nGroups:")
    return tuple(int(word) for word in rest.partition(b"\n")[0].split())


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of who connected to a Unix socket, as they were then (unix(7))."""
    pid, uid, gid = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def refuse_descriptors(connection: socket.socket) -> None:
    """Has the kernel refuse descriptors that are sent there, with ``EPERM`` for who sends them.

    Nobody would take them, so that reading closed them, and closing may take as long as the sender
    likes (SO_LINGER in socket(7)). Before Linux 6.16 they cannot be refused: see ``hurried``.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def take_more(fd: int, size: int) -> None:
    """Has the kernel take about so many bytes that are sent to a socket and not read there; without
    root, as many as anybody may have."""
    connection = socket.socket(fileno=fd)
    try:
        # the kernel takes twice of what is said
        connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size // 2)
    except PermissionError:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)
    finally:
        connection.detach()


@cache
def _refuses_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Within it, a signal ends a wait of the main thread for the close of what somebody sent.

    For reading from sockets and closing them, where the kernel cannot refuse descriptors. A signal
    that comes before its wait is followed by others.
    """
    if _refuses_descriptors():
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, _HURRY, _HURRY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
