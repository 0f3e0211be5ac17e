"""Removing cgroups, where the tests may make some."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from runtime.kernel.cgroups import Cgroup, unified_mount

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or unified_mount() is None, reason="needs root and cgroup v2"
)


@pytest.fixture
def leaf() -> Iterator[Cgroup]:
    """Of a cgroup of the test's own, with a process that ends with its standard input."""
    mount = unified_mount()
    assert mount is not None
    top = Cgroup(mount / f"ctxtest-{os.getpid()}-unit")
    leaf = top.child("leaf")
    leaf.path.mkdir(parents=True)
    yield leaf
    assert top.remove_when_empty(10)


def test_a_cgroup_is_removed_once_its_last_process_has_ended(leaf: Cgroup) -> None:
    top = Cgroup(leaf.path.parent)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        leaf.write("cgroup.procs", str(process.pid))
        assert not top.remove_when_empty(0.01)
        assert leaf.exists()
        removed: list[bool] = []
        thread = threading.Thread(target=lambda: removed.append(top.remove_when_empty(30)))
        thread.start()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        thread.join()
        assert removed == [True]
    assert not top.exists()


def test_an_empty_or_missing_cgroup_is_not_waited_for(leaf: Cgroup) -> None:
    assert leaf.remove_when_empty(0)
    assert leaf.remove_when_empty(0)


def test_each_look_finds_the_processes_of_that_moment_also_below(leaf: Cgroup) -> None:
    with leaf.looking() as look:
        assert look() == []
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one:
            leaf.write("cgroup.procs", str(one.pid))
            assert look() == [one.pid] == leaf.processes()
            own = leaf.child("own")
            own.path.mkdir()
            assert leaf.below() == 1
            own.write("cgroup.procs", str(one.pid))
            assert look() == [one.pid] == leaf.processes()
        assert own.remove_when_empty(10)
        assert look() == []
    assert leaf.remove_when_empty(10)
    assert leaf.below() == 0
    with pytest.raises(FileNotFoundError), leaf.looking():
        pass
