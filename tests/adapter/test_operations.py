"""The adapter alone, over nodes that do what the test says."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing

from ctxfs.caching import Cache
from ctxfs.disks import Disks
from ctxfs.errnos import ERRNOS
from ctxfs.filesystem import Filesystem
from ctxfs.operations import Operations
from ctxfs.reasons import Reasons
from ctxfs.tree.nodes import Attributes, Call, NewAttributes, Node, OpenFile
from runtime import errors
from runtime.authority.accounts import Payer, Reserve, Resource, accounts_of
from runtime.authority.loop import LoopMeter
from runtime.caller import Caller
from runtime.ids import AgentIndex, Incarnation
from runtime.kernel import linux
from runtime.kernel.privilege import ROOT
from runtime.records.config import Config
from tests.worlds.tree import CONTEXT, complete, refused

ME = Caller(1000, 1000, 1)


class FakeOpenFile(OpenFile):
    def __init__(self, node: FakeNode, caller: Caller) -> None:
        super().__init__(node, caller)
        self.log = node.log

    def read(self, offset: int, size: int) -> bytes:
        cast(FakeNode, self.node).fail()
        return b"0123456789"[offset : offset + size]

    def write(self, offset: int, data: bytes) -> int:
        cast(FakeNode, self.node).fail()
        self.log.append(("write", offset, data))
        return len(data)

    def truncate(self, size: int) -> None:
        self.log.append(("truncate", size))

    def flush(self) -> None:
        cast(FakeNode, self.node).fail()
        self.log.append(("flush",))

    lasts = True

    def syncing(self) -> Callable[[], None]:
        return lambda: self.log.append(("sync",))

    def release(self) -> None:
        self.log.append(("release",))


class FakeNode(Node):
    """A directory whose files are named in ``names``; ``error`` is raised by everything."""

    def __init__(self, inode: int = 1, mode: int = stat.S_IFDIR | 0o755) -> None:
        self.inode = inode
        self.mode = mode
        self.log: list[Any] = []
        self.names: dict[str, FakeNode] = {}
        self.error: Exception | None = None

    path = "place"
    incarnation = Incarnation("i1")

    def fail(self) -> None:
        if self.error is not None:
            raise self.error

    def attributes(self) -> Attributes:
        return Attributes(inode=self.inode, mode=self.mode, size=10, mtime=1.5, uid=7, gid=8)

    def lookup(self, call: Call, name: str) -> Node:
        self.fail()
        if name not in self.names:
            raise errors.MissingError(f"no {name}")
        self.names[name].fail()
        return self.names[name]

    def list(self, call: Call) -> Iterator[str]:
        self.fail()
        yield from self.names

    def open(self, call: Call, flags: int) -> OpenFile:
        self.fail()
        return FakeOpenFile(self, call.caller)

    def mkdir(self, call: Call, name: str, mode: int) -> Node:
        self.fail()
        self.log.append(("mkdir", name, mode))
        return self

    def rename(self, call: Call, name: str, target: Node, new_name: str, flags: int = 0) -> None:
        self.fail()
        self.log.append(("rename", name, target.inode, new_name, flags))

    def set_attributes(self, call: Call, changes: NewAttributes) -> None:
        self.fail()
        self.log.append(changes)


OPEN_FILES = 50


class FakeFilesystem:
    def __init__(self, *nodes: FakeNode) -> None:
        self.nodes = {node.inode: node for node in nodes}
        self.reasons = Reasons()
        self.cache = Cache()
        self.folders = SimpleNamespace(forget=lambda inode: None)
        identity = SimpleNamespace(
            resolve=lambda uid, gid, pid: ME,
            is_master=lambda caller: caller.uid == 0,
            payer=lambda caller: Payer(caller.uid, reserve=Reserve.OWNER),
        )
        self.synced = 0
        self.requests = 0
        agents = SimpleNamespace(
            identity=identity,
            journal=SimpleNamespace(synced=self.sync),
            privilege=ROOT,
            registry=SimpleNamespace(get=lambda index: None),
        )
        self.runtime = SimpleNamespace(
            loop=LoopMeter(),
            agents=agents,
            places=SimpleNamespace(state="/"),
            config=Config(),
            accounts=accounts_of(Config(owner_descriptors=OPEN_FILES)),
        )

        self.disks = Disks(lambda caller: Payer(caller.uid))
        self.base = self

    async def sync(self) -> None:
        self.synced += 1

    def node(self, inode: int) -> FakeNode:
        try:
            return self.nodes[inode]
        except KeyError:
            raise errors.MissingError("this object was removed") from None


class Small:
    """One directory, inode 1, with one file, inode 2."""

    def __init__(self) -> None:
        self.root = FakeNode()
        self.file = FakeNode(2, stat.S_IFREG | 0o644)
        self.root.names["file"] = self.file
        self.fs = FakeFilesystem(self.root, self.file)
        self.ops = Operations(cast(Filesystem, self.fs))

    @property
    def reason(self) -> str:
        return self.fs.reasons.of_caller(ME)

    def open(self) -> int:
        return int(complete(self.ops.open, 2, os.O_RDWR, CONTEXT).fh)


@pytest.fixture
def small() -> Small:
    return Small()


def asked(**wanted: bool) -> Any:
    names = ("size", "mode", "uid", "gid", "atime", "mtime", "ctime")
    return SimpleNamespace(**{f"update_{name}": wanted.get(name, False) for name in names})


# the boundary


def name_of(cls: object) -> str:
    return getattr(cls, "__name__", "")


@pytest.mark.parametrize("cls", sorted(ERRNOS, key=name_of), ids=name_of)
def test_each_error_is_the_kernels_errno_and_its_reason_is_kept(
    small: Small, cls: type[errors.CtxError]
) -> None:
    small.file.error = cls("why not")
    name = errno.errorcode[ERRNOS[cls]]
    name = "EOPNOTSUPP" if ERRNOS[cls] == errno.EOPNOTSUPP else name
    with pytest.raises(pyfuse3.FUSEError) as caught:
        complete(small.ops.open, 2, os.O_RDONLY, CONTEXT)
    assert caught.value.errno == ERRNOS[cls]
    # of what is gone nobody is told: the kernel asks again, by the name
    told = cls is not errors.GoneError
    assert small.reason.endswith(f" {name} place: why not\n" if told else "")
    assert bool(small.reason) is told


def test_a_bug_is_eio_and_does_not_end_the_daemon(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    small.file.error = ZeroDivisionError("oops")
    with refused("EIO"):
        complete(small.ops.open, 2, os.O_RDONLY, CONTEXT)
    assert "oops" in caplog.text
    assert "an error inside ctxfs" in small.reason
    assert "oops" not in small.reason


def test_the_kernels_own_refusals_pass(small: Small) -> None:
    small.file.error = OSError(errno.ENOSPC, "No space left on device")
    with refused("ENOSPC"):
        complete(small.ops.open, 2, os.O_RDONLY, CONTEXT)
    assert small.reason.endswith("ENOSPC place: no space left on device\n")


@pytest.mark.parametrize("error", [errors.DeniedError("x"), errors.ForbiddenError("x")])
def test_who_is_refused_for_who_it_is_leaves_nothing_at_the_agent(
    small: Small, error: Exception
) -> None:
    small.file.error = error
    with pytest.raises(pyfuse3.FUSEError):
        small.open()
    assert small.reason
    assert small.fs.reasons.of_agent(FakeNode.incarnation) == ""


def test_other_refusals_are_the_agents_last_error_too(small: Small) -> None:
    small.file.error = errors.MalformedError("not so")
    with refused("EINVAL"):
        small.open()
    assert small.fs.reasons.of_agent(FakeNode.incarnation) == small.reason


def test_control_characters_of_a_reason_are_escaped(small: Small) -> None:
    small.root.error = errors.MalformedError("a\nb\x1b[31m")
    with refused("EINVAL"):
        complete(small.ops.mkdir, 1, b"x\ny", 0o755, CONTEXT)
    assert small.reason.endswith("EINVAL place/x\\ny: a\\nb\\x1b[31m\n")
    assert small.reason.count("\n") == 1


def test_a_name_that_is_not_there_is_no_rejection(small: Small) -> None:
    with refused("ENOENT"):
        complete(small.ops.lookup, 1, b"none", CONTEXT)
    assert small.reason == ""


def test_a_name_that_is_not_yours_is_one(small: Small) -> None:
    small.root.error = errors.DeniedError("private")
    with refused("EACCES"):
        complete(small.ops.lookup, 1, b"x", CONTEXT)
    assert small.reason.endswith("EACCES place/x: private\n")


def test_a_refused_write_is_noted_for_who_opened_the_file(small: Small) -> None:
    fh = small.open()
    small.file.error = errors.MalformedError("bad line")
    with refused("EINVAL"):
        complete(small.ops.write, fh, 0, b"bytes of the caller's")
    assert small.reason.endswith("EINVAL place: bad line\n")


def test_an_unknown_descriptor_is_a_bug_not_a_crash(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    with refused("EIO"):
        complete(small.ops.read, 99, 0, 1)
    assert caplog.records


def test_an_inode_that_is_gone_is_not_there(small: Small) -> None:
    with refused("ENOENT"):
        complete(small.ops.getattr, 77, CONTEXT)


@pytest.mark.parametrize("name", [b".", b".."])
def test_dots_are_the_kernels(small: Small, name: bytes) -> None:
    with refused("ENOENT"):
        complete(small.ops.lookup, 1, name, CONTEXT)


@pytest.mark.parametrize("flags", [3, 4])
def test_an_unknown_way_to_rename_is_refused_with_a_reason(small: Small, flags: int) -> None:
    with refused("EINVAL"):
        complete(small.ops.rename, 1, b"a", 1, b"b", flags, CONTEXT)
    assert small.root.log == []
    assert " EINVAL " in small.reason


@pytest.mark.parametrize("flags", [0, linux.RENAME_NOREPLACE, linux.RENAME_EXCHANGE])
def test_renaming(small: Small, flags: int) -> None:
    complete(small.ops.rename, 1, b"a", 2, b"b", flags, CONTEXT)
    assert small.root.log == [("rename", "a", 2, "b", flags)]


# attributes


def test_attributes_are_the_nodes(small: Small) -> None:
    entry = complete(small.ops.getattr, 2, CONTEXT)
    assert (entry.st_ino, entry.st_mode, entry.st_size) == (2, stat.S_IFREG | 0o644, 10)
    assert (entry.st_uid, entry.st_gid, entry.st_nlink) == (7, 8, 1)
    assert entry.st_mtime_ns == entry.st_ctime_ns == 1_500_000_000
    assert entry.st_blocks == 1


def test_a_name_that_was_looked_up_is_remembered(small: Small) -> None:
    complete(small.ops.lookup, 1, b"file", CONTEXT)
    complete(small.ops.getattr, 2, CONTEXT)
    assert small.fs.cache._known == {2: 1}


def test_only_what_is_asked_for_is_changed(small: Small) -> None:
    entry = pyfuse3.EntryAttributes()
    entry.st_mode, entry.st_uid, entry.st_size = pyfuse3.ModeT(0o100600), 5, 3
    complete(small.ops.setattr, 2, entry, asked(mode=True), None, CONTEXT)
    complete(small.ops.setattr, 2, entry, asked(uid=True), None, CONTEXT)
    complete(small.ops.setattr, 2, entry, asked(), None, CONTEXT)
    assert small.file.log == [NewAttributes(mode=0o600), NewAttributes(uid=5)]


def test_a_file_is_open_while_it_is_truncated_by_its_path(small: Small) -> None:
    entry = pyfuse3.EntryAttributes()
    entry.st_size = 3
    complete(small.ops.setattr, 2, entry, asked(size=True), None, CONTEXT)
    assert small.file.log == [("truncate", 3), ("release",)]


def test_an_open_file_is_truncated_through_its_descriptor(small: Small) -> None:
    fh = small.open()
    entry = pyfuse3.EntryAttributes()
    entry.st_size = 3
    complete(small.ops.setattr, 2, entry, asked(size=True), fh, CONTEXT)
    assert small.file.log == [("truncate", 3)]


# descriptors


def test_descriptors_are_never_given_twice(small: Small) -> None:
    first = small.open()
    complete(small.ops.release, first)
    assert small.open() != first
    listing = complete(small.ops.opendir, 1, CONTEXT)
    assert listing not in (first, first + 1)


def test_a_released_descriptor_is_gone(small: Small) -> None:
    fh = small.open()
    complete(small.ops.release, fh)
    complete(small.ops.release, fh)
    assert small.file.log == [("release",)]
    with refused("EIO"):
        complete(small.ops.read, fh, 0, 1)


def test_reads_and_writes_go_to_the_handle(small: Small) -> None:
    fh = small.open()
    assert complete(small.ops.read, fh, 2, 3) == b"234"
    assert complete(small.ops.write, fh, 4, b"ab") == 2
    complete(small.ops.flush, fh)
    complete(small.ops.fsync, fh, False)
    assert small.file.log == [("write", 4, b"ab"), ("flush",), ("sync",)]


def test_what_waits_to_be_written_is_on_its_owners_account(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand threads that wrote a mebibyte each had the daemon hold all of it."""
    accounts, held = small.fs.runtime.accounts, []

    async def turn(*_: Any, **__: Any) -> None:
        held.append(accounts.use(ME.uid, Resource.MEMORY))

    monkeypatch.setattr(small.ops.scheduler, "turn", turn)
    monkeypatch.setattr(small.ops.scheduler, "is_asked", lambda: True)
    fh = small.open()
    held.clear()
    complete(small.ops.write, fh, 0, b"x" * (1 << 20))
    assert held == [2 << 20]
    assert accounts.use(ME.uid, Resource.MEMORY) == 0
    most = accounts.limit(Resource.MEMORY) - 1
    accounts.charged(Payer(ME.uid, reserve=Reserve.OWNER), Resource.MEMORY, most)
    with refused("EDQUOT"):
        complete(small.ops.write, fh, 0, b"x" * (1 << 20))
    # a verb is obeyed whatever is held
    assert complete(small.ops.write, fh, 0, b"stop\n") == 5


def test_errors_of_flush_reach_close(small: Small) -> None:
    fh = small.open()
    small.file.error = errors.WrongStateError("too late")
    with refused("EBUSY"):
        complete(small.ops.flush, fh)


def test_a_file_without_poll_is_always_ready(small: Small) -> None:
    assert complete(small.ops.poll, 2, small.open(), None, CONTEXT) == 0x5


# directories


class Replies:
    """Takes so many directory entries, then says that the buffer is full."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[tuple[bytes, int]] = []

    def __call__(self, token: Any, name: bytes, entry: Any, next_id: int) -> bool:
        if len(self.taken) == self.room:
            return False
        self.taken.append((name, next_id))
        return True


def page(
    small: Small, monkeypatch: pytest.MonkeyPatch, fh: int, start: int, room: int
) -> list[tuple[bytes, int]]:
    replies = Replies(room)
    monkeypatch.setattr(pyfuse3, "readdir_reply", replies)
    complete(small.ops.readdir, fh, start, None)
    return replies.taken


@pytest.mark.parametrize("room", [1, 2, 3, 100])
def test_a_directory_is_listed_page_by_page_each_name_once(
    small: Small, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    small.root.names = {f"f{n}": FakeNode(10 + n, stat.S_IFREG | 0o644) for n in range(7)}
    fh = complete(small.ops.opendir, 1, CONTEXT)
    seen: list[bytes] = []
    start = 0
    while taken := page(small, monkeypatch, fh, start, room):
        seen += [name for name, _ in taken]
        start = taken[-1][1]
    assert seen == [f"f{n}".encode() for n in range(7)]
    assert small.fs.cache._known == {10 + n: 1 for n in range(7)}


def test_names_of_a_large_directory_are_paid_before_they_are_read(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error loses what the reply has, and nothing would tell whose the names are."""
    small.root.large = True
    small.root.names = {f"f{n}": FakeNode(10 + n, stat.S_IFREG | 0o644) for n in range(3000)}
    fh = complete(small.ops.opendir, 1, CONTEXT)
    first = page(small, monkeypatch, fh, 0, 10_000)
    accounts = small.fs.runtime.accounts
    held = accounts.use(ME.uid, Resource.MEMORY)
    rest = accounts.limit(Resource.MEMORY) - held - 1
    accounts.charged(Payer(ME.uid, reserve=Reserve.OWNER), Resource.MEMORY, rest)
    for _ in range(3):
        with refused("EDQUOT"):
            page(small, monkeypatch, fh, len(first), 10_000)
    assert page(small, monkeypatch, fh, 10, 2000) == first[10:], "no more than were paid"
    known = small.fs.cache._known
    assert {known[node.inode] for node in small.root.names.values()} == {0, 1, 2}
    accounts.pay_anyway(Payer(ME.uid), Resource.MEMORY, -rest)
    while more := page(small, monkeypatch, fh, len(first), 500):
        first += more
    assert [name for name, _ in first] == [os.fsencode(name) for name in small.root.names]
    complete(small.ops.releasedir, fh)
    assert accounts.use(ME.uid, Resource.MEMORY) == 0


def test_a_listing_is_what_was_there_when_it_was_opened(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    fh = complete(small.ops.opendir, 1, CONTEXT)
    small.root.names["later"] = FakeNode(3)
    assert [name for name, _ in page(small, monkeypatch, fh, 0, 9)] == [b"file"]


def test_a_name_that_went_meanwhile_is_left_out(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.root.names["more"] = FakeNode(3)
    fh = complete(small.ops.opendir, 1, CONTEXT)
    small.file.error = errors.MissingError("gone")
    assert page(small, monkeypatch, fh, 0, 9) == [(b"more", 2)]


def test_a_closed_listing_is_gone(small: Small) -> None:
    fh = complete(small.ops.opendir, 1, CONTEXT)
    complete(small.ops.releasedir, fh)
    complete(small.ops.releasedir, fh)
    with refused("EIO"):
        complete(small.ops.readdir, fh, 0, None)


def test_who_may_not_list_is_refused_when_it_opens(small: Small) -> None:
    small.root.error = errors.DeniedError("not yours")
    with refused("EACCES"):
        complete(small.ops.opendir, 1, CONTEXT)
    assert small.reason.endswith("EACCES place: not yours\n")


def test_what_a_node_does_not_know_nobody_may(small: Small) -> None:
    for operation, args in (
        (small.ops.symlink, (1, b"a", b"b")),
        (small.ops.unlink, (1, b"file")),
        (small.ops.rmdir, (1, b"file")),
        (small.ops.mknod, (1, b"a", stat.S_IFIFO, 0)),
        (small.ops.link, (2, 1, b"a")),
        (small.ops.create, (1, b"a", 0o644, os.O_RDWR)),
    ):
        with refused("EPERM"):
            complete(operation, *args, CONTEXT)


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxfs.reasons._KEPT", 3)
    reasons = Reasons()
    for uid in range(10):
        reasons.note(errors.DeniedError("x" * 5000), Caller(uid, 0, 1), "p", None)
    assert reasons.of_caller(Caller(6, 0, 1)) == ""
    assert len(reasons.of_caller(Caller(9, 0, 1))) == 1001


def in_agent(uid: int, index: int, incarnation: str) -> Caller:
    return Caller(uid, uid, index, AgentIndex(index), Incarnation(incarnation))


def test_reasons_are_kept_by_incarnation_inside_an_agent(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons()
    one, two = in_agent(5, 1, "aa"), in_agent(5, 2, "bb")
    with caplog.at_level(logging.INFO, "ctxd.rejected"):
        reasons.note(errors.DeniedError("no"), one, "p", None)
    assert reasons.of_caller(one)
    assert not reasons.of_caller(two)
    assert not reasons.of_caller(Caller(5, 5, 3))
    assert "aa: " in caplog.text


# bounds


def test_a_caller_has_so_many_files_open_and_no_more(small: Small) -> None:
    opened = [small.open() for _ in range(OPEN_FILES)]
    with pytest.raises(pyfuse3.FUSEError) as caught:
        small.open()
    assert caught.value.errno == errno.EDQUOT
    assert "owner_descriptors" in small.reason
    complete(small.ops.release, opened[0])
    assert small.open() not in opened


def test_open_directories_count_too_and_are_given_back(small: Small) -> None:
    for _ in range(3):
        opened = [complete(small.ops.opendir, 1, CONTEXT) for _ in range(OPEN_FILES)]
        with pytest.raises(pyfuse3.FUSEError):
            complete(small.ops.opendir, 1, CONTEXT)
        for number in opened:
            complete(small.ops.releasedir, number)


# what was refused lately


def test_a_caller_that_is_refused_often_is_counted_and_takes_no_place_of_others() -> None:
    reasons = Reasons()
    loud, quiet = in_agent(5, 1, "aa"), in_agent(5, 2, "bb")
    reasons.note(errors.DeniedError("quiet"), quiet, "q", None)
    for number in range(1000):
        reasons.note(errors.DeniedError(f"no {number}"), loud, "p", None)
    found = reasons.recent(Caller(5, 5, 3), None)
    assert [r["reason"] for r in found] == ["quiet", *(f"no {n}" for n in range(10))]
    assert [r["more"] for r in found] == [0] * 10 + [990]


def test_refusals_are_told_to_the_owner_and_to_who_was_refused() -> None:
    reasons = Reasons()
    one, two = in_agent(5, 1, "aa"), in_agent(6, 2, "bb")
    reasons.note(errors.DeniedError("one"), one, "p", None)
    reasons.note(errors.DeniedError("two"), two, "p", None)
    assert [r["reason"] for r in reasons.recent(Caller(5, 5, 3), None)] == ["one"]
    assert [r["reason"] for r in reasons.recent(two, None)] == ["two"]
    assert reasons.recent(Caller(7, 7, 3), None) == []
    assert reasons.recent(Caller(5, 5, 3, known=False), None) == []


def test_refusals_that_are_kept_are_bounded() -> None:
    reasons = Reasons()
    for number in range(50):  # each of an owner of its own
        for _ in range(20):
            error = errors.DeniedError("\x1b" + "x" * 5000)
            reasons.note(error, in_agent(number, number, f"i{number}"), "p" * 5000, None)
    kept = list(reasons._all())
    assert len(kept) <= 32 * 32 * 16
    assert len(reasons._refusals) == 32
    assert all(len(r.path) <= 300 and len(r.reason) <= 300 for r in kept)
    assert kept[0].reason.startswith("\\x1b")


# what is told when nobody is answered


def test_what_is_at_hand_is_told_with_who_asked_and_for_how_long(small: Small) -> None:
    number, may_end = small.open(), threading.Event()
    told: list[str] = []

    def wait() -> None:
        may_end.wait(10)

    small.ops.opened.files[number].syncing = lambda: wait  # type: ignore[method-assign]

    async def ask() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(small.ops.fsync, number, False)
            await trio.testing.wait_all_tasks_blocked()
            # by a thread, as when the event loop is stuck
            told.extend(await trio.to_thread.run_sync(small.ops.at_hand))
            may_end.set()

    trio.run(ask)
    (line,) = told
    who = r"that pid \d+ uid \d+ opened \(its operators\)"
    assert re.fullmatch(rf"fsync {number} of file {number} {who}, 0\.\d s old", line)
    assert small.ops.at_hand() == []
