"""Spaces and homes: who makes and removes them, what their rows say, where ``data`` leads."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import Daemon, read, wait_dead, wait_until

OWNER, OTHER = 1000, 1001


def as_uid(uid: int, act: Callable[..., Any], *args: object) -> Any:
    """What a call returns or raises in a process of this user's."""
    if uid == 0:
        return act(*args)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: tuple[Any, OSError | None] = (None, None)
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = (act(*args), None)
        except OSError as error:
            answer = (None, error)
        finally:
            os.write(write_end, pickle.dumps(answer))
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as said:
        result, failed = pickle.loads(said.read())
    os.waitpid(pid, 0)
    if failed is not None:
        raise failed
    return result


def errno_of(act: Callable[..., Any], *args: object, uid: int = 0) -> str:
    """What a call of this user's fails with; "-" if it does not."""
    try:
        as_uid(uid, act, *args)
    except OSError as error:
        assert error.errno is not None
        return errno.errorcode[error.errno]
    return "-"


def make(daemon: Daemon, name: str, uid: int = 0, mode: int = 0o755) -> Path:
    space = daemon.path("shared", name)
    as_uid(uid, os.mkdir, space, mode)
    return space


def removed(space: Path, uid: int = 0) -> None:
    """Asks until the answer is of a measure after the last change."""
    wait_until(lambda: errno_of(os.rmdir, space, uid=uid) == "-", f"{space.name} is removed")


def test_a_space_has_rows_and_a_tree_of_its_makers(daemon: Daemon) -> None:
    space = make(daemon, "team", OWNER, 0o750)
    assert sorted(os.listdir(space)) == ["data", "max", "owner", "usage"]
    assert read(space, "owner") == f"{OWNER}\n" and int(read(space, "max")) > 0
    assert read(space, "usage").startswith("bytes=0\nentries=0\nmeasured=")
    assert os.readlink(space / "data") == str(daemon.runtime / "tree/shared/team")
    st = os.stat(space / "data")
    assert (st.st_uid, st.st_mode & 0o7777) == (OWNER, 0o750)
    assert errno_of(os.listdir, space / "data", uid=OTHER) == "EACCES"
    as_uid(OWNER, (space / "data" / "file").write_text, "text")
    os.chown(space / "data", OTHER, -1)
    assert read(space, "owner") == f"{OWNER}\n", "who pays does not change with the modes"
    assert errno_of(os.mkdir, space, uid=OWNER) == "EEXIST"


def test_nothing_is_made_beside_data(daemon: Daemon) -> None:
    space = make(daemon, "team", OWNER)
    for uid in (0, OWNER, OTHER):
        assert errno_of(os.mkdir, space / "below", uid=uid) == "EPERM"
        assert as_uid(uid, daemon.error).rstrip().endswith("use shared/team/data")
    assert errno_of(lambda: (space / "file").write_text("text")) == "EPERM"
    assert errno_of(os.rmdir, space / "data") == "ENOTDIR"
    assert errno_of(os.unlink, space / "data") == "EPERM"


def test_who_removes_a_space_and_when(daemon: Daemon) -> None:
    space = make(daemon, "team", OWNER)
    file = space / "data" / "file"
    as_uid(OWNER, file.write_text, "text")
    assert errno_of(os.rmdir, space, uid=OTHER) in ("EACCES", "EPERM")
    wait_until(lambda: "entries=1" in read(space, "usage"), "the file is measured")
    assert errno_of(os.rmdir, space, uid=OWNER) == "ENOTEMPTY"
    file.unlink()
    removed(space, OWNER)
    assert not space.exists() and "team" not in os.listdir(daemon.path("shared"))
    gone = [daemon.state / "tree" / path for path in ("shared/team", "space/team")]
    wait_until(lambda: not any(map(os.path.lexists, gone)), "the tree is gone")
    wait_until(lambda: errno_of(os.mkdir, space) != "EAGAIN", "the name is free")
    assert read(space, "owner") == "0\n"
    assert not os.listdir(space / "data")


def test_what_comes_after_the_measure_is_kept(daemon: Daemon) -> None:
    space = make(daemon, "team")
    (space / "data" / "late").write_text("text")
    os.rmdir(space)  # by what was known when it was made
    lost = daemon.state / "tree/lost"
    wait_until(lambda: os.listdir(lost), "it is kept")
    (kept,) = lost.iterdir()
    assert kept.name.startswith("team-") and (kept / "team/late").read_text() == "text"
    wait_until(lambda: f"kept in {kept}\n" in daemon.log.read_text(), "the log says so")
    daemon.restart()
    assert not os.listdir(daemon.path("shared")), "nobody takes it for a space"


def test_a_measure_that_is_old_is_made_anew(daemon: Daemon) -> None:
    make(daemon, "team")
    daemon.stop()
    space = daemon.path("shared", "team")
    daemon.start()
    # as if that had been long ago
    assert errno_of(os.rmdir, space) in ("-", "EAGAIN")
    if space.exists():
        removed(space)


def test_a_tree_that_was_wanted_or_removed_is_so_after_a_crash(daemon: Daemon) -> None:
    for name in ("kept", "gone"):
        make(daemon, name)
        (daemon.path("shared", name) / "data" / "file").write_text(name)
    os.rmdir(daemon.path("shared", "gone"))
    daemon.restart()
    assert read(daemon.path("shared", "kept", "data"), "file") == "kept"
    assert os.listdir(daemon.path("shared")) == ["kept"]
    wait_until(lambda: not (daemon.state / "tree/space/gone").exists(), "its tree is gone")


def test_a_home_is_made_when_its_user_needs_it(daemon: Daemon) -> None:
    data = daemon.path("home", str(OWNER), "data")
    assert errno_of(os.listdir, data) == "ENOENT", "root is not its user"
    assert as_uid(OWNER, os.listdir, data) == []
    st = os.stat(data)
    assert (st.st_uid, st.st_mode & 0o7777) == (OWNER, 0o700)
    as_uid(OWNER, (data / "file").write_text, "text")
    daemon.restart()
    assert as_uid(OWNER, (data / "file").read_text) == "text"
    assert errno_of(os.listdir, data, uid=OTHER) == "EACCES"


@pytest.mark.settings(spaces=2)
def test_spaces_are_counted_by_uid(daemon: Daemon) -> None:
    for name in ("a", "b"):
        make(daemon, name, OWNER)
    assert errno_of(os.mkdir, daemon.path("shared", "c"), uid=OWNER) == "EDQUOT"
    make(daemon, "c", OTHER)


def test_nothing_is_taken_from_a_running_agent(daemon: Daemon) -> None:
    space = make(daemon, "team")
    agent = daemon.run(
        "x", "sh -c 'ls $CTX_ROOT/shared/team/data/. && echo has; sleep 1000'",
        policy="allow x_t shared:team read",
    )  # fmt: skip
    wait_until(lambda: "has" in read(agent, "out"), "its cell has the tree of a space just made")
    assert errno_of(os.rmdir, space) == "EBUSY"
    assert "the cell of 'x' has the space 'team'" in daemon.error().replace('"', "'")
    (agent / "ctl").write_text("kill\n")
    wait_dead(agent)
    removed(space)
