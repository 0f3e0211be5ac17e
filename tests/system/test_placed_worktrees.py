"""Worktrees of agents at other machines: what is committed there comes back as a branch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.daemon import read, wait_dead, wait_status, wait_until, write
from tests.worlds.family import Family, git
from tests.worlds.nodes import LEASE
from tests.worlds.three import Three, three_of


def _long(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with three_of(n2="30s", n3=LEASE) as made:
        yield made


@pytest.fixture
def family(three: Three) -> Iterator[Family]:
    made = Family(three.daemon, three.numbers)
    yield made
    made.end()


COMMITS = (
    "cat file; git log --format=%s; echo two > file; git commit -qam second;"
    " git status --short --branch"
)


def test_what_is_committed_there_comes_back(three: Three, family: Family) -> None:
    directory = family.child(COMMITS)
    wait_dead(directory)
    assert read(directory, "outcome") == "done\n", read(directory, "reason")
    name = directory.name.removesuffix(".d")
    assert read(directory, "out") == f"one\nfirst\n## ctx/{name}\n", read(directory, "log")
    facts = family.facts(directory)
    assert (facts["state"], facts["reason"]) == ("fetched", "")
    assert git(family.repository, "show", f"ctx/{name}:file") == "two"
    assert git(family.repository, "log", "-1", "--format=%an", f"ctx/{name}") == "A Parent"
    assert git(family.repository, "rev-parse", f"ctx/{name}") == facts["commit"]
    wait_until(lambda: not three.there(directory).exists(), "it is forgotten there")
    write(directory / "ctl", "reset")
    write(directory / "exec", "sh -c 'cat file; cat $CTX_SELF/session/context/now.md'")
    write(directory / "ctl", "start")
    wait_dead(directory)
    assert read(directory, "out").startswith("two\n# Now\n"), "it goes on there"
    assert f"branch: ctx/{name}" in read(directory, "out"), read(directory, "out")
    assert family.facts(directory)["state"] == "fetched", family.facts(directory)


def test_what_is_not_committed_is_kept_until_nobody_wants_it(
    three: Three, family: Family
) -> None:
    directory = family.child("echo two > file; git commit -qam second; echo x > more; rm file")
    wait_dead(directory)
    facts, name = family.facts(directory), directory.name.removesuffix(".d")
    assert facts["state"] == "kept", facts
    assert git(family.repository, "show", f"ctx/{name}:file") == "two", "what is, comes"
    assert facts["reason"].startswith("uncommitted: more file file: "), facts
    assert "kept at n2 for 7 days, in " in facts["reason"]
    path = Path(facts["reason"].partition("in \"")[2].partition("\"")[0])
    assert (path / "more").read_text() == "x\n", path
    family.fetch(directory)
    wait_until(lambda: family.facts(directory)["state"] == "kept", "it is kept still")
    wait_until(lambda: not three.there(directory).exists(), "the agent is forgotten there")
    assert path.exists()
    with pytest.raises(OSError, match="not empty"):
        (family.parent / "task" / name).rmdir()
    place = facts["reason"].partition("remove \"")[2].partition("\"")[0]
    shutil.rmtree(place)
    family.fetch(directory)
    wait_until(lambda: family.facts(directory)["state"] == "fetched", "nobody wants it")
    wait_until(lambda: not path.exists(), "it is gone there")
    (family.parent / "task" / name).rmdir()


def test_what_cannot_be_taken_over_comes_later(three: Three, family: Family) -> None:
    directory = family.child("echo two > file; git commit -qam second; echo ready; sleep 1000")
    wait_until(lambda: "ready" in read(directory, "out"), "it has committed")
    branch = f"ctx/{directory.name.removesuffix('.d')}"
    base = git(family.repository, "rev-parse", branch)
    tree = git(family.repository, "rev-parse", "HEAD^{tree}")
    identity = ("-c", "user.name=x", "-c", "user.email=x@y")
    moved = git(family.repository, *identity, "commit-tree", tree, "-p", base, "-m", "moved")
    git(family.repository, "update-ref", f"refs/heads/{branch}", moved)
    three.go(directory)
    wait_dead(directory)
    facts = family.facts(directory)
    assert facts["state"] == "kept" and "the branch was moved" in facts["reason"]
    git(family.repository, "update-ref", f"refs/heads/{branch}", base)
    family.fetch(directory)
    wait_until(lambda: family.facts(directory)["state"] == "fetched", "it is fetched")
    assert git(family.repository, "show", f"{branch}:file") == "two"
    kept = list((three.hosts["n2"].state / f"tree/agent/{os.geteuid()}").glob(f"{branch[4:]}@*~*"))
    wait_until(lambda: not any(path.exists() for path in kept), "it is forgotten there")


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_what_was_committed_comes_though_it_is_ended(family: Family, verb: str) -> None:
    directory = family.child("echo two > file; git commit -qam second; echo ready; sleep 1000")
    wait_until(lambda: "ready" in read(directory, "out"), "it has committed")
    write(directory / "ctl", verb)
    wait_dead(directory)
    name = directory.name.removesuffix(".d")
    facts = family.facts(directory)
    assert facts["state"] == "fetched", facts["reason"]
    assert git(family.repository, "show", f"ctx/{name}:file") == "two"


@pytest.mark.parametrize("when", [*map(_long, ("at once", "known there")), "made there"])
def test_it_is_stopped_while_it_is_made(three: Three, family: Family, when: str) -> None:
    directory = family.child("sleep 1000")
    there, name = three.there(directory), directory.name.removesuffix(".d")
    trees = three.hosts["n2"].state / f"tree/agent/{os.geteuid()}"

    def made() -> list[Path]:
        return list(trees.glob(f"{name}@one~*/git/objects"))

    is_time = {"at once": lambda: True, "known there": there.exists, "made there": made}
    wait_until(is_time[when], "it is time")
    write(directory / "ctl", "stop")
    wait_dead(directory)
    assert read(directory, "outcome") == "cancelled\n", read(directory, "reason")
    wait_until(lambda: not there.exists() and not made(), "nothing is left there")
    if (handle := family.parent / "task" / name).exists():
        handle.rmdir()
    wait_until(lambda: not git(family.repository, "branch", "--list", "ctx/*"), "no branch is left")


@pytest.mark.parametrize("of", ["lead", "host"])
def test_commits_outlive_daemons(three: Three, family: Family, of: str) -> None:
    directory = family.child("echo two > file; git commit -qam second; sleep 1000; cat file")
    wait_status(directory, "busy")
    (three.daemon if of == "lead" else three.hosts["n2"]).restart()
    three.go(directory)
    wait_dead(directory)
    name = directory.name.removesuffix(".d")
    assert (read(directory, "outcome"), read(directory, "out")) == ("done\n", "two\n")
    facts = family.facts(directory)
    assert facts["state"] == "fetched", facts["reason"]
    assert git(family.repository, "show", f"ctx/{name}:file") == "two"


WITH_A_CHILD = """
mkdir $CTX_ROOT/agent/$1.d && cd $CTX_ROOT/agent/$1.d
echo worktree > workspace
echo 'sh -c "echo three > file; git commit -qam third"' > exec
echo start > ctl
cat wait
cd /workspace && git merge -q --ff-only ctx/$1
"""


def test_its_own_child_has_a_worktree_of_it_there(three: Three, family: Family) -> None:
    kid = f"kid{next(three.numbers)}"
    script = WITH_A_CHILD.replace("$1", kid)
    policy = "allow NAME_t agent:* create\nallow NAME_t tool:* execute\n"
    directory = family.child("sh", policy=policy, **{"handoff.md": script})
    wait_dead(directory)
    name = directory.name.removesuffix(".d")
    assert read(directory, "outcome") == "done\n", read(directory, "log")
    facts = family.facts(directory)
    assert facts["state"] == "fetched", facts["reason"]
    assert git(family.repository, "show", f"ctx/{name}:file") == "three"


#: in place of the program: takes the task, and does it
PROGRAM = "#!/bin/sh\nread -r task\necho \"$task\" > done\ngit add done\ngit commit -qm \"$task\"\n"


@pytest.mark.parametrize("recipe", ["claude", *map(_long, ("codex", "gemini"))])
def test_a_recipe_gives_back_a_branch(three: Three, family: Family, recipe: str) -> None:
    """The real one, whose program is at the node; here a script that is in the repository."""
    programs, name = family.repository / "bin", f"x{next(three.numbers)}"
    programs.mkdir()
    (programs / recipe).write_text(PROGRAM)
    (programs / recipe).chmod(0o755)
    git(family.repository, "add", ".")
    git(family.repository, "commit", "-q", "-m", "programs")
    done = three.daemon.ctx(
        *("spawn", "--parent", family.name, "--node", "n2", "--agent", recipe, "--name", name),
        *("--workspace", "worktree", "--env", "PATH=/workspace/bin:/usr/bin:/bin", "fix the test"),
    )
    assert done.returncode == 0, done.stderr
    directory = three.daemon.agent_dir(name)
    wait_dead(directory)
    assert read(directory, "outcome") == "done\n", read(directory, "log")
    assert git(family.repository, "show", f"ctx/{name}:done") == "fix the test"


# what is left at a host


def home(three: Three, where: str, name: str) -> Path:
    return three.hosts[where].state / f"tree/agent/{os.geteuid()}/{name}@one"


def test_directories_keep_their_modes(three: Three) -> None:
    directory = three.place(
        "cd $CTX_SELF/artifact; mkdir -p a/b c; echo x > a/b/x; chmod 700 a; chmod 750 a/b c"
    )
    wait_dead(directory)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (directory / "artifact").rglob("*")
    }
    assert modes == {"a": 0o700, "b": 0o750, "c": 0o750, "x": 0o644}, read(directory, "error")


def ended(three: Three, directory: Path) -> str:
    """The name of an agent that has ended, and of which its host has nothing any more."""
    wait_dead(directory)
    wait_until(lambda: not three.there(directory).exists(), "it is forgotten there")
    return directory.name.removesuffix(".d")


def test_a_durable_home_is_there_until_it_is_forgotten(three: Three) -> None:
    program = "cat $HOME/x; echo was >> $HOME/x"
    directory = three.place(program, homedir="durable")
    name = ended(three, directory)
    directory.rmdir()
    three.numbers = chain([int(name[1:])], three.numbers)
    directory = three.place(program, homedir="durable")
    assert ended(three, directory) == name
    assert read(directory, "out") == "was\n", "the next agent of its name has it"
    assert home(three, "n2", name).is_dir()
    host = three.hosts["n2"]
    assert host.ctx("nodes", "forget", "--lead", "nobody").returncode == 1
    assert host.ctx("nodes", "forget", "--lead", "one").returncode == 0
    wait_until(lambda: not home(three, "n2", name).exists(), "an operator there has removed it")
    other = ended(three, three.place("true", homedir="durable"))
    assert home(three, "n2", other).is_dir()
    # the last of these tests there: whoever comes next is another lead
    assert three.daemon.ctx("nodes", "forget", "n2").returncode == 0
    wait_until(lambda: not home(three, "n2", other).exists(), "its lead has forgotten it")


@pytest.mark.long
def test_what_a_lease_has_ended_is_kept_there(three: Three, family: Family) -> None:
    directory = family.child("echo two > file; git commit -qam second; sleep 1000", "n3")
    wait_until(lambda: read(directory, "status") == "busy\n", "it runs")
    wait_until(lambda: three.runs(directory, "n3"), "it runs there")
    three.wires["n3"].stop()
    three.gone(directory, "n3")
    wait_dead(directory)
    three.wires["n3"].go_on()
    facts = family.facts(directory)
    assert read(directory, "reason") == "runtime_lost\n"
    assert facts["state"] == "kept", facts
    assert facts["reason"].startswith("n3 has not said what it committed: kept at n3 for 7 days")
    path = Path(facts["reason"].partition('in "')[2].partition('"')[0])
    assert (path / "file").read_text() == "two\n"
