"""Removing cgroups, where the tests may make some."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from runtime.kernel.cgroups import Askers, Cgroup, path_of, unified_mount
from tests.worlds.uncollected import uncollected

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


_IN_THE_ROOT_OF_ANOTHER: Final = """
import os, subprocess, sys
from pathlib import Path
from runtime.kernel.cgroups import Hierarchy, path_of
root, mount = map(Path, sys.argv[1:])
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
before = path_of(child.pid)
hierarchy = Hierarchy(root, mount)
hierarchy.prepare()
assert hierarchy.daemon.path == root / "daemon", hierarchy.daemon
hierarchy.close()
child.communicate()
assert path_of(os.getpid()) == before
"""


def test_nothing_of_a_daemon_is_left_in_a_cgroup_that_is_not_its_own(leaf: Cgroup) -> None:
    mount = unified_mount()
    words = [sys.executable, "-c", _IN_THE_ROOT_OF_ANOTHER, str(leaf.path), str(mount)]
    subprocess.run(words, check=True, timeout=60)
    assert leaf.children() == []


def open_files() -> int:
    """Of this process, without what is only left to be collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def askers() -> Iterator[Askers]:
    askers = Askers()
    yield askers
    askers.close()


def test_who_asks_again_is_where_it_is_then(leaf: Cgroup, askers: Askers) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as asker:
        before = askers.path_of(asker.pid)
        assert before == path_of(asker.pid)
        leaf.write("cgroup.procs", str(asker.pid))
        after = askers.path_of(asker.pid)
        assert after is not None and after.endswith("/leaf") and after != before


def test_an_asker_that_is_gone_is_nowhere(askers: Askers) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as asker:
        assert askers.path_of(asker.pid) is not None
    assert askers.path_of(asker.pid) is None
    assert not askers._files


def test_who_has_the_number_of_another_that_is_gone_is_looked_up_anew(askers: Askers) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as gone:
        assert askers.path_of(gone.pid) is not None
    held = askers._files.get(gone.pid)
    assert held is not None
    askers._files.put(os.getpid(), os.dup(held))
    assert askers.path_of(os.getpid()) == path_of(os.getpid())


def test_few_askers_are_kept(askers: Askers) -> None:
    with uncollected():
        before = open_files()
        found = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(40)]
        try:
            pipes = open_files()
            for each in found * 2:
                assert askers.path_of(each.pid) == path_of(os.getpid())
            assert 0 < open_files() - pipes < 40
            askers.close()
            assert open_files() == pipes
        finally:
            for each in found:
                each.communicate()
        assert open_files() == before


def test_who_writes_to_what_was_removed_since_is_told_that_it_is_gone(
    leaf: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes it may do so between opening and writing."""
    opened = os.open

    def open_and_remove(path: str, flags: int) -> int:
        descriptor = opened(path, flags)
        os.rmdir(leaf.path)
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_remove)
        leaf.kill()
    assert not leaf.exists()


def test_an_asker_is_known_without_free_descriptors(askers: Askers) -> None:
    assert askers.path_of(os.getpid()) is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # as many as there are below it: poll(2) of a thread beside this one refuses more than that
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert askers.path_of(os.getpid()) is not None
        with pytest.raises(OSError, match="Too many open files"):
            askers.path_of(os.getppid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
