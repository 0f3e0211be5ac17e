"""What is told of processes, in directories that look like cgroups."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.kernel import processes
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.processes import Namespace, Place, describe


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
