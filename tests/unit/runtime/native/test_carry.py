"""Copying files out of a directory that others change meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.cell.cell import native

CARRY = str(native("carry"))
pytestmark = pytest.mark.skipif(
    not os.path.exists(CARRY), reason="carry is not compiled: make programs"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    return tmp_path / "from"


@pytest.fixture
def target(source: Path) -> Path:
    return source.parent / "to"


def carry(source: Path, *names: str, prefix: str = "", before: tuple[str, ...] = ()) -> list[str]:
    """What is told of the names that were not copied."""
    command = [*before, CARRY, str(source), str(source.parent / "to"), prefix]
    done = subprocess.run(
        command, input="".join(f"{name}\0" for name in names), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def write(path: Path, text: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_files_keep_their_permissions_and_times(source: Path, target: Path) -> None:
    write(source / "deep/er/file")
    (source / "deep").chmod(0o700)
    (source / "deep/er/file").chmod(0o6640)
    os.utime(source / "deep/er/file", (1, 1))
    assert carry(source, "deep/er/file", prefix="pre/fix/") == []
    made = target / "pre/fix/deep/er/file"
    found = made.stat()
    assert (made.read_text(), found.st_mode & 0o7777, found.st_mtime) == ("text", 0o640, 1)
    assert (target / "pre/fix/deep").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name", ["..", "../secret", "a/../../secret", "/etc/passwd", "a//b", "a/", ".", "a/./b",
             ".git/config", ".GIT/config", "a/.git", "x" * 5000],
)  # fmt: skip
def test_a_name_that_leads_elsewhere(source: Path, target: Path, name: str) -> None:
    write(source.parent / "secret")
    for inside in (".git/config", ".GIT/config", "a/b", "a/.git"):
        write(source / inside)
    [told] = carry(source, name)
    assert told.startswith(f"{name} (")
    assert not [path for path in target.rglob("*") if path.is_file()]


def test_nothing_is_overwritten(source: Path, target: Path) -> None:
    for name in ("file", "link", "above/file"):
        write(source / name, "new")
    write(target / "file", "old")
    (target / "link").symlink_to("elsewhere")
    (target / "above").symlink_to(source.parent)
    assert carry(source, "file", "link", "above/file", "none", "new\x01\nline") == [
        "file (the branch has it)",
        "link (the branch has it)",
        "above/file (a link or a file is where a directory should be)",
    ]
    assert (target / "file").read_text() == "old"
    assert not (target / "elsewhere").exists() and not (source.parent / "file").exists()


def test_what_is_told_is_a_line(source: Path, target: Path) -> None:
    (source / "a\n=end\x1b").symlink_to("x")
    assert carry(source, "a\n=end\x1b", prefix="pre/") == ["pre/a?=end? (no link is followed)"]


def test_there_is_a_bound(source: Path, target: Path) -> None:
    with open(source / "large", "wb") as file:
        file.truncate((256 << 20) + 1)
    names = [f"{number:05}" for number in range(10_001)]
    for name in names:
        (source / name).touch()
    why = "(only 10,000 files and 256 MiB are copied)"
    assert carry(source, "large", *names) == [f"large {why}", f"10000 {why}"]
    assert not (target / "large").exists() and (target / names[-2]).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_what_is_mounted_below_is_not_copied(source: Path, target: Path) -> None:
    write(source / "space/file")
    write(source / "file")
    write(source.parent / "other")
    mounting = 'mount --bind "$1" "$1/space" && mount --bind "$2" "$1/file"; shift 2; exec "$@"'
    before = ("unshare", "-m", "sh", "-ec", mounting, "sh", str(source), f"{source.parent}/other")
    assert carry(source, "space/file", "file", before=before) == [
        "space/file (on another mount)", "file (on another mount)",
    ]  # fmt: skip


@contextmanager
def swapping(path: Path, other: Path) -> Iterator[None]:
    """Somebody puts a link to another directory in the place of this one, and takes it away."""
    over = threading.Event()

    def swap() -> None:
        away = path.with_name("away")
        while not over.is_set():
            path.rename(away)
            path.symlink_to(other)
            path.unlink()
            away.rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_link_that_comes_and_goes_is_not_followed(source: Path, target: Path) -> None:
    write(source / "dir/file", "mine")
    write(source.parent / "outside/file", "secret")
    told: set[str] = set()
    with swapping(source / "dir", source.parent / "outside"):
        for _ in range(200):
            told.update(carry(source, "dir/file"))
            for made in target.rglob("file"):
                assert made.read_text() == "mine"
            shutil.rmtree(target)
            target.mkdir()
    why = "a link or a file is where a directory should be"
    assert told <= {"dir/file (no link is followed)", f"dir/file ({why})"}
