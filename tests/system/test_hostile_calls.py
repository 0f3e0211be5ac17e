"""What a daemon calls while agents live: each object is of a kind that no agent can hold.

tests/unit/calls.txt says whose object each call of the source is; here strace(1) tells which paths
a daemon, its loop and its threads, really names and opens.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_status, wait_until, write

_CALLS: Final = "file,openat2,getdents64,fchmod,fchown,ftruncate,fallocate,fsetxattr,flock"
_LINE: Final = re.compile(r"^\d+ +(\w+)\((.*)")
#: what strace shows of a path, and of a descriptor's file
_PATH: Final = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')
#: what may not be named of a process: it waits for the lock of its memory, or leads into its files
_OF_PROCESSES: Final = re.compile(
    r"/proc/\d+/(task/\d+/)?(smaps|maps|mem|environ|cmdline|root|cwd|exe|fd|map_files)\b"
)


@contextmanager
def traced(daemon: Daemon, to: Path) -> Iterator[None]:
    """Every thread of the daemon, and nothing that it starts."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={_CALLS},execve", "-o", str(to),
         "-p", str(daemon.pid)],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert tracer.stderr is not None
    with tracer.stderr:
        assert b"attached" in tracer.stderr.readline()
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(30)


def _named(trace: Path, pid: int) -> Iterator[tuple[str, str]]:
    """Calls and the paths in them; what executes another program is the daemon no more."""
    others = set()
    for line in trace.read_text(errors="replace").splitlines():
        thread = line.partition(" ")[0]
        if thread in others or (match := _LINE.match(line)) is None:
            continue
        if match[1] == "execve":
            others.add(thread)
            continue
        # a place in a tree, not the pipe, the socket or the memory behind it
        call = "look" if "O_PATH" in match[2] else match[1]
        for named, of in _PATH.findall(match[2]):
            yield call, named or of


def live(daemon: Daemon) -> None:
    """All kinds of things that agents have."""
    (daemon.root / "shared" / "pool").mkdir()
    boss = daemon.run(
        "boss", "sh -c 'mkdir $CTX_SELF/artifact/sub; echo x > $CTX_SELF/artifact/sub/x; "
        "mv $CTX_SELF/artifact/sub/x $CTX_SELF/artifact/y; echo y > /kept/y; "
        "cat $CTX_SELF/artifact/y $CTX_ROOT/shared/pool/data/file; sleep 1000'",
        mount="home: /kept rw", homedir="durable",
        policy="allow boss_t shared:pool read,write\nallow boss_t agent:* create",
    )  # fmt: skip
    wait_status(boss, "busy")
    (boss / "task" / "one").mkdir()
    write(boss / "task" / "one" / "cmd", "sh -c 'read line; echo $line'")
    for file in ("usage", "processes", "log", "out"):
        read(boss, file)
    # it replies to one message, and not to the other
    resident = daemon.run(
        "resident", """sh -c 'read line; echo "$line"; read line; sleep 1000'""", mode="resident"
    )
    wait_status(resident, "ready")
    write(resident / "inbox", "one")
    write(resident / "inbox", "other")
    wait_until(lambda: "other" in read(resident, "message"), "it has both")
    for agent in (boss, resident):
        write(agent / "ctl", "kill")
        wait_dead(agent)
        agent.rmdir()
    (daemon.root / "shared" / "pool").rmdir()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: install strace")
def test_nothing_that_agents_can_hold_is_called_on(daemon: Daemon, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with traced(daemon, trace):
        live(daemon)
    called = list(_named(trace, daemon.pid))
    assert any(path.startswith(str(daemon.state)) for _, path in called), "nothing was traced"
    wrong = sorted({f"{call} {path}" for call, path in called if not _is_ours(daemon, call, path)})
    assert not wrong, "\n".join(wrong)


def _is_ours(daemon: Daemon, call: str, path: str) -> bool:
    for trees in (daemon.state / "tree", daemon.runtime / "tree"):
        if (below := os.path.relpath(path, trees)).startswith(".."):
            continue
        # directories that trees are in, which no cell has, and whose mode lets nobody open them
        return re.fullmatch(r"\.|shared|home|lost|agent(/\d+(/[^/]+)?)?", below) is not None
    if path.startswith(f"{daemon.root}/"):
        return False
    if _OF_PROCESSES.match(path) and not path.startswith(f"/proc/{daemon.pid}/"):
        return False
    if not call.startswith("open"):  # of a FIFO whose inode no agent can change
        return True
    try:
        return not stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return True
