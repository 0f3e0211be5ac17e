"""Programs that ask much of a filesystem work in a shared space, for root and for a user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.daemon import Daemon

_UID: Final = 61011
#: of one program
_SECONDS: Final = 100
Shell = Callable[[str], str]

_REPOSITORY: Final = """
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b \
    GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b main one
for n in 1 2 3 4 5; do
    echo "$n" > "one/file$n" && git -C one add . && git -C one commit -qm "$n"
done
"""
#: two processes add up; each waits for the other's lock
_WRITERS: Final = """
sqlite3 base "PRAGMA journal_mode=$MODE; CREATE TABLE t(who, n);" > mode
for who in 1 2; do
    for n in 1 2 3 4 5 6 7 8 9 10; do
        echo ".timeout 60000"; echo "BEGIN IMMEDIATE; INSERT INTO t VALUES($who, $n); COMMIT;"
    done | sqlite3 -bail base &
    eval "writer$who=$!"
done
wait $writer1 && wait $writer2
cat mode; sqlite3 base "SELECT count(*), sum(n) FROM t; PRAGMA integrity_check;"
"""
_MAKEFILE: Final = """
printf 'all: a.out b.out\\n%%.out: %%.in\\n\\ttr a-z A-Z < $< > $@\\n' > Makefile
echo one > a.in; echo two > b.in
make -s -j2; cat a.out b.out
touch -d '1 hour ago' a.in b.in; make -q && echo current
touch -d '1 hour' a.in; make -q || echo old
"""
_TREE: Final = """
mkdir -p from/d; echo text > from/d/file; chmod 640 from/d/file
ln from/d/file from/other; ln -s d/file from/link; mkfifo from/fifo
touch -h -d '2001-02-03 04:05:06.123456789' from/d/file from/link from/fifo
python3 -c 'import os; os.setxattr("from/d/file", "user.note", b"kept")'
"""
#: what has to be the same of a copy
_LIST: Final = """
shown() { (cd "$1" && find . -mindepth 1 -printf '%p %y %m %n %T@ %l\\n' | grep -v ' d ' | sort
    python3 -c 'import os; print(os.getxattr("d/file", "user.note"))'; cat d/file) }
test "$(shown from)" = "$(shown to)" && shown to | wc -l
"""


def _program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: make test-posix installs it")


@pytest.fixture(params=[0, _UID], ids=["root", "user"])
def shell(request: pytest.FixtureRequest, shared_daemon: Daemon) -> Iterator[Shell]:
    """What a script prints, run by a user in a directory of its own in a space."""
    uid: int = request.param
    space = shared_daemon.root / "shared" / "all"
    space.mkdir(exist_ok=True)
    space.chmod(0o777)
    own = space / f"{len(os.listdir(space))}-{uid}"
    own.mkdir()
    os.chown(own, uid, uid)

    def run(script: str) -> str:
        done = subprocess.run(
            ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups",
             "sh", "-eu", "-c", script],
            cwd=own, env={"PATH": os.environ["PATH"], "HOME": str(own), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    yield run
    shutil.rmtree(own)


def test_git_clones_and_collects(shell: Shell) -> None:
    said = shell(_REPOSITORY + """
git clone -q one two; git clone -q --no-hardlinks one three
git -C two gc -q --prune=now; git -C two fsck --strict; git -C two status --porcelain
git -C two log --format=%s | tr '\\n' ' '; git -C three rev-list --count HEAD
""")
    assert said == "5 4 3 2 1 5\n"


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_two_write_to_a_database_of_sqlite(shell: Shell, mode: str) -> None:
    _program("sqlite3")
    assert shell(f"MODE={mode}\n{_WRITERS}") == f"{mode}\n20|110\nok\n"


def test_make_builds_two_at_a_time(shell: Shell) -> None:
    assert shell(_MAKEFILE) == "ONE\nTWO\ncurrent\nold\n"


def test_tar_keeps_attributes(shell: Shell) -> None:
    said = shell(_TREE + """
tar --xattrs --format=pax -C from -cf archive . && mkdir to && tar --xattrs -C to -xpf archive
""" + _LIST)
    assert said == "6\n"


def test_rsync_keeps_attributes_and_links(shell: Shell) -> None:
    _program("rsync")
    assert shell(_TREE + "rsync -aHX from/ to/\n" + _LIST) == "6\n"


def test_rsync_asks_for_acls(shell: Shell) -> None:
    """There are none to keep, and that is no failure."""
    _program("rsync")
    assert shell(_TREE + "rsync -aHAX from/ to/\n" + _LIST) == "6\n"


def test_vim_writes_a_file(shell: Shell) -> None:
    _program("vim")
    said = shell("""
printf 'one\\ntwo\\n' > file; chmod 640 file
vim -u NONE -i NONE -es -c '%s/two/three/' -c 'wq' file
cat file; stat -c %a file; ls -A
""")
    assert said == "one\nthree\n640\nfile\n"


@pytest.mark.long
def test_python_makes_a_virtual_environment(shell: Shell) -> None:
    assert shell("/usr/bin/python3 -m venv --without-pip v\n"
                 "v/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'") == "True\n"


def test_gpg_agent_listens_on_its_socket(shell: Shell) -> None:
    """Which is in its home, where no run directory of a user is."""
    _program("gpg-agent")
    said = shell("""
mkdir -m 700 h; export GNUPGHOME="$PWD/h"
gpg-agent --homedir h --daemon \
    sh -c 'test -n "$(find h -type s)" && gpg-connect-agent --no-autostart "GETINFO version" /bye'
""")
    assert said.splitlines()[-1] == "OK"


def test_a_directory_that_changes_is_read(shared_daemon: Daemon) -> None:
    """What stays is told once, whatever comes and goes meanwhile."""
    space = shared_daemon.root / "shared" / "changing"
    space.mkdir()
    stay = {f"stay{n:04}" for n in range(1000)}
    for name in sorted(stay):
        (space / name).touch()
    for n in range(500):
        (space / f"go{n:04}").touch()
    told = []
    with os.scandir(space) as entries:
        told.append(next(entries).name)
        for n in range(500):
            (space / f"go{n:04}").unlink()
            (space / f"come{n:04}").touch()
        told += [entry.name for entry in entries]
    assert sorted(set(told) & stay) == sorted(stay)
    assert len(told) == len(set(told))


def test_direct_reads_and_writes_are_tolerated(shared_daemon: Daemon) -> None:
    space = shared_daemon.root / "shared" / "direct"
    space.mkdir()
    fd = os.open(space / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.write(fd, b"text") == 4
        assert os.pread(fd, 100, 0) == b"text"
    finally:
        os.close(fd)


def test_nothing_moves_between_spaces(shared_daemon: Daemon) -> None:
    spaces = [Path(shared_daemon.root / "shared" / name) for name in ("here", "there")]
    for space in spaces:
        space.mkdir()
    (spaces[0] / "file").touch()
    for move in (os.rename, os.link):
        with pytest.raises(OSError, match=r"Errno 18"):
            move(spaces[0] / "file", spaces[1] / "file")
