"""A lock of the kernel's that somebody holds, as an agent can by a page that is not filled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.worlds.unfilled import unfilled_file

#: lists a directory into a page that nobody fills, with the directory's lock held for reading;
#: then wants it for writing, and everybody else waits behind that. Or writes files from that page.
_HOLDER: Final = """
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None)
what, file, *places = sys.argv[1:]
page = mmap.mmap(os.open(file, os.O_RDONLY), 4096, mmap.MAP_PRIVATE,
                 mmap.PROT_READ | mmap.PROT_WRITE)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
call = {'write': 1, 'list': 217}[what]
for at in places:
    top = os.open(at, os.O_RDWR if what == 'write' else os.O_RDONLY | os.O_DIRECTORY)
    holds = threading.Thread(target=libc.syscall, args=(call, top, address, 4096))
    holds.start()
    while open(f'/proc/self/task/{holds.native_id}/syscall').read().split()[0] != str(call):
        pass
if what == 'list':
    writer = os.fork()
    if not writer:
        try:
            os.rmdir(at + '/none')
        finally:
            os._exit(0)
    while open(f'/proc/{writer}/stat').read().rsplit(')', 1)[1].split()[0] != 'D':
        pass
print('held', flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def held(*paths: Path, what: str = "list") -> Iterator[None]:
    """While they are held, or one that is listed: who wants it waits, and can be killed, but not if
    it is that of a FIFO. Who waits at one for somebody to open it for writing is let go by this."""
    with unfilled_file() as file:
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, what, str(file), *map(str, paths)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.kill()
            holder.communicate()
