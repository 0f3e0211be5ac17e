"""Makes the states in tests/unit/runtime/records/states anew:

    python -m tests.upgrade.state DIRECTORY OUT.tar.xz

DIRECTORY is that of a version with its .venv and programs (``make setup programs``). The result is
what a kill of its daemon left of ``tests.upgrade.scene``: the state, and the monitors' records.
"""

from __future__ import annotations

import sqlite3
import sys
import tarfile
from contextlib import closing
from pathlib import Path

from tests.upgrade.older import Successor
from tests.upgrade.scene import begin_all

#: made anew by any daemon, or held for a full disk alone
_LEFT_OUT = ("reserve", "lock")


def _select(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(info.name).name in _LEFT_OUT:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def main(older: str, out: str) -> None:
    daemon = Successor(Path(older).resolve())
    try:
        daemon.start_older()
        begin_all(daemon)
        daemon.kill_older()
        # the same rows, without what they were before
        with closing(sqlite3.connect(daemon.state / "ctxfs.db")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with tarfile.open(out, "w:xz", preset=9) as archive:
            archive.add(daemon.state, "state", filter=_select)
            archive.add(daemon.runtime / "record", "record", filter=_select)
    finally:
        daemon.abandon()
        daemon.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
