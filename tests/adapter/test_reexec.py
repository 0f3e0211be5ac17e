"""What is open in one daemon, saved and restored in the next: each kind goes on as it was."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from ctxfs import filesystem
from ctxfs.files.folders import ROWS
from ctxfs.filesystem import Filesystem
from ctxfs.operations import Operations
from ctxfs.tree import openfiles
from ctxfs.tree.nodes import OpenFile, OpenGone
from runtime.authority.accounts import Resource
from runtime.kernel.handover import Descriptors, read_back, written
from tests.worlds.records import ROOT, inside
from tests.worlds.tree import CONTEXT, OWN_CONTEXT, Mounted, Waiter, complete, refused

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
        "cache": base.cache.save(),
        "reasons": base.reasons.save(),
        "durable": base.durable.save(descriptors),
        "folders": base.folders.save(descriptors),
        "open": operations.save(descriptors),
    })))
    for charges in operations._charges.values():
        for charge in charges:
            charge.release()
    for opened in operations._open_files.values():
        if isinstance(opened, openfiles.OpenRow):
            opened._charge(0)
    mounted.fs = Filesystem(base.runtime)
    mounted.base = mounted.fs.base
    mounted.ops = Operations(mounted.fs)
    mounted.base.restore(saved["base"])
    mounted.base.cache.restore(saved["cache"])
    mounted.base.reasons.restore(saved["reasons"])
    mounted.base.durable.restore(saved["durable"], mounted.fs.space_at)
    mounted.base.folders.restore(saved["folders"], ROWS)
    mounted.ops.restore(saved["open"])
    return descriptors.kept


def opened(mounted: Mounted, fh: int) -> OpenFile:
    return mounted.ops._open_files[fh]


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
    with refused("ENOENT"):
        mounted.flush(writer)
    mounted.flush(writer)  # close(2) of another descriptor of the same
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
    """``shared/s``, with 5,000 files."""
    mounted.agents.spaces.adopt("s", 0)
    space = mounted.world.state / "tree/shared/s"
    space.mkdir()
    for number in range(5000):
        (space / f"f{number}").touch()
    return space


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("path", ["agent", D, "shared/s"])
def test_a_directory_is_listed_on(
    mounted: Mounted, path: str, monkeypatch: pytest.MonkeyPatch
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
    shared = path == "shared/s"
    found = os.listdir(mounted.world.state / "tree" / path) if shared else mounted.list(path)
    assert len(first.names) == 5 and sorted(names) == sorted(found)
    assert read_names(mounted, fh) == [os.fsencode(name) for name in names]
    complete(mounted.ops.releasedir, fh)


def test_of_a_large_directory_no_more_names_pass_than_were_read(
    mounted: Mounted, large: Path
) -> None:
    """Whatever was removed and made since, the others are told once."""
    fh = complete(mounted.ops.opendir, mounted.inode("shared/s"), CONTEXT)
    first = read_names(mounted, fh)[:500]
    complete(mounted.ops.releasedir, fh)
    fh = complete(mounted.ops.opendir, mounted.inode("shared/s"), CONTEXT)
    listing = mounted.ops._listings[fh]
    known, size = list(listing.names), listing.size
    assert len(known) < 2000 and known[:500] == [os.fsdecode(name) for name in first]
    succeed(mounted)
    listing = mounted.ops._listings[fh]
    assert (listing.names, listing.size, listing.ended) == (known, size, False)
    (large / known[0]).unlink()
    (large / "made").touch()
    told = read_names(mounted, fh, 500)
    assert len(told) == len(set(told)) and not set(told) & set(first)
    assert {os.fsdecode(name) for name in told} | set(known[:500]) == {
        *(f"f{number}" for number in range(5000)), "made",
    }  # fmt: skip
    complete(mounted.ops.releasedir, fh)


# real files


@pytest.fixture
def space(mounted: Mounted) -> str:
    (mounted.world.state / "tree/shared/s").mkdir()
    mounted.agents.spaces.adopt("s", 0)
    return "shared/s"


def create(mounted: Mounted, directory: str, name: str, flags: int = os.O_RDWR) -> tuple[int, int]:
    """(handle, inode)"""
    inode = mounted.inode(directory)
    info, entry = complete(
        mounted.ops.create, inode, name.encode(), 0o644, flags, OWN_CONTEXT
    )
    return int(info.fh), int(entry.st_ino)


def test_a_real_file_keeps_its_inode_number_and_its_place(mounted: Mounted, space: str) -> None:
    complete(mounted.ops.mkdir, mounted.inode(space), b"d", 0o755, OWN_CONTEXT)
    fh, inode = create(mounted, f"{space}/d", "f")
    mounted.write(fh, b"one")
    directory = mounted.inode(f"{space}/d")
    succeed(mounted)
    assert mounted.inode(f"{space}/d/f") == inode and mounted.inode(f"{space}/d") == directory
    assert mounted.read(fh) == b"one"
    mounted.write(fh, b" two", 3)
    complete(
        mounted.ops.rename, directory, b"f", mounted.inode(space), b"g", 0, OWN_CONTEXT
    )
    assert mounted.read(fh) == b"one two" and mounted.inode(f"{space}/g") == inode
    mounted.close(fh)
    assert mounted.get(f"{space}/g") == "one two"


def test_a_file_without_a_name_is_read_on(mounted: Mounted, space: str) -> None:
    fh, inode = create(mounted, space, "f")
    mounted.write(fh, b"kept")
    complete(mounted.ops.unlink, mounted.inode(space), b"f", OWN_CONTEXT)
    for _ in range(2):
        succeed(mounted)
        assert mounted.read(fh) == b"kept"
        assert complete(mounted.ops.getattr, inode, CONTEXT).st_nlink == 0
    used = mounted.base.durable.unnamed()
    assert sum(used.values()) > 0
    mounted.close(fh)
    node = mounted.base.durable.known_node(inode)
    assert node is not None
    complete(mounted.ops.forget, [(inode, node.lookups)])
    assert mounted.base.durable.known_node(inode) is None
    assert mounted.base.durable.unnamed() == {}


def test_what_the_kernel_knows_is_forgotten_as_often_as_it_was_told(
    mounted: Mounted, space: str
) -> None:
    (mounted.world.state / "tree" / space / "f").touch()
    for _ in range(3):
        inode = mounted.inode(f"{space}/f")
    succeed(mounted)
    assert mounted.inode(f"{space}/f") == inode
    complete(mounted.ops.forget, [(inode, 3)])
    assert mounted.base.durable.known_node(inode) is not None
    complete(mounted.ops.forget, [(inode, 1)])
    assert mounted.base.durable.known_node(inode) is None


def test_another_file_of_the_same_inode_number_is_another(mounted: Mounted, space: str) -> None:
    """The backing is replaced while nobody has it open, by a line of a mount table."""
    path = mounted.world.state / "tree" / space / "f"
    path.touch()
    inode = mounted.inode(f"{space}/f")
    succeed(mounted)
    path.unlink()
    path.touch()
    assert mounted.inode(f"{space}/f") != inode


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_WRONLY, os.O_RDWR])
def test_how_a_real_file_was_opened_counts_on(mounted: Mounted, space: str, flags: int) -> None:
    fh, _ = create(mounted, space, "f", flags)
    before = opened(mounted, fh)
    mounted.write(fh, b"1")
    succeed(mounted)
    after = opened(mounted, fh)
    assert (after.direct, after.keep, after.flags) == (before.direct, before.keep, before.flags)
    mounted.write(fh, b"2", 0)
    mounted.close(fh)
    assert mounted.get(f"{space}/f") == ("12" if flags & os.O_APPEND else "2")


def test_a_space_that_is_not_on_the_disk_yet_keeps_its_number(mounted: Mounted) -> None:
    agent = mounted.agent("x")
    with mounted.as_(inside(mounted.world.live(agent))):
        inode = mounted.inode(f"{D}/artifact")
        succeed(mounted)
        assert mounted.inode(f"{D}/artifact") == inode
        fh, _ = create(mounted, f"{D}/artifact", "f")
        mounted.write(fh, b"x")
        succeed(mounted)
        mounted.close(fh)
        assert mounted.inode(f"{D}/artifact") == inode
        assert mounted.list(f"{D}/artifact") == ["f"]
    assert stat.S_ISDIR(mounted.stat(f"{D}/artifact").st_mode)


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
    for kind in kinds:
        own = kind.__init__.__code__.co_names
        changing = {name for name in own if name.startswith("_")} & {
            "_rest", "_text", "_staged", "_fresh", "_found", "_refused", "_content", "_truncated",
        }
        if changing and "__init__" in vars(kind):
            assert "save" in vars(kind) and "restore" in vars(kind), kind
