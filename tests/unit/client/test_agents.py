"""Agents made, changed, shown and removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from client.root import Root
from tests.unit.client.fakes import LIFE, FakeRoot, Run, refuse


def test_set_and_get(root: FakeRoot, run: Run) -> None:
    directory = root.agent("x")
    assert run("set", "x", "env", "A=1")[0] == 0
    assert (directory / "env").read_text() == "A=1\n"
    assert run("set", "x", "life=temp", "exec=sh -c 'a=b'")[0] == 0
    assert run("get", "x", "exec")[1] == "sh -c 'a=b'\n"
    assert run("set", "x", "handoff.md", "-", stdin=b"two\nlines")[0] == 0
    assert (directory / "handoff.md").read_bytes() == b"two\nlines"
    assert run("set", "x", "env", "-")[0] == 0
    assert (directory / "env").read_bytes() == b"\n"


@pytest.mark.usefixtures("made_agents_are_full")
def test_new(root: FakeRoot, run: Run) -> None:
    assert run("new", "x", "--parent", "coder", "life=temp", "env=A=1") == (0, "", "")
    directory = root.path / "agent" / "x.d"
    assert (directory / "parent").read_text() == "agent:coder\n"
    assert (directory / "life").read_text() == "temp\n"
    assert (directory / "env").read_text() == "A=1\n"


@pytest.mark.usefixtures("made_agents_are_full")
@pytest.mark.parametrize(
    ("config", "author"),
    [
        ("[user]\nname = Ann  Lee\nemail = ann@example.org\n", "Ann  Lee <ann@example.org>\n"),
        ("[include]\npath = more\n", "Bo <b@o>\n"),
        ('[user]\nname = "A<\\n>B"\nemail = "<a @ b>"\n', "AB <a@b>\n"),
        ("[user]\nname = Ann\n", ""),
        (f"[user]\nname = {'A' * 256}\nemail = a\n", ""),
        ("[user\n", ""),
    ],
)
@pytest.mark.parametrize(
    "argv", [["new", "x"], ["spawn", "x", "--", "true"], ["new", "x", "author=C <c>"]]
)
def test_agents_commit_as_their_maker(
    root: FakeRoot, run: Run, tmp_path: Path, argv: list[str], config: str, author: str
) -> None:
    (tmp_path / "gitconfig").write_text(config)
    (tmp_path / "more").write_text("[user]\nname = Bo\nemail = b@o\n")
    assert run(*argv)[0] == 0
    said = "C <c>\n" if "author=C <c>" in argv else author
    assert (root.path / "agent" / "x.d" / "author").read_text() == said


@pytest.mark.usefixtures("made_agents_are_full")
@pytest.mark.parametrize(
    "argv", [["new", "x", "life=forever"], ["spawn", "x", "--set", "life=forever", "--", "true"]]
)
def test_a_refused_agent_is_removed_again(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    root.reject("EINVAL", LIFE, "no such life")
    refuse(monkeypatch, "life", errno.EINVAL)
    assert run(*argv) == (1, "", f"ctx: {LIFE}: no such life (EINVAL)\n")
    assert os.listdir(root.path / "agent") == []


@pytest.mark.usefixtures("made_agents_are_full")
def test_the_task_is_written_before_the_parent(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is somebody's private child, its task is that one's to write."""
    written: list[str] = []
    write = Root.write

    def note(self: Any, relative: str, data: bytes) -> None:
        written.append(relative.rpartition("/")[2])
        write(self, relative, data)

    monkeypatch.setattr(Root, "write", note)
    argv = ["spawn", "x", "--parent", "p", "--set", "life=owned", "--handoff", "-", "--", "true"]
    run(*argv, stdin=b"the task")
    assert written == ["handoff.md", "parent", "life", "exec", "ctl"]


def test_taken_names(root: FakeRoot, run: Run) -> None:
    root.agent("x")
    said = "ctx: agent/x.d: already exists: choose another name, or remove it first (EEXIST)\n"
    assert run("new", "x")[::2] == (1, said)
    assert (root.path / "agent/x.d/status").exists()


def test_rm_goes_on(root: FakeRoot, run: Run) -> None:
    for name in ("a", "b"):
        (root.path / "agent" / f"{name}.d").mkdir()
    assert run("rm", "a", "nope", "b") == (1, "", 'ctx: no agent "nope"\n')
    assert os.listdir(root.path / "agent") == []


def test_a_mistyped_file_gets_a_suggestion(root: FakeRoot, run: Run) -> None:
    root.agent("x", status="new", mode="once")
    said = "ctx: agent/x.d/mood: no such file; did you mean mode? (ENOENT)\n"
    assert run("set", "x", "mood=turn")[::2] == (1, said)
    assert run("get", "x", "mood")[::2] == (1, said)
    assert "No such file" in run("get", "x", "nothing-like-it")[2]
    said = "ctx: agent/x.d/none/mode: No such file or directory (ENOENT)\n"
    assert run("get", "x", "none/mode")[::2] == (1, said)
