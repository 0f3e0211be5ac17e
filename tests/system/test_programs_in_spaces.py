"""Programs that ask much of a filesystem, in a space: of the host, of two agents, and of both."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.system.test_trees import BOTH, do, make, space, start, way
from tests.worlds.daemon import Daemon, read, running, wait_dead, wait_until
from tests.worlds.ordinary import ordinary_daemon

_PYTHON: Final = "/usr/bin/python3"
#: of one program
_SECONDS: Final = 100
_AGENTS: Final = ("x", "y")


def program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")


class Place:
    """A space that the host and two agents use, and how a script runs there."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.real = space(daemon, "data")
        self.path = f"{daemon.root}/shared/data/data"
        if not daemon.rootless:
            self.real.chmod(0o777)

    def write(self, name: str, text: str) -> None:
        do(self.daemon, lambda: (self.real / name).write_text(text))

    def host(self, script: str) -> str:
        """What it prints, run by an operator."""

        def run() -> str:
            done = subprocess.run(
                ["sh", "-euc", script], cwd=self.path, timeout=_SECONDS, check=False,
                env={"PATH": os.environ["PATH"], "HOME": "/nowhere", "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
            return done.stdout

        return do(self.daemon, run)

    def begin(self, name: str, script: str) -> Path:
        """An agent that runs it."""
        self.write(f".{name}", f"cd {self.path}; umask 0\n{script}")

        def begun() -> Path:
            directory = self.daemon.agent_dir(name)
            if directory.exists():
                directory.rmdir()
            return start(make(self.daemon, name, f"sh -eu {way(self.daemon)}/.{name}", BOTH))

        return do(self.daemon, begun)

    def end(self, directory: Path) -> str:
        def ended() -> str:
            wait_dead(directory)
            said = read(directory, "out")
            assert read(directory, "reason") == "exit:0\n", said + read(directory, "log")
            return said

        return do(self.daemon, ended)

    def agents(self, script: str) -> list[str]:
        """What two of them print who run it at once."""
        return [self.end(each) for each in [self.begin(name, script) for name in _AGENTS]]


@pytest.fixture(params=["root", pytest.param("ordinary", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "ordinary":
        with ordinary_daemon() as user:
            yield Place(user)
    else:
        with running(Daemon()) as daemon:
            yield Place(daemon)


_GIT: Final = """
export GIT_CONFIG_GLOBAL=$PWD/git HOME=/nowhere
who=${CTX_AGENT:-host}
export GIT_AUTHOR_NAME=$who GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=$who GIT_COMMITTER_EMAIL=a@b
umask 0
"""
# not as a local one, which reads the directories that other users' pushes are received in
_COMMITS: Final = _GIT + """
git clone -q --no-local all.git $who; cd $who
for n in 1 2 3 4 5; do
    echo $n > $who-$n; git add .; git commit -qm "$who $n"
    until git push -q origin HEAD:main 2> /dev/null; do git pull -q --rebase origin main; done
done
git gc -q --prune=now; git fsck --strict; git status --porcelain
"""


def test_git_clones_commits_and_collects(place: Place) -> None:
    """Three at once push to one repository of the space, and to each other's objects."""
    # each is another user, and may write what the others made
    place.write("git", "[safe]\ndirectory = *\n[core]\nsharedRepository = 0666\n")
    place.host(_GIT + """
git init -q --bare -b main all.git; git clone -q all.git first 2> /dev/null; cd first
git commit -q --allow-empty -m first; git push -q origin HEAD:main
""")
    agents = [place.begin(name, _COMMITS) for name in _AGENTS]
    place.host(_COMMITS)
    for each in agents:
        place.end(each)
    check = _GIT + """
git -C all.git gc -q --prune=now; git -C all.git fsck --strict
git -C all.git rev-list --count main; git clone -q --no-local all.git after-$who
ls after-$who | wc -l
"""
    assert place.host(check) == "16\n15\n"
    for name in _AGENTS:
        assert place.end(place.begin(name, check)) == "16\n15\n"


_DATABASE: Final = """
import os, sqlite3
base = sqlite3.connect("base", timeout=90, isolation_level=None)
assert base.execute("pragma journal_mode").fetchone() == ("wal",)
for n in range(100):
    base.execute("begin immediate")
    base.execute("insert into t values (?, ?)", (os.environ.get("CTX_AGENT", "host"), n))
    base.execute("commit")
"""


def test_a_database_with_a_shared_index_has_writers_here_and_there(place: Place) -> None:
    """Two agents and the host; an index in shared memory is what they have in common."""
    place.write("writer", _DATABASE)
    # by one: sqlite does not wait for its turn when it changes the mode
    place.host(f"""umask 0; {_PYTHON} -c '
import sqlite3
base = sqlite3.connect("base")
base.execute("pragma journal_mode=wal")
base.execute("create table t (who text, n integer)")
'; chmod 666 base""")
    # an open one keeps the files beside it, which its first user makes, as they are
    holding = f"umask 0; {_PYTHON} writer"
    agents = [place.begin(name, holding) for name in _AGENTS]
    place.host(holding)
    for each in agents:
        place.end(each)
    counted = place.host(f"""{_PYTHON} -c '
import sqlite3
base = sqlite3.connect("base")
print(base.execute("select who, count(*) from t group by who order by who").fetchall(),
      base.execute("pragma integrity_check").fetchone())
'""")
    assert counted == "[('host', 100), ('x', 100), ('y', 100)] ('ok',)\n"


_MAKE: Final = """
mkdir -p $who; cd $who
printf 'all: a.out b.out\\n%%.out: %%.in\\n\\ttr a-z A-Z < $< > $@\\n' > Makefile
echo one > a.in; echo two > b.in
make -s -j2; cat a.out b.out
touch -d '1 hour ago' a.in b.in; make -q && echo current
touch -d '1 hour' a.in; make -q || echo old
"""


def test_make_builds_two_at_a_time(place: Place) -> None:
    script = "who=${CTX_AGENT:-host}" + _MAKE
    said = "ONE\nTWO\ncurrent\nold\n"
    agents = [place.begin(name, script) for name in _AGENTS]
    assert [place.host(script), *map(place.end, agents)] == [said] * 3
    # what one built is current for the other
    current = "cd {}; touch -d '1 hour ago' a.in; make -q && echo current"
    if not place.daemon.rootless:
        current = "cd {}; make -q b.out && echo current"
    assert place.host(current.format("x")) == "current\n"
    assert place.end(place.begin("x", current.format("host"))) == "current\n"


def test_vim_writes_what_the_other_reads(place: Place) -> None:
    program("vim")
    edit = "vim -u NONE -i NONE -es -c '%s/{}/{}/' -c 'wq' file; cat file; stat -c %a file"
    place.host("umask 0; printf 'one\\ntwo\\n' > file; chmod 666 file")
    assert place.host(edit.format("two", "three")) == "one\nthree\n666\n"
    assert place.end(place.begin("x", edit.format("three", "four"))) == "one\nfour\n666\n"
    assert place.end(place.begin("y", edit.format("four", "five"))) == "one\nfive\n666\n"
    assert place.host("cat file; ls") == "one\nfive\nfile\n"


#: an access list for the uid that runs it; the extended attribute; two names; a hole
_TREE: Final = """
mkdir -p from/d; echo text > from/d/file; chmod 640 from/d/file
ln from/d/file from/other; ln -s d/file from/link; mkfifo from/fifo
truncate -s 1M from/hole
touch -h -d '2001-02-03 04:05:06.123456789' from/d/file from/link from/fifo
chmod -R a+rX from
""" + f"""
{_PYTHON} -c '
import os, struct
entries = [(1, 6, -1), (2, 6, os.getuid()), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
entries = b"".join(struct.pack("<HHi", *entry) for entry in entries)
os.setxattr("from/d/file", "user.note", b"kept")
os.setxattr("from/d/file", "system.posix_acl_access", struct.pack("<I", 2) + entries)
'
"""
#: what has to be the same of a copy
_LIST: Final = f"""
shown() {{ (cd "$1" && find . -mindepth 1 -printf '%p %y %m %n %T@ %l\\n' | grep -v ' d ' | sort
    {_PYTHON} -c 'import os; print(os.getxattr("d/file", "user.note"), len(os.listxattr("d/file")))'
    cat d/file) }}
test "$(shown from)" = "$(shown to)" && shown to | wc -l; shown from | grep -c "kept' 2"; rm -r to
"""
_TAR: Final = """
tar --xattrs --acls --format=pax -C from -cf archive . && mkdir to
tar --xattrs --acls -C to -xpf archive; rm archive
""" + _LIST


def _copies(place: Place, copy: str) -> None:
    """What an agent made is copied by the host and by an agent, and the reverse."""
    agent = place.begin("x", f"mkdir x; chmod 777 x; cd x; {_TREE}{copy}")
    assert place.end(agent) == "7\n1\n"
    assert place.host(f"cd x; {copy}") == "7\n1\n"
    assert place.host(f"mkdir host; chmod 777 host; cd host; {_TREE}{copy}") == "7\n1\n"


def test_tar_keeps_attributes_and_access_lists(place: Place) -> None:
    _copies(place, _TAR)


def test_rsync_keeps_attributes_access_lists_and_links(place: Place) -> None:
    program("rsync")
    _copies(place, "rsync -aHAX from/ to/\n" + _LIST)


_WATCH: Final = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init()
assert libc.inotify_add_watch(fd, b"watched", 0x100 | 0x8 | 0x200 | 0x80) >= 0
open("ready-" + sys.argv[1], "w").close()
seen = []
while len(seen) < 4:
    data = os.read(fd, 4096)
    while data:
        _, mask, _, size = struct.unpack("iIII", data[:16])
        seen.append("%x %s" % (mask, data[16:16 + size].rstrip(b"\\0").decode()))
        data = data[16 + size:]
print(seen)
"""
_SEEN: Final = "['100 file', '8 file', '80 other', '200 other']\n"
_CHANGE: Final = "cd watched; echo text > file; mv file other; rm other"


def test_each_is_told_what_the_other_changes(place: Place) -> None:
    """By inotify(7): the host what an agent does, an agent what the host and another agent do."""
    place.write("watch", _WATCH)
    place.host("mkdir -m 777 watched")
    for number, changing in enumerate(("host", "y")):
        who = f"a{number}"
        agent = place.begin("x", f"{_PYTHON} watch {who}")
        wait_until((place.real / f"ready-{who}").exists, "the agent watches")
        if changing == "host":
            place.host(_CHANGE)
        else:
            place.end(place.begin("y", _CHANGE))
        assert place.end(agent) == _SEEN
    change = _CHANGE.replace("cd watched", "until test -e ready-h; do sleep 0.02; done; cd watched")
    agent = place.begin("y", change)
    assert place.host(f"{_PYTHON} watch h") == _SEEN
    place.end(agent)
