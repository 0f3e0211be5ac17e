"""make test-hostile ROOTLESS=1: runs pytest as an ordinary user, on a machine made for it.

All daemons of the tests are that user's then, and so is whoever asks them; the cgroup in which
they and the tests live is delegated. Two capabilities are the tests' alone, no daemon's and no
program's: they look at the daemons, and are told of each fork and exec (worlds/membership.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import wait_until
from tests.worlds.ordinary import IDS, UID, delegate, make_machine, on_machine
from tests.worlds.whose import HIERARCHY

_CAPABILITIES: Final = "+sys_ptrace,+net_admin"
_KEPT: Final = ("PATH", "LANG", "TERM", "CTXFS_TEST_BYSTANDERS")


def main(arguments: list[str]) -> int:
    if os.geteuid() != 0 or HIERARCHY is None:
        print("make test-hostile ROOTLESS=1 needs root, which makes the user's machine, and "
              "cgroup v2", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not before all is removed
    cgroup = Cgroup(HIERARCHY / f"ctxtest-rootless-{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="ctxtest-rootless-", dir="/tmp") as base:
        Path(base).chmod(0o755)
        delegate(cgroup.path, cgroup.path / "tests")
        machine = make_machine(Path(base) / "machine")
        try:
            # of what the user writes none is in the checkout
            written = Path(base) / "tmp"
            written.mkdir()
            os.chown(written, UID, UID)
            environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
                "CTXFS_TEST_ROOTLESS": str(cgroup.path),
                "HOME": "/nonexistent",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(written),
            }
            ids = (*IDS, f"--inh-caps={_CAPABILITIES}", f"--ambient-caps={_CAPABILITIES}")
            pytest = ("env", "-C", os.getcwd(), sys.executable, "-m", "pytest",
                      *("-p", "no:cacheprovider"), *arguments)
            return subprocess.run(
                on_machine(machine, *pytest, cgroup=cgroup.path / "tests", ids=ids),
                env=environment, check=False,
            ).returncode
        finally:
            cgroup.kill()
            wait_until(lambda: not cgroup.populated(), "all processes of the user have ended")
            machine.communicate()
            for path in sorted(cgroup.path.rglob("*/"), reverse=True):
                path.rmdir()
            cgroup.path.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
