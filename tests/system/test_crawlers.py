"""Programs that read whatever they find, over a live tree: nothing that a listing names holds them
up, or refuses who operates the agents."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Final

import pytest

from tests.worlds.daemon import AGENT_UID, TIMEOUT, Daemon, read, wait_status, write

#: by name: what is typed for a directory, with another one to write to
CRAWLERS: Final = {
    "find": "find {tree} -type f -size -1000k",
    "ls": "ls -lRa {tree}",
    "du": "du -s {tree}",
    "grep": "grep -rc nothing {tree}; grep -Rc nothing {tree}/agent/coder.d/task/errand",
    "rg": "rg -uuu -c nothing {tree}",
    "ag": "ag -u nothing {tree}",
    "cp": "cp -r {tree}/agent/coder.d {out}/copy",
    "rsync": "rsync -a {tree}/agent/coder.d/ {out}/rsync",
    "tar": "tar cf {out}/tree.tar -C {tree} .",
    "updatedb": "updatedb -U {tree} -o {out}/db -l 0",
    "git": "git init -q --bare {out}/git; git -C {tree}/agent/coder.d --git-dir={out}/git "
    "--work-tree=. status --short",
}
#: what is typed before a glob
READERS: Final = (
    *("grep nothing", "head -n1", "tail -n1", "cat", "wc", "md5sum", "sha256sum", "cksum", "od"),
    *("sort", "nl", "file", "stat", "sed -n p", "awk 1", "strings"),
)
GLOBS: Final = ("*", "task/*/*", "work/*/*", "waiting/*/*", "session/*", "session/context/*")
#: no complaints about what is found: nobody reads sockets and directories as files, and a busy
#: machine takes more than the second that usage and processes give it
HARMLESS: Final = (
    *("socket ignored", "s a directory", "directory not regular", "Removing leading"),
    "Resource temporarily unavailable",
)

# of a program that is missing the run tells at its end, and goes on with the others
pytestmark = pytest.mark.filterwarnings("default:not tried")


@pytest.fixture(scope="module")
def crawled(shared_daemon: Daemon) -> Iterator[Path]:
    """A live agent with something in each of its planes, and a child."""
    daemon = shared_daemon
    agent = daemon.run("coder", "sleep 1000", owner=str(AGENT_UID))
    for name in ("task/errand", "work/plan", "waiting/bell"):
        (agent / name).mkdir()
    for file, text in (("cmd", "sleep 1000"), ("accepts_input", "1"), ("ctl", "start")):
        write(agent / "task" / "errand" / file, text)
    write(agent / "waiting" / "bell" / "on", "trigger")
    child = daemon.make("kid", "sleep 1000", owner=str(AGENT_UID), parent="agent:coder")
    write(child / "ctl", "start")
    for each in (agent, child):
        wait_status(each, "busy")
    yield daemon.root
    write(agent / "ctl", "kill")


def complaints(command: str, user: int) -> list[str]:
    """What a command says beside its output; fails if it hangs."""
    done = subprocess.run(
        ["sh", "-c", command], user=user, group=user, extra_groups=[], timeout=TIMEOUT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nonexistent"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    return [line for line in lines if not any(word in line for word in HARMLESS)]


#: root meets what owners meet: it is in make test-faults
EACH = pytest.mark.parametrize("user", [
    pytest.param(AGENT_UID, id="owner"), pytest.param(0, id="root", marks=pytest.mark.long)
])


@pytest.mark.needs_root("two operators, of whom one is root")
@EACH
def test_a_crawler_ends_and_is_refused_nothing(crawled: Path, user: int) -> None:
    before = read(crawled / "agent" / "coder.d", "status")
    for name, command in CRAWLERS.items():
        if which(name) is None:
            warnings.warn(f"not tried, as it is not installed: {name}", stacklevel=1)
            continue
        out = crawled.parent / f"{name}-{user}"
        out.mkdir()
        os.chown(out, user, user)
        assert not complaints(command.format(tree=crawled, out=out), user), name
    assert read(crawled / "agent" / "coder.d", "status") == before


@pytest.mark.needs_root("two operators, of whom one is root")
@EACH
def test_a_glob_meets_nothing_that_blocks_or_refuses(crawled: Path, user: int) -> None:
    agent = crawled / "agent" / "coder.d"
    files = " ".join(f"{agent}/{glob}" for glob in GLOBS)
    for reader in READERS:
        if which(reader.split()[0]) is None:
            warnings.warn(f"not tried, as it is not installed: {reader}", stacklevel=1)
            continue
        assert not complaints(f"{reader} {files}", user), reader
    assert read(agent / "waiting" / "bell", "status") == "armed\n"
    assert read(agent / "task" / "errand", "status") == "running\n"


@pytest.mark.needs_root("a stranger")
def test_a_token_that_was_used_is_gone_and_the_reason_says_so(crawled: Path) -> None:
    bell = crawled / "agent" / "coder.d" / "waiting" / "bell"
    token = crawled / "trigger" / read(bell, "token").strip()
    assert not complaints(f"echo now > {token}", 12345)
    (said,) = complaints(f"echo again > {token}", 12345)
    assert "nonexistent" in said or "No such file" in said
    told = complaints(f"cat {crawled}/error >&2", 12345)
    assert "ENOENT" in told[0] and "it may have been used" in told[0]
    assert token.name not in told[0]
