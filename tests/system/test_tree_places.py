"""Where durable trees are seen on the host, and how those of an older version get there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernel import linux
from tests.system.test_spaces import make
from tests.worlds.daemon import AGENT_UID, Daemon
from tests.worlds.ordinary import OrdinaryDaemon, ordinary_daemon

MOVED = "the durable trees of an older ctxd are now in"


def mounts(daemon: Daemon) -> dict[str, linux.MountEntry]:
    """By what is below the directory of all trees, at most one each."""
    top = str(daemon.runtime / "tree")
    found = [each for each in linux.read_mounts() if f"{each.point}/".startswith(f"{top}/")]
    by_name = {each.point.removeprefix(top): each for each in found}
    assert len(by_name) == len(found)
    return by_name


def mount_number(fd: int) -> str:
    info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return next(line for line in info.splitlines() if line.startswith("mnt_id:"))


def test_each_tree_is_a_mount_and_is_known_again(daemon: Daemon) -> None:
    """Of users and spaces: those of agents are shown in their cells only."""
    tree = daemon.runtime / "tree"
    make(daemon, "team", AGENT_UID)
    for data in (daemon.path("shared", "team"), daemon.path("home", "0")):
        (data / "data").readlink()  # which waits for the tree
    names = {"", "/shared/team", "/home/0"}
    assert set(mounts(daemon)) == names
    for shown in mounts(daemon).values():
        assert {"rw", "nosuid", "nodev"} <= set(shown.options.split(",")) and not shown.shared
    assert [(tree / name).stat().st_mode & 0o777 for name in (".", "home", "shared")] == [0o711] * 3
    assert (tree / "shared/team").samefile(daemon.state / "tree/space/team/team")
    assert (tree / "home/0").samefile(daemon.state / "tree/home/0")
    with (tree / "shared/team").joinpath("file").open("w") as file:
        number = mount_number(file.fileno())
        daemon.restart()
        assert set(mounts(daemon)) == names
        with (tree / "shared/team").joinpath("file").open() as again:
            assert mount_number(again.fileno()) == number
    daemon.stop()
    assert not mounts(daemon) and not tree.exists()
    daemon.start()
    assert set(mounts(daemon)) == names


def test_a_mount_of_something_else_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    tree = daemon.runtime / "tree"
    make(daemon, "team", AGENT_UID)
    (daemon.path("shared", "team") / "data").readlink()
    daemon.kill()
    linux.mount(str(tmp_path), tree / "shared/team", "none", linux.MS_BIND)
    daemon.start()
    assert set(mounts(daemon)) == {"", "/shared/team"}
    daemon.kill()
    linux.mount(str(tmp_path), tree, "none", linux.MS_BIND)
    daemon.start()
    assert set(mounts(daemon)) == {"", "/shared/team"}
    assert (tree / "shared/team").samefile(daemon.state / "tree/space/team/team")


def test_a_place_of_no_space_goes(daemon: Daemon) -> None:
    """As when the records were replaced meanwhile."""
    daemon.kill()
    (daemon.runtime / "tree/shared/none").mkdir(parents=True)
    daemon.start()
    assert os.listdir(daemon.runtime / "tree/shared") == []


@pytest.fixture
def ordinary() -> Iterator[OrdinaryDaemon]:
    with ordinary_daemon() as daemon:
        yield daemon


def test_without_root_it_is_a_link(ordinary: OrdinaryDaemon) -> None:
    tree = ordinary.runtime / "tree"
    space = ordinary.path("shared", "team")
    ordinary.do(space.mkdir)
    ordinary.do((space / "data").readlink)  # which waits for the tree
    for _ in range(2):
        assert os.readlink(tree) == str(ordinary.state / "tree")
        assert (tree / "shared/team").samefile(ordinary.state / "tree/space/team/team")
        ordinary.restart()
    ordinary.stop()
    assert not tree.is_symlink()
    ordinary.start()


# of an older version

#: what it left below its state: whose, with which mode
OLDER = {
    "shared/team": (1000, 0o2770),
    "shared/free": (0, 0o1777),
    "home/1000/data": (1000, 0o700),
    f"home/{AGENT_UID}/data": (AGENT_UID, 0o700),
    "home/1000/agent/coder/.home/61000": (AGENT_UID, 0o700),
}
NEWER = {
    "tree/space/team/team": (1000, 0o2770),
    "tree/space/free/free": (0, 0o1777),
    "tree/home/1000": (1000, 0o700),
    # all agents of all users have written there: it is for root to look through
    f"tree/home/{AGENT_UID}": (0, 0o700),
    "tree/agent/1000/coder/61000": (AGENT_UID, 0o700),
}


def tell(state: Path, paths: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    found = {path: (state / path).stat() for path in paths if (state / path / "file").is_file()}
    return {path: (st.st_uid, st.st_mode & 0o7777) for path, st in found.items()}


def leave(state: Path, paths: dict[str, tuple[int, int]]) -> None:
    for path, (uid, mode) in paths.items():
        (state / path).mkdir(parents=True)
        (state / path).parent.chmod(0o711)
        (state / path / "file").write_text(path)
        os.chown(state / path, uid, uid)
        (state / path).chmod(mode)


#: how far an earlier start had come, which died then
DONE = [(), ("tree/home/1000",), tuple(path for path in NEWER if path != "tree/space/free/free")]


@pytest.mark.parametrize("done", DONE, ids=["nothing", "a home", "all but a space"])
def test_trees_of_an_older_version_get_their_places_once(
    daemon: Daemon, done: tuple[str, ...]
) -> None:
    daemon.stop()
    gone = {older for older, newer in zip(OLDER, NEWER, strict=True) if newer in done}
    leave(daemon.state, {path: OLDER[path] for path in OLDER if path not in gone})
    leave(daemon.state, {path: NEWER[path] for path in done})
    daemon.start()
    assert tell(daemon.state, NEWER) == NEWER
    assert not tell(daemon.state, OLDER) and not (daemon.state / "shared").exists()
    for above in ("agent/1000/coder", "space/team"):
        assert (daemon.state / "tree" / above).stat().st_mode & 0o777 == 0o711
    assert (daemon.root / "shared/team/data/file").is_file()
    daemon.restart()
    assert daemon.log.read_text().count(MOVED) == 1


def test_a_tree_without_a_record_is_its_owners_space(daemon: Daemon) -> None:
    """A power loss takes records that nobody synced, and not what was synced in a tree."""
    daemon.stop()
    leave(daemon.state, {"tree/space/team/team": (1000, 0o755)})
    daemon.start()
    assert (daemon.root / "shared/team/owner").read_text() == "1000\n"
    assert (daemon.root / "shared/team/data/file").read_text() == "tree/space/team/team"
    assert MOVED not in daemon.log.read_text()
