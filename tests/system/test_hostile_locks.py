"""Locks of inodes of the mount, which the kernel holds for others: verbs have a way around them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.system.hostile.guarded import LATENCY, OBEDIENCE, TIMES_BASELINE
from tests.system.test_hostile_requests import compiled
from tests.worlds.daemon import TIMEOUT, Daemon, wait_dead, wait_status, wait_until

#: who has no rights to anything
STRANGER = 5151


@pytest.mark.parametrize("name", ["ctl", "inbox"])
def test_who_has_no_rights_is_refused_before_a_lock_is_taken(daemon: Daemon, name: str) -> None:
    """By the look-up; by whom the name was handed to, by the mode."""
    agent = daemon.run("other", "sleep 100000")
    wait_status(agent, "busy")
    assert (agent / name).stat().st_mode & 0o7777 == 0o660
    handed = os.open(agent / name, os.O_PATH)
    try:
        for file in (str(agent / name), f"/proc/self/fd/{handed}"):
            for words in (["truncate", "-s", "0", file], ["dd", "if=/dev/null", f"of={file}"]):
                done = subprocess.run(words, user=STRANGER, group=STRANGER, extra_groups=[],
                                      capture_output=True, text=True, check=False,
                                      pass_fds=[handed], timeout=TIMEOUT)
                assert "Permission denied" in done.stderr
    finally:
        os.close(handed)


def killed(daemon: Daemon, name: str) -> float:
    """Seconds from root's ``ctx kill``, as it is installed, to the end of an agent."""
    begun = time.monotonic()
    ctx = Path(sys.executable).with_name("ctx")
    subprocess.run([ctx, "--root", daemon.root, "kill", name], check=True, timeout=TIMEOUT)
    took = time.monotonic() - begun
    wait_dead(daemon.agent_dir(name))
    return took


def late(daemon: Daemon, there: Path) -> float:
    """The second slowest of what needs the lock of /ctx/agent: names that are not there, and a
    directory that is."""
    times = []
    for number in range(50):
        for call, path in ((os.stat, daemon.agent_dir(f"none-{number}")), (os.mkdir, there)):
            begun = time.monotonic()
            with suppress(FileNotFoundError, FileExistsError):
                call(path)
            times.append(time.monotonic() - begun)
    return sorted(times)[-2]


@pytest.mark.alone
@pytest.mark.parametrize("operation", [
    "fsyncdir", "setxattr",
    *(pytest.param(name, marks=pytest.mark.long)
      for name in ("removexattr", "getxattr", "listxattr", "setattr", "getattr", "fsync", "open")),
])
def test_hundreds_who_queue_for_a_lock_hold_up_nobody(daemon: Daemon, operation: str) -> None:
    """Of the first two the kernel knows the answer, and asks no more."""
    program = compiled(daemon, "queue")
    agent = daemon.run("other", "sleep 100000")
    wait_status(agent, "busy")
    usual = late(daemon, agent)
    words = [str(program), operation, "500", str(agent)]
    # a session of its own has its own share of the processors
    with subprocess.Popen(words, stdout=subprocess.PIPE, user=STRANGER, group=STRANGER,
                          extra_groups=[], start_new_session=True,
                          env={"CTX_ROOT": str(daemon.root)}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"attacks")
            took = late(daemon, agent)
            assert took < max(LATENCY, TIMES_BASELINE * usual), f"{took:.2f} s"
            killed(daemon, "other")
        finally:
            process.kill()


#: writes to a file from a page that nobody fills (userfaultfd(2)), as a user can from a page of a
#: FUSE filesystem of his own: the kernel has the lock of the file by then
WRITE = """
import ctypes, fcntl, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
fault = libc.syscall(323, os.O_CLOEXEC)
assert fault >= 0, os.strerror(ctypes.get_errno())
fcntl.ioctl(fault, 0xC018AA3F, struct.pack('QQQ', 0xAA, 0, 0))
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(fault, 0xC020AA00, struct.pack('QQQQ', address, 4096, 1, 0))
libc.write(os.open(sys.argv[1], os.O_WRONLY), ctypes.c_void_p(address), 5)
"""


@pytest.mark.alone
def test_root_kills_by_ctx_while_somebody_holds_the_ctl(daemon: Daemon) -> None:
    agent = daemon.run("held", "sleep 100000")
    for each in (agent, daemon.run("other", "sleep 100000")):
        wait_status(each, "busy")
    usual = killed(daemon, "other")
    with ExitStack() as stack:
        begun = []
        for words, waits in (
            (["/usr/bin/python3", "-c", WRITE, str(agent / "ctl")], "userfault"),
            (["sh", "-c", f"echo kill > {agent}/ctl"], "do_truncate"),
        ):
            process = stack.enter_context(subprocess.Popen(words))
            begun.append(process)
            for earlier in begun:
                stack.callback(earlier.kill)
            kernel = Path(f"/proc/{process.pid}/stack")
            wait_until(lambda kernel=kernel, waits=waits: waits in kernel.read_text(), waits)  # type: ignore[misc]
        took = killed(daemon, "held")
        assert begun[1].poll() is None, "by echo, root waits for the lock"
        assert took < max(OBEDIENCE, TIMES_BASELINE * usual), f"ctx kill took {took:.2f} s"


def test_ctx_says_verbs_although_the_mount_shows_something_else(daemon: Daemon) -> None:
    agent = daemon.run("told", "sleep 100000")
    wait_status(agent, "busy")
    ctx = [str(Path(sys.executable).with_name("ctx")), "--root", str(daemon.root)]
    subprocess.run(["mount", "-t", "tmpfs", "none", daemon.root], check=True)
    try:
        subprocess.run([*ctx, "kill", "told"], check=True, timeout=TIMEOUT)
    finally:
        subprocess.run(["umount", daemon.root], check=True)
    wait_dead(agent)
