"""What stage.c binds, and with whose rights it opens it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.cell.cell import native
from runtime.kernel import orders

TIMEOUT = 60.0
#: a creator without rights
UID = 61000
SHOW = "cat /proc/self/mountinfo; ls"

WHY_NOT = "" if native("stage").exists() else "stage is not compiled: make programs"
if os.geteuid():
    WHY_NOT = "stage takes the ids of others: run it as root"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def tree() -> Iterator[Path]:
    """``stage`` for the tmpfs, ``given`` for a source, ``own`` for what is forbidden except for
    ``own/kept``; the creator reaches all."""
    base = Path(tempfile.mkdtemp(prefix="ctxfs-stage-"))
    base.chmod(0o755)
    for name in ("stage", "given", "own/kept"):
        (base / name).mkdir(parents=True)
    yield base
    shutil.rmtree(base)


def run(
    tree: Path,
    source: Path,
    *,
    before: str = "",
    around: tuple[str, ...] = (),
    show: str = SHOW,
) -> subprocess.CompletedProcess[str]:
    """What a shell shows of a staged source. The host sees none of the mounts made before."""
    own = tree / "own"
    wanted = [("r", "-", str(source))]
    message = orders.message(tree / "stage", UID, UID, [], [own], [own / "kept"], wanted)
    spec = orders.memory_file("stage", message)
    step = ["/bin/sh", "-c", f"cd '{tree}/stage/0' && {show}"]
    words = orders.words(native("stage"), spec, "-", step)
    try:
        return subprocess.run(
            ["unshare", "-m", "sh", "-ec", f'{before}\nexec "$@"', "sh", *around, *words],
            pass_fds=[spec],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    finally:
        os.close(spec)


@pytest.mark.parametrize("name", ["plain", "a b", "tab\there", "back\\slash", "new\nline", "\\040"])
@pytest.mark.parametrize("source", ["proc", "", " x"])
def test_a_procfs_is_removed_whatever_its_name(tree: Path, name: str, source: str) -> None:
    point = tree / "given" / name
    point.mkdir()
    done = run(tree, tree / "given", before=f"mount -t proc '{source}' '{point}'")
    assert done.returncode == 0, done.stderr
    assert f"{tree}/stage/0 " in done.stdout
    staged = [line for line in done.stdout.splitlines() if f"{tree}/stage/0/" in line]
    assert staged == []


@pytest.mark.parametrize("name", ["own/kept", "own/kept/a", "own/kept/a/b", "given/in"])
def test_what_is_permitted_can_be_given_although_it_is_in_what_is_forbidden(
    tree: Path, name: str
) -> None:
    (tree / "own/kept/a/b").mkdir(parents=True)
    (tree / "given/in").symlink_to(tree / "own/kept/a")
    (tree / name / "here").touch()
    done = run(tree, tree / name)
    assert done.returncode == 0, done.stderr
    assert "here" in done.stdout.splitlines()


@pytest.mark.parametrize(
    "name", ["own", "own/kept2", "own/kep", "own/other/kept", "own/kept/../other", "own/kept/out"]
)
def test_what_is_beside_or_above_the_permitted_cannot_be_given(tree: Path, name: str) -> None:
    for other in ("own/kept2", "own/kep", "own/other/kept"):
        (tree / other).mkdir(parents=True)
    (tree / "own/kept/out").symlink_to(tree / "own/other")
    done = run(tree, tree / name)
    assert done.returncode == 125
    assert "own directories cannot be given to an agent" in done.stderr


def test_a_source_above_the_forbidden_does_not_show_what_is_permitted_in_it(tree: Path) -> None:
    covered = run(tree, tree, show="ls -A own")
    assert (covered.returncode, covered.stdout) == (0, ""), covered.stderr


@pytest.mark.parametrize("bits", ["", "+no_setuid_fixup"])
def test_a_source_is_opened_with_no_more_than_the_creators_rights(tree: Path, bits: str) -> None:
    closed = tree / "given"
    (closed / "file").write_text("x")
    closed.chmod(0o700)
    around = ("setpriv", f"--securebits={bits}") if bits else ()
    done = run(tree, closed / "file", around=around)
    assert done.returncode == 125
    assert "Permission denied" in done.stderr


def test_capabilities_that_would_stay_are_a_reason_to_refuse(tree: Path) -> None:
    around = ("setpriv", "--securebits=+no_setuid_fixup,+no_setuid_fixup_locked")
    done = run(tree, tree / "given", around=around)
    assert done.returncode == 125
    assert "securebits" in done.stderr
