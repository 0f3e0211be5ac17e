"""The end of the second boot: the power is cut while agents come and go, and files are written."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from tests.systemd.service import SECONDS, Service
from tests.vm.power import (
    ACKNOWLEDGED,
    STATE,
    append_synced,
    cut,
    durable_trees,
    sync,
    version,
    write_synced,
)
from tests.worlds.daemon import wait_dead, write

BUSY_SECONDS = 15.0


def main() -> None:
    service = Service()
    service.start()
    # written back at any moment: the journal every second, the rest after two
    subprocess.run(["mount", "-o", "remount,commit=1", str(STATE)], check=True)
    for name, centiseconds in (("writeback", 100), ("expire", 200)):
        Path(f"/proc/sys/vm/dirty_{name}_centisecs").write_text(f"{centiseconds}\n")
    counted = service.make("counted", "true")
    trees = durable_trees(service.root)
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
        # a control, the lines of a file, and a file that is replaced as careful programs do
        write_synced(counted / "label", f"{number}")
        for tree in trees:
            append_synced(tree / "lines", f"{number}\n".encode())
            append_synced(tree / "next", version(number))
            (tree / "next").rename(tree / "replaced")
            sync(tree)
    append_synced(ACKNOWLEDGED, json.dumps(number).encode())
    # what is at hand in the moment of the cut
    for tree in trees:
        with (tree / "lines").open("ab") as file:
            file.write(f"{number + 1}\n".encode())
        (tree / "next").write_bytes(version(number + 1))
        (tree / "next").rename(tree / "replaced")
    write(counted / "label", f"{number + 1}")
    cut()


if __name__ == "__main__":
    main()
