"""make test-vm: limits, and a power cut, in a Debian of its own under emulation.

The machine has cgroup v2 alone, with all controllers, and the kernel of Debian. It is booted three
times with the same disk below ctxd's state; twice the power is cut. Its image is built once, in
CTXVM_CACHE (/var/cache/ctxfs-vm).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

CHECKOUT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = Path(os.environ.get("CTXVM_CACHE", "/var/cache/ctxfs-vm"))
PREFIX: Final = "ctxfs-vm-run-"
BOOT_SECONDS: Final = 600.0
#: the first two end with the power cut
BOOTS: Final = (1, 2, 3)
#: should this program be killed, the kernel ends the command
PDEATHSIG: Final = ("setpriv", "--pdeathsig", "KILL")


class MachineError(Exception):
    """One sentence."""


def say(text: str) -> None:
    print(f"test-vm: {text}", flush=True)


# the image


def image() -> Path:
    """The directory with the image, built if it is not there or its recipe has changed."""
    recipe = Path(__file__).with_name("build.sh")
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    found = CACHE / f"image-{digest}"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            if os.geteuid() != 0:
                raise MachineError(f"the image is built by root: no {found}")
            for old in CACHE.glob("image-*"):
                shutil.rmtree(old)
            say(f"building the image, once, in {CACHE}: about a minute")
            # in namespaces that end with this program, whatever is running and mounted there
            own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
            try:
                subprocess.run([*PDEATHSIG, *own, "sh", str(recipe), str(found)], check=True)
            finally:
                shutil.rmtree(f"{found}.part", ignore_errors=True)
    version = (found / "python").read_text().strip()
    if version != f"{sys.version_info.major}.{sys.version_info.minor}":
        raise MachineError(
            f"the machine has Python {version}, and the packages of {sys.prefix} are for another: "
            "make .venv with Debian's python3"
        )
    return found


# the disk with what is tested


def packages(*wanted: str) -> Iterator[importlib.metadata.Distribution]:
    """The distributions, and those that they require."""
    seen: set[str] = set()
    missing = list(wanted)
    while missing:
        requirement = Requirement(missing.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate()):
            continue
        seen.add(requirement.name)
        found = importlib.metadata.distribution(requirement.name)
        missing += found.requires or []
        yield found


def payload(to: Path, disk: Path) -> None:
    """The checkout, and the packages that it needs, compiled here: it is slow in there."""
    ignore = shutil.ignore_patterns("*.c")
    for part in ("client", "ctxfs", "runtime", "tests", "contrib"):
        shutil.copytree(CHECKOUT / part, to / part, ignore=ignore)
    shutil.copy2(CHECKOUT / "pyproject.toml", to)
    for package in packages("ctxfs", "pytest", "hypothesis"):
        for file in package.files or ():
            source, target = Path(str(file.locate())), to / "site" / file
            if ".." in file.parts or file.suffix == ".pth" or "editable" in file.name:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(to)], check=True)
    make_disk(disk, "256M", "-d", str(to))


def make_disk(disk: Path, size: str, *more: str) -> None:
    with disk.open("wb"):
        os.truncate(disk, int(size.removesuffix("M")) << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", *more, str(disk)], check=True)


# the machine


def command(found: Path, work: Path, boot: int) -> list[str]:
    disks = {
        "root": f"file={found / 'root.img'},snapshot=on",
        "payload": f"file={work / 'payload.img'}",
        "state": f"file={work / 'state.img'}",
    }
    arguments = [
        *PDEATHSIG,
        "qemu-system-x86_64",
        *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"),
        *("-smp", "2", "-m", "1024", "-nodefaults", "-display", "none", "-no-reboot"),
        *("-kernel", str(found / "vmlinuz")),
        *("-serial", f"file:{work / f'console{boot}'}", "-serial", "stdio"),
        *("-device", "nvme,id=disks,serial=ctxfs"),
    ]
    for number, (name, drive) in enumerate(disks.items(), 1):
        arguments += ["-drive", f"if=none,id={name},format=raw,{drive}"]
        arguments += ["-device", f"nvme-ns,drive={name},bus=disks,nsid={number}"]
    parameters = (
        "root=/dev/nvme0n1 rw console=ttyS0 panic=-1 quiet mitigations=off",
        f"systemd.show_status=0 systemd.setenv=CTXFS_VM={boot}",
    )
    return [*arguments, "-append", " ".join(parameters)]


def run(found: Path, work: Path, boot: int) -> list[str]:
    """One boot, until the machine is off; what it said, which is shown meanwhile."""
    lines: list[str] = []
    machine = subprocess.Popen(
        command(found, work, boot), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(work)},
    )
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
            f"the console said:\n{console(work, boot)}"
        )
    return lines


def console(work: Path, boot: int) -> str:
    return (work / f"console{boot}").read_text(errors="replace")[-3000:]


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


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Where the disks of this run are. Those of runs that were killed go."""
    for old in CACHE.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX).partition("-")[0]).exists():
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=CACHE) as work:
        yield Path(work)


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
                        say(f"the console said:\n{console(work, boot)}")
                        break
    except (MachineError, subprocess.CalledProcessError) as error:
        failures.append(str(error))
    for failure in failures:
        say(failure)
    say(f"over after {time.monotonic() - began:.0f} s")
    passed, failed = count(said, "passed"), count(said, "failed") + count(said, "error")
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failures or failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
