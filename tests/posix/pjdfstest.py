"""make test-pjdfstest: what passes on the backing filesystem has to pass in a shared space.

    python -m tests.posix.pjdfstest CHECKOUT [GROUP…]

CHECKOUT is a checkout of pjdfstest with its program built. Every file of its tests runs three
times: in a directory of the backing filesystem; there again without the right to make device
nodes, as in a space; and in a shared space of a daemon. A test that fails only in the space fails
the run, unless it fails without device nodes too or a row of ``APART`` names it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.worlds.daemon import MARK, daemon_of

GROUPS: Final = ("chmod", "chown", "ftruncate", "link", "mkdir", "mkfifo", "open", "rename",
                 "rmdir", "symlink", "truncate", "unlink", "utimensat")
WHERE: Final = """\
make test-pjdfstest needs the suite, which is not part of this project:
get https://github.com/pjd/pjdfstest, build its program as its README says, then
    make test-pjdfstest PJDFSTEST=/path/to/pjdfstest"""
#: what is apart, by the file of a test and what it tried, and why
APART: Final[Sequence[tuple[str, str, str]]] = (
    (r"(chmod|chown)/.*\.t", r"expected \(?0[2-7][0-7]{3}",
     "expects a set-id bit, of a nosuid mount"),
)
#: of one file; the longest takes a minute on an idle machine
_SECONDS: Final = 1200
#: files at a time
_AT_ONCE: Final = 2
#: to make device nodes
_WITHOUT_DEVICES: Final = ("setpriv", "--bounding-set", "-mknod", "--inh-caps", "-mknod", "--")
_LINE: Final = re.compile(r"(not )?ok (\d+)(.*)")
#: of the names that the suite makes up, the part that says nothing
_RANDOM: Final = re.compile(r"[0-9a-f]{28,}")


@dataclass(slots=True)
class Outcome:
    """Of all tests in a directory: those that passed, and what the others said."""

    passed: set[tuple[str, int]] = field(default_factory=set)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.passed) + len(self.failed)


def _run(file: Path, where: Path, prefix: Sequence[str], tools: Path) -> str:
    """What one file of tests says, run in a directory of its own."""
    own = where / f"{file.parent.name}-{file.stem}"
    own.mkdir(mode=0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "LC_ALL": "C"}
    done = subprocess.run([*prefix, "sh", str(file)], cwd=own, env=environment, text=True,
                          errors="replace", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False)
    return done.stdout


def run(files: Iterable[Path], where: Path, prefix: Sequence[str], tools: Path) -> Outcome:
    """All files of tests in a directory, two at a time."""
    outcome = Outcome()
    files = list(files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        said = pool.map(lambda file: _run(file, where, prefix, tools), files)
        for file, text in zip(files, said, strict=True):
            name = f"{file.parent.name}/{file.name}"
            for line in text.splitlines():
                if (match := _LINE.match(line)) is None:
                    continue
                key = name, int(match[2])
                if match[1]:
                    outcome.failed[key] = _RANDOM.sub("…", match[3].strip(" -"))
                else:
                    outcome.passed.add(key)
    return outcome


def apart(name: str, said: str) -> str | None:
    """The reason of the row that a failure falls under."""
    for files, tried, reason in APART:
        if re.fullmatch(files, name) and re.search(tried, said):
            return reason
    return None


def _tools(base: Path) -> Path:
    """A directory for PATH. The suite asks df(1) for the filesystem's name, and leaves out what it
    does not expect of every one. Both places are held to what is expected of the backing one."""
    tools = base / "tools"
    tools.mkdir()
    told = subprocess.run(["df", "-PT", str(base)], capture_output=True, text=True, check=True)
    (tools / "df").write_text(f"#!/bin/sh\ncat <<'END'\n{told.stdout}END\n")
    (tools / "df").chmod(0o755)
    return tools


def compare(files: Sequence[Path]) -> int:
    """The exit status: whether something fails in a space alone."""
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-pjdfstest-", dir="/tmp") as made:
        base = Path(made)
        base.chmod(0o755)
        tools = _tools(base)
        outcomes = []
        for name, prefix in (("backing", ()), ("without-devices", _WITHOUT_DEVICES)):
            (base / name).mkdir()
            outcomes.append(run(files, base / name, prefix, tools))
            _say(name, outcomes[-1])
        backing, without = outcomes
        with daemon_of() as daemon:
            space = daemon.root / "shared" / "pjdfstest"
            space.mkdir()
            space.chmod(0o755)
            (space / "tests").mkdir()
            ours = run(files, space / "tests", (), tools)
            shutil.rmtree(space / "tests")
        _say("space", ours)
    return _judge(backing, without, ours)


def _say(name: str, outcome: Outcome) -> None:
    print(f"{name}: {len(outcome.passed)} of {len(outcome)} pass", flush=True)


def _judge(backing: Outcome, without: Outcome, ours: Outcome) -> int:
    worse = sorted(backing.passed - ours.passed)
    reasons: dict[str, int] = {}
    found = []
    for key in worse:
        said = ours.failed.get(key, "was not run")
        reason = "needs a device node" if key not in without.passed else apart(key[0], said)
        if reason is None:
            found.append(f"  {key[0]} {key[1]}: {said}")
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    print(f"as on the backing filesystem: {len(backing.passed) - len(worse)} "
          f"of {len(backing.passed)}")
    for reason, count in sorted(reasons.items()):
        print(f"apart: {count} ({reason})")
    print(f"fail in the space alone: {len(found)}", *found, sep="\n")
    return 1 if found or not backing.passed else 0


def main(arguments: list[str]) -> int:
    if not arguments or not arguments[0]:
        print(WHERE, file=sys.stderr)
        return 2
    checkout = Path(arguments[0]).resolve()
    if not (checkout / "pjdfstest").is_file() or not (checkout / "tests").is_dir():
        print(f"{checkout} has no program pjdfstest beside its tests.\n{WHERE}", file=sys.stderr)
        return 2
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        print("make test-pjdfstest needs root and /dev/fuse", file=sys.stderr)
        return 2
    groups = arguments[1:] or GROUPS
    files = [file for group in groups for file in sorted((checkout / "tests" / group).glob("*.t"))]
    return compare(files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
