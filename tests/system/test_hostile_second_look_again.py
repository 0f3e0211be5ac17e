"""What others tried who had not built it: what got in, and what would show if a defence broke."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import AGENT_UID, Daemon, daemon_of, wait_until
from tests.system.hostile.guarded import guarded

IDS = {"uid": str(AGENT_UID), "gid": str(AGENT_UID)}
#: files to read ahead of; by itself the kernel sends twelve such requests at once
AHEAD = 40


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_of() as made, guarded(made, bystanders=False):
        (made.base / "scripts").mkdir()
        yield made


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
