"""What is wrong is said in one sentence, and what to do about it."""

from __future__ import annotations

import pytest

from runtime.records.lifecycle import Status
from tests.worlds.tree import CONTEXT, Mounted, complete, refused

D = "agent/x.d"


@pytest.fixture
def mounted(mounted: Mounted) -> Mounted:
    mounted.make("x")
    return mounted


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("status", f"status cannot be written: use {D}/ctl\n"),
        ("task/t/status", f"status cannot be written: use {D}/task/t/ctl\n"),
        ("queue", f"queue cannot be written: use {D}/inbox\n"),
        ("mount.effective", f"mount.effective cannot be written: use {D}/mount\n"),
        ("policy.effective", f"policy.effective cannot be written: use {D}/policy\n"),
        ("outcome", "outcome cannot be written\n"),
    ],
)
def test_what_only_shows_names_what_is_written(mounted: Mounted, path: str, instead: str) -> None:
    mounted.live(mounted.agent("x"))
    complete(mounted.ops.mkdir, mounted.inode(f"{D}/task"), b"t", 0o755, CONTEXT)
    with refused("EPERM"):
        mounted.put(f"{D}/{path}", "stop\n")
    assert mounted.reason.endswith(instead)


@pytest.mark.parametrize(
    ("directory", "name"), [("", "status"), ("/work", "current"), ("/task/t", "cmd"), ("", "out")]
)
def test_what_is_there_by_itself_goes_with_the_whole(
    mounted: Mounted, directory: str, name: str
) -> None:
    """As ``rm -r`` tries it, name by name."""
    mounted.live(mounted.agent("x"))
    complete(mounted.ops.mkdir, mounted.inode(f"{D}/task"), b"t", 0o755, CONTEXT)
    with refused("EPERM"):
        complete(mounted.ops.unlink, mounted.inode(D + directory), name.encode(), CONTEXT)
    whole = D + directory.removesuffix("/work")
    assert mounted.reason.endswith(
        f"{name} cannot be removed alone: rmdir {whole} removes all of it\n"
    )


def test_what_nobody_removes_names_no_rmdir(mounted: Mounted) -> None:
    with refused("EPERM"):
        complete(mounted.ops.unlink, mounted.inode(""), b"status", CONTEXT)
    assert mounted.reason.endswith("status cannot be removed from /\n")


@pytest.mark.parametrize(
    ("status", "path", "remedy"),
    [
        (Status.NEW, f"{D}/work/current", '"x" is new: start it first'),
        (Status.DEAD, f"{D}/work/current", '"x" is dead: reset and start it first'),
        (Status.DEAD, f"{D}/mode", '"x" is dead: reset it first'),
        (Status.BUSY, f"{D}/mode", 'mode can be written while new; "x" is busy'),
    ],
)
def test_another_status_tells_the_way_to_the_right_one(
    mounted: Mounted, status: Status, path: str, remedy: str
) -> None:
    if status is not Status.NEW:
        mounted.live(mounted.agent("x"), status)
    with refused("EBUSY"):
        mounted.put(path, "turn\n")
    assert mounted.reason.endswith(f"{remedy}\n")


@pytest.mark.parametrize("text", ["sh -c 'a\nb'\n", "sh -c 'a\nb'"])
def test_a_program_of_several_lines_is_shown_the_quoting_for_them(
    mounted: Mounted, text: str
) -> None:
    with refused("EINVAL"):
        mounted.put(f"{D}/exec", text)
    hint = r"; a line break in it is \n within $'...', as in: sh -c $'date\nls'"
    assert mounted.reason.endswith(f"exec takes one value, on one line{hint}\n")
    mounted.put(f"{D}/exec", r"sh -c $'date\nls'")
    with refused("EINVAL"):
        mounted.put(f"{D}/mode", "once\nturn\n")
    assert mounted.reason.endswith("mode takes one value, on one line\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mood", f"{D}/mood is no file; did you mean mode?\n"),
        ("handoff", f"{D}/handoff is no file; did you mean handoff.md?\n"),
        ("passwd", f"files cannot be created in {D}\n"),
    ],
)
def test_a_mistyped_control_is_recognized(mounted: Mounted, name: str, said: str) -> None:
    with refused("EPERM"):
        complete(mounted.ops.create, mounted.inode(D), name.encode(), 0o644, 0, CONTEXT)
    assert mounted.reason.endswith(said)


@pytest.mark.parametrize(
    ("directory", "said"),
    [("shared", "in shared: use shared/SPACE/data\n"), ("", "in /: use agent/NAME.d\n")],
)
def test_where_nothing_is_made_names_where_it_is(
    mounted: Mounted, directory: str, said: str
) -> None:
    with refused("EPERM"):
        complete(mounted.ops.create, mounted.inode(directory), b"x", 0o644, 0, CONTEXT)
    assert mounted.reason.endswith(f"files cannot be created {said}")
