"""Another user of the machine attacks the places of an ordinary user's daemon.

They are below ``/run/user`` and the user's home, which nobody else may enter as a rule. Here both
are open to all, as some homes are, and the daemon's own modes have to do; or the user has chosen a
directory where all may make names, as ``/tmp`` is.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import alive, read, wait_dead, wait_status, write
from tests.worlds.ordinary import UID, OrdinaryDaemon, ordinary_daemon

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
    for path in sys.argv[3:]:
        attempt("list", path, lambda: os.listdir(path))
        attempt("read", path, lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        attempt("write", path, lambda: os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        attempt("truncate", path, lambda: os.truncate(path, 0))
        attempt("mode", path, lambda: os.chmod(path, 0o777))
        attempt("times", path, lambda: os.utime(path))
        attempt("make", path, lambda: os.mkdir(f"{path}/mine"))
        attempt("link", path, lambda: os.symlink("/", f"{path}/mine"))
        attempt("also", path, lambda: os.link(path, f"{sys.argv[2]}-mine", follow_symlinks=False))
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


@pytest.fixture
def stopped() -> Iterator[OrdinaryDaemon]:
    """Its runtime directory is as ``/tmp`` is."""
    daemon = OrdinaryDaemon()
    _open_to_all(daemon)
    yield daemon
    daemon.close()


def _open_to_all(user: OrdinaryDaemon) -> None:
    os.chown(user.run_dir, 0, 0)
    user.run_dir.chmod(0o1777)


def _by_stranger(user: OrdinaryDaemon, code: str, *words: object) -> list[str]:
    """A command of a stranger's, on the user's machine."""
    ids = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")
    return user.run_as_user(sys.executable, "-IS", "-c", code, *map(str, words), ids=ids)


def _attack(user: OrdinaryDaemon, *paths: Path) -> list[str]:
    command = _by_stranger(user, _ATTACK, user.pid, user.run_dir / "also", *paths)
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
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


@pytest.mark.parametrize("run_dir", ["the user's", "everybody's"])
def test_a_stranger_gets_at_nothing_of_a_users_daemon(user: OrdinaryDaemon, run_dir: str) -> None:
    def begin() -> int:
        agent = user.run("victim", "sleep 1000", homedir="durable")
        wait_status(agent, "busy")
        user.path("shared", "pool").mkdir()
        (user.path("shared", "pool") / "data" / "file").write_text("pooled\n")
        return int(read(agent, "pid"))

    pid = user.do(begin)
    for directory in (user.run_dir, user.home, user.home / ".local", user.home / ".local/state"):
        directory.chmod(0o755)
    if run_dir == "everybody's":
        _open_to_all(user)
    places = user.do(lambda: _places(user))
    assert len(places) > 30
    kinds = {stat.S_IFMT(os.lstat(path).st_mode) for path in places if path.is_relative_to(
        user.runtime) and os.path.lexists(path)}  # fmt: skip
    assert {stat.S_IFDIR, stat.S_IFSOCK, stat.S_IFIFO} <= kinds
    # a second name of a link is no way to change it, and fs.protected_hardlinks may refuse it
    found = [line for line in _attack(user, *places) if line != f"also {user.root}"]
    assert not found, "\n".join(found)
    assert alive(pid) and not user.has_ended()

    def end() -> str:
        assert user.path("shared", "pool", "data", "file").read_text() == "pooled\n"
        write(user.agent_dir("victim") / "ctl", "kill")
        wait_dead(user.agent_dir("victim"))
        return read(user.agent_dir("victim"), "reason")

    assert user.do(end) == "operator_stop\n"


#: takes a name before the daemon does; a link leads to what is the user's
_TAKE = """if True:
    import os, socket, sys
    what, path, leads = sys.argv[1:]
    if what == "directory":
        os.umask(0)
        os.mkdir(path, 0o777)
    elif what == "link":
        os.symlink(leads, path)
    elif what == "fifo":
        os.mkfifo(path, 0o666)
    elif what == "socket":
        socket.socket(socket.AF_UNIX).bind(path)
    else:
        open(path, "w").close()
"""


def _precious(user: OrdinaryDaemon) -> Path:
    """A directory of the user's, which nobody else may change."""
    def make() -> Path:
        (user.home / "precious").mkdir(mode=0o750)
        (user.home / "precious" / "ctx").symlink_to("nowhere")
        return user.home / "precious"

    return user.do(make)


def _is_untouched(precious: Path) -> bool:
    return os.listdir(precious) == ["ctx"] and stat.S_IMODE(precious.stat().st_mode) == 0o750


def _begun(user: OrdinaryDaemon) -> str:
    """What a daemon says that was started, and stopped if it was ready."""
    said = ""
    with subprocess.Popen(user.command(), env={**os.environ, **user.env}, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if line == "ready\n":
                process.terminate()
    assert process.returncode == (0 if "ready\n" in said else 1), said
    return said


#: in every run of the tests
_OFTEN = (("ctxfs", "directory"), ("ctx", "link"))


@pytest.mark.parametrize(("name", "what"), [
    pytest.param(name, what, marks=[] if (name, what) in _OFTEN else pytest.mark.long)
    for name in ("ctxfs", "ctx") for what in ("directory", "link", "fifo", "socket", "file")
])
def test_a_name_that_a_stranger_took_first_is_not_used(
    stopped: OrdinaryDaemon, name: str, what: str
) -> None:
    precious = _precious(stopped)
    path = stopped.run_dir / name
    # what the link of a daemon that was killed would lead to
    leads = stopped.runtime / "root" / "ctx" if name == "ctx" else precious
    subprocess.run(_by_stranger(stopped, _TAKE, what, path, leads), check=True)
    taken = os.lstat(path)
    said = _begun(stopped)
    assert said.startswith("ctxd: ") and said.count("\n") == 1, said
    assert f"{path} belongs to uid {STRANGER}: choose a directory of your own" in said
    assert os.lstat(path) == taken and _is_untouched(precious)
    path.rmdir() if what == "directory" else path.unlink()
    assert "ready\n" in _begun(stopped)


#: a name is now there and now not, until nobody listens
_TOGGLE = """if True:
    import os, sys
    path, leads = sys.argv[1:]
    print("begins", flush=True)
    while os.getppid() != 1:
        try:
            os.symlink(leads, path)
            os.unlink(path)
        except OSError:
            pass
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["ctxfs", "ctx"])
def test_a_stranger_who_is_faster_is_noticed(stopped: OrdinaryDaemon, name: str) -> None:
    """Between the look at a name and its use: the daemon is the user's own, or there is none."""
    precious = _precious(stopped)
    with subprocess.Popen(_by_stranger(stopped, _TOGGLE, stopped.run_dir / name, precious),
                          stdout=subprocess.PIPE) as toggles:
        try:
            assert toggles.stdout is not None and toggles.stdout.readline() == b"begins\n"
            for _ in range(4):
                said = _begun(stopped)
                assert "Traceback" not in said and "a bug in ctxfs" not in said, said
                assert "ready\n" in said or said.count("\n") == 1, said
                assert _is_untouched(precious), said
        finally:
            toggles.kill()
    with contextlib.suppress(FileNotFoundError):
        (stopped.run_dir / name).unlink()
    assert "ready\n" in _begun(stopped)


def test_without_a_directory_of_the_user_there_is_no_daemon(stopped: OrdinaryDaemon) -> None:
    """Not even below /tmp, where somebody else might be first."""
    stopped.env["XDG_RUNTIME_DIR"] = ""
    said = _begun(stopped)
    assert said.count("\n") == 1 and f"/run/user/{UID}" in said, said
    stopped.env["XDG_RUNTIME_DIR"] = str(stopped.run_dir)
