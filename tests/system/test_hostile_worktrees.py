"""Children with a repository of their own, in real cells: what they may not do, how long
others wait for it, and that no commit is lost."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.agents.workspace import DIFFERENCES
from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    read,
    refusal,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

#: of calls that wait for nobody; the machine may be busy
PROMPT = 5.0
COMMIT = "git -c user.name=kid -c user.email=kid@localhost commit --quiet --all --message"
#: what the parent's git is while there is a file "hang" in its workspace
GIT = """#!/bin/sh
[ ! -e /hang/hang ] || exec sleep 1000
exec /usr/lib/git-core/git "$@"
"""

pytestmark = pytest.mark.settings(grace="300ms")


def git(path: Path, *words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(path), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Family:
    """A parent with a repository, and children of it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.repository = daemon.base / "repository"
        self.repository.mkdir()
        git(self.repository, "init", "--quiet", "--initial-branch=main")
        (self.repository / "file").write_text("content\n")
        git(self.repository, "add", "file")
        identity = ("-c", "user.name=you", "-c", "user.email=you@localhost")
        git(self.repository, *identity, "commit", "--quiet", "--message", "One")
        self.switch = daemon.base / "switch"
        self.switch.mkdir()
        wrapper = daemon.base / "git"
        wrapper.write_text(GIT)
        wrapper.chmod(0o755)
        self.own()
        self.boss = daemon.run(
            "boss",
            "sleep 1000",
            workspace=f"explicit_root:{self.repository}",
            mount=f"{wrapper} /usr/bin/git ro\n{self.switch} /hang ro\n",
        )
        wait_status(self.boss, "busy")

    def own(self) -> None:
        for each in (self.repository, *self.repository.rglob("*")):
            os.chown(each, AGENT_UID, AGENT_UID, follow_symlinks=False)

    def hang(self) -> None:
        (self.switch / "hang").touch()

    def child(self, name: str, script: str, *, start: bool = True, **files: str) -> Path:
        given = {"parent": "agent:boss", "workspace": "worktree", **files}
        (self.switch / name).write_text(script)
        directory = self.daemon.make(name, f"sh /hang/{name}", **given)
        if start:
            write(directory / "ctl", "start")
        return directory

    def handle(self, name: str) -> Path:
        return self.boss / "task" / name

    def worktree(self, name: str) -> dict[str, str]:
        lines = read(self.handle(name), "worktree").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def tool(self, name: str, kid: str = "kid") -> dict[str, Any]:
        """The answer of a tool about the handle of a child."""
        given = json.dumps({"agent_id": self.boss.stem, "task_id": kid})
        path = self.daemon.root / "tool" / name
        found: dict[str, Any] = json.loads(subprocess.check_output([path, given]))
        return found

    def state(self, name: str) -> str:
        return self.worktree(name).get("state", "")

    def commit(self, branch: str) -> str:
        return git(self.repository, "rev-parse", branch)


@pytest.fixture
def family(daemon: Daemon) -> Family:
    return Family(daemon)


def prompt(what: Callable[[], object]) -> None:
    begun = time.monotonic()
    what()
    assert time.monotonic() - begun < PROMPT


@pytest.mark.usefixtures("guard_beside")
def test_a_branch_comes_over_before_the_end_is_told(family: Family) -> None:
    base = family.commit("main")
    kid = family.child("kid", f"echo two >> file && {COMMIT} Two && git rev-parse HEAD")
    wait_dead(kid)
    commit = read(kid, "out").strip()
    assert family.commit("ctx/kid") == commit != base
    assert family.worktree("kid") == {
        "state": "fetched",
        "path": f"{family.repository}/.git/ctx/kid/work",
        "branch": "ctx/kid",
        "base": base,
        "commit": commit,
        "reason": "",
        **{**dict.fromkeys(DIFFERENCES, ""), "refs_left_out": "main"},
    }
    assert git(family.repository, "worktree", "list").count("\n") == 0
    prompt(family.handle("kid").rmdir)
    place = family.repository / ".git/ctx/kid"
    wait_until(lambda: not place.exists(), "its files are taken away")
    assert family.commit("ctx/kid") == commit
    # a temp one leaves its branch, and nothing else
    brief = family.child("brief", f"echo x >> file && {COMMIT} Three", life="temp")
    wait_until(lambda: not brief.exists() and not family.handle("brief").exists(), "it is gone")
    wait_until(lambda: not (place.parent / "brief").exists(), "its files, too")
    assert git(family.repository, "log", "--format=%s", "ctx/brief").split() == ["Three", "One"]


@pytest.mark.usefixtures("guard_beside")
def test_a_branch_is_fetched_while_its_child_works(family: Family) -> None:
    script = f"echo two >> file && {COMMIT} Two && echo x > dirt && echo over && sleep 1000"
    kid = family.child("kid", script)
    base = family.commit("main")
    wait_until(lambda: read(kid, "out") == "over\n", "it has committed")
    assert family.state("kid") == "open"
    dirt = Path(family.worktree("kid")["path"]) / "dirt"
    with open(family.handle("kid") / "worktree", encoding="utf-8") as file:
        file.read()
        poll = select.poll()
        poll.register(file, select.POLLPRI)
        write(family.handle("kid") / "ctl", "fetch")
        assert poll.poll(60_000)
    wait_until(lambda: family.state("kid") == "fetched", "it is taken over")
    assert family.commit("ctx/kid") == family.worktree("kid")["commit"] != base
    with pytest.raises(OSError, match="busy"):
        family.handle("kid").rmdir()
    write(kid / "ctl", "stop")
    wait_dead(kid)
    found = family.worktree("kid")
    assert found["state"] == "kept" and "uncommitted: dirt" in found["reason"]
    with pytest.raises(OSError, match="not empty"):
        family.handle("kid").rmdir()
    kid.rmdir()
    assert family.handle("kid").exists() and dirt.exists(), "nothing is removed"
    dirt.unlink()
    write(family.handle("kid") / "ctl", "fetch")
    wait_until(lambda: family.state("kid") == "fetched", "it was mended")
    family.handle("kid").rmdir()
    wait_until(lambda: not dirt.parent.exists(), "its files are taken away")


@pytest.mark.usefixtures("guard")
def test_the_removal_of_a_handle_waits_for_no_git(family: Family) -> None:
    """Nor does anything of anybody else's, an end least of all."""
    bystander = family.daemon.run("bystander", "sleep 1000")
    wait_status(bystander, "busy")
    kids = [family.child(f"kid{n}", "sleep 1000") for n in range(6)]
    for kid in kids:
        wait_status(kid, "busy")
    done, first = family.child("done", "true"), family.child("first", "true")
    for each in (done, first):
        wait_dead(each)
    family.hang()
    prompt(family.handle("first").rmdir)
    for kid in kids:
        write(kid / "ctl", "kill")
    wait_until(lambda: family.state("kid0") == "fetching", "git hangs")
    late = family.child("late", "true")
    assert read(late, "status") == "starting\n"
    for number in range(6):
        with pytest.raises(OSError, match="busy"):
            prompt(family.handle(f"kid{number}").rmdir)
    prompt(family.handle("done").rmdir)
    for _ in range(10):
        prompt(lambda: write(bystander / "meta.json", "{}"))
    prompt(lambda: write(late / "ctl", "kill"))
    prompt(lambda: wait_dead(late))
    assert read(late, "reason").startswith("operator_stop")
    # whoever cannot help any more is not waited for
    begun = time.monotonic()
    write(family.boss / "ctl", "kill")
    wait_dead(family.boss)
    assert time.monotonic() - begun < 20
    for number in range(6):
        found = family.worktree(f"kid{number}")
        assert found["state"] == "kept" and '"boss" is ending' in found["reason"]
        assert Path(found["path"]).is_dir()


@pytest.mark.usefixtures("guard_beside")
def test_what_a_paused_parent_cannot_take_over_is_kept(family: Family) -> None:
    script = f"echo two >> file && {COMMIT} Two && echo over && sleep 1000"
    kid = family.child("kid", script)
    wait_until(lambda: read(kid, "out") == "over\n", "it has committed")
    base = family.commit("main")
    write(family.boss / "ctl", "pause")
    write(kid / "ctl", "kill")
    wait_dead(kid)
    assert "paused" in family.worktree("kid")["reason"]
    assert "EBUSY" in refusal(family.handle("kid") / "ctl", "fetch")
    assert family.commit("ctx/kid") == base
    write(family.boss / "ctl", "resume")
    kept = family.tool("TaskStatus")["worktree"]
    assert (kept["state"], kept["branch"]) == ("kept", "ctx/kid")
    assert kept["reason"].endswith("then call WorktreeTake")
    assert family.tool("WorktreeTake")["worktree"]["state"] == "fetching"
    wait_until(lambda: family.state("kid") not in ("", "fetching"), "it goes on")
    assert family.state("kid") == "fetched", family.worktree("kid")
    taken = family.tool("TaskOutput")["worktree"]
    assert (taken["state"], taken["commit"]) == ("fetched", family.commit("ctx/kid"))
    assert family.commit("ctx/kid") != base
    # the same child goes on where it was
    write(kid / "ctl", "reset")
    (family.switch / "kid").write_text(f"echo 3 >> file && {COMMIT} Three")
    write(kid / "ctl", "start")
    wait_dead(kid)
    assert family.state("kid") == "fetched"
    assert git(family.repository, "log", "--format=%s", "ctx/kid").split() == [
        "Three", "Two", "One",
    ]  # fmt: skip


@pytest.mark.usefixtures("guard_beside")
def test_a_child_forges_nothing_of_its_parents(family: Family) -> None:
    """Row by row what worked when they shared a repository."""
    sibling = family.child("sib", "sleep 1000")
    wait_status(sibling, "busy")
    repository = family.repository / ".git"
    script = f"""
    P={repository}; C=$(git rev-parse --absolute-git-dir)
    blob=$(git rev-parse HEAD:file)
    loose=objects/$(echo $blob | cut -c1-2)/$(echo $blob | cut -c3-)
    try() {{ if "$@" 2>/dev/null; then echo "WON: $*"; fi; }}
    try rm -f $P/$loose
    try sh -c "echo evil > $P/$loose"
    try git --git-dir=$P update-ref refs/heads/ctx/sib HEAD
    try git --git-dir=$P update-ref -d refs/heads/main
    try rm -rf $P/objects
    try sh -c "echo x >> $P/config"
    try sh -c "echo x >> $C/config"
    try sh -c "echo x > $C/info/attributes"
    try sh -c "echo x > $C/hooks/pre-commit"
    try rm -rf /workspace/.git
    # its own copy of its parent's file, under that one's name
    mkdir -p $C/objects/$(echo $blob | cut -c1-2)
    perl -MCompress::Zlib -e 'print compress("blob 5\\0evil\\n")' > $C/$loose
    echo '* filter=evil' > .gitattributes
    echo more > more; git add more .gitattributes
    {COMMIT} Forged
    printf '[core]\\n\\tfsmonitor = touch /workspace/executed\\n' > $C/config.worktree
    echo over
    """
    kid = family.child("kid", script)
    wait_dead(kid)
    assert read(kid, "out") == "over\n", read(kid, "log")
    git(family.repository, "fsck", "--strict")
    assert git(family.repository, "show", "main:file") == "content"
    assert git(family.repository, "show", "ctx/kid:file") == "content"
    assert family.commit("ctx/sib") == family.commit("main")
    assert git(family.repository, "status", "--porcelain") == ""
    place = repository / "ctx/kid/work"
    assert not (place / "executed").exists()
    done = subprocess.run(["git", "-C", place, "status"], capture_output=True, text=True)
    assert done.returncode and "invalid gitfile" in done.stderr


@pytest.mark.usefixtures("guard_beside")
def test_what_a_start_needs_git_for_fails_the_start(family: Family) -> None:
    git(family.repository, "branch", "ctx/taken")
    family.own()
    taken = family.child("taken", "true")
    wait_dead(taken)
    assert read(taken, "outcome") == "error\n"
    assert read(taken, "reason").startswith("start_failed: EEXIST: ")
    assert "start_failed: EEXIST: " in read(taken, "error")
    family.handle("taken").rmdir()
    assert git(family.repository, "branch", "--list", "ctx/*") == "ctx/taken"
    shallow = family.daemon.base / "shallow"
    subprocess.run(["cp", "-a", family.repository, shallow], check=True)
    (shallow / ".git/shallow").write_text(family.commit("main") + "\n")
    for name, root, code in (("low", shallow, "EOPNOTSUPP"), ("none", family.switch, "EINVAL")):
        lone = family.daemon.run(f"{name}boss", "sleep 1000", workspace=f"explicit_root:{root}")
        wait_status(lone, "busy")
        kid = family.child(name, "true", start=False, parent=f"agent:{name}boss")
        write(kid / "exec", "true")
        write(kid / "ctl", "start")
        wait_dead(kid)
        assert read(kid, "reason").startswith(f"start_failed: {code}: ")
    # what can be told without git is still refused
    bare = family.daemon.run("bare", "sleep 1000")
    wait_status(bare, "busy")
    kid = family.child("lost", "true", start=False, parent="agent:bare")
    assert "EINVAL" in refusal(kid / "ctl", "start")
    assert read(kid, "status") == "new\n"
