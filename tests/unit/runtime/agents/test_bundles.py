"""Packs of worktrees that cross to other machines: made, unpacked, and forged. Git is real."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Callable
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.agents import bundles, workspace
from runtime.agents.bundles import Given, Left
from runtime.agents.workspace import Worktree, WorktreeState
from runtime.cell import cell
from runtime.errors import CtxError, MalformedError, TooLargeError, WrongStateError
from runtime.records.model import Agent
from tests.worlds.records import World, inside, operator

BASE = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nowhere",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}
GATHER = str(cell.native("gather"))
MOST = 1 << 20


def git(directory: Path, *words: str, data: bytes = b"") -> str:
    command = ["git", "-C", str(directory), *words]
    done = subprocess.run(command, env=BASE, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="replace").strip()


def commit(directory: Path, name: str, text: str = "text\n") -> str:
    (directory / name).write_text(text)
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", name)
    return git(directory, "rev-parse", "HEAD")


async def here(
    agent: Agent,
    argv: list[str],
    cwd: str,
    env: dict[str, str],
    *,
    out: Path | None = None,
    data: bytes = b"",
) -> tuple[int, str]:
    """A cell without walls; standard output is apart if it is wanted."""
    done = subprocess.run(
        argv, cwd=cwd, env={**BASE, **env}, input=data, capture_output=True, check=False
    )
    if out is None:
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")
    out.write_bytes(done.stdout)
    return done.returncode, done.stderr.decode(errors="replace")


class Two:
    """A parent's repository at a lead, and what is at the host, on one machine."""

    def __init__(self, world: World, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parent = world.agents.births.create(operator(1000), "boss")
        world.agents.journal.update(self.parent, exec="true")
        world.live(self.parent)
        self.child = world.agents.births.create(inside(self.parent), "kid")
        self.repo, self.pack = base / "repo", base / "pack"
        self.work, self.git, self.back = base / "work", base / "git", base / "back"
        for path in (self.repo, self.work, self.git):
            path.mkdir()
        git(self.repo, "init", "-q", "-b", "main")
        git(self.repo, "config", "user.name", "A Parent")
        self.base = commit(self.repo, "file")
        monkeypatch.setattr(bundles, "WORKSPACE", str(self.work))
        monkeypatch.setattr(bundles, "REPOSITORY", str(self.git))

    def call(self, function: Callable[..., Any], *words: Any, **more: Any) -> Any:
        return trio.run(partial(function, *words, **more))

    def send(self, most: int = MOST) -> Worktree:
        planned = self.call(workspace.plan, here, self.parent, self.child, str(self.repo))
        send = partial(here, out=self.pack)
        add = partial(workspace.add, send=send, most=most)
        made: Worktree = self.call(add, here, self.parent, planned, "/nowhere")
        return made

    def unpack(self, worktree: Worktree, data: bytes | None = None) -> Given:
        data = self.pack.read_bytes() if data is None else data
        given = Given.of(worktree)
        self.call(bundles.unpack, partial(here, data=data), self.child, given)
        return given

    def keep(self, given: Given, most: int = MOST, *settled: str) -> Left:
        run = partial(here, out=self.back)
        left: Left = self.call(bundles.keep, run, self.child, given, GATHER, settled, most)
        return left

    def receive(self, worktree: Worktree, name: str, data: bytes | None = None) -> None:
        data = self.back.read_bytes() if data is None else data
        self.call(bundles.receive, partial(here, data=data), self.parent, worktree, name, MOST)

    def take(self, worktree: Worktree) -> Worktree:
        take = partial(workspace.take, settled=None, most=MOST)
        found = self.call(take, here, self.parent, worktree, GATHER)
        assert isinstance(found, Worktree)
        return found


@pytest.fixture
def two(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(world, tmp_path, monkeypatch)


def test_a_repository_crosses_and_its_commits_come_back(two: Two) -> None:
    commit(two.repo, "other")
    worktree = two.send()
    assert worktree.size == two.pack.stat().st_size > 0
    assert git(two.repo, "rev-parse", "ctx/kid") == worktree.base
    assert sorted(os.listdir(worktree.path)) == [".git"], "no files are made here"
    given = two.unpack(worktree)
    assert (two.work / "other").read_text() == "text\n"
    assert git(two.work, "branch", "--show-current") == "ctx/kid"
    assert git(two.work, "log", "--format=%s") == "other\nfile"
    assert git(two.work, "config", "user.name") == "A Parent"
    assert git(two.work, "status", "--porcelain") == ""
    new = commit(two.work, "new")
    left = two.keep(given)
    assert (left.commit, left.size, left.why) == (new, two.back.stat().st_size, "")
    two.receive(worktree, left.commit)
    found = two.take(worktree)
    assert (found.state, found.commit, found.reason) == (WorktreeState.FETCHED, new, "")
    assert git(two.repo, "show", "ctx/kid:new") == "text"
    git(two.repo, "fsck", "--strict")
    two.receive(worktree, left.commit)  # as after a crash
    assert two.take(found).state is WorktreeState.FETCHED


def test_a_child_goes_on_with_what_it_had_committed(two: Two) -> None:
    """Also if that could not be taken over."""
    worktree = two.send()
    given = two.unpack(worktree)
    first = commit(two.work, "first")
    two.receive(worktree, two.keep(given).commit)
    moved = git(two.repo, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "by its parent")
    git(two.repo, "update-ref", "refs/heads/ctx/kid", moved)
    kept = two.take(worktree)
    assert kept.state is WorktreeState.KEPT and "the branch was moved" in kept.reason
    send = partial(here, out=two.pack)
    again = two.call(workspace.send_again, here, send, two.parent, kept, MOST)
    assert again.sent == first and again.size == two.pack.stat().st_size
    given = two.unpack(again)
    assert (two.work / "first").exists()
    second = commit(two.work, "second")
    two.receive(again, two.keep(given).commit)
    git(two.repo, "update-ref", "refs/heads/ctx/kid", worktree.base)
    assert two.take(again).commit == second
    assert git(two.repo, "log", "--format=%s", "ctx/kid") == "second\nfirst\nfile"


def test_nothing_is_committed(two: Two) -> None:
    worktree = two.send()
    left = two.keep(two.unpack(worktree))
    assert (left.commit, left.size, left.why) == (worktree.base, 0, "")
    assert two.take(worktree).state is WorktreeState.FETCHED


def test_it_is_unpacked_once_more(two: Two) -> None:
    worktree = two.send()
    two.unpack(worktree)
    (two.work / "left").write_text("of an earlier try")
    (two.git / "index.lock").touch()
    two.unpack(worktree)
    assert git(two.work, "status", "--porcelain") == ""


def test_what_is_too_large_does_not_go(two: Two) -> None:
    with pytest.raises(TooLargeError, match="artifact_max"):
        two.send(100)


def test_what_is_too_large_does_not_come_back(two: Two) -> None:
    given = two.unpack(two.send())
    commit(two.work, "new", os.urandom(3000).hex())
    left = two.keep(given, 1000)
    assert left.size == 0 and "more than 1000 bytes (artifact_max)" in left.why


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("echo x > more", "uncommitted: more"),
        ("rm file", "uncommitted: file"),
        ("git init -q sub", "uncommitted: ./sub/.git"),
        ("git commit -q --allow-empty -m x; git reset -q --hard HEAD^", "1 of its commits are on"),
        ("git checkout -q -b other; git branch -D ctx/kid", "it has no branch ctx/kid any more"),
        ("mkdir -p ../git/ctx/below", "worktrees of its own children are kept in it"),
    ],
)
def test_what_would_be_lost_is_kept(two: Two, spoil: str, why: str) -> None:
    given = two.unpack(two.send())
    subprocess.run(["sh", "-ec", spoil], cwd=two.work, env=BASE, check=True)
    assert two.keep(given).why.startswith(why)


def test_worktrees_of_children_may_go_with_it(two: Two) -> None:
    given = two.unpack(two.send())
    (two.git / "ctx/below").mkdir(parents=True)
    assert two.keep(given, MOST, "below").why == ""


def test_nothing_is_obeyed_that_the_agent_left(two: Two, tmp_path: Path) -> None:
    """Neither its configuration and hooks, nor what is in the place of ours."""
    given, marker = two.unpack(two.send()), tmp_path / "marker"
    new = commit(two.work, "new")
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {marker}\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "filter.x.clean"):
        git(two.work, "config", key, str(script))
    (two.work / ".gitattributes").write_text("* filter=x\n")
    git(two.work, "config", "core.worktree", "/")
    (two.git / "hooks/post-index-change").symlink_to(script)
    (two.git / "ctxfs").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    left = two.keep(given)
    assert (left.commit, left.why) == (new, "uncommitted: .gitattributes ")
    assert not marker.exists() and os.listdir(tmp_path / "elsewhere") == []


# a hostile lead


@pytest.mark.parametrize("data", [b"", b"PACK\0\0\0\2\0\0\0\1"])
def test_what_is_no_pack_makes_no_repository(two: Two, data: bytes) -> None:
    with pytest.raises(WrongStateError, match="its repository cannot be made"):
        two.unpack(two.send(), data)


def test_a_pack_that_lacks_something_makes_no_repository(two: Two) -> None:
    worktree = two.send()
    commit(two.repo, "other")
    revisions = b"main\n^ctx/kid\n"
    command = ["git", "-C", str(two.repo), "pack-objects", "--revs", "--stdout", "-q"]
    data = subprocess.run(command, env=BASE, input=revisions, capture_output=True, check=True)
    with pytest.raises(WrongStateError):
        two.unpack(worktree, data.stdout)


@pytest.mark.parametrize(
    "said",
    [
        {"base": "HEAD"},
        {"base": "-" * 40},
        {"base": "a" * 41},
        {"config": {"core.sshcommand": "touch x"}},
        {"config": {"core.hookspath": "/x"}},
        {"config": {"user.name": "x\n[core]\n\tpager = x"}},
        {"config": {"user.name": 1}},
        {"config": []},
        {"differs": {"result": "x"}},
        {"differs": {"copied": "x\ny"}},
        {"more": 1},
    ],
)
def test_a_lead_says_something_else(said: dict[str, Any]) -> None:
    right = {"base": "a" * 40, "config": {"user.name": "A Parent"}, "differs": {"copied": "x"}}
    assert Given.read(right, "kid").said() == right
    with pytest.raises(MalformedError):
        Given.read({**right, **said}, "kid")


# a hostile host


def packed(kind: int, text: bytes, size: int | None = None) -> bytes:
    """A pack of one object, which may say of itself that it is longer."""
    size = len(text) if size is None else size
    head = [kind << 4 | size & 15]
    size >>= 4
    while size:
        head[-1] |= 0x80
        head.append(size & 0x7F)
        size >>= 7
    data = b"PACK" + (2).to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes(head)
    data += zlib.compress(text)
    return data + sha1(data).digest()


BLOB, COMMIT = 3, 1


def name_of(kind: str, text: bytes) -> str:
    return sha1(f"{kind} {len(text)}\0".encode() + text).hexdigest()


def test_a_commit_that_is_not_in_the_pack(two: Two) -> None:
    worktree = two.send()
    given = two.unpack(worktree)
    commit(two.work, "new")
    two.keep(given)
    two.receive(worktree, "f" * 40)
    found = two.take(worktree)
    assert found.state is WorktreeState.KEPT and "missing" in found.reason
    assert git(two.repo, "rev-parse", "ctx/kid") == worktree.base


def test_a_commit_without_its_tree(two: Two) -> None:
    worktree = two.send()
    text = f"tree {'e' * 40}\nparent {worktree.base}\nauthor x <x@y> 1 +0000\n"
    whole = f"{text}committer x <x@y> 1 +0000\n\nx\n".encode()
    two.receive(worktree, name_of("commit", whole), packed(COMMIT, whole))
    found = two.take(worktree)
    assert found.state is WorktreeState.KEPT and "missing" in found.reason
    assert git(two.repo, "rev-parse", "ctx/kid") == worktree.base


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 1000,
        packed(BLOB, b"x" * 100)[:-1] + b"x",
        packed(BLOB, b"x", 1 << 40),
        packed(2, b"100644 ../x\0" + b"a" * 20)[:30],
    ],
)
def test_what_is_no_pack_is_not_received(two: Two, data: bytes) -> None:
    worktree = two.send()
    with pytest.raises(CtxError, match="what it committed cannot be unpacked"):
        two.receive(worktree, "a" * 40, data)
    assert sorted(os.listdir(Path(worktree.place))) == ["config", "dotgit", "git", "work"]


def test_an_object_that_fills_the_memory(two: Two) -> None:
    """Few bytes that stand for gigabytes end the program, and nothing else."""
    base = b"x" * (1 << 20)
    def number(value: int) -> bytes:
        found = bytearray()
        while value >= 0x80:
            found.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*found, value])

    inserted = bytes([0x80 | 0x10 | 0x20]) + (0xFFFF).to_bytes(2, "little")
    count = 70_000
    delta = number(len(base)) + number(count * 0xFFFF) + inserted * count
    body = b"PACK" + (2).to_bytes(4, "big") + (2).to_bytes(4, "big")
    first = packed(BLOB, base)[12:-20]
    size, head = len(delta), [6 << 4 | len(delta) & 15]
    size >>= 4
    while size:
        head[-1] |= 0x80
        head.append(size & 0x7F)
        size >>= 7
    back, offset = len(first), bytearray()
    offset.append(back & 0x7F)
    back >>= 7
    while back:
        back -= 1
        offset.insert(0, 0x80 | back & 0x7F)
        back >>= 7
    body += first + bytes(head) + bytes(offset) + zlib.compress(delta)
    worktree = two.send()
    assert len(body) < 10_000
    with pytest.raises(CtxError, match=r"[Oo]ut of memory"):
        two.receive(worktree, "a" * 40, body + sha1(body).digest())


@pytest.mark.parametrize("name", [".gitmodules", ".GIT", "../x"])
def test_a_tree_that_would_harm_who_checks_it_out(two: Two, name: str) -> None:
    worktree = two.send()
    given = two.unpack(worktree)
    text = b'[submodule "x"]\n\tpath = x\n\turl = -u./payload\n'
    blob = git(two.work, "hash-object", "-w", "--stdin", data=text)
    entry = f"100644 {name}\0".encode() + bytes.fromhex(blob)
    words = "hash-object", "-t", "tree", "-w", "--stdin", "--literally"
    tree = git(two.work, *words, data=entry)
    new = git(two.work, "commit-tree", tree, "-p", worktree.base, "-m", "x")
    git(two.work, "update-ref", "refs/heads/ctx/kid", new)
    left = two.keep(given)
    two.receive(worktree, left.commit)
    found = two.take(worktree)
    assert found.state is WorktreeState.KEPT and "errors in its objects" in found.reason
    assert git(two.repo, "rev-parse", "ctx/kid") == worktree.base


@pytest.mark.parametrize(
    "said",
    [
        {"commit": "HEAD"},
        {"commit": "../../config"},
        {"commit": ["a" * 40]},
        {"size": -1},
        {"size": True},
        {"size": "1"},
        {"keep": "x"},
        {"why": 1},
    ],
)
def test_a_host_says_something_else(said: dict[str, Any]) -> None:
    right = {"commit": "a" * 40, "size": 5, "path": "/p", "keep": 1.0, "why": ""}
    assert Left.read(right) == Left(commit="a" * 40, size=5, path="/p", keep=1.0)
    with pytest.raises(MalformedError):
        Left.read({**right, **said})


def test_what_a_host_says_is_a_line() -> None:
    left = Left.read({"path": "/a\nb\x1b[2J", "why": "x\n\ny" + "z" * 10_000})
    assert "\n" not in left.where("n2") and "\x1b" not in left.where("n2")
    assert left.why.startswith("x y") and len(left.why) == 1000
