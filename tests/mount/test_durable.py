"""Spaces of ``shared/`` and ``home/`` on a real mount, where the kernel has its part."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, wait_until


@pytest.fixture
def space(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Path:
    """A directory of this test's."""
    pool = shared_daemon.root / "shared" / "pool"
    pool.mkdir(mode=0o777, exist_ok=True)
    made = pool / str(request.node.name).replace("/", "-")
    made.mkdir()
    return made


def refusing(action: Callable[[], object]) -> str:
    """The errno's name."""
    with pytest.raises(OSError) as caught:
        action()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def as_user(uid: int, program: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> str:
    """What a process of this user says: ``ok``, or the errno's name."""
    told = (
        "import errno, os, sys\n"
        f"try:\n {program}\n"
        "except OSError as error: print(errno.errorcode[error.errno])\n"
        "else: print('ok')"
    )
    return subprocess.run(
        ["python3", "-I", "-c", told, *map(str, arguments)],
        check=True, capture_output=True, text=True, pass_fds=pass_fds,
        user=uid, group=uid, extra_groups=(), cwd="/",
    ).stdout.strip()


def backing(daemon: Daemon, space: Path) -> Path:
    """Where it really is, as a line of a mount table shows it."""
    return daemon.state / space.relative_to(daemon.root)


def opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def test_a_shared_mapping_and_the_file_are_one(space: Path) -> None:
    fd = opened(space / "file", os.O_RDWR)
    os.ftruncate(fd, 8192)
    with mmap.mmap(fd, 8192) as mapped:
        mapped[4090:4100] = b"0123456789"
        assert os.pread(fd, 10, 4090) == b"0123456789"
        other = os.open(space / "file", os.O_WRONLY)
        os.pwrite(other, b"ab", 4095)
        os.close(other)
        assert mapped[4090:4100] == b"01234ab789"
        os.pwrite(fd, b"cd", 4089)
        assert mapped[4088:4092] == b"\0cd1"
        os.ftruncate(fd, 4096)
        os.ftruncate(fd, 8192)
        assert mapped[4090:4100] == b"d1234a\0\0\0\0"
    os.close(fd)


def test_what_was_mapped_is_in_the_backing_file(
    shared_daemon: Daemon, space: Path
) -> None:
    fd = opened(space / "file", os.O_RDWR)
    os.ftruncate(fd, 4096)
    backing = shared_daemon.state / space.relative_to(shared_daemon.root) / "file"
    with mmap.mmap(fd, 4096) as mapped:
        mapped[:4] = b"sync"
        mapped.flush()
        assert backing.read_bytes()[:4] == b"sync"
        mapped[:4] = b"more"
    os.close(fd)
    assert backing.read_bytes()[:4] == b"more", "written when it is unmapped"


def test_another_process_sees_a_shared_mapping(space: Path) -> None:
    fd = opened(space / "file", os.O_RDWR)
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096) as mapped:
        program = (
            "import mmap, os, sys\n"
            "with mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096) as m: m[:3] = b'two'"
        )
        subprocess.run([sys.executable, "-c", program, str(space / "file")], check=True)
        assert mapped[:3] == b"two"
    os.close(fd)


def test_what_another_way_changed_is_seen_at_the_next_open(
    shared_daemon: Daemon, space: Path
) -> None:
    file = space / "file"
    backing = shared_daemon.state / space.relative_to(shared_daemon.root) / "file"
    file.write_text("first")
    for number in range(20):
        assert len(file.read_text()) == 5
        backing.write_text(f"{number:05}")
        assert file.read_text() == f"{number:05}"


def test_appending_goes_to_the_end_whichever_way_it_is_open(space: Path) -> None:
    first = opened(space / "file", os.O_RDWR | os.O_APPEND)
    second = opened(space / "file", os.O_WRONLY | os.O_APPEND)
    for letter in b"abcdef":
        os.write(first if letter % 2 else second, bytes([letter]))
    assert (space / "file").read_text() == "abcdef"
    os.ftruncate(first, 4096)
    with mmap.mmap(first, 4096) as mapped:
        mapped[:3] = b"xyz"
    os.close(first)
    os.close(second)
    assert (space / "file").read_bytes() == b"xyzdef" + bytes(4090)


def test_a_removed_file_is_a_file_while_it_is_open(space: Path) -> None:
    fd = opened(space / "file", os.O_RDWR)
    (space / "file").unlink()
    os.write(fd, b"0123456789")
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, 4)
    os.utime(fd, ns=(1, 2))
    found = os.fstat(fd)
    assert (found.st_size, found.st_nlink, found.st_mode) == (4, 0, stat.S_IFREG | 0o600)
    assert (found.st_atime_ns, found.st_mtime_ns) == (1, 2)
    assert os.pread(fd, 10, 0) == b"0123"
    os.close(fd)


def test_a_fifo_and_a_socket_work(space: Path) -> None:
    os.mkfifo(space / "fifo")
    reader = os.open(space / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(space / "fifo", os.O_WRONLY)
    os.write(writer, b"through")
    assert os.read(reader, 10) == b"through"
    for fd in (reader, writer):
        os.close(fd)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        # a path of a socket is short
        at = os.open(space, os.O_PATH)
        server.bind(f"/proc/self/fd/{at}/socket")
        server.listen(1)
        client.connect(f"/proc/self/fd/{at}/socket")
        os.close(at)
    assert stat.S_ISSOCK((space / "socket").stat().st_mode)


def test_a_hole_takes_no_room(space: Path) -> None:
    fd = opened(space / "file", os.O_RDWR)
    os.pwrite(fd, b"x", 1 << 30)
    found = os.fstat(fd)
    os.close(fd)
    assert found.st_size == (1 << 30) + 1
    assert found.st_blocks < 1000


def test_extended_attributes_are_those_of_users(space: Path) -> None:
    file = space / "file"
    file.write_text("")
    os.setxattr(file, "user.a", b"1")
    assert os.getxattr(file, "user.a") == b"1"
    assert os.listxattr(file) == ["user.a"]
    assert refusing(lambda: os.setxattr(file, "user.a", b"2", os.XATTR_CREATE)) == "EEXIST"
    assert refusing(lambda: os.setxattr(file, "user.b", b"2", os.XATTR_REPLACE)) == "ENODATA"
    no = errno.errorcode[errno.EOPNOTSUPP]
    for name in ("trusted.a", "security.a", "system.posix_acl_access"):
        assert refusing(lambda: os.getxattr(file, name)) == no  # noqa: B023
        assert refusing(lambda: os.setxattr(file, name, b"\2\0\0\0")) == no  # noqa: B023
    capability = b"\1\0\0\2" + bytes(16)
    assert refusing(lambda: os.setxattr(file, "security.capability", capability)) == no


USER, OTHER = 61001, 61002


@pytest.mark.skipif(os.geteuid() != 0, reason="of two users")
def test_a_sticky_directory_is_sticky_also_for_what_changed_since(
    shared_daemon: Daemon, space: Path
) -> None:
    """The kernel asks of the mount whose a file is, and keeps the answer."""
    space.chmod(0o1777)
    real = backing(shared_daemon, space)
    attempts = {
        "unlink": "os.unlink(sys.argv[1])",
        "rmdir": "os.rmdir(sys.argv[1])",
        "rename": "os.rename(sys.argv[1], sys.argv[1] + '-moved')",
        "onto": "os.rename(sys.argv[1] + '-own', sys.argv[1])",
    }
    for name, attempt in attempts.items():
        file = real / name
        kind = "os.mkdir(sys.argv[1])" if name == "rmdir" else "open(sys.argv[1], 'w').close()"
        assert as_user(USER, kind, space / name) == "ok"
        assert as_user(USER, "open(sys.argv[1], 'w').close()", space / f"{name}-own") == "ok"
        # by a line of a mount table, while the kernel keeps what it was told
        os.stat(space / name)
        os.chown(file, OTHER, OTHER)
        assert as_user(USER, attempt, space / name) == "EPERM", name
        assert file.stat().st_uid == OTHER
    wait_until(lambda: (space / "unlink").stat().st_uid == OTHER, "the owner to be seen")
    assert as_user(OTHER, attempts["unlink"], space / "unlink") == "ok"
    # the daemon has its rights still
    (space / "rename").unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="of two users")
def test_a_descriptor_gives_no_right_to_another_file_with_its_inode_number(
    shared_daemon: Daemon, space: Path
) -> None:
    real = backing(shared_daemon, space)
    file = space / "file"
    file.touch()
    os.chown(file, USER, USER)
    held = os.open(file, os.O_PATH)
    number = (real / "file").stat().st_ino
    for index in range(600):  # the daemon keeps descriptors of fewer files
        (space / f"{index}").touch()
        (space / f"{index}").chmod(0o600)
    (real / "file").unlink()
    for index in range(1000):
        secret = real / f"secret-{index}"
        secret.touch(0o600)
        os.chown(secret, OTHER, OTHER)
        if secret.stat().st_ino == number:
            break
    else:
        pytest.skip("the filesystem gives no inode number again at once")
    secret.rename(real / "file")
    # the kernel has the owner of before, and asks no more
    path = f"/proc/self/fd/{held}"
    change = "os.chmod(sys.argv[1], 0o666)"
    assert as_user(USER, change, path, pass_fds=(held,)) == "ESTALE"
    assert stat.S_IMODE((real / "file").stat().st_mode) == 0o600
    assert as_user(OTHER, "open(sys.argv[1]).close()", file) == "ok", "by its name, it is found"
    os.close(held)


@pytest.mark.skipif(os.geteuid() != 0, reason="of two users")
def test_only_the_owner_of_now_changes_modes(shared_daemon: Daemon, space: Path) -> None:
    file = space / "file"
    file.touch()
    os.chown(file, USER, USER)
    fd = os.open(file, os.O_RDWR)
    os.chown(backing(shared_daemon, file), OTHER, OTHER)
    change = "os.fchmod(int(sys.argv[1]), 0o777)"
    assert as_user(USER, change, fd, pass_fds=(fd,)) == "EPERM"
    wait_until(lambda: file.stat().st_uid == OTHER, "the owner to be seen")
    assert as_user(OTHER, "os.chmod(sys.argv[1], 0o640)", file) == "ok"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="of another user")
def test_what_has_no_name_is_on_the_disk_still() -> None:
    with daemon_of(config="owner_disk_max: 33554432\n") as daemon:
        space = daemon.root / "shared" / "own"
        space.mkdir()
        os.chown(space, USER, USER)
        removed = (
            "fds = []\n"
            " for n in range(8):\n"
            "  fds.append(os.open(f'{sys.argv[1]}/{n}', os.O_RDWR | os.O_CREAT))\n"
            "  os.unlink(f'{sys.argv[1]}/{n}')\n"
            "  for _ in range(8): os.write(fds[-1], bytes(1 << 20))"
        )
        assert as_user(USER, removed, space) == "EDQUOT"
        # all of them are closed
        one = "open(sys.argv[1], 'wb').write(bytes(8 << 20))"
        wait_until(lambda: as_user(USER, one, space / "file") == "ok", "the room to be there again")


_LIBC = ctypes.CDLL(None, use_errno=True)


def test_what_cannot_be_passed_on_is_answered_as_the_manual_says(space: Path) -> None:
    fd = opened(space / "file", os.O_RDWR)
    os.write(fd, b"0123456789")
    no = errno.errorcode[errno.EOPNOTSUPP]
    for mode in (0, 3):
        done = _LIBC.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096))
        assert (done, ctypes.get_errno()) == (-1, errno.EOPNOTSUPP)
    assert refusing(lambda: os.open(space, os.O_TMPFILE | os.O_RDWR)) == no
    assert refusing(lambda: fcntl.ioctl(fd, 0x40049409, fd)) == no, "FICLONE"
    other = opened(space / "other", os.O_RDWR)
    assert os.copy_file_range(fd, other, 5, 0) == 5
    assert os.pread(other, 10, 0) == b"01234"
    assert (os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE)) == (0, 10)
    os.posix_fallocate(fd, 0, 5000)
    assert os.fstat(fd).st_size == 5000
    os.close(os.open(space / "file", os.O_RDWR | os.O_DIRECT))
    for each in (fd, other):
        fcntl.flock(each, fcntl.LOCK_EX)
        fcntl.lockf(each, fcntl.LOCK_EX)
        os.close(each)


def test_a_directory_may_change_while_it_is_read(space: Path) -> None:
    there = {f"{number:05}" for number in range(3000)}
    for name in there:
        (space / name).touch()
    removed: set[str] = set()
    seen: list[str] = []
    with os.scandir(space) as entries:
        for entry in entries:
            seen.append(entry.name)
            if len(seen) % 3 == 0:
                other = next(iter(there - removed - set(seen)), None)
                if other is not None:
                    (space / other).unlink()
                    removed.add(other)
                    (space / f"new-{len(seen)}").touch()
    old = [name for name in seen if not name.startswith("new-")]
    assert len(seen) == len(set(seen)), "no name twice"
    assert set(old) >= there - removed, "none is lost that stayed"


def test_a_directory_is_read_anew_from_its_beginning(space: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.opendir.restype = ctypes.c_void_p
    libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long

    def names() -> set[str]:
        found: set[str] = set()
        while entry := libc.readdir(ctypes.c_void_p(stream)):
            found.add(ctypes.string_at(entry + 19).decode())
        return found

    for number in range(100):
        (space / f"{number}").touch()
    stream = libc.opendir(os.fsencode(space))
    for _ in range(40):
        libc.readdir(ctypes.c_void_p(stream))
    middle = libc.telldir(ctypes.c_void_p(stream))
    rest = names()
    libc.seekdir(ctypes.c_void_p(stream), ctypes.c_long(middle))
    assert names() == rest
    (space / "new").touch()
    (space / "0").unlink()
    libc.rewinddir(ctypes.c_void_p(stream))
    assert names() - {".", ".."} == {f"{number}" for number in range(1, 100)} | {"new"}
    libc.closedir(ctypes.c_void_p(stream))
