"""Real files as nodes, without a kernel: descriptors, names, counts, owners."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from ctxfs.caching import Cache
from ctxfs.tree import durable, spaces
from ctxfs.tree.durable import Durable, DurableNode
from ctxfs.tree.nodes import Call, NewAttributes, Node, OpenFile
from ctxfs.tree.realfiles import OpenRealFile
from ctxfs.tree.spaces import Space
from runtime.authority.disk import ENTRY_SIZE
from runtime.caller import Caller
from runtime.errors import (
    CrossingError,
    ForbiddenError,
    GoneError,
    MissingError,
    QuotaError,
    TakenError,
    TooLargeError,
    UnsupportedError,
)
from runtime.kernel import linux
from tests.worlds.records import ROOT
from tests.worlds.tree import CONTEXT, OWN_CONTEXT, Mounted, complete

pytestmark = pytest.mark.settings(files=3)

OWNER = (61000, 61001)


class Someone:
    """Stands for the request of a process with these ids."""

    uid, gid, pid = os.getuid(), os.getgid(), 0
    caller = ROOT


CALL = cast(Call, Someone())


def anyone(caller: Caller) -> None:
    """May."""


def space_of(root: Path, **rules: Any) -> Space:
    given: dict[str, Any] = {
        "path": "agent/coder.d/artifact",
        "root": lambda: root,
        "owner": lambda: OWNER,
        "links": False,
        "limit": 100,
        "files": None,
        "total": None,
        "incarnation": None,
        "may_read": anyone,
        "may_write": anyone,
    }
    return Space(**{**given, **rules})


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def known(node: Node) -> DurableNode:
    """What the adapter does with a node that the kernel gets."""
    assert isinstance(node, DurableNode)
    node.remembered()
    node.attributes()
    return node


def touch(directory: DurableNode, name: str) -> DurableNode:
    return known(directory.mknod(CALL, name, 0o100644))


def mkdir(directory: DurableNode, name: str) -> DurableNode:
    return known(directory.mkdir(CALL, name, 0o755))


def evict(table: Durable) -> None:
    """Closes every descriptor."""
    for cached in (table._open, table._removed):
        for node in list(cached._fds):
            fd = cached.take(node)
            assert fd is not None
            os.close(fd)


@pytest.fixture
def table() -> Iterator[Durable]:
    made = Durable(Cache(), os.close)
    yield made
    evict(made)


@pytest.fixture
def top(table: Durable, tmp_path: Path) -> Iterator[DurableNode]:
    yield known(table.root(space_of(tmp_path)))
    # deeper than pytest itself can remove
    subprocess.run(["rm", "-rf", "--", str(tmp_path / "d")], check=True)


@pytest.fixture
def linked(table: Durable, tmp_path: Path) -> DurableNode:
    """The root of a space with hard links."""
    return known(table.root(space_of(tmp_path, links=True, owner=lambda: None)))


# descriptors


def test_many_known_files_hold_few_descriptors(top: DurableNode) -> None:
    before = descriptors()
    nodes = [touch(top, f"f{number}") for number in range(2000)]
    assert descriptors() - before <= durable._DESCRIPTORS
    for node in nodes:
        assert node.attributes().links == 1
    assert descriptors() - before <= durable._DESCRIPTORS


def test_a_deep_directory_is_reached_again_from_the_root(table: Durable, top: DurableNode) -> None:
    node = top
    depth = 4000
    before = descriptors()
    for _ in range(depth):
        node = mkdir(node, "d")
    assert descriptors() - before <= durable._DESCRIPTORS
    key = node.key
    evict(table)
    st = os.fstat(node.fd)
    assert (st.st_dev, st.st_ino) == key
    assert descriptors() - before <= durable._CHAIN + 1
    assert node.path == "…" + ("/d" * depth)[-200:]
    assert spaces._measure(top.space.root()) == (depth, 0)
    while node is not top:
        parent = node.parent
        assert parent is not None
        parent.rmdir(CALL, "d")
        node = parent
    assert spaces._measure(top.space.root()) == (0, 0)


def test_what_one_operation_uses_is_not_closed_by_a_long_chain(
    table: Durable, top: DurableNode
) -> None:
    deep = top
    for _ in range(2 * durable._DESCRIPTORS):
        deep = mkdir(deep, "d")
    side = mkdir(top, "side")
    file = touch(side, "file")
    evict(table)
    side.rename(CALL, "file", deep, "file")
    assert file.parent is deep
    evict(table)
    deep.rename(CALL, "file", side, "back")
    evict(table)
    assert file.attributes().links == 1
    assert os.listdir(top.space.root() / "side") == ["back"]


def test_a_file_replaced_behind_the_tree_is_missing(
    table: Durable, top: DurableNode, tmp_path: Path
) -> None:
    node = touch(top, "file")
    evict(table)
    (tmp_path / "other").write_text("")
    (tmp_path / "other").rename(tmp_path / "file")
    with pytest.raises(MissingError, match="was replaced or removed"):
        node.attributes()
    (tmp_path / "file").unlink()
    with pytest.raises(MissingError, match="was replaced or removed"):
        node.attributes()
    evict(table)
    tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(MissingError):
        top.attributes()
    tmp_path.mkdir()
    with pytest.raises(MissingError, match="was replaced or removed"):
        top.attributes()


def test_forgetting_closes(table: Durable, top: DurableNode) -> None:
    before = descriptors()
    node = touch(top, "file")
    node.remembered()
    table.forget(node.inode, 1)
    assert table.get(node.inode) is node
    table.forget(node.inode, 1)
    with pytest.raises(GoneError):
        table.get(node.inode)
    assert descriptors() == before
    assert table.find(top, "file") is not node


# names


def test_a_renamed_file_is_found_again(table: Durable, top: DurableNode) -> None:
    old, new = mkdir(top, "old"), mkdir(top, "new")
    directory = mkdir(old, "d")
    file = touch(directory, "file")
    old.rename(CALL, "d", new, "e")
    directory.rename(CALL, "file", directory, "other", linux.RENAME_NOREPLACE)
    evict(table)
    assert file.attributes().links == 1
    assert file.path == "agent/coder.d/artifact/new/e/other"


def test_a_removed_file_keeps_its_attributes_while_it_is_known(
    table: Durable, top: DurableNode
) -> None:
    file, directory, replaced = touch(top, "file"), mkdir(top, "d"), touch(top, "new")
    top.unlink(CALL, "file")
    top.rmdir(CALL, "d")
    touch(top, "newer")
    top.rename(CALL, "newer", top, "new")
    again = touch(top, "file")
    for node in (file, replaced):
        assert node.attributes().links == 0
    assert directory.is_directory()
    assert again is not file and again.inode != file.inode
    evict(table)
    for node in (file, directory, replaced):
        with pytest.raises(MissingError, match="was removed"):
            node.attributes()
    assert again.attributes().links == 1


def test_what_the_kernel_never_got_is_not_kept(table: Durable, top: DurableNode) -> None:
    touch(top, "a")
    touch(top, "b")
    for name in ("a", "b"):
        table.forget(table.find(top, name).inode, 1)
    kept = len(table._nodes)
    top.rename(CALL, "a", top, "b")
    top.unlink(CALL, "b")
    assert len(table._nodes) == kept == len(table._numbers)


def test_a_file_with_two_links_is_found_by_either(table: Durable, linked: DurableNode) -> None:
    file = touch(linked, "a")
    assert known(linked.link(CALL, "b", file)) is file
    linked.unlink(CALL, "b")
    evict(table)
    assert file.attributes().links == 1
    linked.link(CALL, "c", file)
    linked.unlink(CALL, "a")
    evict(table)
    assert file.attributes().links == 1
    linked.link(CALL, "d", file)
    linked.rename(CALL, "c", linked, "d")
    assert sorted(linked.list(CALL)) == ["c", "d"]
    linked.unlink(CALL, "c")
    linked.unlink(CALL, "d")
    assert file.attributes().links == 0


def test_the_end_of_a_long_path_is_shown(top: DurableNode) -> None:
    node = mkdir(mkdir(mkdir(top, "x" * 90), "y" * 90), "z" * 90)
    assert len(node.path) == 201
    assert node.path.startswith("…x")
    assert node.path.endswith("/" + "z" * 90)


def test_renaming_without_replacing(top: DurableNode) -> None:
    touch(top, "a")
    touch(top, "b")
    with pytest.raises(TakenError, match='"b" already exists'):
        top.rename(CALL, "a", top, "b", linux.RENAME_NOREPLACE)
    with pytest.raises(MissingError):
        top.rename(CALL, "c", top, "d")


# how many


def test_one_more_than_files_is_refused(table: Durable, tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "f").write_text("")
    space = space_of(tmp_path, links=True, owner=lambda: None, files=6)
    top = known(table.root(space))
    file = touch(top, "a")
    top.symlink(CALL, "s", "a")
    top.link(CALL, "b", file)
    makes: tuple[Callable[[], object], ...] = (
        lambda: top.create(CALL, "x", 0o644, os.O_RDWR),
        lambda: top.mkdir(CALL, "x", 0o755),
        lambda: top.mknod(CALL, "x", 0o100644),
        lambda: top.symlink(CALL, "x", "a"),
        lambda: top.link(CALL, "x", file),
    )
    for make in makes:
        with pytest.raises(QuotaError, match=r"has 6 files and directories.*\(files\)"):
            make()
    d = known(table.find(top, "d"))
    top.rename(CALL, "s", d, "s")
    with pytest.raises(QuotaError):
        mkdir(top, "x")
    leaving: tuple[Callable[[], object], ...] = (
        lambda: d.unlink(CALL, "s"),
        lambda: d.rmdir(CALL, "e"),
        lambda: top.rename(CALL, "a", d, "f"),
    )
    for leave in leaving:
        leave()
        top.symlink(CALL, f"x{os.urandom(4).hex()}", "target")
        with pytest.raises(QuotaError):
            mkdir(top, "x")
        assert space._entries == spaces._measure(tmp_path)[0] == 6


def test_a_refused_removal_keeps_the_number(table: Durable, tmp_path: Path) -> None:
    space = space_of(tmp_path, files=3)
    top = known(table.root(space))
    mkdir(mkdir(top, "d"), "e")
    calls: tuple[Callable[[], object], ...] = (
        lambda: top.rmdir(CALL, "d"),
        lambda: top.unlink(CALL, "d"),
        lambda: top.unlink(CALL, "nothing"),
        lambda: top.mkdir(CALL, "d", 0o755),
    )
    for refused_call in calls:
        with pytest.raises(Exception, match=r"not empty|is a directory|no such|exists|permitted"):
            refused_call()
    assert space._entries == 2


# how much


def write(opened: OpenFile, offset: int, data: bytes) -> int:
    work = opened.writing(offset, data)
    assert work is not None
    with work as act:
        return act()


def cut(cutting: OpenFile | DurableNode, size: int) -> None:
    """ftruncate(2) or truncate(2)."""
    work = (
        cutting.truncating(size)
        if isinstance(cutting, OpenFile)
        else cutting.truncating(CALL, size)
    )
    assert work is not None
    with work as act:
        act()


def put(node: DurableNode, data: bytes, offset: int = 0, flags: int = 0) -> None:
    opened = node.open(CALL, os.O_WRONLY | flags)
    try:
        write(opened, offset, data)
    finally:
        opened.release()


@pytest.fixture
def small(table: Durable, tmp_path: Path) -> DurableNode:
    """The root of a space for 100 bytes, of which 30 are there."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_bytes(bytes(30))
    return known(table.root(space_of(tmp_path, total=100)))


def in_space(node: DurableNode, expected: int) -> None:
    assert node.space._bytes == expected
    assert node.space._bytes == spaces._measure(node.space.root())[1]


def test_all_files_together_have_a_limit(small: DurableNode) -> None:
    a, b = touch(small, "a"), touch(small, "b")
    put(a, bytes(60))
    put(a, bytes(10), offset=20)
    in_space(a, 90)
    actions: tuple[Callable[[], object], ...] = (
        lambda: put(b, bytes(11)),
        lambda: put(b, b"x", offset=10),
        lambda: put(a, bytes(11), flags=os.O_APPEND),
        lambda: cut(b, 11),
        lambda: cut(a, 71),
    )
    for action in actions:
        with pytest.raises(QuotaError, match=r"has 90 of at most 100 bytes \(artifact_max\)"):
            action()
    put(b, b"x", offset=9)
    in_space(a, 100)
    put(a, bytes(60))
    cut(a, 50)
    in_space(a, 90)
    opened = b.open(CALL, os.O_WRONLY)
    cut(opened, 0)
    in_space(a, 80)
    cut(opened, 20)
    in_space(a, 100)
    with pytest.raises(QuotaError):
        cut(opened, 21)
    cut(opened, 3)
    in_space(a, 83)
    opened.release()


def test_what_is_there_may_be_too_much(table: Durable, tmp_path: Path) -> None:
    """The limit is lower than it was."""
    (tmp_path / "old").write_bytes(bytes(90))
    top = known(table.root(space_of(tmp_path, total=50)))
    old = known(table.find(top, "old"))
    put(old, bytes(90))
    cut(old, 60)
    with pytest.raises(QuotaError):
        put(old, b"x", offset=60)
    cut(old, 40)
    put(old, bytes(10), offset=40)
    in_space(top, 50)


def test_a_failed_write_costs_nothing(small: DurableNode) -> None:
    file = touch(small, "a")
    opened = cast(durable._OpenDurable, file.open(CALL, os.O_RDONLY))
    opened._may_write = lambda: None
    with pytest.raises(OSError):
        write(opened, 0, b"x")
    in_space(small, 30)
    opened.release()


def test_removed_files_give_their_bytes_back(table: Durable, small: DurableNode) -> None:
    for name in ("a", "b"):
        node = touch(small, name)
        put(node, bytes(20))
        table.forget(node.inode, 1)
    small.unlink(CALL, "a")
    in_space(small, 50)
    d = known(table.find(small, "d"))
    small.rename(CALL, "b", d, "old")
    in_space(small, 20)
    with pytest.raises(MissingError):
        small.unlink(CALL, "b")
    in_space(small, 20)


def test_the_first_thing_may_be_a_removal(table: Durable, small: DurableNode) -> None:
    d = known(table.find(small, "d"))
    d.unlink(CALL, "old")
    in_space(small, 0)


def test_a_removed_file_counts_while_it_is_open(table: Durable, small: DurableNode) -> None:
    file = touch(small, "a")
    first, second = (file.open(CALL, os.O_WRONLY) for _ in range(2))
    write(first, 0, bytes(40))
    small.unlink(CALL, "a")
    table.forget(file.inode, 1)
    write(first, 40, bytes(30))
    with pytest.raises(QuotaError):
        write(second, 70, b"x")
    first.release()
    assert small.space._bytes == 100
    second.release()
    in_space(small, 30)


def test_a_removed_file_counts_while_somebody_refers_to_it(
    table: Durable, small: DurableNode
) -> None:
    """It can be opened again by /proc/self/fd."""
    file = touch(small, "a")
    put(file, bytes(40))
    small.unlink(CALL, "a")
    assert small.space._bytes == 70
    file.open(CALL, os.O_RDONLY).release()
    assert small.space._bytes == 70
    table.forget(file.inode, 1)
    in_space(small, 30)


def test_of_very_many_removed_files_the_first_are_gone(
    table: Durable, small: DurableNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table._removed, "_limit", 1)
    one, two, three = (touch(small, name) for name in "abc")
    opened = two.open(CALL, os.O_WRONLY)
    for node in (one, two, three):
        put(node, bytes(20))
    small.unlink(CALL, "a")
    small.unlink(CALL, "b")
    assert small.space._bytes == 70
    small.unlink(CALL, "c")
    assert small.space._bytes == 70, "it is open"
    opened.release()
    assert small.space._bytes == 50
    for node in (one, two, three):
        table.forget(node.inode, 1)
    in_space(small, 30)


# attributes


def test_the_owner_that_is_there_may_be_set(top: DurableNode) -> None:
    file = touch(top, "file")
    file.set_attributes(CALL, NewAttributes(uid=OWNER[0], gid=OWNER[1]))
    file.set_attributes(CALL, NewAttributes(gid=OWNER[1], mode=0o4755))
    assert file.attributes().mode & 0o7777 == 0o755
    for changes in (NewAttributes(uid=0), NewAttributes(uid=OWNER[0], gid=0, mode=0o777)):
        with pytest.raises(ForbiddenError, match="cannot be changed"):
            file.set_attributes(CALL, changes)
    assert file.attributes().mode & 0o7777 == 0o755
    assert os.fstat(file.fd).st_uid == os.getuid()


def test_truncating_keeps_to_the_limit(top: DurableNode) -> None:
    file = touch(top, "file")
    cut(file, 100)
    with pytest.raises(TooLargeError, match="document_max"):
        cut(file, 101)
    assert file.attributes().size == 100


# in the tree


def test_a_space_made_anew_is_another(mounted: Mounted) -> None:
    shared = mounted.inode("shared")
    first = complete(mounted.ops.mkdir, shared, b"s", 0o755, OWN_CONTEXT).st_ino
    complete(mounted.ops.rmdir, shared, b"s", CONTEXT)
    second = complete(mounted.ops.mkdir, shared, b"s", 0o755, OWN_CONTEXT).st_ino
    assert first != second
    evict(mounted.base.durable)


# as any other filesystem


def test_times_are_set_one_by_one_to_the_nanosecond(linked: DurableNode) -> None:
    file = touch(linked, "file")
    file.set_attributes(CALL, NewAttributes(atime=1_000_000_001, mtime=2_000_000_002))
    file.set_attributes(CALL, NewAttributes(mtime=-3))
    found = os.fstat(file.fd)
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_001, -3)
    file.set_attributes(CALL, NewAttributes(atime=4))
    shown = file.attributes().real
    assert shown is not None
    assert (shown.st_atime_ns, shown.st_mtime_ns) == (4, -3)
    link = known(linked.symlink(CALL, "link", "nowhere"))
    link.set_attributes(CALL, NewAttributes(atime=5, mtime=6))
    found = os.fstat(link.fd)
    assert (found.st_atime_ns, found.st_mtime_ns) == (5, 6)


def test_names_are_exchanged(table: Durable, linked: DurableNode) -> None:
    file, directory = touch(linked, "file"), mkdir(linked, "d")
    inner = touch(directory, "inner")
    linked.rename(CALL, "file", linked, "d", linux.RENAME_EXCHANGE)
    evict(table)
    assert (file.name, directory.name) == ("d", "file")
    assert inner.path.endswith("/file/inner")
    assert inner.attributes().links == 1
    with pytest.raises(MissingError):
        linked.rename(CALL, "file", linked, "nothing", linux.RENAME_EXCHANGE)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_only_a_space_for_everything_has_fifos_and_sockets(
    linked: DurableNode, kind: int
) -> None:
    made = known(linked.mknod(CALL, "it", kind | 0o640))
    assert made.attributes().mode == kind | 0o640
    assert linked.lookup(CALL, "it") is made
    linked.space.links = False
    with pytest.raises(ForbiddenError, match="only files and directories"):
        linked.mknod(CALL, "other", kind | 0o640)


def test_devices_are_not_made(linked: DurableNode) -> None:
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        with pytest.raises(ForbiddenError, match="devices"):
            linked.mknod(CALL, "device", kind | 0o600)


def test_between_spaces_nothing_is_linked_or_renamed(
    table: Durable, linked: DurableNode, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = known(table.root(space_of(tmp_path / "other", links=True, owner=lambda: None)))
    file = touch(linked, "file")
    with pytest.raises(CrossingError, match="another space"):
        other.link(CALL, "file", file)
    with pytest.raises(CrossingError, match="another space"):
        linked.rename(CALL, "file", other, "file")


def test_a_set_group_id_directory_gives_its_group(linked: DurableNode) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to any group")
    directory = mkdir(linked, "d")
    directory.set_attributes(CALL, NewAttributes(gid=4242, mode=0o3775))
    assert directory.attributes().mode == stat.S_IFDIR | 0o3775
    inner = mkdir(directory, "inner")
    assert (inner.attributes().mode, inner.attributes().gid) == (stat.S_IFDIR | 0o2755, 4242)
    file = touch(inner, "file")
    assert (file.attributes().mode, file.attributes().gid) == (stat.S_IFREG | 0o644, 4242)
    file.set_attributes(CALL, NewAttributes(mode=0o6755))
    assert file.attributes().mode & 0o7777 == 0o755, "no programs with others' rights"


def test_only_a_space_for_everything_has_extended_attributes(linked: DurableNode) -> None:
    file = touch(linked, "file")
    file.set_xattr(CALL, "user.a", b"1")
    assert (file.xattr(CALL, "user.a"), list(file.xattrs(CALL))) == (b"1", ["user.a"])
    file.remove_xattr(CALL, "user.a")
    with pytest.raises(OSError, match="No data"):
        file.xattr(CALL, "user.a")
    linked.space.links = False
    with pytest.raises(UnsupportedError):
        file.set_xattr(CALL, "user.a", b"1")
    assert list(file.xattrs(CALL)) == []


# whose it is


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_what_is_put_in_the_place_of_a_new_directory_stays_whose_it_is(
    linked: DurableNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        uid, gid, pid, caller = *OWNER, 0, ROOT

    secret = tmp_path / "secret"
    secret.mkdir(0o700)
    make = os.mkdir

    def mkdir_and_replace(name: str, mode: int, *, dir_fd: int) -> None:
        make(name, mode, dir_fd=dir_fd)
        made = tmp_path / name
        assert (made.stat().st_uid, made.stat().st_gid) == OWNER
        made.rmdir()
        secret.rename(made)

    monkeypatch.setattr(os, "mkdir", mkdir_and_replace)
    linked.mkdir(cast(Call, Other()), "new", 0o777)
    found = (tmp_path / "new").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, 0, 0o700)
    monkeypatch.undo()
    linked.mkdir(cast(Call, Other()), "next", 0o777)
    found = (tmp_path / "next").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (*OWNER, 0o777)
    assert (os.stat(touch(linked, "mine").name, dir_fd=linked.fd)).st_uid == os.getuid()


def test_files_that_are_open_without_a_name_are_told(tmp_path: Path) -> None:
    noted: list[int] = []

    class Account:
        """Stands for the part of an owner's account."""

        check = writing = staticmethod(lambda *_: nullcontext())
        note = staticmethod(noted.append)
        owner = staticmethod(lambda: 7)

    table = Durable(Cache(), os.close)
    root = table.root(space_of(tmp_path, links=True, share=Account()))
    node, opened = root.create(CALL, "file", 0o644, os.O_RDWR)
    known(node)
    assert isinstance(opened, OpenRealFile)
    with opened.writing(0, b"x" * 100) as act:
        act()
    os.fsync(opened.fd)  # it has blocks when it is on the disk
    size = (tmp_path / "file").stat().st_blocks * 512
    assert size
    assert table.unnamed() == {}
    noted.clear()
    root.unlink(CALL, "file")
    assert sum(noted) == -ENTRY_SIZE
    assert table.unnamed() == {7: size}
    opened.release()
    assert sum(noted) == -ENTRY_SIZE - size
    table.forget(node.inode, 1)
    assert table.unnamed() == {}
