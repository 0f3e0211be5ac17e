"""Binding sockets on filesystems, by a real binder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from runtime.cell.cell import native
from runtime.kernel.binder import Binder
from runtime.kernel.cgroups import Cgroup, unified_mount
from runtime.kernel.spawn import Spawner
from tests.worlds.daemon import TIMEOUT
from tests.worlds.unfilled import unfilled_file

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or unified_mount() is None, reason="needs root and cgroup v2"
)


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    mount = unified_mount()
    assert mount is not None
    home = Cgroup(mount / f"ctxtest-{os.getpid()}-binder")
    home.path.mkdir()
    made = Spawner(native("launcher"), home)
    yield made
    made.close()
    assert home.remove_when_empty(TIMEOUT)


def test_a_socket_is_bound_once(spawner: Spawner, tmp_path: Path) -> None:
    async def main() -> None:
        binder = Binder(native("binder"), spawner, spawner.home)
        (await binder.bind(tmp_path, "here")).close()
        with pytest.raises(OSError, match="Address already in use"):
            await binder.bind(tmp_path, "here")
        binder.close()

    trio.run(main)
    assert (tmp_path / "here").is_socket()


def test_nobody_is_told_that_the_connection_is_gone(spawner: Spawner) -> None:
    """The daemon makes it anew; a start would fail by it, or the daemon that begins."""

    async def main(directory: Path) -> None:
        binder = Binder(native("binder"), spawner, spawner.home)
        answered = False

        async def bind() -> None:
            nonlocal answered
            await binder.bind(directory, "here")
            answered = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bind)
            await trio.testing.wait_all_tasks_blocked()
            # the answer to this comes after that one
            with pytest.raises(FileNotFoundError):
                await binder.bind(directory.parent / "none", "here")
            await trio.testing.wait_all_tasks_blocked()
            assert not answered
            nursery.cancel_scope.cancel()
        binder.close()

    with unfilled_file() as file:
        connection = os.minor(file.parent.stat().st_dev)
        Path(f"/sys/fs/fuse/connections/{connection}/abort").write_text("1")
        trio.run(main, file.parent)
