"""A file whose pages nobody brings: who reads one waits until the file system is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyfuse3
import trio

_INODE = 2
_SIZE = 1 << 30


class _Unfilled(pyfuse3.Operations):
    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino = inode
        is_file = inode == _INODE
        found.st_mode = stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o755
        found.st_size = _SIZE if is_file else 0
        return found

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._attributes(_INODE)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        return pyfuse3.StatvfsData()

    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(1))

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        await trio.sleep_forever()
        return b""


@contextmanager
def unfilled_file() -> Iterator[Path]:
    """The file, for everybody, or for its user; on leaving, who waits for it gets an error."""
    directory = Path(tempfile.mkdtemp(prefix="ctxtest-unfilled-"))
    directory.chmod(0o755)
    command = [sys.executable, "-m", __name__, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield directory / "file"
        finally:
            server.kill()
            subprocess.run(["fusermount3", "-u", "-z", directory], check=True)
            directory.rmdir()


if __name__ == "__main__":
    everybody = {"allow_other"} if os.geteuid() == 0 else set()
    pyfuse3.init(_Unfilled(), sys.argv[1], {"fsname=ctxtest-unfilled", *everybody})
    print("ready", flush=True)
    trio.run(pyfuse3.main)
