"""The loop hangs: the guard has it told why, and the same process serves a new mount.

Nothing of the product is made for it. Each way is one by which a loop can sleep, or did: in its
own mount, for a lock that somebody holds who waits for a page of its mount, for somebody who does
not come, stopped. The settings and the directory of FIFOs are only where a test can get at it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    alive,
    read,
    running,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.held import held

#: ptrace(2), waitpid(2)
_SEIZE, _INTERRUPT, _DETACH, _WALL = 0x4206, 0x4207, 17, 0x40000000
_SETTINGS = "watchdog: 3s\ngrace: 1s\n"
_PAGES = 16
#: functions of the kernel that take the mutex of a pipe
_PIPE = "fifo_open|fifo_pipe_read|anon_pipe_read|pipe_read"

#: takes the mutex of PIPE for as long as it waits for pages of PAGES, which are not in memory
_HOLDER = """if True:
    import mmap, os, sys
    pages, pipe = sys.argv[1:]
    with open(pages, "rb") as of:
        os.posix_fadvise(of.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(of.fileno()).st_size
        memory = mmap.mmap(of.fileno(), size, mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_RANDOM)  # one request for each page
    os.write(1, b"now\\n")
    os.write(os.open(pipe, os.O_RDWR), memory)
"""

Way = Callable[[Daemon], Iterator[None]]


def _settings(daemon: Daemon) -> Path:
    return daemon.base / "config.yaml"


def _sleeps(pid: int, where: str) -> int:
    """How often its main thread has slept so far, if it sleeps in such a function of the kernel."""
    status = Path(f"/proc/{pid}/status").read_text()
    stack = Path(f"/proc/{pid}/stack").read_text()
    if re.search(r"^State:\t[SD]", status, re.MULTILINE) and re.search(rf"\b({where})\+", stack):
        return int(re.findall(r"^voluntary_ctxt_switches:\t(\d+)", status, re.MULTILINE)[0])
    return 0


def _replace_settings(daemon: Daemon) -> None:
    """What the daemon finds when it begins anew."""
    _settings(daemon).unlink()
    _settings(daemon).write_text(_SETTINGS)


def _come(fifo: int) -> bool:
    """The partner for whom a reader may wait, and who writes nothing; whether there is one."""
    with suppress(OSError):
        os.close(os.open(f"/proc/self/fd/{fifo}", os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False


def in_its_own_mount(daemon: Daemon) -> Iterator[None]:
    """The loop waits for an answer that it would have to give itself."""
    _settings(daemon).unlink()
    _settings(daemon).symlink_to(daemon.root / "status")
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: _sleeps(daemon.pid, "request_wait_answer"), "it waits for itself")
    _replace_settings(daemon)
    yield


def behind_the_mutex_of_a_pipe(daemon: Daemon) -> Iterator[None]:
    """Whose holder waits for a page that the loop would have to fill."""
    _settings(daemon).unlink()
    os.mkfifo(_settings(daemon))

    def begin() -> None:
        _come(fifo)  # to a loop that came when the holder had gone
        os.kill(daemon.pid, signal.SIGHUP)

    fifo = os.open(_settings(daemon), os.O_PATH)
    with _holding(daemon, _settings(daemon), begin):
        _replace_settings(daemon)
        yield
    # it may wait for a partner now
    wait_until(lambda: not _sleeps(daemon.pid, _PIPE) or _come(fifo), "it has opened it")
    os.close(fifo)


def behind_the_lock_of_a_directory(daemon: Daemon) -> Iterator[None]:
    """Which somebody holds for as long as he likes: the loop makes a FIFO for each agent."""
    with held(daemon.runtime / "root" / "wait"):
        maker = subprocess.Popen(["mkdir", daemon.agent_dir("made")], stderr=subprocess.DEVNULL)
        wait_until(lambda: _sleeps(daemon.pid, "filename_create"), "the loop waits for him")
        yield
        assert maker.wait(TIMEOUT) == 1
    assert "waiting: mkdir " in daemon.log.read_text()


@contextmanager
def _holding(daemon: Daemon, pipe: Path, begin: Callable[[], None]) -> Iterator[None]:
    """Until the loop hangs behind who holds a mutex: they meet in time, sooner or later."""
    pages = daemon.agent_dir("survivor") / "artifact" / "pages"
    holder = None

    def meet() -> bool:
        nonlocal holder
        if holder is None or holder.poll() is not None:
            if holder is not None:
                holder.communicate()
            holder = subprocess.Popen([sys.executable, "-c", _HOLDER, pages, pipe],
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert holder.stdout is not None
            holder.stdout.readline()
            begin()
        while holder.poll() is None:  # not a look now and then: the guard soon parts them
            # the loop sleeps all the time, and the other in the middle of it
            slept = _sleeps(daemon.pid, _PIPE)
            waits = slept and _sleeps(holder.pid, "request_wait_answer")
            if waits and _sleeps(daemon.pid, _PIPE) == slept:
                return True
        return False

    try:
        wait_until(meet, "the loop waits for who waits for it")
        yield
    finally:
        if holder is not None:
            holder.kill()
            holder.communicate()


def for_a_partner_who_does_not_come(daemon: Daemon) -> Iterator[None]:
    """Which no end of the connection ends: the one that comes in the end does."""
    _settings(daemon).unlink()
    os.mkfifo(_settings(daemon))
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: _sleeps(daemon.pid, "fifo_open"), "it waits for a partner")
    yield
    fifo = os.open(_settings(daemon), os.O_PATH)
    _replace_settings(daemon)
    _come(fifo)
    os.close(fifo)


def stopped(daemon: Daemon) -> Iterator[None]:
    """As one that hangs in the kernel beyond any signal: its other threads go on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (_SEIZE, _INTERRUPT):
        assert libc.ptrace(request, daemon.pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(daemon.pid, _WALL)
    yield
    assert libc.ptrace(_DETACH, daemon.pid, None, None) == 0, os.strerror(ctypes.get_errno())


WAYS = (
    behind_the_mutex_of_a_pipe,
    *(pytest.param(way, marks=pytest.mark.long)
      for way in (in_its_own_mount, behind_the_lock_of_a_directory,
                  for_a_partner_who_does_not_come, stopped)),
)  # fmt: skip


def _is_aborted(daemon: Daemon) -> bool:
    """Waits for the guard, as every caller does."""
    asked = subprocess.run(["stat", "-f", daemon.root], timeout=TIMEOUT, check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return asked.returncode != 0


def _answers(daemon: Daemon) -> bool:
    with suppress(OSError):
        return "state=ready\n" in (daemon.root / "status").read_text()
    return False


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_loop_that_hangs_is_explained_and_the_same_process_goes_on(way: Way) -> None:
    with running(Daemon(config=_SETTINGS)) as daemon:
        agent = daemon.run("survivor", f"sh -c 'truncate -s {_PAGES * 4096} "
                           "$CTX_SELF/artifact/pages; echo made; sleep 1000'")
        wait_until(lambda: read(agent, "out") == "made\n", "there are pages")
        wait_status(agent, "busy")
        pid, guards = int(read(agent, "pid")), daemon.guards()
        with contextmanager(way)(daemon):
            assert _is_aborted(daemon)
        wait_until(lambda: _answers(daemon) or daemon.has_ended(), "it is mounted anew")
        said = daemon.log.read_text(errors="replace")
        assert not daemon.has_ended(), said  # the same process
        assert (read(agent, "status"), int(read(agent, "pid"))) == ("busy\n", pid)
        assert alive(pid)
        wait_until(lambda: daemon.guards() not in ([], guards), "there is another guard")
        _explains(said)
        write(agent / "ctl", "kill")
        wait_dead(agent)


def _explains(said: str) -> None:
    """That it says where each thread was, the loop too, and in which call."""
    assert "the mount does not answer" in said
    threads = dict(re.findall(r"ctxd\.mount: thread (.+?): (.*)", said))
    assert "_run.py" in threads["MainThread"], said
    assert any("_write_all" in calls for calls in threads.values()), said
