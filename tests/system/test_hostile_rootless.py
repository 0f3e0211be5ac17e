"""Another user of the machine attacks the places of an ordinary user's daemon.

They are below ``/run/user`` and the user's home, which nobody else may enter as a rule. Here both
are open to all, as some homes are, and the daemon's own modes have to do.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import alive, read, wait_dead, wait_status, write
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

#: has no agents, and no rights on what the user has
STRANGER = 61002

#: what a stranger does to each path, and how it ends; what succeeds is told
_ATTACK = """if True:
    import json, os, socket, sys
    succeeded = []
    def attempt(what, path, function):
        try:
            function()
        except OSError:
            return
        succeeded.append(f"{what} {path}")
    def connect(path, kind):
        with socket.socket(socket.AF_UNIX, kind) as mine:
            mine.connect(path)
    for path in sys.argv[2:]:
        attempt("list", path, lambda: os.listdir(path))
        attempt("read", path, lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        attempt("write", path, lambda: os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        attempt("truncate", path, lambda: os.truncate(path, 0))
        attempt("mode", path, lambda: os.chmod(path, 0o777))
        attempt("times", path, lambda: os.utime(path))
        attempt("make", path, lambda: os.mkdir(f"{path}/mine"))
        attempt("link", path, lambda: os.symlink("/", f"{path}/mine"))
        attempt("move", path, lambda: os.rename(path, f"{path}-moved"))
        attempt("remove", path, lambda: os.unlink(path))
        attempt("stream", path, lambda: connect(path, socket.SOCK_STREAM))
        attempt("packets", path, lambda: connect(path, socket.SOCK_SEQPACKET))
    attempt("kill", sys.argv[1], lambda: os.kill(int(sys.argv[1]), 0))
    attempt("signal", sys.argv[1], lambda: os.kill(int(sys.argv[1]), 12))
    print(json.dumps(succeeded))
"""


@pytest.fixture
def user() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


def _attack(user: OrdinaryDaemon, *paths: Path) -> list[str]:
    command = user.run_as_user(sys.executable, "-c", _ATTACK, str(user.pid), *map(str, paths))
    ids = ["setpriv", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    at = command.index("setpriv")
    said = subprocess.run([*command[:at], *ids, *command[at + len(ids):]],
                          capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    found: list[str] = json.loads(said.stdout)
    return found


def _places(user: OrdinaryDaemon) -> list[Path]:
    """All that the daemon and its agents have there; of the mount only its root and an agent."""
    found = [user.root, user.root / "status", user.agent_dir("victim"),
             user.agent_dir("victim") / "ctl", user.runtime / "root" / "ctx" / "status"]
    for top in (user.runtime, user.state):
        for directory, names, files in os.walk(top):
            names[:] = [name for name in names if Path(directory, name) != user.runtime / "root/ctx"
                        and not os.path.ismount(os.path.join(directory, name))]
            found += [Path(directory), *(Path(directory, name) for name in files)]
    return found


def test_a_stranger_gets_at_nothing_of_a_users_daemon(user: OrdinaryDaemon) -> None:
    def begin() -> int:
        agent = user.run("victim", "sleep 1000", homedir="durable")
        wait_status(agent, "busy")
        user.path("shared", "pool").mkdir()
        (user.path("shared", "pool") / "data" / "file").write_text("pooled\n")
        return int(read(agent, "pid"))

    pid = user.do(begin)
    for directory in (user.run_dir, user.home, user.home / ".local", user.home / ".local/state"):
        directory.chmod(0o755)
    places = user.do(lambda: _places(user))
    assert len(places) > 30
    kinds = {stat.S_IFMT(os.lstat(path).st_mode) for path in places if path.is_relative_to(
        user.runtime) and os.path.lexists(path)}  # fmt: skip
    assert {stat.S_IFDIR, stat.S_IFSOCK} <= kinds
    found = _attack(user, *places)
    assert not found, "\n".join(found)
    assert alive(pid) and not user.has_ended()

    def end() -> str:
        assert user.path("shared", "pool", "data", "file").read_text() == "pooled\n"
        write(user.agent_dir("victim") / "ctl", "kill")
        wait_dead(user.agent_dir("victim"))
        return read(user.agent_dir("victim"), "reason")

    assert user.do(end) == "operator_stop\n"
