"""An agent with a repository, whose children are placed at nodes with worktrees of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.worlds.daemon import AGENT_UID, Daemon, read, wait_dead, wait_status, write


def git(repository: Path, *words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Family:
    """A parent here with a repository, whose children are placed."""

    def __init__(self, daemon: Daemon, numbers: Iterator[int], **files: str) -> None:
        self.daemon, self.numbers = daemon, numbers
        self.name = f"boss{next(numbers)}"
        repository = self.repository = daemon.base / self.name
        repository.mkdir()
        git(repository, "init", "-q", "-b", "main")
        git(repository, "config", "user.name", "A Parent")
        git(repository, "config", "user.email", "parent@example.org")
        (repository / "file").write_text("one\n")
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", "first")
        for each in (repository, *repository.rglob("*")):
            os.chown(each, AGENT_UID, AGENT_UID)
        self.parent = daemon.make(self.name, workspace=f"explicit_root:{repository}", **files)
        label = f"allow {self.name}_t"
        policy = [f"{label} network:* connect", f"{label} recipe:* use"]
        write(self.parent / "policy", read(self.parent, "policy") + "\n".join(policy))
        write(self.parent / "exec", "sleep 1000")
        write(self.parent / "ctl", "start")
        wait_status(self.parent, "busy")

    def child(self, program: str, where: str = "n2", **files: str) -> Path:
        """One that has been started, here if it is placed nowhere."""
        given = {"parent": f"agent:{self.name}", "workspace": "worktree", **files}
        name = f"x{next(self.numbers)}"
        directory = self.daemon.make(name, parent=given.pop("parent"))
        if where:
            write(directory / "placement", f"node={where}")
        for file, text in {**given, "exec": f"sh -c '{program}'"}.items():
            write(directory / file, text.replace("NAME", name))
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
