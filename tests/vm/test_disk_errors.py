"""The third boot: the disk of the state is full, read-only, or fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.systemd.service import DAEMON, SECONDS, Service, systemctl
from tests.vm.disk import Disk
from tests.vm.power import damaged, write_synced
from tests.worlds.daemon import read, refusal, wait_dead, wait_status, wait_until

#: ends with 3 when it is told to, whatever the daemon can record then
ENDS = "sh -c 'trap \"exit 3\" TERM; echo begun; while :; do sleep 0.1; done'"


@pytest.fixture(scope="module")
def disk(service: Service) -> Iterator[Disk]:
    """The disk below a service that is started anew on it."""
    service.stop()
    mapped = Disk()
    mapped.map()
    service.start()
    yield mapped
    service.stop()
    mapped.unmap()


@pytest.fixture(scope="module")
def space(service: Service, disk: Disk) -> Path:
    made = service.root / "shared/disk-errors"
    made.mkdir()
    return made / "data"


def _refused(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "accepted"


def _mkdir(service: Service) -> str:
    return _refused((service.root / "agent/not-made.d").mkdir)


def _append_synced(file: Path, data: bytes) -> str:
    def action() -> None:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)

    return _refused(action)


def _end(agent: Path) -> None:
    os.kill(int(read(agent, "pid")), signal.SIGTERM)
    group = Path(read(agent, "cgroup").strip())
    wait_until(
        lambda: not group.exists() or "populated 0" in (group / "cgroup.events").read_text(),
        "nothing of the agent runs",
        SECONDS,
    )


def _is_recorded(agent: Path) -> None:
    wait_dead(agent, SECONDS)
    assert (read(agent, "outcome"), read(agent, "reason")) == ("error\n", "exit:3\n")


def _goes_on(service: Service, agent: Path, file: Path) -> None:
    """Everything is accepted again, and nothing acknowledged is lost. A daemon that was stopped
    has ended the agent, whose controls cannot be written any more."""
    assert read(agent, "label") == "before\n"
    name = f"next-{agent.name.removesuffix('.d')}"
    later = service.make(f"{name}-made", "true")
    write_synced(later / "label", "after")
    assert read(later, "label") == "after\n"
    assert file.read_bytes() == b"kept\n"
    assert _append_synced(file, b"more\n") == "accepted"
    assert read(service.finish(name, "echo hello"), "result.md") == "hello\n"
    assert not (service.root / "agent/not-made.d").exists()
    damage = damaged(service.root)
    assert not damage, damage


def _scene(service: Service, space: Path, name: str) -> tuple[Path, Path, Path]:
    """An agent with a label, one that runs, and a file, all synced."""
    runs = service.run(f"{name}-runs", ENDS)
    wait_status(runs, "busy", timeout=SECONDS)
    kept = service.make(name, "true")
    write_synced(kept / "label", "before")
    file = space / name
    assert _append_synced(file, b"kept\n") == "accepted"
    return kept, file, runs


def test_a_full_disk_refuses_and_life_goes_on_with_space(
    service: Service, disk: Disk, space: Path
) -> None:
    kept, file, runs = _scene(service, space, "full")
    with disk.full():
        assert refusal(kept / "label", "lost") == "ENOSPC"
        assert "disk" in service.error()
        assert _mkdir(service) == "ENOSPC"
        assert _append_synced(file, bytes(1 << 20)) == "ENOSPC"
        assert read(kept, "label") == "before\n"
        assert read(runs, "status") == "busy\n"
        _end(runs)
    os.truncate(file, len(b"kept\n"))
    _is_recorded(runs)
    _goes_on(service, kept, file)


def test_a_daemon_does_not_start_on_a_disk_that_is_read_only_and_says_so(
    service: Service, disk: Disk, space: Path
) -> None:
    kept, file, _ = _scene(service, space, "read-only")
    service.stop()
    with disk.read_only():
        started = subprocess.run(
            ["systemctl", "start", DAEMON], capture_output=True, timeout=SECONDS, check=False
        )
        assert started.returncode != 0
        said = subprocess.run(
            ["journalctl", "-o", "cat", "-u", DAEMON, "-n", "50"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        assert "read-only" in said.stdout.lower()
        systemctl("stop", DAEMON)
    service.start()
    _goes_on(service, kept, file)


def test_a_disk_that_fails_loses_nothing_acknowledged(
    service: Service, disk: Disk, space: Path
) -> None:
    kept, file, runs = _scene(service, space, "fails")
    disk.fail()
    # a filesystem that cannot read which blocks are free says that none is
    refused = {"EIO", "EROFS", "ENOSPC"}
    assert _append_synced(file, b"lost\n") in refused
    # what is not synced may be accepted, and lost
    assert _refused(lambda: write_synced(kept / "label", "lost")) in refused
    assert read(kept, "label") in ("before\n", "lost\n")
    assert read(runs, "status") == "busy\n"
    service.stop()
    disk.mend()
    service.start()
    assert read(runs, "status") == "dead\n"
    _goes_on(service, kept, file)
