"""A directory whose lock somebody holds, as an agent can by a page that is not filled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: lists the directory into a page that nobody fills (userfaultfd(2)), with the lock held for
#: reading; then wants it for writing, and everybody else waits behind that
_HOLDER: Final = """
import ctypes, fcntl, mmap, os, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
fault = libc.syscall(323, os.O_CLOEXEC)
assert fault >= 0, os.strerror(ctypes.get_errno())
fcntl.ioctl(fault, 0xC018AA3F, struct.pack('QQQ', 0xAA, 0, 0))
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(fault, 0xC020AA00, struct.pack('QQQQ', address, 4096, 1, 0))
top = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
threading.Thread(target=libc.syscall, args=(217, top, ctypes.c_void_p(address), 4096)).start()
os.read(fault, 32)
writer = os.fork()
if not writer:
    try:
        os.rmdir(sys.argv[1] + '/none')
    finally:
        os._exit(0)
while open(f'/proc/{writer}/stat').read().rsplit(')', 1)[1].split()[0] != 'D':
    pass
print('held', flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """While it is held: who lists it waits, and can be killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.kill()
        holder.communicate()
