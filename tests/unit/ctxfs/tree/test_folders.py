"""``artifact/`` and ``episode/`` without a kernel: names, numbers, limits, what is handed over."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest

from ctxfs.files.folders import ARTIFACT, ROWS
from ctxfs.tree.folder import NODE_SIZE
from ctxfs.tree.folders import Folders
from runtime.authority.accounts import Resource
from runtime.kernel import linux
from runtime.kernel.handover import Descriptors, read_back, written
from runtime.records.model import Agent
from tests.worlds.records import inside
from tests.worlds.tree import CONTEXT, USER, Mounted, complete, mounted_in, refused

A = "agent/x.d/artifact"
E = "home/1000/agent/x/session/default/context/episode"


class Scene:
    """An agent that does things with its files."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted
        self.agent: Agent = mounted.make("x", USER)
        mounted.world.live(self.agent)
        self.real = mounted.agents.documents.path(self.agent, "artifact")

    def _do(self, operation: str, *args: Any) -> Any:
        with self.mounted.as_(inside(self.agent)):
            return complete(getattr(self.mounted.ops, operation), *args, CONTEXT)

    def inode(self, path: str) -> int:
        with self.mounted.as_(inside(self.agent)):
            return self.mounted.inode(path)

    def at(self, path: str) -> tuple[int, bytes]:
        directory, _, name = path.rpartition("/")
        return self.inode(directory), os.fsencode(name)

    def create(self, path: str, data: bytes = b"", mode: int = 0o644) -> tuple[int, int]:
        """A handle to be written, and the number."""
        info, entry = self._do("create", *self.at(path), mode, os.O_WRONLY)
        if data:
            self.write(info.fh, data)
        return info.fh, entry.st_ino

    def file(self, path: str, data: bytes = b"") -> int:
        """The number of a file that is closed."""
        fh, inode = self.create(path, data)
        self.mounted.close(fh)
        return inode

    def write(self, fh: int, data: bytes, offset: int = 0) -> None:
        assert self.mounted.write(fh, data, offset) == len(data)

    def mkdir(self, path: str) -> int:
        return int(self._do("mkdir", *self.at(path), 0o755).st_ino)

    def unlink(self, path: str) -> None:
        self._do("unlink", *self.at(path))

    def rmdir(self, path: str) -> None:
        self._do("rmdir", *self.at(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self._do("rename", *self.at(old), *self.at(new), flags)

    def stat(self, inode: int) -> pyfuse3.EntryAttributes:
        return cast(pyfuse3.EntryAttributes, self._do("getattr", inode))

    def list(self, path: str = A) -> list[str]:
        with self.mounted.as_(inside(self.agent)):
            return sorted(self.mounted.list(path))

    def get(self, path: str) -> str:
        with self.mounted.as_(inside(self.agent)):
            return self.mounted.get(path)

    def forget(self, inode: int) -> None:
        known = self.mounted.base.cache._known
        complete(self.mounted.ops.forget, [(inode, known[inode])])

    @property
    def counted(self) -> tuple[int | None, int]:
        folder = self.mounted.base.folders.root(ARTIFACT, self.agent).folder
        return folder.entries, folder.bytes

    @property
    def memory(self) -> int:
        """What its owner pays for numbers."""
        known = self.mounted.base.folders._folders.values()
        paid = sum(folder._memory.amount for folder in known if folder._memory is not None)
        assert paid <= self.mounted.agents.accounts.use(1000, Resource.MEMORY)
        return paid


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with mounted_in(tmp_path, artifact_max=100, document_max=60, files=5) as mounted:
        yield Scene(mounted)


# names


@pytest.mark.parametrize("place", [A, E])
def test_files_and_directories_are_made_renamed_and_removed(scene: Scene, place: str) -> None:
    scene.mkdir(f"{place}/d")
    scene.mkdir(f"{place}/d/e")
    file = scene.file(f"{place}/d/e/f", b"one")
    scene.rename(f"{place}/d", f"{place}/c")
    assert scene.inode(f"{place}/c/e/f") == file
    assert scene.get(f"{place}/c/e/f") == "one"
    scene.rename(f"{place}/c/e/f", f"{place}/g")
    assert (scene.inode(f"{place}/g"), scene.stat(file).st_size) == (file, 3)
    with refused("ENOTEMPTY"):
        scene.rmdir(f"{place}/c")
    scene.rmdir(f"{place}/c/e")
    scene.rmdir(f"{place}/c")
    scene.unlink(f"{place}/g")
    assert scene.list(place) == []
    with refused("ESTALE"):
        scene.stat(file)


def test_a_file_that_is_replaced_is_there_while_it_is_open(scene: Scene) -> None:
    fh, old = scene.create(f"{A}/old", b"old")
    new = scene.file(f"{A}/new", b"new!")
    scene.rename(f"{A}/new", f"{A}/old")
    assert scene.list() == ["old"]
    assert (scene.inode(f"{A}/old"), scene.get(f"{A}/old")) == (new, "new!")
    scene.write(fh, b"er", 3)
    assert (scene.stat(old).st_size, scene.stat(old).st_nlink) == (5, 0)
    assert scene.counted == (1, 9)
    scene.mounted.close(fh)
    assert scene.counted == (1, 4)
    with refused("ESTALE"):
        scene.stat(old)


def test_directories_replace_empty_ones_only(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.mkdir(f"{A}/{name}")
    inner = scene.file(f"{A}/b/f")
    with refused("ENOTEMPTY"):
        scene.rename(f"{A}/a", f"{A}/b")
    scene.rename(f"{A}/b", f"{A}/a")
    assert scene.counted == (2, 0)
    assert scene.inode(f"{A}/a/f") == inner


def test_names_are_exchanged_or_not_taken(scene: Scene) -> None:
    file, directory = scene.file(f"{A}/a", b"x"), scene.mkdir(f"{A}/b")
    with refused("EEXIST"):
        scene.rename(f"{A}/a", f"{A}/b", linux.RENAME_NOREPLACE)
    scene.rename(f"{A}/a", f"{A}/b", linux.RENAME_EXCHANGE)
    assert (scene.inode(f"{A}/b"), scene.inode(f"{A}/a")) == (file, directory)
    assert scene.counted == (2, 1)
    with refused("ENOENT"):
        scene.rename(f"{A}/a", f"{A}/c", linux.RENAME_EXCHANGE)


def test_a_filesystem_that_exchanges_no_names_renames(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = linux.rename

    def without(fd: int, name: str, new_name: str, flags: int = 0) -> None:
        if flags:
            raise OSError(22, "Invalid argument")
        rename(fd, name, new_name)

    monkeypatch.setattr(linux, "rename", without)
    scene.file(f"{A}/a", b"a")
    scene.file(f"{A}/b", b"bb")
    scene.rename(f"{A}/a", f"{A}/b")
    assert (scene.list(), scene.get(f"{A}/b"), scene.counted) == (["b"], "a", (1, 1))


def test_into_another_directory_only_files_are_renamed(scene: Scene) -> None:
    """A lock of the whole filesystem, which rename(2) takes for it, is never waited for."""
    scene.mkdir(f"{A}/d")
    scene.mkdir(f"{A}/e")
    file = scene.file(f"{A}/f", b"new")
    for name in ("d/f", "d/g"):
        scene.file(f"{A}/{name}", b"old")
    with refused("EXDEV"):
        scene.rename(f"{A}/d", f"{A}/e/x")
    with refused("EXDEV"):
        scene.rename(f"{A}/f", f"{A}/d/f", linux.RENAME_EXCHANGE)
    with refused("EEXIST"):
        scene.rename(f"{A}/f", f"{A}/d/f", linux.RENAME_NOREPLACE)
    with refused("EISDIR"):
        scene.rename(f"{A}/d/g", f"{A}/e")
    assert scene.counted == (5, 9)
    scene.rename(f"{A}/f", f"{A}/d/f")
    scene.rename(f"{A}/d/g", f"{A}/g", linux.RENAME_NOREPLACE)
    assert (scene.inode(f"{A}/d/f"), scene.get(f"{A}/d/f")) == (file, "new")
    assert (scene.list(), scene.list(f"{A}/d")) == (["d", "e", "g"], ["f"])
    assert scene.counted == (4, 6)


def test_between_two_folders_nothing_is_renamed(scene: Scene) -> None:
    scene.file(f"{A}/f")
    with refused("EXDEV"):
        scene.rename(f"{A}/f", f"{E}/f")


def test_there_are_only_files_and_directories(scene: Scene) -> None:
    root, _ = scene.at(f"{A}/x")
    file = scene.file(f"{A}/f")
    with refused("EPERM"):
        scene._do("symlink", root, b"s", b"f")
    with refused("EPERM"):
        scene._do("link", file, root, b"l")
    for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR):
        with refused("EPERM"):
            scene._do("mknod", root, b"n", kind | 0o644, 0)
    scene._do("mknod", root, b"n", stat.S_IFREG | 0o600, 0)
    assert scene.list() == ["f", "n"]


def test_no_link_is_followed(scene: Scene, tmp_path: Path) -> None:
    """However it came there: by an archive that was restored, say."""
    scene.mkdir(f"{A}/d")
    inner = scene.file(f"{A}/d/secret", b"own")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("another's")
    os.symlink(tmp_path / "other", scene.real / "link")
    with refused("EPERM"):
        scene.inode(f"{A}/link")
    (scene.real / "d").rename(scene.real / "moved")
    os.symlink(tmp_path / "other", scene.real / "d")
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with refused("ENOTDIR"):
            scene._do("open", inner, flags)
    file = scene.file(f"{A}/f")
    (scene.real / "f").unlink()
    os.symlink("moved/secret", scene.real / "f")
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with refused("ELOOP"):
            scene._do("open", file, flags)


def test_what_is_deeper_than_a_path_is_long_is_refused(tmp_path: Path) -> None:
    with mounted_in(tmp_path) as mounted:
        scene = Scene(mounted)
        inode = scene.inode(A)
        with refused("ENAMETOOLONG"):
            for _ in range(40):
                inode = scene._do("mkdir", inode, b"d" * 200, 0o755).st_ino
        scene.file(f"{A}/f")
        assert scene.list() == ["d" * 200, "f"]


# attributes


def test_everything_belongs_to_whom_the_agent_runs_as(scene: Scene) -> None:
    file = scene.file(f"{A}/f")
    assert (scene.stat(file).st_uid, scene.stat(file).st_gid) == (scene.agent.uid, scene.agent.gid)
    assert (scene.real / "f").stat().st_uid == os.getuid()


def set_attributes(scene: Scene, inode: int, fh: int | None = None, **values: int) -> None:
    entry = pyfuse3.EntryAttributes()
    for name, value in values.items():
        setattr(entry, f"st_{name}", value)
    names = {"mode", "uid", "gid", "size", "atime_ns", "mtime_ns"}
    fields = {f"update_{name.removesuffix('_ns')}": name in values for name in names}
    scene._do("setattr", inode, entry, cast(Any, SimpleNamespace(**fields)), fh)


def test_modes_and_times_are_set_and_owners_are_not(scene: Scene) -> None:
    fh, file = scene.create(f"{A}/f", mode=0o4755)
    assert stat.S_IMODE(scene.stat(file).st_mode) == 0o755
    set_attributes(scene, file, mode=0o6710, mtime_ns=1_000_000_001)
    set_attributes(scene, file, atime_ns=2_000_000_002, uid=scene.agent.uid)
    found = scene.stat(file)
    assert stat.S_IMODE(found.st_mode) == 0o710
    assert (found.st_atime_ns, found.st_mtime_ns) == (2_000_000_002, 1_000_000_001)
    with refused("EPERM"):
        set_attributes(scene, file, uid=4242)
    scene.unlink(f"{A}/f")
    set_attributes(scene, file, mode=0o600)
    assert stat.S_IMODE(scene.stat(file).st_mode) == 0o600, "it is open"
    scene.mounted.close(fh)
    directory = scene.mkdir(f"{A}/d")
    set_attributes(scene, directory, mode=0o1700)
    assert scene.stat(directory).st_mode == stat.S_IFDIR | 0o1700


# how much


def test_one_more_than_files_is_refused(scene: Scene) -> None:
    (scene.real / "d").mkdir(parents=True)
    for name in ("a", "d/b", "d/c"):
        (scene.real / name).write_text("")
    scene.mkdir(f"{A}/e")
    root = scene.inode(A)
    makes: tuple[Callable[[], object], ...] = (
        lambda: scene.create(f"{A}/x"),
        lambda: scene.mkdir(f"{A}/x"),
        lambda: scene._do("mknod", root, b"x", 0o100644, 0),
    )
    for make in makes:
        with refused("EDQUOT"):
            make()
    assert f"{A} has 5 files and directories, the configured maximum (files)" in (
        scene.mounted.base.reasons.of_caller(inside(scene.agent))
    )
    leaving: tuple[Callable[[], object], ...] = (
        lambda: scene.unlink(f"{A}/d/b"),
        lambda: scene.rmdir(f"{A}/e"),
        lambda: scene.rename(f"{A}/a", f"{A}/d/c"),
    )
    for number, leave in enumerate(leaving):
        leave()
        scene.file(f"{A}/x{number}")
        with refused("EDQUOT"):
            scene.file(f"{A}/y")
        assert scene.counted == (5, 0)


def test_all_files_together_have_a_limit(scene: Scene) -> None:
    scene.file(f"{A}/a", bytes(60))
    fh, b = scene.create(f"{A}/b", bytes(40))
    attempts: tuple[Callable[[], None], ...] = (
        lambda: scene.write(fh, b"x", 40),
        lambda: set_attributes(scene, b, size=41),
        lambda: set_attributes(scene, b, fh, size=41),
    )
    for attempt in attempts:
        with refused("EDQUOT"):
            attempt()
    with refused("EFBIG"):
        scene.write(fh, b"x", 60)
    scene.unlink(f"{A}/b")
    with refused("EDQUOT"):
        scene.write(fh, b"x", 40)
    set_attributes(scene, b, fh, size=10)
    assert scene.counted == (1, 70)
    scene.mounted.close(fh)
    assert scene.counted == (1, 60)
    scene.file(f"{A}/c", bytes(40))


def test_a_result_that_is_taken_is_no_part_of_it(scene: Scene) -> None:
    with scene.mounted.as_(inside(scene.agent)):
        scene.mounted.put("agent/x.d/result.md", "before")
    fh, file = scene.create(f"{A}/f", bytes(60))
    scene.rename(f"{A}/f", "agent/x.d/result.md")
    assert (scene.list(), scene.counted) == ([], (0, 0))
    with refused("ESTALE"):  # so that the kernel asks what the new name is
        scene.stat(file)
    assert scene.memory == NODE_SIZE
    scene.write(fh, b"more")
    scene.mounted.close(fh)
    assert scene.get("agent/x.d/result.md") == "more" + 56 * "\0"
    scene.file(f"{A}/g", bytes(60))
    scene.file(f"{A}/h", bytes(40))
    assert scene.counted == (2, 100)
    scene.mkdir(f"{A}/d")
    with refused("EPERM"):
        scene.rename(f"{A}/d", "agent/x.d/result.md")
    with refused("EPERM"):
        scene.rename(f"{A}/g", "agent/x.d/handoff.md")


# on whose account


def test_what_the_kernel_knows_is_on_the_owners_account(scene: Scene) -> None:
    assert scene.memory == 0
    scene.mkdir(f"{A}/d")
    file = scene.file(f"{A}/d/f")
    assert scene.memory == 3 * NODE_SIZE
    assert scene.mounted.inode(f"{A}/d/f") == file, "whoever asks"
    assert scene.memory == 3 * NODE_SIZE
    scene.unlink(f"{A}/d/f")
    assert scene.memory == 3 * NODE_SIZE, "the kernel knows it still"
    for inode in (file, scene.inode(f"{A}/d"), scene.inode(A)):
        scene.forget(inode)
    assert (scene.memory, len(scene.mounted.base.folders)) == (0, 0)
    assert scene.list() == ["d"]


def test_a_full_account_refuses_look_ups_and_new_files(tmp_path: Path) -> None:
    with mounted_in(tmp_path, owner_memory_max=100 * NODE_SIZE) as mounted:
        scene = Scene(mounted)
        scene.mounted.agents.documents.ensure(scene.agent)
        for number in range(200):
            (scene.real / f"{number:03}").write_text("")
        with refused("EDQUOT"):
            for number in range(200):
                scene.inode(f"{A}/{number:03}")
        assert 85 * NODE_SIZE < scene.memory <= 90 * NODE_SIZE
        with refused("EDQUOT"):
            scene.file(f"{A}/new")
        assert not (scene.real / "new").exists()
        with mounted.as_(USER):  # a tenth is reserved for operators
            mounted.inode(f"{A}/198")
        mounted.inode(f"{A}/199")


def test_a_listing_tells_that_the_account_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted_in(tmp_path, owner_memory_max=100 * NODE_SIZE) as mounted:
        scene = Scene(mounted)
        scene.mounted.agents.documents.ensure(scene.agent)
        for number in range(200):
            (scene.real / f"{number:03}").write_text("")
        told: list[bytes] = []

        def reply(token: object, name: bytes, entry: object, position: int) -> bool:
            told.append(name)
            return True

        monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
        fh = scene._do("opendir", scene.inode(A))
        with mounted.as_(inside(scene.agent)):
            complete(mounted.ops.readdir, fh, 0, None)
            assert 0 < len(told) < 90
            with refused("EDQUOT"):
                complete(mounted.ops.readdir, fh, len(told), None)


def test_what_a_reply_has_no_room_for_costs_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        scene.forget(scene.file(f"{A}/{name}"))
    known = scene.file(f"{A}/d")
    monkeypatch.setattr(pyfuse3, "readdir_reply", lambda *args: False)
    fh = scene._do("opendir", scene.inode(A))
    for start in range(4):
        with scene.mounted.as_(inside(scene.agent)):
            complete(scene.mounted.ops.readdir, fh, start, None)
    assert scene.memory == 2 * NODE_SIZE
    assert scene.stat(known).st_size == 0


# in the next daemon


def handed_over(scene: Scene) -> Folders:
    """The next daemon's table."""
    base = scene.mounted.base
    saved = read_back(b"".join(written(base.folders.save(Descriptors()))))
    made = Folders(base.runtime, base.cache, base.disks)
    made.restore(saved, ROWS)
    return made


def test_the_next_daemon_knows_the_same_numbers(scene: Scene) -> None:
    scene.mkdir(f"{A}/d")
    file = scene.file(f"{A}/d/f\udcff", b"one")
    fh, _ = scene.create(f"{A}/gone", b"four")
    scene.unlink(f"{A}/gone")
    made = handed_over(scene)
    assert made.get(file).attributes().size == 3
    assert made.way(file) == "d/f\udcff"
    folder = made.get(file).folder
    assert (folder.entries, folder.bytes) == (2, 7)
    more = made.root(ARTIFACT, scene.agent)
    assert more.inode == scene.inode(A)
    scene.mounted.close(fh)


def test_what_goes_to_the_next_daemon_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many the kernel knows: each is resolved when it is asked for."""
    count = 20_000
    with mounted_in(tmp_path, files=2 * count) as mounted:
        scene = Scene(mounted)
        table, call = mounted.base.folders, inside(scene.agent)
        root = table.root(ARTIFACT, scene.agent)
        mounted.agents.documents.ensure(scene.agent)
        st = os.stat(scene.real)
        numbers = [table.child(call, root, f"{number}", st).inode for number in range(count)]
        with monkeypatch.context() as patch:
            for name in ("open", "stat", "scandir"):
                patch.delattr(os, name)
            begun = time.thread_time()
            made = handed_over(scene)
            assert time.thread_time() - begun < 2.0
        assert len(made) == count + 1
        (scene.real / "7").write_text("seven")
        assert made.get(numbers[7]).attributes().size == 5


def test_what_was_open_goes_on(scene: Scene) -> None:
    fh, inode = scene.create(f"{A}/f", b"one")
    opened = scene.mounted.ops.opened.files[fh]
    saved = {**opened.save(Descriptors()), "flags": os.O_WRONLY}
    scene.unlink(f"{A}/f")
    made = handed_over(scene)
    again = made.reopened(inode, inside(scene.agent), saved, ROWS)
    assert again is not None
    work = again.writing(3, b" more")
    assert work is not None
    with work as act:
        act()
    assert made.get(inode).attributes().size == 8
    again.release()
    folder = made.get(scene.inode(A)).folder
    assert (folder.entries, folder.bytes) == (0, 0)
    scene.mounted.ops.opened.files.clear()


# of agents that are gone


def test_a_removed_childs_artifacts_are_read_and_not_written(mounted: Mounted) -> None:
    parent = mounted.make("parent")
    mounted.world.live(parent)
    child = mounted.agents.births.create(inside(parent), "kid")
    mounted.world.live(child)
    root = mounted.base.folders.root(ARTIFACT, child)
    with mounted.as_(inside(child)):
        info, _ = complete(mounted.ops.create, root.inode, b"file", 0o644, os.O_WRONLY, CONTEXT)
        mounted.close(info.fh)
    mounted.agents.journal.update(child, status="dead")
    mounted.agents.removals.remove(child)
    again = mounted.base.folders.root(ARTIFACT, child)
    assert again.inode == root.inode
    fh = complete(mounted.ops.opendir, root.inode, CONTEXT)
    assert mounted.ops.opened.listings[fh].names == ["file"]
    with refused("EACCES"):
        complete(mounted.ops.unlink, root.inode, b"file", CONTEXT)


def test_a_removed_agents_files_are_gone(scene: Scene) -> None:
    file, episode = scene.file(f"{A}/f"), scene.file(f"{E}/e")
    scene.mounted.agents.journal.update(scene.agent, status="dead")
    with scene.mounted.as_(USER):
        complete(scene.mounted.ops.rmdir, scene.mounted.inode("agent"), b"x.d", CONTEXT)
    with refused("ESTALE"):
        complete(scene.mounted.ops.getattr, file, CONTEXT)
    for inode in list(scene.mounted.base.folders._places):
        scene.forget(inode)
    assert scene.memory == 0
    assert episode
