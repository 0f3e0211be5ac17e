"""What is told of processes, in directories that look like cgroups."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.kernel import processes
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.processes import Namespace, Place, describe, memory
from tests.system.hostile.compiling import compile_to
from tests.worlds.daemon import wait_until

ARGUED = Path(__file__).parents[3] / "system" / "requests" / "argued.c"


@pytest.fixture
def asleep() -> Iterator[int]:
    """A process that waits, with a command line of many characters, one of them a newline."""
    with subprocess.Popen(["sh", "-c", "cat; :", "a\nb", "x" * 5000], stdin=subprocess.PIPE,
                          stdout=subprocess.DEVNULL) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


def told(path: Path, *pids: int, spared: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    text = describe([Place("a", (Cgroup(path),), spared)], os.getpid())
    return [json.loads(line) for line in text.splitlines()]


def test_a_place_is_left_out_until_its_programs_have_begun(tmp_path: Path, asleep: int) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{asleep}\n")
    place = Place("a", (Cgroup(tmp_path),), frozenset(), begun=False)
    assert describe([place], os.getpid()) == ""
    used, count = memory([place])
    assert used > 0
    assert count == 1, "it uses memory nevertheless"


def test_each_process_is_one_line(tmp_path: Path, asleep: int) -> None:
    mine, other = told(tmp_path, os.getpid(), asleep)
    assert (mine["agent"], mine["pid"], other["pid"]) == ("a", os.getpid(), asleep)
    assert other["name"] in ("sh", "dash", "bash")
    assert mine["cpu"] > 0
    assert mine["memory"] > 1 << 20
    assert other["age"] in range(60)
    assert other["command"].startswith(r"sh -c cat; : a\nb xxx")
    assert len(other["command"]) == 1024


def test_what_surrounds_a_program_and_what_is_gone_is_left_out(
    tmp_path: Path, asleep: int
) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    (line,) = told(tmp_path, os.getpid(), gone.pid, asleep, spared=frozenset({os.getpid()}))
    assert line["pid"] == asleep


def test_a_limited_number_is_told_of(
    tmp_path: Path, asleep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST", 1)
    assert len(told(tmp_path, asleep, os.getpid())) == 1


def test_no_more_is_read_once_time_is_up(
    tmp_path: Path, asleep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SECONDS", -1.0)
    assert told(tmp_path, asleep) == []


def test_for_nobody_a_process_has_no_number(asleep: int) -> None:
    assert Namespace(os.getpid()).number(asleep) == asleep
    assert Namespace(0).number(asleep) is None


def test_of_a_command_line_of_any_size_no_more_is_read_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process says itself where its command line is, and psutil asks that for its name, too."""
    program = compile_to(tmp_path / "argued-by-itself", ARGUED)
    with subprocess.Popen([program, "64"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"argued\n"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            (line,) = told(tmp_path, process.pid)
        finally:
            process.kill()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert line["name"] == "argued-by-itsel"
    assert len(line["command"]) <= 1024
    assert grown < 32 << 20


@contextmanager
def headless() -> Iterator[int]:
    """A process of 40 MiB whose first thread has ended, and whose second has not."""
    code = ("import ctypes, os, threading, time\n"
            "kept = os.urandom(40 << 20)\n"
            "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
            "print(flush=True)\n"
            "ctypes.CDLL(None).pthread_exit(None)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        status = Path(f"/proc/{process.pid}/status")
        wait_until(lambda: "zombie" in status.read_text(), "its first thread has ended")
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_process_whose_first_thread_has_ended_is_told_of_as_ever(tmp_path: Path) -> None:
    with headless() as pid:
        wait_until(lambda: told(tmp_path, pid)[0]["state"] == "sleeping", "its second one sleeps")
        (line,) = told(tmp_path, pid)
        used, count = memory([Place("a", (Cgroup(tmp_path),), frozenset())])
    assert line["memory"] > 40 << 20
    assert "pthread_exit" in line["command"]
    assert (used > 40 << 20, count) == (True, 1)


def test_who_got_the_pid_of_one_that_was_listed_is_not_told_of(
    tmp_path: Path, asleep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor counted: it may be anybody's, and its command line a secret."""
    place = Place("a", (Cgroup(tmp_path),), frozenset())
    lists = iter(([asleep, os.getpid()], [os.getpid()]) * 2)
    monkeypatch.setattr(Cgroup, "processes", lambda leaf: next(lists))
    (line,) = [json.loads(line) for line in describe([place], os.getpid()).splitlines()]
    assert line["pid"] == os.getpid()
    mine = psutil.Process().memory_full_info().pss
    assert abs(memory([place])[0] - mine) < 1 << 20
