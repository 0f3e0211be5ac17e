"""The first boot: durable trees that the kernel bounds, on a filesystem with project quotas."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from runtime.authority.accounts import Accounts, Payer, Resource
from runtime.authority.disk import Disk
from runtime.kernel.quotas import Quotas, are_enforced
from runtime.kernel.rooms import Rooms
from runtime.records.spaces import Spaces
from tests.worlds.natives import measure_all

OWNER = 4000
MIB = 1 << 20
LIMIT = 16 * MIB


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """On a filesystem of its own."""
    image, at = tmp_path / "image", tmp_path / "state"
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    at.mkdir()
    subprocess.run(["sh", "-c", "modprobe -a loop quota_v2"], check=False)
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-O", "quota,project", "-E", "quotatype=prjquota", image],
        check=True,
    )
    mounted = subprocess.run(["mount", "-o", "loop,prjquota", image, at], check=False)
    if mounted.returncode:
        pytest.skip("the kernel has no project quotas (CONFIG_QFMT_V2)")
    at.chmod(0o755)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def fill(path: Path) -> int:
    """What an agent's program can write; the kernel says no with EDQUOT."""
    read_end, write_end = os.pipe()
    # it cannot search what is above
    top = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    if os.fork() == 0:
        try:
            os.setresuid(OWNER, OWNER, OWNER)
            fd = os.open(path.name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=top)
            while True:
                os.write(fd, bytes(MIB))
        except OSError as error:
            os.write(write_end, str(error.errno).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.close(top)
    with open(read_end, "rb") as said:
        assert int(said.read()) == errno.EDQUOT
    os.wait()
    return path.stat().st_blocks * 512


def test_the_kernel_bounds_trees_by_what_the_account_has_left(state: Path, spaces: Spaces) -> None:
    assert are_enforced(state)
    home, agents = state / f"tree/home/{OWNER}", state / f"tree/agent/{OWNER}/coder"
    for tree in (home, agents):
        (tree / "below").mkdir(parents=True)
        for path in (tree, tree / "below"):
            os.chown(path, OWNER, OWNER)
    (home / "below" / "old").write_bytes(bytes(4 * MIB))
    disk = Disk(
        Accounts(dict.fromkeys(Resource, LIMIT)), state, Rooms(state),
        spaces, lambda names: {}, lambda: {}, lambda caller: Payer(caller.uid),
    )  # fmt: skip
    disk.quotas = Quotas(state, 1000, 10)
    disk.note(OWNER, 2 * MIB)  # a message, say
    trio.run(measure_all, disk, state)
    assert disk.quotas.project(OWNER) == 1000
    bound = LIMIT - LIMIT // 10
    written = fill(home / "below" / "new") + 4 * MIB
    assert bound - 3 * MIB < written <= bound
    assert fill(agents / "more") <= MIB, "they have one bound together"
    trio.run(measure_all, disk, state)
    assert disk.full == set(), "nobody is paused for it"
    (home / "below" / "new").unlink()
    assert fill(agents / "again") > 6 * MIB
