"""Agents that fill the disk, each in a way that ctxd does not see: their owner's account stops
them, for root and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import Daemon, daemon_of, wait_until
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

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
    files["mount"] = f"{daemon.base}/bin /attack ro\n" + files.get("mount", "")

    def run() -> Path:
        return daemon.run(name, f"sh /attack/{name}.sh", **files)

    return daemon.do(run) if isinstance(daemon, OrdinaryDaemon) else run()


def on_disk(path: Path) -> int:
    """Bytes of files."""
    files = (Path(at) / name for at, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_blocks * 512 for file in files)


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
