"""What a worktree has not of its parent's workspace: told to the parent and to the child, and
copied where the parent says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.worlds.daemon import (
    AGENT_UID,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)


def git(path: Path, *words: str) -> str:
    identity = ("-c", "user.name=you", "-c", "user.email=you@localhost")
    command = ["git", *identity, "-c", "safe.directory=*", "-C", str(path), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(daemon: Daemon) -> Path:
    """A project as people have them: with a submodule, a hook, dependencies and secrets."""
    library, project = daemon.base / "library", daemon.base / "project"
    for path in (library, project):
        git(daemon.base, "init", "-q", "-b", "main", str(path))
        (path / "file").write_text("content\n")
    (project / ".gitignore").write_text(".env*\nnode_modules/\n")
    (project / ".ctxfs-copy").write_text("# what the tests need\n.env*\n!.env.example\n")
    git(library, "add", "-A")
    git(library, "commit", "-q", "-m", "One")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "lib")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "One")
    for name in (".env", ".env.local", ".env.example", "node_modules/x/index.js"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(f"{name} of the parent\n")
    (project / "file").write_text("not committed\n")
    (project / ".git/hooks/pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (project / ".git/hooks/pre-commit").chmod(0o755)
    for each in (project, *project.rglob("*")):
        os.chown(each, AGENT_UID, AGENT_UID, follow_symlinks=False)
    return project


def worktree_of(boss: Path, name: str) -> dict[str, str]:
    lines = read(boss / "task" / name, "worktree").splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_a_child_is_told_what_its_worktree_lacks(daemon: Daemon, repository: Path) -> None:
    boss = daemon.run("boss", "sleep 1000", workspace=f"explicit_root:{repository}")
    wait_status(boss, "busy")
    given = {"parent": "agent:boss", "workspace": "worktree"}
    look = "sh -c 'cat file .env .env.local $CTX_SELF/session/context/now.md; git status -s'"
    kid = daemon.run("kid", look, **given)
    wait_dead(kid)
    copied = "content\n.env of the parent\n.env.local of the parent\n"
    text = read(kid, "out")
    assert text.startswith(copied + "# Now\n"), read(kid, "reason")
    differs = {
        "copied": ".env, .env.local",
        "not_copied": ".env.example, node_modules/",
        "uncommitted": "file",
        "empty_submodules": "lib",
        "hooks_not_run": "pre-commit",
        "refs_left_out": "main",
    }
    found = worktree_of(boss, "kid")
    assert {key: value for key, value in found.items() if key in differs} == differs
    base = git(repository, "rev-parse", "main")
    lines = {"path": "/workspace", "branch": "ctx/kid", "base": base, **differs}
    wanted = "".join(f"{key}: {value}\n" for key, value in lines.items())
    assert text.endswith(f"\n## Workspace\n\n{wanted}"), "and nothing in the status of git"
    # copies make no difference, until the child writes them
    assert found["state"] == "fetched", found
    (boss / "task" / "kid").rmdir()
    wait_until(lambda: not Path(found["path"]).exists(), "its files are taken away")
    writer = daemon.run("writer", "sh -c 'rm .env.local; echo more >> .env'", **given)
    wait_dead(writer)
    found = worktree_of(boss, "writer")
    assert found["state"] == "kept" and found["reason"].startswith("uncommitted: .env;")
    # what the child shall not see is not copied either
    hidden = f"- {repository}/.env hide\n"
    sub = daemon.run("sub", "sh -c 'ls -A .'", mount=hidden, **given)
    wait_dead(sub)
    assert ".env.local" in read(sub, "out").split() and ".env" not in read(sub, "out").split()
    told = worktree_of(boss, "sub")["not_copied"]
    assert told == ".env (not in the child's view), .env.example, node_modules/"
    # nor told anew to the same child, or forgotten with ctxd
    before = worktree_of(boss, "sub")
    daemon.restart()
    assert worktree_of(boss, "sub") == before
    write(sub / "ctl", "reset")
    write(sub / "ctl", "start")
    wait_dead(sub)
    assert worktree_of(boss, "sub")["not_copied"] == told
