"""What is told of processes, in directories that look like cgroups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from runtime.cell.cell import native
from runtime.kernel import linux, processes
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.processes import Census, Place
from tests.system.hostile.compiling import compile_to
from tests.worlds.daemon import wait_until
from tests.worlds.natives import Children
from tests.worlds.unfilled import unfilled_file

REQUESTS = Path(__file__).parents[3] / "system" / "requests"
ARGUED, TANGLED = REQUESTS / "argued.c", REQUESTS / "tangled.c"


@pytest.fixture
def asleep() -> Iterator[int]:
    """A process that waits, with a command line of many characters, one of them a newline."""
    with subprocess.Popen(["sh", "-c", "cat; :", "a\nb", "x" * 5000], stdin=subprocess.PIPE,
                          stdout=subprocess.DEVNULL) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


CENSUS = Census(native("census"), Children())


def describe(place: Place) -> list[dict[str, Any]]:
    said = trio.run(CENSUS.describe, 0, [place], os.getpid())
    return [json.loads(line) for line in said.decode().splitlines()]


def memory(*places: Place) -> list[tuple[int, int]]:
    return [(each.memory, each.processes) for each in trio.run(CENSUS.memory, 0, places)]


def told(path: Path, *pids: int, spared: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return describe(Place("a", 0, (Cgroup(path),), spared))


def test_a_place_is_left_out_until_its_programs_have_begun(tmp_path: Path, asleep: int) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{asleep}\n")
    place = Place("a", 0, (Cgroup(tmp_path),), frozenset(), begun=False)
    assert describe(place) == []
    [(used, count)] = memory(place)
    assert used > 0
    assert count == 1, "it uses memory nevertheless"


def test_each_process_is_one_line(tmp_path: Path, asleep: int) -> None:
    lines = {line["pid"]: line for line in told(tmp_path, os.getpid(), asleep)}
    assert lines.keys() == {os.getpid(), asleep}
    mine, other = lines[os.getpid()], lines[asleep]
    assert mine["agent"] == other["agent"] == "a"
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


def test_for_nobody_a_process_has_no_number(tmp_path: Path, asleep: int) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{asleep}\n")
    place = Place("a", 0, (Cgroup(tmp_path),), frozenset())
    said = trio.run(CENSUS.describe, 0, [place], 0)
    assert json.loads(said)["pid"] is None


@pytest.mark.parametrize(("said", "shown"), [
    ("\x1b[31m\x7f", r"\x1b[31m\x7f"), ("a\tb\\c\"", "a\\tb\\c\""),
    ("gr\u00fc\u00dfe \u65e5", "gr\u00fc\u00dfe \u65e5"),
    ("\u202egpj.exe\u2066\x85", r"\u202egpj.exe\u2066\x85"), ("\U000e0041", r"\U000e0041"),
    (b"\xff\xc3(\xed\xa0\x80".decode(errors="surrogateescape"), "\ufffd\ufffd(\ufffd\ufffd\ufffd"),
])  # fmt: skip
def test_what_a_process_says_of_itself_does_nothing_to_a_terminal(
    tmp_path: Path, said: str, shown: str
) -> None:
    with subprocess.Popen(["sh", "-c", "cat; :", said], stdin=subprocess.PIPE) as process:
        (line,) = told(tmp_path, process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert line["command"] == f"sh -c cat; : {shown}"


def test_of_a_command_line_of_any_size_no_more_is_read_than_told(tmp_path: Path) -> None:
    """A process says itself where its command line is."""
    program = compile_to(tmp_path / "argued-by-itself", ARGUED)
    with subprocess.Popen([program, "64"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"argued\n"
        try:
            (line,) = told(tmp_path, process.pid)
        finally:
            process.kill()
    assert line["name"] == "argued-by-itsel"
    assert len(line["command"]) <= 1024


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
        [(used, count)] = memory(Place("a", 0, (Cgroup(tmp_path),), frozenset()))
    assert line["memory"] > 40 << 20
    assert "pthread_exit" in line["command"]
    assert (used > 40 << 20, count) == (True, 1)


def test_who_got_the_pid_of_one_that_was_listed_is_not_told_of(
    tmp_path: Path, asleep: int
) -> None:
    """Nor counted: it may be anybody's, and its command line a secret."""
    place = Place("a", 0, (Cgroup(tmp_path),), frozenset())
    procs = tmp_path / "cgroup.procs"
    os.mkfifo(procs)

    def list_twice() -> None:
        with open(procs, "w") as first:  # it is open at the other end, too
            procs.rename(tmp_path / "first")
            os.mkfifo(procs)
            first.write(f"{asleep}\n{os.getpid()}\n")
        procs.write_text(f"{os.getpid()}\n")

    with ThreadPoolExecutor() as threads:
        lists = threads.submit(list_twice)
        (line,) = describe(place)
        lists.result()
        assert line["pid"] == os.getpid()
        lists = threads.submit(list_twice)
        [(used, _)] = memory(place)
        lists.result()
    mine = psutil.Process().memory_full_info().pss
    assert abs(used - mine) < 4 << 20


def test_places_below_one_another_are_apart(tmp_path: Path, asleep: int) -> None:
    empty, below = tmp_path / "empty", tmp_path / "run" / "own"
    below.mkdir(parents=True)
    empty.mkdir()
    (below / "cgroup.procs").write_text(f"{asleep}\n{os.getpid()}\n")
    places = [Place(name, 0, (Cgroup(path), Cgroup(tmp_path / "none")), frozenset())
              for name, path in (("a", empty), ("b", tmp_path / "run"))]
    (nothing, none), (used, count) = memory(*places)
    assert (nothing, none, count) == (0, 0, 2)
    assert used > 1 << 20


@contextmanager
def tangled_in(program: Path, file: Path) -> Iterator[int]:
    """A process that holds the lock of its memory as long as the file is held."""
    with subprocess.Popen([program, file, "0"], stdout=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pid = 0
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"tangled\n"
            pid = int(children.read_text())
            threads = Path(f"/proc/{pid}/task")

            def states() -> list[str]:
                return [(thread / "stat").read_text().split()[2] for thread in threads.iterdir()]

            wait_until(lambda: states() == ["D", "D"], "one waits for a page, one for the lock")
            yield pid
        finally:
            process.kill()
            if pid:
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_cannot_be_looked_into_is_told_of_and_delays_nobody(tmp_path: Path) -> None:
    """Here for the lock of its memory: it waits for a page with it, which nobody brings."""
    program = compile_to(tmp_path / "tangled", TANGLED)
    with unfilled_file() as file, tangled_in(program, file) as pid:
        (tangled, mine) = sorted(told(tmp_path, pid, os.getpid()), key=lambda e: e["pid"] != pid)
        [(used, count)] = memory(Place("a", 0, (Cgroup(tmp_path),), frozenset()))
    assert (tangled["name"], tangled["memory"], tangled["command"]) == ("tangled", None, None)
    assert mine["memory"] > 1 << 20
    assert (used > 1 << 20, count) == (True, 2)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts, as root")
def test_processes_are_looked_up_in_a_procfs_of_ones_own() -> None:
    """Others cannot hold its locks, as they can hold that of /proc."""
    fd = linux.open_of_process(os.getpid(), "stat")
    try:
        assert os.read(fd, 1000).startswith(f"{os.getpid()} (".encode())
        assert os.fstat(fd).st_dev != os.stat("/proc/self/stat").st_dev
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        linux.open_of_process(1 << 22, "stat")
