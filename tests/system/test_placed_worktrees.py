"""Worktrees of agents at other machines: what is committed there comes back as a branch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.daemon import AGENT_UID, read, wait_dead, wait_status, wait_until, write
from tests.worlds.nodes import LEASE
from tests.worlds.three import Three, three_of


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    with three_of(n2="30s", n3=LEASE) as made:
        yield made


def git(repository: Path, *words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Family:
    """A parent here with a repository, whose children are placed."""

    def __init__(self, three: Three) -> None:
        self.three = three
        self.name = f"boss{next(three.numbers)}"
        repository = self.repository = three.daemon.base / self.name
        repository.mkdir()
        git(repository, "init", "-q", "-b", "main")
        git(repository, "config", "user.name", "A Parent")
        git(repository, "config", "user.email", "parent@example.org")
        (repository / "file").write_text("one\n")
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", "first")
        for each in (repository, *repository.rglob("*")):
            os.chown(each, AGENT_UID, AGENT_UID)
        self.parent = three.daemon.make(self.name, workspace=f"explicit_root:{repository}")
        write(self.parent / "exec", "sleep 1000")
        write(self.parent / "ctl", "start")
        wait_status(self.parent, "busy")

    def child(self, program: str, where: str = "n2", **files: str) -> Path:
        given = {"parent": f"agent:{self.name}", "workspace": "worktree", **files}
        name = f"x{next(self.three.numbers)}"
        directory = self.three.daemon.make(name, parent=given.pop("parent"))
        write(directory / "placement", f"node={where}")
        for file, text in {**given, "exec": f"sh -c '{program}'"}.items():
            write(directory / file, text)
        write(directory / "ctl", "start")
        return directory

    def facts(self, directory: Path) -> dict[str, str]:
        handle = self.parent / "task" / directory.name.removesuffix(".d")
        lines = (handle / "worktree").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def fetch(self, directory: Path) -> None:
        write(self.parent / "task" / directory.name.removesuffix(".d") / "ctl", "fetch")

    def end(self) -> None:
        if self.parent.exists():
            write(self.parent / "ctl", "kill")
            wait_dead(self.parent)


@pytest.fixture
def family(three: Three) -> Iterator[Family]:
    made = Family(three)
    yield made
    made.end()


COMMITS = "cat file; git log --format=%s; echo two > file; git commit -qam second; git status --short --branch"


def test_what_is_committed_there_comes_back(family: Family) -> None:
    directory = family.child(COMMITS)
    wait_dead(directory)
    assert read(directory, "outcome") == "done\n", (read(directory, "reason"), read(directory, "log"))
    name = directory.name.removesuffix(".d")
    assert read(directory, "out") == f"one\nfirst\n## ctx/{name}\n", read(directory, "log")
    facts = family.facts(directory)
    assert (facts["state"], facts["reason"]) == ("fetched", "")
    assert git(family.repository, "show", f"ctx/{name}:file") == "two"
    assert git(family.repository, "log", "-1", "--format=%an", f"ctx/{name}") == "A Parent"
    assert git(family.repository, "rev-parse", f"ctx/{name}") == facts["commit"]
    wait_until(lambda: not family.three.there(directory).exists(), "it is forgotten there")
