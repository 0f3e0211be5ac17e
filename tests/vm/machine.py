"""Emulated machines: their image, the disk with what is tested, and how one is started."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

CHECKOUT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = Path(os.environ.get("CTXVM_CACHE", "/var/cache/ctxfs-vm"))
PREFIX: Final = "ctxfs-vm-run-"
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


def command(
    kernel: Path, drives: Mapping[str, str], name: str, console: Path, *more: str
) -> list[str]:
    """One with these disks, by the names that they have there; its second serial line is the
    standard input and output. It finds ``name`` as CTXFS_VM."""
    arguments = [
        *PDEATHSIG,
        "qemu-system-x86_64",
        *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"),
        *("-smp", "2", "-m", "1024", "-nodefaults", "-display", "none"),
        *("-kernel", str(kernel)),
        *("-serial", f"file:{console}", "-serial", "stdio"),
        *("-device", "nvme,id=disks,serial=ctxfs"),
    ]
    for number, (disk, drive) in enumerate(drives.items(), 1):
        arguments += ["-drive", f"if=none,id={disk},format=raw,{drive}"]
        arguments += ["-device", f"nvme-ns,drive={disk},bus=disks,nsid={number}"]
    parameters = (
        "root=/dev/nvme0n1 rw console=ttyS0 panic=-1 quiet mitigations=off",
        f"systemd.show_status=0 systemd.setenv=CTXFS_VM={name}",
    )
    return [*arguments, *more, "-append", " ".join(parameters)]


def tail(console: Path) -> str:
    return console.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Where the disks of this run are. Those of runs that were killed go."""
    for old in CACHE.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX).partition("-")[0]).exists():
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=CACHE) as work:
        yield Path(work)
