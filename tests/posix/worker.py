"""A process of one user that obeys: it does to a directory what it is told, and says what it got.

    python -m tests.posix.worker UID GID GROUP…

Reads pickled tuples, the verb and its arguments, from its standard input, and answers each on its
standard output: what the call returned, as far as two filesystems have to agree on it, or the name
of its error. Paths lead from the directory that ``begin`` names. Descriptors have numbers of its
own, the slots; where a call exists for both, a slot stands for a path.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import pickle
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_KINDS: Final = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link",
                 stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}
#: times before it were set, and are told; later ones are those of the run
_PAST: Final = 1_000_000_000 * 10**9
#: of a file, how much is compared
_SHOWN: Final = 1 << 20

UTIME: Final = {"now": (1 << 30) - 1, "omit": (1 << 30) - 2}
#: of nothing
_CLOSED: Final = 999_999
#: What stands in for a path: a slot.
At = str | int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _time(nanoseconds: int) -> object:
    return nanoseconds if nanoseconds < _PAST else "now"


def _told(st: os.stat_result) -> tuple[object, ...]:
    kind = _KINDS.get(stat.S_IFMT(st.st_mode), "other")
    # how large a directory is, and a link's time, tell how a filesystem keeps them
    size = None if kind == "directory" else st.st_size
    modified = None if kind == "link" else _time(st.st_mtime_ns)
    mode = f"{stat.S_IMODE(st.st_mode):04o}"
    return kind, mode, st.st_nlink, st.st_uid, st.st_gid, size, modified


class Worker:
    """Each public method is a verb."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._sockets: list[socket.socket] = []

    def _fd(self, slot: int) -> int:
        return self._slots.get(slot, _CLOSED)

    def _at(self, what: At) -> At:
        return self._fd(what) if isinstance(what, int) else what

    # the place

    def begin(self, directory: str) -> None:
        os.umask(0o022)
        os.chdir(directory)

    def end(self) -> None:
        os.chdir("/")
        for slot in list(self._slots):
            self.close(slot)
        while self._sockets:
            self._sockets.pop().close()

    def remove(self, directory: str) -> None:
        shutil.rmtree(directory)

    def umask(self, mask: int) -> None:
        os.umask(mask)

    def snapshot(self) -> list[object]:
        """All there is."""
        found: list[object] = [self._whole(".")]
        for directory, directories, files in os.walk("."):
            directories.sort()
            found += [self._whole(os.path.join(directory, name))
                      for name in sorted((*directories, *files))]
        return found

    def _whole(self, path: str) -> tuple[object, ...]:
        st = os.lstat(path)
        content: object = None
        if stat.S_ISLNK(st.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(st.st_mode):
            with open(path, "rb") as file:
                content = file.read(_SHOWN)
        names = sorted(os.listxattr(path, follow_symlinks=False))
        attributes = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
        return path, _told(st), content, attributes

    # names

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def link(self, source: str, path: str, follow: bool) -> None:
        os.link(source, path, follow_symlinks=follow)

    def rename(self, source: str, path: str, flags: int) -> None:
        _checked(_libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(path),
                                 flags))

    def mkfifo(self, path: str, mode: int) -> None:
        os.mkfifo(path, mode)

    def mknod(self, path: str, kind: int, mode: int) -> None:
        os.mknod(path, kind | mode, os.makedev(1, 3))

    def bind(self, path: str) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            made.bind(path)
            made.listen()
        except OSError:
            made.close()
            raise
        self._sockets.append(made)

    def connect(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as made:
            made.connect(path)

    def list(self, at: At) -> object:
        with os.scandir(self._at(at)) as entries:
            found = []
            for entry in entries:
                st = entry.stat(follow_symlinks=False)
                kind = (entry.is_dir(follow_symlinks=False), entry.is_symlink(),
                        entry.is_file(follow_symlinks=False))
                assert entry.inode() == st.st_ino, f"{entry.name}: two numbers of the inode"
                found.append((entry.name, kind))
        return sorted(found)

    # attributes

    def stat(self, at: At) -> object:
        return _told(os.stat(self._at(at)))

    def lstat(self, path: str) -> object:
        return _told(os.lstat(path))

    def access(self, path: str, mode: int) -> bool:
        return os.access(path, mode, effective_ids=True)

    def statfs(self, at: At) -> object:
        st = os.statvfs(self._at(at))
        sane = st.f_bsize > 0 and st.f_frsize > 0 and 0 < st.f_bavail <= st.f_bfree <= st.f_blocks
        return sane, st.f_namemax, 0 < st.f_ffree <= st.f_files

    def chmod(self, at: At, mode: int) -> None:
        os.chmod(self._at(at), mode)

    def chmod_kept(self, at: At, mode: int) -> None:
        """With what a space keeps of a mode."""
        is_directory = stat.S_ISDIR(os.stat(self._at(at)).st_mode)
        os.chmod(self._at(at), mode & (0o3777 if is_directory else 0o1777))

    def chown(self, at: At, uid: int, gid: int) -> None:
        os.chown(self._at(at), uid, gid)

    def lchown(self, path: str, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def utimes(self, at: At, accessed: int | str, modified: int | str, follow: bool) -> object:
        """From known times on, since any reader may have changed them."""
        self._set_times(at, 10**9, 2 * 10**9, follow)
        self._set_times(at, accessed, modified, follow)
        st = os.stat(self._at(at), follow_symlinks=isinstance(at, int) or follow)
        return _time(st.st_atime_ns), _time(st.st_mtime_ns)

    def touch(self, at: At, accessed: int | str, modified: int | str) -> None:
        self._set_times(at, accessed, modified, True)

    def _set_times(self, at: At, accessed: int | str, modified: int | str, follow: bool) -> None:
        times = (_Timespec * 2)()
        for time, value in zip(times, (accessed, modified), strict=True):
            if isinstance(value, str):
                time.nanoseconds = UTIME[value]
            else:
                time.seconds, time.nanoseconds = divmod(value, 10**9)
        if isinstance(at, int):
            _checked(_libc.futimens(self._fd(at), times))
        else:
            flags = 0 if follow else _AT_SYMLINK_NOFOLLOW
            _checked(_libc.utimensat(_AT_FDCWD, os.fsencode(at), times, flags))

    def setxattr(self, at: At, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self._at(at), name, value, flags)

    def getxattr(self, at: At, name: str) -> bytes:
        return os.getxattr(self._at(at), name)

    def listxattr(self, at: At) -> object:
        return sorted(os.listxattr(self._at(at)))

    def removexattr(self, at: At, name: str) -> None:
        os.removexattr(self._at(at), name)

    # open files

    def open(self, slot: int, path: str, flags: int, mode: int) -> None:
        with suppress(OSError):
            self.close(slot)
        # nothing here waits for the other end of a FIFO
        self._slots[slot] = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)

    def close(self, slot: int) -> None:
        os.close(self._slots.pop(slot, _CLOSED))

    def read(self, slot: int, size: int) -> bytes:
        return os.read(self._fd(slot), size)

    def write(self, slot: int, data: bytes) -> int:
        return os.write(self._fd(slot), data)

    def pread(self, slot: int, size: int, offset: int) -> bytes:
        return os.pread(self._fd(slot), size, offset)

    def pwrite(self, slot: int, data: bytes, offset: int) -> int:
        return os.pwrite(self._fd(slot), data, offset)

    def seek(self, slot: int, offset: int, whence: int) -> int:
        fd = self._fd(slot)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            # every other offset in a directory is a number of its filesystem's own
            return os.lseek(fd, 0, os.SEEK_SET)
        return os.lseek(fd, offset, whence)

    def holes(self, slot: int, offset: int, whence: int) -> tuple[object, int]:
        """What SEEK_DATA or SEEK_HOLE finds, and the size; the offset stays."""
        fd = self._fd(slot)
        size = os.fstat(fd).st_size
        before = os.lseek(fd, 0, os.SEEK_CUR)
        try:
            return os.lseek(fd, offset, whence), size
        except OSError as error:
            return errno.errorcode[error.errno or 0], size
        finally:
            os.lseek(fd, before, os.SEEK_SET)

    def truncate(self, at: At, size: int) -> None:
        os.truncate(self._at(at), size)

    def fsync(self, slot: int) -> None:
        os.fsync(self._fd(slot))

    def fdatasync(self, slot: int) -> None:
        os.fdatasync(self._fd(slot))

    def fallocate(self, slot: int, mode: int, offset: int, size: int) -> None:
        _checked(_libc.fallocate(self._fd(slot), mode, ctypes.c_long(offset), ctypes.c_long(size)))

    def copy(self, source: int, target: int, size: int) -> int:
        return os.copy_file_range(self._fd(source), self._fd(target), size)

    def sendfile(self, target: int, source: int, offset: int, size: int) -> int:
        return os.sendfile(self._fd(target), self._fd(source), offset, size)

    def map_write(self, slot: int, offset: int, data: bytes) -> int:
        """By a shared mapping, until the file has it."""
        with self._mapped(slot, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED) as mapped:
            mapped.seek(min(offset, len(mapped)))
            written = mapped.write(data[: len(mapped) - mapped.tell()])
            mapped.flush()
            return written

    def map_read(self, slot: int, private: bool) -> bytes:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        with self._mapped(slot, mmap.PROT_READ, flags) as mapped:
            return mapped[:_SHOWN]

    def _mapped(self, slot: int, protection: int, flags: int) -> mmap.mmap:
        fd = self._fd(slot)
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size == 0:
            raise OSError(errno.EINVAL, "Python maps no empty file")
        return mmap.mmap(fd, 0, flags=flags, prot=protection)

    def flock(self, slot: int, operation: int) -> None:
        fcntl.flock(self._fd(slot), operation | fcntl.LOCK_NB)

    def lockf(self, slot: int, operation: int, start: int, size: int) -> None:
        wait_not = 0 if operation == fcntl.LOCK_UN else fcntl.LOCK_NB
        fcntl.lockf(self._fd(slot), operation | wait_not, size, start)

    def getlk(self, slot: int, kind: int) -> int:
        """The kind of lock that stands in the way."""
        asked = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
        told = fcntl.fcntl(self._fd(slot), fcntl.F_GETLK, asked)
        return int(struct.unpack("hhqqi4x", told)[0])


def answer(verb: Callable[..., object], arguments: tuple[Any, ...]) -> tuple[str, object]:
    """Of one call: ``is`` and what it returned, or ``error`` and which."""
    try:
        return "is", verb(*arguments)
    except OSError as error:
        if error.errno is None:  # Python's own
            return "error", str(error)
        name = errno.errorcode[error.errno]
        return "error", "EOPNOTSUPP" if name == "ENOTSUP" else name
    except Exception as error:
        return "broken", repr(error)


def serve(commands: BinaryIO, answers: BinaryIO) -> None:
    worker = Worker()
    while True:
        try:
            verb, *arguments = pickle.load(commands)
        except EOFError:
            return
        pickle.dump(answer(getattr(worker, verb), tuple(arguments)), answers)
        answers.flush()


if __name__ == "__main__":
    _uid, _gid, *_groups = map(int, sys.argv[1:])
    os.setgroups(_groups)
    os.setresgid(_gid, _gid, _gid)
    os.setresuid(_uid, _uid, _uid)
    serve(sys.stdin.buffer, sys.stdout.buffer)
