"""Agents that fill the disk, each in a way that ctxd does not see: their owner's account stops
them, for root and without."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from tests.system.test_trees import space
from tests.worlds.daemon import Daemon, daemon_of, read, wait_until, write
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

T = TypeVar("T")
SIZE = 1 << 20
ACCOUNT = 16 * SIZE
CONFIG = "owner_disk_max: 16M\ngrace: 1s\n"


def root_daemon() -> Iterator[Daemon]:
    with daemon_of(config=CONFIG) as daemon:
        yield daemon


def users_daemon() -> Iterator[Daemon]:
    with ordinary_daemon(config=CONFIG) as daemon:
        yield daemon


@pytest.fixture(params=[root_daemon, users_daemon], ids=["root", "rootless"])
def small(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Its owners have little."""
    yield from request.param()


def run_script(daemon: Daemon, name: str, script: str, **files: str) -> Path:
    """An agent of the daemon's user that runs a script."""
    (daemon.base / "bin").mkdir(exist_ok=True)
    (daemon.base / "bin" / f"{name}.sh").write_text(script)
    # after the policy, which judges it
    files["mount"] = f"{daemon.base}/bin /attack ro\n" + files.pop("mount", "")

    return do(daemon, lambda: daemon.run(name, f"sh /attack/{name}.sh", **files))


def do(daemon: Daemon, function: Callable[[], T]) -> T:
    """As the daemon's user."""
    return daemon.do(function) if isinstance(daemon, OrdinaryDaemon) else function()


def on_disk(path: Path) -> int:
    """Bytes of files, some of which may be removed meanwhile."""
    size = 0
    for file in (Path(at) / name for at, _, names in os.walk(path) for name in names):
        with suppress(FileNotFoundError):
            size += file.lstat().st_blocks * 512
    return size


PRINTERS = """
cd $CTX_SELF/task
mkfifo /tmp/go
for n in $(seq 20); do
    mkdir t$n && echo 'read x < /tmp/go; yes | head -c 4M' > t$n/cmd && echo start > t$n/ctl
done
for n in $(seq 20); do
    while [ $(cat t$n/status) != running ]; do sleep 0.01; done
done
while :; do yes > /tmp/go; done &
exec sleep 1000
"""


def test_output_of_many_tasks_stays_within_the_account(small: Daemon) -> None:
    """Each of them alone has room for all that it says."""
    run_script(small, "printer", PRINTERS)

    told = b"bytes of output lost, the disk or its owner's account of it was full"

    def used() -> int:
        used = on_disk(small.state / "agent")
        assert used < ACCOUNT
        return used

    def all_is_told() -> bool:
        kept = (small.state / "agent").glob("*/task/*/0*")
        return used() > 0 and sum(told in path.read_bytes() for path in kept) > 16

    wait_until(all_is_told, "all have said it", timeout=60)
    used()


#: writes a megabyte at a time; what it may write in all is far more than the account
FILLER = """
n=0
while [ $n -lt 200 ] && dd if=/dev/zero of=$1/part-$n bs=1M count=1 status=none; do
    n=$((n+1)); sleep 0.02
done
exec sleep 1000
"""
#: may overshoot by what is written between two looks
SOFT = ACCOUNT + 64 * SIZE


def paused(daemon: Daemon, name: str) -> bool:
    return do(daemon, lambda: read(daemon.agent_dir(name), "status")) == "paused\n"


def test_a_durable_home_that_grows_over_the_account_is_stopped(small: Daemon) -> None:
    run_script(small, "filler", "set -- $HOME\n" + FILLER, homedir="durable")
    wait_until(lambda: paused(small, "filler"), "it is paused", timeout=60)
    assert on_disk(small.state / "tree" / "agent") < SOFT
    error = do(small, lambda: read(small.agent_dir("filler"), "error"))
    assert "the tree agent/" in error
    assert "grew over the disk account of its owner (owner_disk_max)" in error
    events = do(small, lambda: small.events("filler"))
    told = [each for each in events if each.get("status") == "paused"]
    assert told[0]["reason"].startswith("no_room: agent/")
    assert told[0]["by"] == "runtime"


@pytest.mark.needs_root("owners have accounts of their own")
@pytest.mark.settings(owner_disk_max="16M", grace="1s")
def test_a_space_that_grows_is_stopped_whoever_writes_it(daemon: Daemon) -> None:
    """Its owner pays; an agent of another user fills it, and one that only reads goes on."""
    tree = space(daemon, "space", owner=0)
    tree.chmod(0o1777)
    policy = "allow {}_t shared:space {}\n"
    filler = run_script(daemon, "filler", "set -- /space\n" + FILLER, owner="4001",
                        mount="shared:space /space rw\n",
                        policy=policy.format("filler", "read,write"))
    reader = daemon.run("reader", "sleep 1000", policy=policy.format("reader", "read"))
    wait_until(lambda: read(filler, "status") == "paused\n", "it is paused", timeout=60)
    assert on_disk(daemon.state / "tree/space") < SOFT
    assert "the tree shared/space" in read(filler, "error")
    assert read(reader, "status") == "busy\n"
    assert "EDQUOT" in refused(filler / "ctl", "resume")
    assert daemon.finish("other", "sh -c 'echo fine > $CTX_SELF/result.md'", owner="4002")
    for path in tree.iterdir():
        path.unlink()
    wait_until(lambda: read(filler, "status") == "busy\n", "it goes on by itself", timeout=60)


@pytest.mark.settings(owner_disk_max="16M", grace="1s")
def test_who_is_paused_for_want_of_room_stays_so_in_the_next_daemon(daemon: Daemon) -> None:
    filler = run_script(daemon, "filler", "set -- $HOME\n" + FILLER, homedir="durable")
    wait_until(lambda: read(filler, "status") == "paused\n", "it is paused", timeout=60)
    daemon.kill()
    daemon.start()
    assert "EDQUOT" in refused(filler / "ctl", "resume")
    for path in (daemon.state / "tree" / "agent").rglob("part-*"):
        path.unlink()
    wait_until(lambda: read(filler, "status") == "busy\n", "it goes on by itself", timeout=60)


def refused(path: Path, text: str) -> str:
    """The name of the error."""
    with pytest.raises(OSError) as found:
        write(path, text)
    return errno.errorcode[found.value.errno or 0]
