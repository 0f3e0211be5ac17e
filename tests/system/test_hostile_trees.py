"""Agents that hold the kernel's locks on files and directories that they share with others."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.hostile.guarded import OBEDIENCE, Guard
from tests.system.test_spaces import as_uid, errno_of, make, removed
from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_dead, wait_until, write
from tests.worlds.held import held
from tests.worlds.whose import OTHER

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
OWNER = OTHER
#: that an attack goes on, in seconds
LONG_ENOUGH = 1.5

#: writes from pages that only ctxd can fill, and reads of a directory into such pages: the inode's
#: lock is held meanwhile. Others ask ctxd for whatever changes the same files, by all their names.
HOLD = """
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None, use_errno=True)
ctx, me = os.environ['CTX_ROOT'], os.environ['CTX_SELF']
SIZE = 1 << 16
with open(f'{me}/artifact/page', 'wb') as file:
    file.write(b'x' * SIZE)
for n in range(4):
    open(f'/t/f{n}', 'wb').close()
os.makedirs('/t/a/moved')
os.mkdir('/t/b')

def forever(act):
    def run():
        if os.fork():
            return
        while True:
            try:
                act()
            except OSError:
                time.sleep(0.001)
    run()

def page():
    fd = os.open(f'{me}/artifact/page', os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found = mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    return found

def writing(n):
    with page() as pages, open(f'/t/f{n}', 'rb+', buffering=0) as file:
        file.write(pages)

def listing(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with page() as pages:
        libc.syscall(217, fd, ctypes.byref(ctypes.c_char.from_buffer(pages)), SIZE)
    os.close(fd)

def moving():
    os.rename('/t/a/moved', '/t/b/moved')
    os.rename('/t/b/moved', '/t/a/moved')

def asking(n):
    for where in (f'{ctx}/shared/data', f'{ctx}/shared/data/data'):
        for act in (lambda: os.chmod(f'{where}/f{n}', 0o600 + n),
                    lambda: os.truncate(f'{where}/f{n}', n),
                    lambda: os.close(os.open(f'{where}/n{n}', os.O_CREAT | os.O_WRONLY)),
                    lambda: os.rename(f'{where}/n{n}', f'{where}/m{n}'),
                    lambda: os.unlink(f'{where}/m{n}'),
                    lambda: os.listdir(where)):
            try:
                act()
            except OSError:
                pass

def filling():
    with mmap.mmap(-1, 256 << 20, mmap.MAP_PRIVATE, mmap.PROT_READ) as zeros:
        with open('/t/f0', 'rb+', buffering=0) as file:
            file.write(zeros)
            file.truncate(0)

for n in range(4):
    forever(lambda: writing(n))
    forever(lambda: asking(n))
for path in ('/t', '/t/a/moved', '/t/b/moved'):
    forever(lambda: listing(path))
forever(moving)
forever(filling)
print('attacks', flush=True)
time.sleep(1000)
"""


def hold(daemon: Daemon) -> Path:
    """Such an agent, at work, with a space of its own."""
    space = daemon.path("shared", "data")
    space.mkdir()
    os.chown((space / "data").resolve(), AGENT_UID, AGENT_UID)
    directory = daemon.base / "attack"
    directory.mkdir()
    (directory / "hold.py").write_text(HOLD)
    agent = daemon.make("hold", f"{PYTHON} /attack/hold.py", owner=OWNER)
    write(agent / "policy", "allow hold_t shared:data read,write\n")
    write(agent / "mount", f"{directory} /attack ro\nshared:data /t rw\n")
    write(agent / "ctl", "start")
    wait_until(lambda: "attacks" in read(agent, "out"), "it attacks")
    return agent


def test_who_holds_an_inode_holds_up_nobody_else(daemon: Daemon, guard: Guard) -> None:
    """Neither bystanders, who are judged, nor root who asks for the space itself, nor those whose
    files ctxd takes away meanwhile."""
    hold(daemon)
    space, slowest = daemon.path("shared", "data"), 0.0
    until = time.monotonic() + LONG_ENOUGH
    for number in itertools.count():
        if time.monotonic() > until:
            break
        short = daemon.run(f"short-{number}", "echo said")
        wait_dead(short)
        short.rmdir()
        begun = time.monotonic()
        try:
            space.rmdir()
        except OSError as error:
            assert error.errno == errno.EBUSY, error  # an agent has it
        os.listdir(space)
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < OBEDIENCE


def state_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def sleeping(daemon: Daemon) -> bool:
    """Whether a helper of the daemon waits in the kernel for the lock of a tree."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words, state = (directory / "cmdline").read_bytes(), state_of(directory.name)
        except OSError:
            continue
        if b"remove" in words and bytes(daemon.state) in words and state == "D":
            return True
    return False


def go_on(daemon: Daemon, name: str) -> None:
    """Others make a space, have an agent that takes all there are, and remove it."""
    space = make(daemon, name, AGENT_UID)
    wait_until(lambda: errno_of(os.listdir, space / "data") == "-", "its tree is there")
    command = f"sh -c 'ls {daemon.root}/shared/{name}/data/. && echo has'"
    agent = daemon.run(f"of-{name}", command, policy=f"allow of-{name}_t shared:* read")
    wait_dead(agent)
    assert read(agent, "out") == "has\n", read(agent, "log") + read(agent, "reason")
    removed(space, AGENT_UID)


@pytest.mark.needs_root("others have turns of their own")
def test_who_holds_a_space_that_is_removed_waits_alone(daemon: Daemon) -> None:
    """rmdir(2) takes the lock of what it removes with that of the directory above: the helper
    sleeps for as long as its owner likes, whatever becomes of ctxd."""
    owner = int(OWNER)
    space = make(daemon, "held", owner)
    tree = (space / "data").resolve()
    with held(tree):
        removed(space, owner)
        wait_until(lambda: sleeping(daemon), "the helper waits for the tree")
        make(daemon, "later", owner)  # whose tree is made in its owner's turn
        go_on(daemon, "a")
        for name in ("b", "c"):
            daemon.kill()
            daemon.start()
            go_on(daemon, name)
        assert errno_of(os.mkdir, space) == "EAGAIN", "the name is his until his tree is gone"
    wait_until(lambda: errno_of(os.mkdir, space, uid=owner) == "-", "it is gone")
    assert as_uid(owner, os.listdir, space / "data") == []
    assert as_uid(owner, os.listdir, daemon.path("shared", "later", "data")) == []


MOVE = """
import os, sys
file, to, uid = sys.argv[1:]
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
os.rename(file, to)
"""


@pytest.mark.needs_root("others have turns of their own")
def test_who_holds_a_tree_and_renames_out_of_it_waits_alone(daemon: Daemon) -> None:
    """rename(2) takes the locks of both directories before it judges, unless they are on two
    mounts: who sleeps for his own tree must not have that of one which others need."""
    owner = int(OWNER)
    space = make(daemon, "held", owner)
    tree = (space / "data").resolve()
    (tree / "file").touch()
    above = [*tree.parents][: tree.parents.index(daemon.runtime)]
    assert daemon.runtime / "tree" in above
    with ExitStack() as stack:
        moving = []
        with held(tree):
            for to in (f"{tree}/../moved", *(directory / "moved" for directory in above)):
                command = [sys.executable, "-c", MOVE, str(tree / "file"), str(to), OWNER]
                moving.append(subprocess.Popen(command, stderr=subprocess.PIPE))
                stack.enter_context(moving[-1])
            wait_until(lambda: all(state_of(each.pid) in "DZ" for each in moving), "they tried")
            go_on(daemon, "a")
            daemon.kill()
            daemon.start()
            go_on(daemon, "b")
        for each in moving:
            assert b"Invalid cross-device link" in each.communicate()[1]
    assert os.listdir(tree) == ["file"]
