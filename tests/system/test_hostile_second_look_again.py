"""What others tried who had not built it: what got in, and what would show if a defence broke."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_dead, wait_until, write

IDS = {"uid": str(AGENT_UID), "gid": str(AGENT_UID)}
_CREATE_RULESET, _VERSION, _SCOPES = 444, 1, 6  # landlock(7)
#: files to read ahead of; by itself the kernel sends twelve such requests at once
AHEAD = 40


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    with guarded(shared_daemon, bystanders=False):
        (shared_daemon.base / "scripts").mkdir()
        yield shared_daemon


def public_files(*agents: Path) -> list[int]:
    """Descriptors of values that everybody may read, and whose pages the kernel keeps."""
    found = []
    for agent in agents:
        for name in ("status", "reason", "outcome", "life", "owner", "uid", "gid", "label",
                     "iso", "mode", "exec", "parent", "profile", "visibility"):
            found.append(os.open(agent / name, os.O_RDONLY | os.O_CLOEXEC))
            assert os.fstat(found[-1]).st_size, name
    return found


def test_who_reads_ahead_takes_nobodys_place(daemon: Daemon) -> None:
    """The kernel sent a dozen reads ahead at once, whosever, and kept all others that read into
    pages waiting in one line: for a second and more behind an agent with a thousand files."""
    files = public_files(*(daemon.finish(f"ahead-{n}", "true", **IDS) for n in range(3)))
    asked = 0

    def read_ahead() -> None:
        nonlocal asked
        for fd in files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            asked += 1

    thread = threading.Thread(target=read_ahead)
    try:
        assert len(files) > AHEAD
        for fd in files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.kill(daemon.pid, signal.SIGSTOP)
        thread.start()
        wait_until(lambda: asked == len(files), "the kernel takes all of them", timeout=5)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        thread.join()
        for fd in files:
            os.close(fd)


#: in a cell: does something to each process that appears there, while children start
HUNTS = r"""
import ctypes, os, signal, sys, threading
agents, own, done = os.environ["CTX_ROOT"] + "/agent", os.getpid(), set()
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    done.add("stopped")
def trace(pid):
    if ptrace(0x4206, pid, 0, 0) == 0:  # PTRACE_SEIZE
        done.add("traced")
    for name in ("mem", "environ", "maps", "exe", "root", "cwd", "fd/3", "ns/mnt"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as found:
                if name != "maps" or found.read(1):  # of who has ended it is empty
                    done.add(name)
        except OSError:
            pass
def hunt():
    while True:
        for pid in os.listdir("/proc"):
            if pid.isdigit() and int(pid) not in (1, own):
                try:
                    {"stop": stop, "trace": trace}[sys.argv[1]](int(pid))
                except OSError:
                    pass
threading.Thread(target=hunt, daemon=True).start()
children = [f"{agents}/{sys.argv[1]}-{n}.d" for n in range(8)]
for child in children:
    os.mkdir(child)
    for name, text in (("exec", "true"), ("ctl", "start")):
        with open(f"{child}/{name}", "w") as file:
            file.write(text + "\n")
if sys.argv[1] == "trace":
    for child in children:
        open(f"{child}/wait").read()
        print(open(f"{child}/reason").read().strip())
    print(*sorted(done) or ["nothing"])
else:
    while "stopped" not in done:
        pass
    print("stops", flush=True)
    threading.Event().wait()
"""


def hunting(daemon: Daemon, kind: str) -> Path:
    (daemon.base / "scripts" / "hunts.py").write_text(HUNTS)
    return daemon.run(f"hunter-{kind}", f"python3 -IS /scripts/hunts.py {kind}", **IDS,
                      mount=f"{daemon.base}/scripts /scripts ro",
                      policy=f"allow hunter-{kind}_t agent:* create")


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION) < _SCOPES,
    reason="this kernel has no Landlock that keeps a parent from tracing (Linux 6.12 has)",
)
def test_a_parent_gets_into_nothing_that_becomes_its_child(daemon: Daemon) -> None:
    """What builds the child's view is in its parent's PID namespace, and has its uid."""
    agent = hunting(daemon, "trace")
    wait_dead(agent)
    assert read(agent, "out") == "exit:0\n" * 8 + "nothing\n", read(agent, "log")


def test_starts_that_a_parent_stops_hold_up_nobody_and_end_with_it(daemon: Daemon) -> None:
    agent = hunting(daemon, "stop")
    wait_until(lambda: read(agent, "out") == "stops\n", "it stops what starts")
    assert read(daemon.finish("beside", "true", **IDS), "reason") == "exit:0\n"
    write(agent / "ctl", "kill")
    wait_dead(agent)
    for number in range(8):
        wait_dead(daemon.agent_dir(f"stop-{number}"))
