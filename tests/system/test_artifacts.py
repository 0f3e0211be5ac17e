"""What agents do with their own files, through a real kernel, and what that costs."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.system.hostile.guarded import guarded
from tests.worlds.daemon import Daemon, read, wait_until, write
from tests.worlds.reexecution import replaceable

PYTHON = "/usr/bin/python3"
OWNER = "61000"


def finish(daemon: Daemon, script: str, **files: str) -> str:
    """What a script of an agent's says, in Python, in its ``artifact``."""
    (daemon.base / "bin").mkdir(exist_ok=True)
    (daemon.base / "bin" / "script.py").write_text(
        "import errno, mmap, os, sys, threading\nos.chdir(os.environ['CTX_SELF'] + '/artifact')\n"
        + script
    )
    agent = daemon.finish("x", f"{PYTHON} /script/script.py", owner=OWNER,
                          mount=f"{daemon.base}/bin /script ro", **files)
    return read(agent, "out") or read(agent, "log")


FILES = """
def refused(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'done'

os.mkdir('d')
with open('d/a', 'w') as file:
    file.write('text')
os.rename('d/a', 'b')
held = open('b', 'r+b', buffering=0)
with open('c', 'w') as file:
    file.write('other')
os.replace('c', 'b')
held.write(b'more')
held.seek(0)
print(held.read(), os.fstat(held.fileno()).st_nlink, open('b').read(), sorted(os.listdir('.')))
held.close()
os.chmod('b', 0o4751)
st = os.stat('b')
print(oct(st.st_mode), st.st_uid == os.getuid(), st.st_size)
os.utime('b', ns=(10**9, 2 * 10**9))
print(os.stat('b').st_mtime)
with open('b', 'r+b') as file:
    with mmap.mmap(file.fileno(), 5, mmap.MAP_PRIVATE) as private:
        print(private[:])
    print(refused(lambda: mmap.mmap(file.fileno(), 5)))
print(refused(os.symlink, 'b', 's'), refused(os.link, 'b', 'l'), refused(os.mkfifo, 'f'))
print(refused(os.setxattr, 'b', 'user.a', b'1'), refused(os.getxattr, 'b', 'user.a'),
      os.listxattr('b') if refused(os.listxattr, 'b') == 'done' else [])
print(refused(os.rmdir, 'd'), refused(os.unlink, 'b'), os.listdir('.'))
"""


def test_files_and_directories_are_what_they_are_elsewhere(daemon: Daemon) -> None:
    lines = finish(daemon, FILES).splitlines()
    assert lines[:5] == [
        "b'more' 0 other ['b', 'd']", "0o100751 True 5", "2.0", "b'other'", "ENODEV",
    ]  # fmt: skip
    assert lines[5] == "EPERM EPERM EPERM"
    no = errno.errorcode[errno.EOPNOTSUPP]
    assert lines[6] == f"{no} {no} []"
    assert lines[7] == "done done []"


#: each of many threads writes to a file of its own from a page of another one, which the kernel
#: has to ask for while it holds the lock of what is written
PAGES = """
with open('source', 'wb') as file:
    file.write(b'x' * 65536)

def work(number):
    with open('source', 'rb') as source, open(f't{number}', 'wb', buffering=0) as target:
        for _ in range(50):
            with mmap.mmap(source.fileno(), 65536, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                target.seek(0)
                target.write(pages)

threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(os.path.getsize(f't{number}') for number in range(32)))
"""


def test_what_is_written_comes_from_pages_of_the_mount(daemon: Daemon) -> None:
    """An agent's writes wait for its reads, which never wait for its writes."""
    assert finish(daemon, PAGES) == f"{32 * 65536}\n"


#: replaces and removes what is large, and not on the disk yet, for ever
REPLACER = """
text = b'x' * (15 << 20)
print('begun', flush=True)
while True:
    for name in 'ab':
        with open(name, 'wb') as file:
            file.write(text)
    os.replace('a', 'b')
    with open('c', 'wb') as file:
        file.write(text)
    os.rename('c', '../result.md')
    os.unlink('b')
"""


@pytest.mark.alone
def test_who_replaces_large_files_holds_up_nobody(daemon: Daemon) -> None:
    with guarded(daemon):
        (daemon.base / "bin").mkdir()
        (daemon.base / "bin" / "script.py").write_text(
            "import os\nos.chdir(os.environ['CTX_SELF'] + '/artifact')\n" + REPLACER
        )
        agent = daemon.run("x", f"{PYTHON} /script/script.py", owner=OWNER,
                           mount=f"{daemon.base}/bin /script ro")
        wait_until(lambda: read(agent, "out") == "begun\n", "it begins")
        seen: set[int] = set()

        def replaced() -> bool:
            seen.add((agent / "result.md").stat().st_mtime_ns)
            return len(seen) > 4

        wait_until(replaced, "four results", timeout=120)
        write(agent / "ctl", "kill")


MANY = 30_000


def resident(daemon: Daemon) -> int:
    """Bytes of the daemon in memory."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())
    return int(line) << 10


def paid(daemon: Daemon) -> int:
    """Bytes of memory on the account of the agent's owner."""
    rows = json.loads(daemon.ctx("quota", "--json").stdout)
    (use,) = [
        row["use"] for row in rows if (str(row["owner"]), row["account"]) == (OWNER, "memory")
    ]
    return int(use)


def numbers_of(directory: Path, names: Iterable[str]) -> dict[str, int]:
    return {name: (directory / name).stat().st_ino for name in names}


@pytest.mark.long
@pytest.mark.alone
def test_many_files_are_on_an_account_and_hold_up_no_re_execution() -> None:
    with replaceable(config=f"files: {2 * MANY}\n") as daemon:
        agent = daemon.make("x", owner=OWNER)
        daemon.agent_dir("x").joinpath("handoff.md").write_text("it has files from now on")
        (real,) = (daemon.state / "agent").glob("*/doc/artifact")
        for number in range(MANY):
            (real / str(number)).touch()
        before = resident(daemon)
        names = os.listdir(agent / "artifact")
        assert len(names) == MANY
        numbers = numbers_of(agent / "artifact", names)
        grown, held = resident(daemon) - before, paid(daemon)
        assert held >= MANY << 10
        assert grown < held + (16 << 20)
        daemon.reexec()
        (waited,) = re.findall(r"callers have waited ([0-9.]+) s", daemon.log.read_text())
        assert float(waited) < 1.5
        some = names[::30]
        assert numbers_of(agent / "artifact", some) == {name: numbers[name] for name in some}
        assert paid(daemon) == held
