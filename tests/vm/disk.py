"""The disk of ctxd's state on a mapped device, so that it can be filled, or fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.vm.power import STATE

BELOW: Final = Path("/dev/nvme0n3")
NAME: Final = "state"
#: by the kernel's name, since there is no udev
MAPPED: Final = Path("/dev/dm-0")
#: filled before the daemon's part of the filesystem is
_STEPS: Final = (1 << 20, 1 << 12)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Disk:
    """The third disk, as a mapped device."""

    def __init__(self) -> None:
        self.sectors = int(Path("/sys/class/block", BELOW.name, "size").read_text())

    def map(self) -> None:
        """Has the filesystem on a mapped device; nobody may use it."""
        _run("umount", str(STATE))
        _run("dmsetup", "create", NAME, "--table", self._table("linear"))
        self.mount()

    def unmap(self) -> None:
        _run("umount", str(STATE))
        _run("dmsetup", "remove", NAME)
        _run("mount", str(BELOW), str(STATE))

    def mount(self) -> None:
        _run("mount", str(MAPPED), str(STATE))

    def mend(self) -> None:
        """As after a reboot with the disk mended: checked, and mounted anew."""
        self._become("linear")
        _run("umount", str(STATE))
        checked = subprocess.run(
            ["e2fsck", "-fy", str(MAPPED)], capture_output=True, text=True, timeout=120, check=False
        )
        assert checked.returncode in (0, 1), checked.stdout
        self.mount()

    def fail(self) -> None:
        """Every read of the disk and every write to it fails from now on."""
        self._become("error")
        Path("/proc/sys/vm/drop_caches").write_text("3\n")

    def _become(self, target: str) -> None:
        _run("dmsetup", "suspend", "--nolockfs", "--noflush", NAME)
        _run("dmsetup", "load", NAME, "--table", self._table(target))
        _run("dmsetup", "resume", NAME)

    def _table(self, target: str) -> str:
        return f"0 {self.sectors} {target}" + (f" {BELOW} 0" if target == "linear" else "")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """No block is left, not even of those that are kept for root."""
        filler = STATE / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in _STEPS:
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        try:
            yield
        finally:
            filler.unlink()
            os.sync()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """While nobody uses it."""
        _run("mount", "-o", "remount,ro", str(STATE))
        try:
            yield
        finally:
            _run("mount", "-o", "remount,rw", str(STATE))
