"""What is open in one daemon, saved and restored in the next: each kind goes on as it was."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from ctxfs import filesystem
from ctxfs.files.folders import ARTIFACT, ROWS
from ctxfs.filesystem import Filesystem
from ctxfs.operations import Operations
from ctxfs.tree import folders, openfiles
from ctxfs.tree.folders import Folders
from ctxfs.tree.nodes import OpenFile, OpenGone
from runtime.authority.accounts import Resource
from runtime.errors import MissingError
from runtime.kernel.handover import Descriptors, read_back, written
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, Mounted, Waiter, complete, refused

WRITE = os.O_WRONLY | os.O_TRUNC
APPEND = os.O_WRONLY | os.O_APPEND
D = "agent/x.d"
EVENTS = "home/0/agent/x/session/default/messages.jsonl"


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    mounted.make("x")
    return mounted


def succeed(mounted: Mounted) -> list[int]:
    """The next daemon takes the place of this one; the descriptors that it gets."""
    descriptors = Descriptors()
    base, operations = mounted.base, mounted.ops
    saved = read_back(b"".join(written({
        "base": base.save(descriptors),
        "cache": base.cache.save(descriptors),
        "reasons": base.reasons.save(descriptors),
        "folders": base.folders.save(descriptors),
        "open": operations.opened.save(descriptors),
    })))
    for charges in operations.opened.charges.values():
        for charge in charges:
            charge.release()
    for opened in operations.opened.files.values():
        if isinstance(opened, openfiles.OpenRow):
            opened._charge(0)
    mounted.fs = Filesystem(base.runtime)
    mounted.base = mounted.fs.base
    mounted.ops = Operations(mounted.fs)
    mounted.base.restore(saved["base"])
    mounted.base.cache.restore(saved["cache"])
    mounted.base.reasons.restore(saved["reasons"])
    mounted.base.folders.restore(saved["folders"], ROWS)
    mounted.ops.opened.restore(saved["open"])
    return descriptors.kept


def opened(mounted: Mounted, fh: int) -> OpenFile:
    return mounted.ops.opened.files[fh]


def test_a_control_that_is_half_written_is_committed_afterwards(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/exec", WRITE)
    mounted.write(fh, b"tr")
    succeed(mounted)
    assert mounted.get(f"{D}/exec") == ""
    mounted.write(fh, b"ue\n", 2)
    mounted.close(fh)
    assert mounted.get(f"{D}/exec") == "true\n"


def test_what_was_committed_is_not_committed_again(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/exec", WRITE)
    mounted.write(fh, b"true\n")
    mounted.flush(fh)
    succeed(mounted)
    mounted.put(f"{D}/exec", "false\n")
    mounted.close(fh)
    assert mounted.get(f"{D}/exec") == "false\n"


def test_what_is_appended_is_joined_to_the_value_of_then(mounted: Mounted) -> None:
    mounted.put(f"{D}/env", "A=1\n")
    fh = mounted.open(f"{D}/env", APPEND)
    mounted.write(fh, b"B=")
    succeed(mounted)
    mounted.put(f"{D}/env", "C=3\n", os.O_APPEND)
    mounted.write(fh, b"2\n", 2)
    mounted.close(fh)
    assert mounted.get(f"{D}/env") == "A=1\nC=3\nB=2\n"


def test_what_paths_led_to_is_not_looked_at_again(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/mount", WRITE)
    mounted.write(fh, b"/usr /mnt ro\n/v")
    found = opened(mounted, fh)._found  # type: ignore[attr-defined]
    assert found
    succeed(mounted)
    assert opened(mounted, fh)._found == found  # type: ignore[attr-defined]
    mounted.write(fh, b"ar /mnt/var ro\n", 15)
    mounted.close(fh)
    assert mounted.get(f"{D}/mount") == "/usr /mnt ro\n/var /mnt/var ro\n"


def test_a_line_that_is_checked_with_those_before_is(mounted: Mounted) -> None:
    """``policy`` keeps count over its lines."""
    lines = b"".join(b"allow x_t agent:a%d read\n" % number for number in range(200))
    fh = mounted.open(f"{D}/policy", WRITE)
    mounted.write(fh, lines + b"allow x_t agent:b re")
    succeed(mounted)
    more = b"ad\n" + b"".join(b"allow x_t agent:c%d read\n" % number for number in range(100))
    with refused("EDQUOT"):  # more than there may be, with those before
        mounted.write(fh, more, len(lines) + 20)
    complete(mounted.ops.release, fh)


def test_a_verb_that_is_half_said_acts_once_it_is(mounted: Mounted) -> None:
    mounted.put(f"{D}/exec", "true\n")
    fh = mounted.open(f"{D}/ctl", os.O_WRONLY)
    mounted.write(fh, b"sta")
    succeed(mounted)
    assert mounted.supervisor.said == []
    mounted.write(fh, b"rt\n", 3)
    assert mounted.supervisor.said == [("start", "x")]
    mounted.close(fh)


def test_a_history_gets_the_rest_of_a_line(mounted: Mounted) -> None:
    agent = mounted.agent("x")
    with mounted.as_(inside(mounted.world.live(agent))):
        fh = mounted.open(EVENTS, APPEND)
        mounted.write(fh, b'{"role":"user",')
        succeed(mounted)
        mounted.write(fh, b'"content":"hi"}\n', 15)
        mounted.close(fh)
        assert json.loads(mounted.get(EVENTS))["content"] == "hi"


def test_a_message_is_sent_once_and_whole(mounted: Mounted) -> None:
    mounted.put(f"{D}/mode", "turn\n")
    fh = mounted.open(f"{D}/inbox", os.O_WRONLY)
    mounted.write(fh, b"one ")
    succeed(mounted)
    mounted.write(fh, b"message\n", 4)
    mounted.close(fh)
    (line,) = mounted.get(f"{D}/queue").splitlines()
    assert json.loads(line)["text"] == "one message"


def test_what_is_read_in_parts_is_of_one_moment(mounted: Mounted) -> None:
    for number in range(20):
        mounted.make(f"n{number}")
    whole = mounted.get("agents").encode()
    fh = mounted.open("agents")
    head = mounted.read(fh, 0, 10)
    mounted.make("later")
    succeed(mounted)
    assert head + mounted.read(fh, 10) == whole
    mounted.close(fh)


def test_a_document_is_written_on(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/handoff.md", os.O_RDWR | os.O_TRUNC)
    absent = mounted.open(f"{D}/result.md", os.O_RDONLY)
    mounted.write(fh, b"begin ")
    assert opened(mounted, fh).fd in succeed(mounted)  # type: ignore[attr-defined]
    mounted.write(fh, b"end", 6)
    assert mounted.read(fh) == b"begin end" and mounted.read(absent) == b""
    mounted.close(fh)
    mounted.close(absent)
    assert mounted.get(f"{D}/handoff.md") == "begin end"


def test_a_document_of_lines_is_checked_on(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/input.jsonl", WRITE)
    mounted.write(fh, b'{"path":"/a"}\n{"path"')
    succeed(mounted)
    mounted.write(fh, b':"/b"}\n', 21)
    mounted.close(fh)
    assert mounted.get(f"{D}/input.jsonl") == '{"path":"/a"}\n{"path":"/b"}\n'


def test_output_is_read_on(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/log")
    mounted.read(fh, 0, 10)
    succeed(mounted)
    assert mounted.read(fh, 0) == mounted.get(f"{D}/log").encode()
    mounted.close(fh)


def test_an_object_that_is_gone_is_as_gone_as_before(mounted: Mounted) -> None:
    def answers(fhs: tuple[int, ...]) -> list[bytes]:
        return [mounted.read(fh) for fh in fhs]

    readers = tuple(mounted.open(f"{D}/{name}") for name in ("exec", "policy", "status"))
    answers(readers)
    writer = mounted.open(f"{D}/exec", WRITE)
    idle = mounted.open(f"{D}/env", WRITE)
    mounted.write(writer, b"true\n")
    complete(mounted.ops.rmdir, mounted.inode("agent"), b"x.d", CONTEXT)
    before = answers(readers)
    for _ in range(2):
        succeed(mounted)
        assert answers(readers) == before
        assert isinstance(opened(mounted, writer), OpenGone)
    for _ in range(2):  # close(2) of another descriptor of the same
        with refused("ENOENT"):
            mounted.flush(writer)
    mounted.flush(idle)
    with refused("ENOENT"):
        mounted.write(idle, b"A=1\n")
    for fh in (*readers, writer, idle):
        complete(mounted.ops.release, fh)


def test_rights_are_those_of_who_opened_it(mounted: Mounted) -> None:
    agent = mounted.agent("x")
    with mounted.as_(inside(mounted.world.live(agent))):
        fh = mounted.open(f"{D}/policy")
        mounted.read(fh)
    succeed(mounted)
    assert mounted.read(fh) is not None
    mounted.agents.journal.update(agent, status="dead")
    with refused("EACCES"):
        mounted.read(fh)


def test_charges_are_those_of_before(mounted: Mounted) -> None:
    accounts = mounted.agents.accounts
    kinds = (Resource.DESCRIPTORS, Resource.MEMORY)

    def uses() -> list[int]:
        return [accounts.use(0, kind) for kind in kinds]

    nothing = uses()
    control = mounted.open(f"{D}/env", WRITE)
    mounted.write(control, b"A=" + b"x" * 5000)
    listing = complete(mounted.ops.opendir, mounted.inode(D), CONTEXT)
    before = uses()
    assert before[0] == nothing[0] + 2 and before[1] > nothing[1] + 5000
    succeed(mounted)
    assert uses() == before
    complete(mounted.ops.release, control)
    complete(mounted.ops.releasedir, listing)
    assert uses() == nothing


class Told:
    """What readdir replies with."""

    def __init__(self, room: int) -> None:
        self.names: list[bytes] = []
        self._room = room

    def reply(self, token: Any, name: bytes, entry: Any, position: int) -> bool:
        if len(self.names) >= self._room:
            return False
        self.names.append(name)
        return True


def read_names(mounted: Mounted, fh: int, start: int = 0) -> list[bytes]:
    """What readdir tells from a position on."""
    told: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        while True:
            some = Told(10_000)
            patch.setattr(pyfuse3, "readdir_reply", some.reply)
            complete(mounted.ops.readdir, fh, start + len(told), None)
            if not some.names:
                return told
            told += some.names


@pytest.fixture
def large(mounted: Mounted) -> Path:
    """The artifacts of ``x``: more files than are read at once."""
    agent = mounted.agent("x")
    mounted.agents.documents.ensure(agent)
    real = mounted.agents.documents.path(agent, "artifact")
    for number in range(2500):
        (real / f"f{number}").touch()
    return real


@pytest.mark.parametrize("path", ["agent", D, f"{D}/artifact"])
def test_a_directory_is_listed_on(
    mounted: Mounted, large: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        mounted.make(f"n{number}")
    fh = complete(mounted.ops.opendir, mounted.inode(path), CONTEXT)
    first = Told(5)
    monkeypatch.setattr(pyfuse3, "readdir_reply", first.reply)
    complete(mounted.ops.readdir, fh, 0, None)
    for _ in range(2):
        succeed(mounted)
    names = [os.fsdecode(name) for name in (*first.names, *read_names(mounted, fh, 5))]
    found = os.listdir(large) if path == f"{D}/artifact" else mounted.list(path)
    assert len(first.names) == 5 and sorted(names) == sorted(found)
    assert read_names(mounted, fh) == [os.fsencode(name) for name in names]
    complete(mounted.ops.releasedir, fh)


def test_of_a_large_directory_no_more_names_pass_than_were_read(
    mounted: Mounted, large: Path
) -> None:
    """Whatever was removed and made since, the others are told once."""
    fh = complete(mounted.ops.opendir, mounted.inode(f"{D}/artifact"), CONTEXT)
    first = read_names(mounted, fh)[:500]
    complete(mounted.ops.releasedir, fh)
    fh = complete(mounted.ops.opendir, mounted.inode(f"{D}/artifact"), CONTEXT)
    listing = mounted.ops.opened.listings[fh]
    known, size = list(listing.names), listing.size
    assert len(known) < 2000 and known[:500] == [os.fsdecode(name) for name in first]
    succeed(mounted)
    listing = mounted.ops.opened.listings[fh]
    assert (listing.names, listing.size, listing.ended) == (known, size, False)
    (large / known[0]).unlink()
    (large / "made").touch()
    told = read_names(mounted, fh, 500)
    assert len(told) == len(set(told)) and not set(told) & set(first)
    assert {os.fsdecode(name) for name in told} | set(known[:500]) == {
        *(f"f{number}" for number in range(2500)), "made",
    }  # fmt: skip
    complete(mounted.ops.releasedir, fh)


# real files


@pytest.fixture
def running(mounted: Mounted) -> Iterator[Mounted]:
    """As the agent finds it."""
    with mounted.as_(inside(mounted.world.live(mounted.agent("x")))):
        yield mounted


A = f"{D}/artifact"


def create(mounted: Mounted, directory: str, name: str, flags: int = os.O_RDWR) -> tuple[int, int]:
    """(handle, inode)"""
    inode = mounted.inode(directory)
    info, entry = complete(
        mounted.ops.create, inode, name.encode(), 0o644, flags, CONTEXT
    )
    return int(info.fh), int(entry.st_ino)


def test_a_real_file_keeps_its_inode_number_and_its_place(running: Mounted) -> None:
    mounted = running
    complete(mounted.ops.mkdir, mounted.inode(A), b"d", 0o755, CONTEXT)
    fh, inode = create(mounted, f"{A}/d", "f")
    mounted.write(fh, b"one")
    directory = mounted.inode(f"{A}/d")
    succeed(mounted)
    assert mounted.inode(f"{A}/d/f") == inode and mounted.inode(f"{A}/d") == directory
    assert mounted.read(fh) == b"one"
    mounted.write(fh, b" two", 3)
    complete(mounted.ops.rename, directory, b"f", mounted.inode(A), b"g", 0, CONTEXT)
    assert mounted.read(fh) == b"one two" and mounted.inode(f"{A}/g") == inode
    mounted.close(fh)
    assert mounted.get(f"{A}/g") == "one two"


def test_a_file_without_a_name_is_read_on(running: Mounted) -> None:
    mounted = running
    fh, inode = create(mounted, A, "f")
    mounted.write(fh, b"kept")
    os.fsync(opened(mounted, fh).fd)  # type: ignore[attr-defined]  # it has blocks from now on
    complete(mounted.ops.unlink, mounted.inode(A), b"f", CONTEXT)
    for _ in range(2):
        succeed(mounted)
        assert mounted.read(fh) == b"kept"
        assert complete(mounted.ops.getattr, inode, CONTEXT).st_nlink == 0
    assert sum(mounted.base.folders.unnamed().values()) > 0
    mounted.close(fh)
    assert mounted.base.folders.unnamed() == {}
    with refused("ESTALE"):
        complete(mounted.ops.getattr, inode, CONTEXT)


def test_what_the_kernel_knows_is_forgotten_as_often_as_it_was_told(running: Mounted) -> None:
    mounted = running
    fh, _ = create(mounted, A, "f")
    mounted.close(fh)
    for _ in range(2):
        inode = mounted.inode(f"{A}/f")
    succeed(mounted)
    assert mounted.inode(f"{A}/f") == inode
    complete(mounted.ops.forget, [(inode, 3)])
    assert mounted.base.folders.knows(inode)
    complete(mounted.ops.forget, [(inode, 1)])
    assert not mounted.base.folders.knows(inode)


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_WRONLY, os.O_RDWR])
def test_how_a_real_file_was_opened_counts_on(running: Mounted, flags: int) -> None:
    mounted = running
    fh, _ = create(mounted, A, "f", flags)
    before = opened(mounted, fh)
    mounted.write(fh, b"1")
    succeed(mounted)
    after = opened(mounted, fh)
    assert (after.direct, after.keep, after.flags) == (before.direct, before.keep, before.flags)
    mounted.write(fh, b"2", 0)
    mounted.close(fh)
    assert mounted.get(f"{A}/f") == ("12" if flags & os.O_APPEND else "2")


def test_a_folder_that_is_not_on_the_disk_yet_keeps_its_number(running: Mounted) -> None:
    mounted = running
    inode = mounted.inode(A)
    succeed(mounted)
    assert mounted.inode(A) == inode
    fh, _ = create(mounted, A, "f")
    mounted.write(fh, b"x")
    succeed(mounted)
    mounted.close(fh)
    assert mounted.inode(A) == inode
    assert mounted.list(A) == ["f"]
    assert stat.S_ISDIR(mounted.stat(A).st_mode)


def test_what_version_0_2_knew_goes_on(running: Mounted) -> None:
    """Its numbers mean the same files; of what it served and this one does not, nothing is read."""
    mounted = running
    fh, _ = create(mounted, A, "f")
    mounted.write(fh, b"text")
    gone, _ = create(mounted, A, "gone")
    complete(mounted.ops.unlink, mounted.inode(A), b"gone", CONTEXT)
    agent, first = mounted.agent("x"), 1 << 62
    space = {"place": ["artifact", f"{agent.index}.{agent.incarnation}"], "entries": 1, "bytes": 4}
    shared = {"place": ["shared", "s"], "entries": None, "bytes": 0}
    node = {"gone": False, "listed": True, "space": 0, "parent": None, "name": ""}
    saved = folders.saved_before({"spaces": [space, shared], "nodes": [
        {**node, "inode": first + 2, "parent": 1, "name": "f"},
        {**node, "inode": first + 1},
        {**node, "inode": first + 3, "parent": 1, "name": "gone", "gone": True},
        {**node, "inode": first + 4, "space": 1},
    ]})  # fmt: skip
    base = mounted.base
    made = Folders(base.runtime, base.cache, base.disks)
    made.restore(read_back(b"".join(written(saved))), ROWS)
    assert made.get(first + 2).attributes().size == 4
    assert made.root(ARTIFACT, agent).inode == first + 1
    kept = {"fd": os.dup(opened(mounted, gone).fd), "flags": os.O_RDONLY}  # type: ignore[attr-defined]
    again = made.reopened(first + 3, mounted.identity.caller, kept, ROWS)
    assert again is not None and again.read(0, 10) == b""
    again.release()
    assert not made.knows(first + 4)
    for each in (fh, gone):
        mounted.close(each)


def test_what_version_0_2_had_open_of_other_trees_is_refused(mounted: Mounted) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    saved = {"kind": "_OpenDurable", "fd": fd, "keep": False, "flags": os.O_RDONLY}
    node = mounted.fs.opened_before((1 << 62) + 7, "shared/s/f")
    found = mounted.ops.opened._reopened(node, ROOT, saved)
    with pytest.raises(MissingError, match="open the file again"):
        found.read(0, 10)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


# caches


def test_pollers_are_woken_once_and_know_what_they_have_seen(mounted: Mounted) -> None:
    agent = mounted.agent("x")
    fh = mounted.open(f"{D}/status")
    mounted.read(fh)
    waiter = Waiter()
    inode = mounted.inode(f"{D}/status")
    quiet = complete(mounted.ops.poll, inode, fh, waiter, CONTEXT)
    succeed(mounted)
    assert waiter.notified == 1
    again = Waiter()
    assert complete(mounted.ops.poll, inode, fh, again, CONTEXT) == quiet
    mounted.world.live(agent)
    mounted.base.cache.poller.changed(inode)
    assert again.notified == 1 and waiter.notified == 1
    assert complete(mounted.ops.poll, inode, fh, None, CONTEXT) != quiet


def test_a_change_that_a_poller_has_not_seen_is_told_afterwards(mounted: Mounted) -> None:
    fh = mounted.open(f"{D}/status")
    mounted.read(fh)
    inode = mounted.inode(f"{D}/status")
    quiet = complete(mounted.ops.poll, inode, fh, None, CONTEXT)
    mounted.base.cache.poller.changed(inode)
    succeed(mounted)
    assert complete(mounted.ops.poll, inode, fh, None, CONTEXT) != quiet


def test_the_last_refusals_are_known(mounted: Mounted) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/mode", "nonsense\n")
    reason, refusals = mounted.reason, mounted.base.reasons.recent(ROOT, None)
    assert "nonsense" in reason and refusals
    succeed(mounted)
    assert mounted.reason == reason and mounted.base.reasons.recent(ROOT, None) == refusals


def test_every_kind_of_open_file_says_what_passes() -> None:
    """A new kind has to say what of it the next daemon cannot know."""
    kinds = {
        value
        for module in (openfiles, filesystem)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, OpenFile) and value is not OpenFile
    }
    changing = {"_rest", "_text", "_staged", "_fresh", "_inlet", "_refused", "_truncated"}
    for kind in kinds:
        handed = {name for cls in kind.__mro__ for name in vars(cls).get("HANDED", ())}
        own = set(kind.__init__.__code__.co_names) & changing
        assert own <= handed or "save" in vars(kind), kind
