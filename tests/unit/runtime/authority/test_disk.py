"""What is measured on the disk, and whose it is."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from runtime.authority.accounts import Accounts, Payer, Reserve, Resource
from runtime.authority.disk import INCARNATION_SIZE, Disk, Share
from runtime.caller import Caller
from runtime.errors import QuotaError
from runtime.kernel.rooms import Rooms
from runtime.records.model import Agent
from runtime.records.spaces import Spaces
from tests.worlds.held import held
from tests.worlds.natives import measure_all, walker_of
from tests.worlds.records import World, inside, operator, rmdir, world_in

OWNER = 1000
SIZE = 1 << 20


def write(path: Path, size: int = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def _payer(caller: Caller) -> Payer:
    return Payer(caller.uid)


def disk_in(
    path: Path, spaces: Spaces, limit: int = 100 * SIZE, *, stored: bool = False
) -> Disk:
    accounts = Accounts(dict.fromkeys(Resource, limit))
    return Disk(
        accounts, path, Rooms(path), spaces,
        lambda names: {"abc": (OWNER, "coder")} if "abc" in names else {},
        lambda: {(OWNER, "newer"): (3, 100)} if stored else {}, _payer,
    )


def measure(disk: Disk, state: Path) -> None:
    trio.run(measure_all, disk, state)


def use(disk: Disk, owner: int = OWNER) -> int:
    return disk._accounts.use(owner, Resource.DISK)


def test_what_has_no_files_counts_as_well(tmp_path: Path, spaces: Spaces) -> None:
    disk = disk_in(tmp_path, spaces, stored=True)
    measure(disk, tmp_path)
    assert use(disk) == 3 * INCARNATION_SIZE + 100


def test_what_is_open_without_a_name_counts_until_it_is_closed(
    tmp_path: Path, spaces: Spaces
) -> None:
    disk, unnamed = disk_in(tmp_path, spaces), {OWNER: 5 * SIZE}
    disk.unnamed = lambda: unnamed
    disk.note(OWNER, 5 * SIZE)  # as it was written
    for _ in range(2):
        measure(disk, tmp_path)
        assert use(disk) == 5 * SIZE
    unnamed.clear()
    measure(disk, tmp_path)
    assert use(disk) == 0


def test_what_is_below_the_state_is_its_owners(tmp_path: Path, spaces: Spaces) -> None:
    write(tmp_path / "agent/abc/out/1")
    write(tmp_path / f"tree/home/{OWNER}/file")
    write(tmp_path / f"home/{OWNER}/agent/coder/default/events.jsonl")
    write(tmp_path / "tree/home/1001/file")
    write(tmp_path / "tree/space/space/space/file")
    space = spaces.adopt("space", 1002)
    disk = disk_in(tmp_path, spaces)
    measure(disk, tmp_path)
    assert 3 * SIZE <= use(disk) < 4 * SIZE
    assert SIZE <= use(disk, 1001) < 2 * SIZE
    assert SIZE <= use(disk, 1002) < 2 * SIZE
    assert SIZE <= space.bytes < 2 * SIZE and space.entries == 1 and space.measured
    with pytest.raises(QuotaError, match='"coder" holds most'):
        disk.check(OWNER, 100 * SIZE)


def test_what_was_written_counts_until_it_is_measured(tmp_path: Path, spaces: Spaces) -> None:
    disk = disk_in(tmp_path, spaces)
    disk.note(OWNER, 50 * SIZE)
    with pytest.raises(QuotaError, match="owner_disk_max"):
        disk.check(OWNER, 41 * SIZE)
    disk.check(OWNER, 41 * SIZE, reserve=Reserve.OWNER)
    disk.note(OWNER, -10 * SIZE)
    disk.check(OWNER, 41 * SIZE)
    write(tmp_path / f"tree/home/{OWNER}/file")
    measure(disk, tmp_path)
    assert SIZE <= use(disk) < 2 * SIZE
    (tmp_path / f"tree/home/{OWNER}/file").unlink()
    measure(disk, tmp_path)
    assert use(disk) < SIZE


def test_what_is_made_while_trees_are_looked_for_counts(tmp_path: Path, spaces: Spaces) -> None:
    """A tree that is not among them is not measured this time."""
    disk = disk_in(tmp_path, spaces)

    def stored() -> dict[tuple[int, str], tuple[int, int]]:
        write(tmp_path / f"tree/home/{OWNER}/file")
        disk.note(OWNER, SIZE)
        return {(OWNER, "newer"): (1, 0)}

    disk._stored = stored
    measure(disk, tmp_path)
    assert use(disk) >= SIZE


@pytest.mark.parametrize("broken", ["_incarnations", "_stored"])
def test_what_counted_goes_on_to_count_while_the_store_cannot_be_read(
    tmp_path: Path,
    spaces: Spaces,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = disk_in(tmp_path, spaces, stored=True)
    write(tmp_path / f"tree/home/{OWNER}/file")
    measure(disk, tmp_path)
    measured = use(disk)
    disk.note(OWNER, 5 * SIZE)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, broken, fail)
        measure(disk, tmp_path)
    assert use(disk) == measured + 5 * SIZE
    assert "cannot measure the disk accounts: [Errno 5] disk I/O error" in caplog.text
    measure(disk, tmp_path)
    assert use(disk) == measured


@pytest.mark.skipif(os.getuid() != 0, reason="userfaultfd(2) for what the kernel writes, as root")
def test_who_holds_up_a_measure_holds_up_no_other_owner(
    tmp_path: Path, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.kernel.walker._SECONDS", 1.0)
    for owner in (OWNER, OWNER + 1):
        write(tmp_path / f"tree/home/{owner}/file")
    write(tmp_path / f"home/{OWNER}/agent/coder/file")
    disk = disk_in(tmp_path, spaces)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.run, walker_of(tmp_path))
            with trio.fail_after(30):
                while not use(disk, OWNER + 1):
                    await disk.measured.wait_changed()
                    assert use(disk) <= use(disk, OWNER + 1), "the held one is not measured"
                while not use(disk):
                    await disk.measured.wait_changed()
            nursery.cancel_scope.cancel()

    with held(tmp_path / f"tree/home/{OWNER}"):
        trio.run(main)
    assert SIZE <= use(disk) < 2 * SIZE, "of his own, the trees that are not held"


def test_what_others_remove_hides_nobody_who_writes(
    tmp_path: Path, spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He is measured soon, as much less is left than there was."""
    left = 1000 * SIZE
    monkeypatch.setattr("runtime.authority.disk._SOON_SECONDS", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(
        f_bavail=left, f_frsize=1, f_blocks=2000 * SIZE))  # fmt: skip
    tree = tmp_path / f"tree/home/{OWNER}"
    write(tree / "file")
    disk = disk_in(tmp_path, spaces)
    disk.grows = lambda: True

    async def until(is_so: Callable[[], bool]) -> None:
        with trio.fail_after(20):  # else it is measured after half a minute
            while not is_so():
                await trio.sleep(0.01)

    async def main() -> None:
        nonlocal left
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disk.run, walker_of(tmp_path))
            await until(lambda: use(disk) >= SIZE)
            left += 500 * SIZE
            await until(lambda: disk.free == left)
            write(tree / "more", 20 * SIZE)
            left -= 20 * SIZE
            await until(lambda: use(disk) >= 20 * SIZE)
            nursery.cancel_scope.cancel()

    trio.run(main)


def share_in(world: World) -> Share:
    return Share(world.agents.disk, cast(Agent, SimpleNamespace(owner=OWNER)))


def test_another_users_operators_have_no_part_in_the_reserve(tmp_path: Path) -> None:
    with world_in(tmp_path, owner_disk_max=100 * SIZE) as world:
        share = share_in(world)
        world.agents.disk.note(OWNER, 90 * SIZE)
        share.check(operator(OWNER), SIZE)
        share.check(operator(0), 100 * SIZE)
        with pytest.raises(QuotaError):
            share.check(operator(1001), SIZE)


def over(world: World) -> Share:
    world.agents.disk.note(OWNER, world.config.owner_disk_max)
    return share_in(world)


def test_over_the_account_nothing_begins_and_everything_ends(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        agents = world.agents
        agent = world.live(agents.births.create(operator(OWNER), "a"))
        other = agents.births.create(operator(OWNER), "b")
        task = agents.tasks.make(inside(agent), agent, "t")
        agents.tasks.set(task, cmd="true")
        over(world)
        for refused in (
            lambda: agents.births.create(operator(OWNER), "c"),
            lambda: agents.upkeep.check_agent(other),
            lambda: agents.tasks.start(inside(agent), agent, task),
        ):
            with pytest.raises(QuotaError, match="owner_disk_max"):
                refused()
        rmdir(agents.tasks, inside(agent), agent, "t")
        agents.removals.remove(other)
        agents.births.create(operator(1001), "d")


def counted(rooms: Path) -> tuple[int, int]:
    """(what monitors have kept, what that may become)."""
    _, kept, most = struct.unpack("=Qqq", (rooms / str(OWNER)).read_bytes())
    return kept, most


def keep(rooms: Path, size: int) -> None:
    """As a monitor does."""
    kept, most = counted(rooms)
    (rooms / str(OWNER)).write_bytes(struct.pack("=Qqq", 1, kept + size, most))


def test_monitors_share_the_room_of_their_owner(tmp_path: Path, spaces: Spaces) -> None:
    disk = disk_in(tmp_path, spaces)
    disk.note(OWNER, 40 * SIZE)
    disk.output(OWNER)
    assert counted(tmp_path) == (0, 50 * SIZE)
    keep(tmp_path, 20 * SIZE)
    disk.output(OWNER)
    assert counted(tmp_path) == (20 * SIZE, 50 * SIZE), "another one has no more"
    disk._share_room(OWNER)
    assert use(disk) == 60 * SIZE, "and it counts"
    disk.note(OWNER, -30 * SIZE)
    disk._share_room(OWNER)
    assert counted(tmp_path) == (20 * SIZE, 80 * SIZE)


def test_a_daemon_gives_no_room_before_it_has_measured(tmp_path: Path, spaces: Spaces) -> None:
    first = disk_in(tmp_path, spaces)
    first.output(OWNER)
    keep(tmp_path, 70 * SIZE)
    next_one = disk_in(tmp_path, spaces)
    next_one.output(OWNER)
    assert counted(tmp_path) == (70 * SIZE, 90 * SIZE)
    write(tmp_path / f"tree/home/{OWNER}/file", 30 * SIZE)
    measure(next_one, tmp_path)
    next_one._share_room(OWNER)
    kept, most = counted(tmp_path)
    assert kept == 70 * SIZE
    assert most - kept <= 60 * SIZE


def test_a_tenth_of_what_the_filesystem_has_left_is_roots(tmp_path: Path, spaces: Spaces) -> None:
    """Two owners, each below its own limit, cannot fill it together."""
    free = os.statvfs(tmp_path)
    there = free.f_bavail * free.f_frsize
    disk = disk_in(tmp_path, spaces, limit=there)
    write(tmp_path / "agent" / "abc" / "file")
    measure(disk, tmp_path)
    part = int(there * 0.6)
    disk.note(OWNER, part)
    with pytest.raises(QuotaError, match=r"accounts disk of all owners .* reserved for root"):
        disk.check(OWNER + 1, part // 2 + part // 10)
    assert disk.room(OWNER + 1) < part
    disk.check(OWNER + 1, part // 8)
    disk.check(0, part // 2 + part // 20, reserve=Reserve.MASTER)
