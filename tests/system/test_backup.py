"""ctx backup beside a daemon at work, and ctx restore elsewhere."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from client.backup import DATABASE, FORMAT, MANIFEST, do_restore
from client.declaring import Arguments
from client.root import Root
from client.words import SCHEMA
from tests.worlds.daemon import (
    REMOVALS,
    TIMEOUT,
    Daemon,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)
from tests.worlds.held import held

STATES: Final = Path(__file__).parents[1] / "unit/runtime/records/states"
#: answers each message, with more text than the store holds before there is a file
TALKER: Final = "sh -c 'cat; head -c 400 /dev/zero | tr \"\\\\0\" x'"
SHOWN: Final = (
    *("status", "outcome", "reason", "result.md", "out", "incarnation", "parent", "meta.json"),
)


def ctx(*words: str) -> subprocess.CompletedProcess[str]:
    """The client, without a daemon."""
    return subprocess.run(
        [sys.executable, "-c", "from client.main import program; program()", *words],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.long
def test_a_tree_that_somebody_holds_is_left_out_and_said_so(daemon: Daemon) -> None:
    """As an agent can hold its own: the others are in the backup, and it ends."""
    for name in ("free", "held"):
        daemon.path("shared", name).mkdir()
        (daemon.path("shared", name) / "data" / "file").write_text(name)
    impatient = "import client.backup, client.main; client.backup.HELD_SECONDS = 3; "
    file = daemon.base / "backup.tar"
    with held(daemon.state / "tree/space/held/held"):
        done = subprocess.run(
            [sys.executable, "-c", f"{impatient} client.main.program()",
             "backup", "--state", str(daemon.state), str(file)],
            capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert daemon.path("status").read_text()
    assert done.returncode == 1
    assert done.stderr.startswith("left out: tree/space/held: something holds it")
    with tarfile.open(file) as archive:
        names = set(archive.getnames())
    assert "./tree/space/free/free/file" in names and "./tree/space/held/held/file" not in names


def test_a_backup_of_an_older_version_is_restored(daemon: Daemon, tmp_path: Path) -> None:
    """Its durable trees were beside the histories; the daemon moves them when it starts."""
    with tarfile.open(STATES / "schema-5.tar.xz") as older:
        older.extraction_filter = getattr(tarfile, "data_filter", None)
        older.extractall(tmp_path)
    state = tmp_path / "state"
    for path in ("shared/team", "home/0/data"):
        (state / path).mkdir(parents=True, exist_ok=True)
        (state / path / "file").write_text(path)
    manifest = {"format": 1, "version": "0.2.0", "schema": 5, "made": "then", "agents": 1}
    (state / MANIFEST).write_text(json.dumps(manifest))
    backup = tmp_path / "backup.tar"
    names = (f"./{name}" for name in ("agent", "home", "shared"))
    words = ["tar", "--create", f"--file={backup}", MANIFEST, *names, DATABASE]
    subprocess.run(words, cwd=state, check=True)
    daemon.stop()
    shutil.rmtree(daemon.state)
    done = ctx("restore", "--state", str(daemon.state), str(backup))
    assert done.returncode == 0, done.stderr
    daemon.start()
    assert daemon.path("shared", "team", "data", "file").read_text() == "shared/team"
    assert daemon.path("home", "0", "data", "file").read_text() == "home/0/data"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[int]:
    return [int(str(line["id"])[1:]) for line in lines(path)]


@contextmanager
def at_work(daemon: Daemon, ready: int = 3) -> Iterator[list[str]]:
    """Agents come, work, and go, and others get messages, without pause; yields what was said.

    The body begins when each of them has done that a few times.
    """
    said: list[str] = []
    over, counts = threading.Event(), [threading.Semaphore(0) for _ in range(2)]
    failed: list[BaseException] = []

    def come_and_go() -> None:
        while True:
            agent = daemon.run(f"short{len(gone)}", "echo done")
            wait_dead(agent)
            if len(gone) % 2:
                agent.rmdir()
            gone.append(agent.name)
            counts[0].release()
            if over.is_set():
                return

    def talk() -> None:
        inbox = daemon.agent_dir("talker") / "inbox"
        while not over.is_set():
            write(inbox, text := f"message {len(said)} {'y' * 300}")
            said.append(text)
            counts[1].release()
            wait_status(daemon.agent_dir("talker"), "idle")

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
            for count in counts:
                count.release(ready)

    gone: list[str] = []
    wait_status(daemon.run("talker", TALKER, mode="turn"), "idle")
    threads = [threading.Thread(target=guarded, args=(work,)) for work in (come_and_go, talk)]
    for thread in threads:
        thread.start()
    try:
        for count in counts:
            for _ in range(ready):
                assert count.acquire(timeout=TIMEOUT)
        assert not failed, failed
        yield said
    finally:
        over.set()
        for thread in threads:
            thread.join(TIMEOUT)
    assert not failed, failed


@pytest.fixture
def other() -> Iterator[Daemon]:
    """A daemon that has not been started, with a state to come."""
    daemon = Daemon()
    yield daemon
    if daemon.process is not None:
        daemon.stop()
    REMOVALS.begin(daemon.base)


def test_a_backup_under_load_is_whole_elsewhere(daemon: Daemon, other: Daemon) -> None:
    done = [daemon.finish(f"done{n}", f"sh -c 'echo {n}; exit {n}'") for n in range(3)]
    chatty = daemon.run("chatty", TALKER, mode="turn")
    for number in range(12):
        write(chatty / "inbox", f"number {number} {'z' * 300}")
    conversation = chatty / "session" / "messages.jsonl"
    wait_until(lambda: len(numbers(conversation)) == 24, "each message is answered")
    write(chatty / "ctl", "stop")
    wait_dead(chatty)
    made = daemon.make("made", "true", **{"meta.json": '{"kept": true}'})
    still = [*done, chatty, made]
    file = daemon.base / "state.tar.gz"
    with at_work(daemon) as said:
        before = list(said)
        backup = daemon.ctx("backup", "--state", str(daemon.state), str(file))
    assert (backup.returncode, backup.stderr) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o600

    restored = ctx("restore", "--state", str(other.state), str(file))
    assert (restored.returncode, restored.stderr) == (0, "")
    assert other.state.stat().st_mode & 0o777 == 0o700
    other.start()
    for agent in still:
        again = other.agent_dir(agent.name.removesuffix(".d"))
        for shown in SHOWN:
            assert read(again, shown) == read(agent, shown), (agent.name, shown)
        for history in ("events.jsonl", "messages.jsonl", "latest.md"):
            assert read(again / "session", history) == read(agent / "session", history)
    # of the one that worked meanwhile: a beginning of what it did, and its end by the restart
    talker, again = daemon.agent_dir("talker"), other.agent_dir("talker")
    assert (read(again, "status"), read(again, "outcome")) == ("dead\n", "interrupted\n")
    for history in ("events.jsonl", "messages.jsonl"):
        kept = numbers(again / "session" / history)
        assert kept == list(range(1, len(kept) + 1)), history
    users = [line["content"] for line in lines(again / "session" / "messages.jsonl")
             if line["role"] == "user"]  # fmt: skip
    heard = [line["content"] for line in lines(talker / "session" / "messages.jsonl")
             if line["role"] == "user"]  # fmt: skip
    assert users == heard[: len(users)]
    assert len(users) >= len(before) - 1
    for directory in (other.root / "agent").glob("short*.d"):
        kept = numbers(directory / "session" / "events.jsonl")
        assert kept == list(range(1, len(kept) + 1)), directory.name
    # it is a state as any other
    assert read(other.finish("later", "echo more"), "result.md") == "more\n"
    assert [path.name for path in other.state.iterdir() if path.name.startswith("restor")] == []


def test_files_of_users_keep_what_they_are(daemon: Daemon, other: Daemon) -> None:
    space = daemon.root / "shared/space/data"
    space.parent.mkdir()
    (space / "plain").write_text("text\n")
    os.setxattr(space / "plain", "user.colour", b"green\n\0")
    os.chown(space / "plain", 1234, 2345)
    (space / "plain").chmod(0o640)
    os.utime(space / "plain", ns=(10**18, 10**18 + 5))
    os.link(space / "plain", space / "linked")
    (space / "link").symlink_to("/etc/passwd")
    os.mkfifo(space / "fifo", 0o622)
    with open(space / "holes", "wb") as holes:
        holes.truncate(1 << 30)
        holes.seek(1 << 29)
        holes.write(b"middle")
    odd = "a\nb\x1b[31m"
    (space / odd).mkdir(mode=0o500)
    file = daemon.base / "b.tar"
    done = daemon.ctx("backup", "--state", str(daemon.state), str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert file.stat().st_size < 10 << 20, "holes take no room"
    assert ctx("restore", "--state", str(other.state), str(file)).returncode == 0
    other.start()
    again = other.root / "shared/space/data"
    was, now = (space / "plain").stat(), (again / "plain").stat()
    for name in ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_nlink"):
        assert getattr(now, name) == getattr(was, name), name
    assert now.st_ino == (again / "linked").stat().st_ino
    assert os.getxattr(again / "plain", "user.colour") == b"green\n\0"
    assert os.readlink(again / "link") == "/etc/passwd"
    assert (again / "fifo").lstat().st_mode == (space / "fifo").lstat().st_mode
    assert (again / "holes").stat().st_size == 1 << 30
    assert (other.state / "tree/space/space/space" / "holes").stat().st_blocks < 1 << 10
    with open(again / "holes", "rb") as holes:
        holes.seek(1 << 29)
        assert holes.read(7) == b"middle\0"
    assert (again / odd).stat().st_mode & 0o777 == 0o500


def test_files_of_users_can_be_left_out(daemon: Daemon, other: Daemon) -> None:
    (daemon.root / "shared/space").mkdir()
    (daemon.root / "shared/space/data" / "large").write_text("large")
    wait_dead(daemon.run("homely", "sh -c 'echo kept > ~/file; echo $HOME'", homedir="durable"))
    file = daemon.base / "b.tar"
    done = daemon.ctx("backup", "--records", "--state", str(daemon.state), str(file))
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(file) as archive:
        names = archive.getnames()
    assert any("homely" in name or name.startswith("./agent/") for name in names)
    assert not [name for name in names if "space/" in name or ".home" in name or "/data" in name]
    assert ctx("restore", "--state", str(other.state), str(file)).returncode == 0
    other.start()
    assert read(other.agent_dir("homely"), "outcome") == "done\n"
    other.finish("homely2", "true", homedir="durable")


def test_a_live_or_a_used_state_is_never_written_over(daemon: Daemon, other: Daemon) -> None:
    file = daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    live = ctx("restore", "--state", str(daemon.state), str(file))
    assert live.returncode == 1
    assert f"{daemon.state}: a ctxd uses this state; stop it" in live.stderr
    other.start()
    other.finish("own", "true")
    other.stop()
    before = sorted(path.name for path in other.state.iterdir())
    used = ctx("restore", "--state", str(other.state), str(file))
    assert used.returncode == 1
    assert "is not empty" in used.stderr and f"mv {other.state}" in used.stderr
    assert sorted(path.name for path in other.state.iterdir()) == before
    other.start()
    assert read(other.agent_dir("own"), "outcome") == "done\n"


@pytest.mark.parametrize(("field", "value"), [("format", FORMAT + 1), ("schema", SCHEMA + 1)])
def test_a_newer_backup_is_refused_with_a_sentence(
    daemon: Daemon, other: Daemon, field: str, value: int
) -> None:
    file = daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    with tarfile.open(file) as archive:
        told = archive.extractfile("ctxfs-backup.json")
        assert told is not None
        manifest = {**json.load(told), field: value, "version": "7.1"}
    newer = daemon.base / "newer.tar"
    (daemon.base / "ctxfs-backup.json").write_text(json.dumps(manifest))
    with tarfile.open(newer, "w") as archive:
        archive.add(daemon.base / "ctxfs-backup.json", "ctxfs-backup.json")
    refused = ctx("restore", "--state", str(other.state), str(newer))
    assert refused.returncode == 1
    assert "was made by ctxfs 7.1, which is newer than this one" in refused.stderr
    assert not other.state.exists()


def test_a_part_of_an_archive_restores_nothing(daemon: Daemon, other: Daemon) -> None:
    daemon.finish("one", "true")
    file, part = daemon.base / "b.tar", daemon.base / "part.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    whole = file.read_bytes()
    # the archive ends with the database; tar fills it up with 10 KiB at most
    for size in (3 << 10, len(whole) // 8, len(whole) // 2, len(whole) - (24 << 10)):
        part.write_bytes(whole[:size])
        done = ctx("restore", "--state", str(other.state), str(part))
        assert done.returncode == 1
        assert "the backup is not whole: nothing was restored" in done.stderr
        assert sorted(path.name for path in other.state.iterdir()) == ["lock"]
    assert ctx("restore", "--state", str(other.state), str(file)).returncode == 0
    other.start()
    assert read(other.agent_dir("one"), "outcome") == "done\n"


# what agents and other users do to it


@pytest.mark.long
def test_no_tree_is_too_deep_for_the_others(daemon: Daemon, other: Daemon) -> None:
    space = daemon.root / "shared/space/data"
    space.parent.mkdir()
    (space / "file").write_text("kept")
    deep = os.open(daemon.state / "tree/space/space/space", os.O_RDONLY)
    for _ in range(8000):
        os.mkdir("d", dir_fd=deep)
        deeper = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.close(deep)
    file = daemon.base / "b.tar"

    def small_stack() -> None:
        """Of a half of what is usual; where there is more, the tree may be deeper."""
        resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 4 << 20))

    done = daemon.ctx("backup", "--state", str(daemon.state), str(file), preexec_fn=small_stack)
    assert done.stderr.startswith(
        "left out: files whose paths are too long, such as ./tree/space/space/space/d"
    )
    assert done.returncode == 1
    restored = ctx("restore", "--state", str(other.state), str(file))
    assert (restored.returncode, restored.stderr) == (0, "")
    assert (other.state / "tree/space/space/space" / "file").read_text() == "kept"
    assert (other.state / "tree/space/space/space" / "/".join("d" * 1000)).is_dir()


def test_who_owns_the_directory_of_a_backup_leads_it_nowhere(daemon: Daemon) -> None:
    place, programs = daemon.base / "place", daemon.base / "programs"
    victim = daemon.base / "victim"
    victim.write_text("kept")
    place.mkdir()
    programs.mkdir()
    (programs / "tar").write_text(f"""#!/bin/sh
for made in {place}/.b.tar*; do
    if [ -d "$made" ]; then made=$made/b.tar; fi
    mv "$made" "$made.moved" && ln -s {victim} "$made"
done
exec {shutil.which("tar")} "$@"
""")
    (programs / "tar").chmod(0o755)
    subprocess.run(
        [sys.executable, "-IS", str(daemon.root / "bin" / "ctx"), "backup",
         "--state", str(daemon.state), str(place / "b.tar")],
        env={"CTX_ROOT": str(daemon.root), "PATH": f"{programs}:{os.environ['PATH']}"},
        timeout=TIMEOUT, check=False, capture_output=True,
    )  # fmt: skip
    assert victim.read_text() == "kept"
    assert (place / "b.tar").is_symlink(), "it was led there"


def test_who_can_write_an_archive_says_as_whom_agents_run(daemon: Daemon, other: Daemon) -> None:
    file = daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    for uid, mode, why in ((1234, 0o600, "belongs to uid 1234"), (0, 0o620, "can be written by")):
        os.chown(file, uid, 0)
        file.chmod(mode)
        refused = ctx("restore", "--state", str(other.state), str(file))
        assert refused.returncode == 1
        assert f"{file} {why}" in refused.stderr and "a copy of your own" in refused.stderr
        assert not other.state.exists()


@pytest.mark.parametrize("link", ["home", "shared", "home/7", "home/7/agent"])
def test_no_link_of_an_archive_is_followed(daemon: Daemon, other: Daemon, link: str) -> None:
    """Of a history that the database does not know, the directory is removed."""
    victim = daemon.base / "victim"
    (victim / "7" / "agent" / "coder" / "papers").mkdir(parents=True)
    whole, file = daemon.base / "whole.tar", daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(whole)).returncode == 0
    within = victim.joinpath(*link.split("/")[1:])
    with tarfile.open(whole) as read, tarfile.open(file, "w") as archive:
        archive.addfile(read.getmember(MANIFEST), read.extractfile(MANIFEST))
        made = tarfile.TarInfo(f"./{link}")
        made.type, made.linkname = tarfile.SYMTYPE, str(within)
        archive.addfile(made)
        archive.addfile(read.getmember(DATABASE), read.extractfile(DATABASE))
    before = sorted(victim.rglob("*"))
    done = ctx("restore", "--state", str(other.state), str(file))
    assert done.returncode == 1
    assert f"{link} is a link; nothing was restored" in done.stderr
    assert sorted(victim.rglob("*")) == before
    assert [path.name for path in other.state.iterdir()] == ["lock"]


def test_a_state_is_closed_before_there_is_something_in_it(
    daemon: Daemon, other: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    other.state.mkdir(mode=0o755)
    modes = []

    def rename(source: str, to: str) -> None:
        modes.append(other.state.stat().st_mode & 0o777)
        os.replace(source, to)

    monkeypatch.setattr(os, "rename", rename)
    args = Arguments(state=str(other.state), file=str(file))
    assert do_restore(Root(str(daemon.root)), args) == 0
    assert modes and {*modes} == {0o700}


def test_the_state_of_another_user_is_left_to_that_user(daemon: Daemon, other: Daemon) -> None:
    file = daemon.base / "b.tar"
    assert daemon.ctx("backup", "--state", str(daemon.state), str(file)).returncode == 0
    other.state.mkdir()
    os.chown(other.state, 1234, 1234)
    for words in (("restore",), ("backup",)):
        done = ctx(*words, "--state", str(other.state), str(file))
        assert done.returncode == 1
        assert f"{other.state} belongs to uid 1234: run this as that user" in done.stderr
    assert [*other.state.iterdir()] == []


def test_what_cannot_be_backed_up_is_one_sentence(daemon: Daemon, tmp_path: Path) -> None:
    nothing = daemon.ctx("backup", "--state", str(tmp_path), str(tmp_path.parent / "b.tar"))
    assert nothing.returncode == 1
    assert "ctxfs.db: No such file or directory; name the state directory" in nothing.stderr
    within = daemon.ctx("backup", "--state", str(daemon.state), str(daemon.state / "b.tar"))
    assert within.returncode == 2
    assert "is below the state" in within.stderr
    nowhere = daemon.ctx("backup", "--state", str(daemon.state), "/nowhere/b.tar")
    assert nowhere.stderr == "ctx: /nowhere: No such file or directory\n"
    (tmp_path / "text").write_text("no archive")
    other = ctx("restore", "--state", str(tmp_path / "new"), str(tmp_path / "text"))
    assert other.stderr == f"ctx: {tmp_path}/text is not a backup of ctxfs\n"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
