"""Programs find in a cell what they need to work: git an identity and the repositories that are
mounted, tools that there is no network, ping its socket."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.kernel import linux
from tests.worlds.daemon import TIMEOUT, Daemon, read, wait_dead, write

Ctx = Callable[..., str]
PING = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)"


@pytest.fixture
def home(daemon: Daemon) -> Path:
    """That of a user with an identity, as git has it after its first commit."""
    path = daemon.base / "home"
    path.mkdir()
    (path / ".gitconfig").write_text("[user]\nname = Ann Lee\nemail = ann@example.org\n")
    return path


@pytest.fixture
def ctx(daemon: Daemon, home: Path) -> Ctx:
    """What the user types; it must succeed."""
    env = {"CTX_ROOT": str(daemon.root), "PATH": os.environ["PATH"], "HOME": str(home)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), *words],
            env=env, text=True, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def repository(daemon: Daemon) -> Path:
    """Root's own, which says nothing of who commits."""
    path = daemon.base / "repository"
    path.mkdir()
    (path / "sub").mkdir()
    (path / "sub" / "file").write_text("text\n")
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=root", "-c", "user.email=root@host"]
        subprocess.run(["git", *identity, *words], cwd=path, check=True)
    return path


def test_git_works_in_what_is_mounted(ctx: Ctx, repository: Path) -> None:
    """Whoever owns it, in a subdirectory too, and with the tree of the host."""
    script = "cd /src/sub && git status --short && git log --format=%s && git config user.email"
    options = ["--mount", f"{repository}:/src", "--wait", "--rm"]
    said = "first\nann@example.org\n"
    assert ctx("spawn", "a", *options, "--", "sh", "-c", script) == said
    script = script.replace("/src", str(repository))
    options = ["--mount", str(repository), "--set", "iso=shared", "--wait", "--rm"]
    assert ctx("spawn", "b", *options, "--", "sh", "-c", script) == said


def test_a_child_commits_as_the_user(ctx: Ctx, daemon: Daemon, repository: Path) -> None:
    """As the repository says, else as the user who made the family."""
    lead = ctx("new", "lead", f"workspace=explicit_root:{repository}", "exec=sleep 1000").strip()
    assert lead == "" and read(daemon.agent_dir("lead"), "author") == (
        "Ann Lee <ann@example.org>\n"
    )
    ids = [int(read(daemon.agent_dir("lead"), file)) for file in ("uid", "gid")]
    for path in (repository, *repository.rglob("*")):
        os.lchown(path, *ids)
    ctx("start", "lead")
    script = "cd /workspace && date > new && git add new && git commit -qm second"
    for name, configured in (("kid", False), ("other", True)):
        if configured:
            identity = ("config", "user.name", "Of the repository")
            subprocess.run(["git", "-c", f"safe.directory={repository}", *identity],
                           cwd=repository, check=True)  # fmt: skip
        made = daemon.make(name, parent="agent:lead", workspace="worktree")
        (made / "exec").write_text(f"sh -c '{script}'\n")
        (made / "ctl").write_text("start\n")
        wait_dead(made)
        assert read(made, "reason") == "exit:0\n", read(made, "log")
        assert "state=fetched\n" in read(daemon.agent_dir("lead"), f"task/{name}/worktree")
    log = subprocess.run(
        ["git", "-c", "safe.directory=*", "log", "--format=%an %ae", "ctx/kid", "ctx/other"],
        cwd=repository, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert set(log.splitlines()) == {
        "Ann Lee ann@example.org", "Of the repository ann@example.org", "root root@host",
    }  # fmt: skip


def test_without_one_the_identity_is_that_of_the_account(daemon: Daemon) -> None:
    script = "git config user.name && git config user.email && printenv GIT_CONFIG_SYSTEM"
    made = daemon.finish("a", f"sh -c '{script}'")
    name, email, config = read(made, "out").splitlines()
    assert (name, email) == ("root", f"root@{os.uname().nodename}")
    assert Path(config).read_text() == "", "outside of the cell it says nothing"


def test_tools_hear_of_no_network_and_ping_is_possible(daemon: Daemon) -> None:
    script = f'printenv PIP_NO_INDEX GOPROXY; python3 -c "{PING}" && echo may ping'
    env = "GOPROXY=file:///mirror\n"
    made = daemon.make("a", env=env)
    (made / "exec").write_text(f"sh -c '{script}'\n")
    (made / "ctl").write_text("start\n")
    wait_dead(made)
    assert read(made, "out") == "1\nfile:///mirror\nmay ping\n", read(made, "log")
    made = daemon.finish("b", "printenv PIP_NO_INDEX", policy="allow b_t network:default connect\n")
    assert (read(made, "out"), read(made, "reason")) == ("", "exit:1\n")


@pytest.mark.skipif(not Path("/usr/bin/npm").exists(), reason="needs npm")
def test_npm_gives_up_at_once(daemon: Daemon) -> None:
    made = daemon.finish("a", "npm view left-pad")
    assert "ENOTCACHED" in read(made, "log")


def test_inotify_sees_nothing_of_what_the_daemon_changes(daemon: Daemon) -> None:
    """As ctxfs-programs(7) says; poll(2) does."""
    made = daemon.make("a", "true")
    watch = linux.inotify_init()
    status = os.open(made / "status", os.O_RDONLY)
    try:
        # IN_MODIFY, IN_CLOSE_WRITE
        linux.inotify_add_watch(watch, made / "status", 0x2 | 0x8)
        assert os.read(status, 100) == b"new\n"
        write(made / "ctl", "start")
        wait_dead(made)
        poll = select.poll()
        poll.register(status, select.POLLPRI)
        poll.register(watch, select.POLLIN)
        assert [fd for fd, _ in poll.poll(TIMEOUT * 1000)] == [status]
    finally:
        os.close(status)
        os.close(watch)
