"""The end of the second boot: the power is cut while agents come and go."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.systemd.service import SECONDS, Service
from tests.vm.power import STATE, cut, sync
from tests.worlds.daemon import wait_dead

BUSY_SECONDS = 15.0


def main() -> None:
    service = Service()
    service.start()
    # written back at any moment: the journal every second, the rest after two
    subprocess.run(["mount", "-o", "remount,commit=1", str(STATE)], check=True)
    for name, centiseconds in (("writeback", 100), ("expire", 200)):
        Path(f"/proc/sys/vm/dirty_{name}_centisecs").write_text(f"{centiseconds}\n")
    until = time.monotonic() + BUSY_SECONDS
    number = 0
    while time.monotonic() < until:
        number += 1
        agents = [service.run(f"busy-{number}-{i}", "echo done") for i in range(3)]
        if number % 2:
            sync(agents[0] / "exec")
        if number % 3:
            wait_dead(agents[0], SECONDS)
            agents[0].rmdir()
    cut()


if __name__ == "__main__":
    main()
