"""make test-vm: limits, a power cut, and two machines with a link, in a Debian under emulation.

The machine has cgroup v2 alone, with all controllers, and the kernel of Debian. It is booted three
times with the same disk below ctxd's state; twice the power is cut. Its image is built once, in
CTXVM_CACHE (/var/cache/ctxfs-vm). Then two of them are a node of each other (``nodes.py``).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from tests.vm import nodes
from tests.vm.machine import (
    MachineError,
    command,
    image,
    make_disk,
    payload,
    say,
    tail,
    workplace,
)

BOOT_SECONDS: Final = 600.0
#: the first two end with the power cut
BOOTS: Final = (1, 2, 3)


def run(found: Path, work: Path, boot: int) -> list[str]:
    """One boot, until the machine is off; what it said, which is shown meanwhile."""
    lines: list[str] = []
    console = _console(work, boot)
    disks = {
        "root": f"file={found / 'root.img'},snapshot=on",
        "payload": f"file={work / 'payload.img'}",
        "state": f"file={work / 'state.img'}",
    }
    machine = subprocess.Popen(
        command(found / "vmlinuz", disks, str(boot), console, "-no-reboot"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(work)},
    )  # fmt: skip
    late = threading.Timer(BOOT_SECONDS, machine.kill)
    late.start()
    try:
        assert machine.stdout is not None
        for line in machine.stdout:
            lines.append(line.decode(errors="replace").rstrip())
            print(lines[-1], flush=True)
        machine.wait(30)
    finally:
        late.cancel()
        machine.kill()
        machine.wait()
    if machine.returncode < 0:
        raise MachineError(
            f"boot {boot} was not over within {BOOT_SECONDS:.0f} s; "
            f"the console said:\n{tail(console)}"
        )
    return lines


def _console(work: Path, boot: int) -> Path:
    return work / f"console{boot}"


def judge(boot: int, lines: list[str]) -> str | None:
    """What went wrong in a boot."""
    results = [line.split()[2] for line in lines if line.startswith("@@ pytest ")]
    cut = lines[-1:] == ["@@ cut"]
    if cut != (boot != BOOTS[-1]):
        return "the power was cut too early" if cut else "the power was not cut"
    return None if results == ["0"] else f"pytest ended with {', '.join(results) or 'nothing'}"


def count(lines: list[str], word: str) -> int:
    """What pytest's last lines say."""
    ends = [line for line in lines if line.startswith("==") and " in " in line]
    return sum(int(n) for line in ends for n in re.findall(rf"(\d+) {word}", line))


def main() -> int:
    def interrupted(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    failures: list[str] = []
    said: list[str] = []
    began = time.monotonic()
    try:
        found = image()
        with workplace() as work:
            payload(work / "payload", work / "payload.img")
            make_disk(work / "state.img", "256M")
            for boot in BOOTS:
                say(f"boot {boot} of {len(BOOTS)}, after {time.monotonic() - began:.0f} s")
                lines = run(found, work, boot)
                said += lines
                if (wrong := judge(boot, lines)) is not None:
                    failures.append(f"boot {boot}: {wrong}")
                    if "power" in wrong:
                        say(f"the console said:\n{tail(_console(work, boot))}")
                        break
        failures += nodes.run()
    except (AssertionError, MachineError, subprocess.CalledProcessError) as error:
        failures.append(str(error))
    for failure in failures:
        say(failure)
    say(f"over after {time.monotonic() - began:.0f} s")
    passed, failed = count(said, "passed"), count(said, "failed") + count(said, "error")
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failures or failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
