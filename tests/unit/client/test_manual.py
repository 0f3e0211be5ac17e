"""The man pages, as `ctx help` shows them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from client import help, shipped
from client.help import TOPICS, page_of, place_of, plain
from tests.unit.client.fakes import FakeRoot, Run, all_commands

MAN = Path(__file__).parents[3] / "man"
PAGES = sorted(path.name for path in MAN.glob("*.[1-8]"))


def test_every_topic_has_a_page() -> None:
    assert {page for _, page in TOPICS.values()} <= {*PAGES}


@pytest.mark.parametrize(
    ("word", "page"),
    [("tour", "ctxfs.7"), ("ctxd", "ctxd.8"), ("ctxfs(5)", "ctxfs.5"), ("ctxfs.7", "ctxfs.7"),
     ("ctx", "ctx.1"), ("yaml", "ctxfs.yaml.5"), ("ctxfs.yaml(5)", "ctxfs.yaml.5"),
     ("policy", "ctxfs-policy.5"), ("tasks", "ctxfs-tasks.5"), ("ps", ""), ("ctxfs(9)", ""),
     ("", "")],
)  # fmt: skip
def test_what_names_a_page(word: str, page: str) -> None:
    assert page_of(word) == page


@pytest.mark.parametrize("page", PAGES)
def test_a_page_as_plain_text(page: str) -> None:
    source = (MAN / page).read_text()
    text = plain(source)
    assert not re.search(r"^\s*\.[A-Z][a-z]\b", text, re.M), "a macro is left"
    assert not re.search(r"(?<![\w`'])\b(Cm|Fl|Ns|Xr|Oo|Oc) ", text), "a macro is left"
    assert "\\&" not in text and "\\(" not in text
    for heading in re.findall(r"^\.S[hs] (.*)$", source, re.M):
        assert re.search(rf"^ *{re.escape(heading)}$", text, re.M), heading
    for block in re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", source, re.M | re.S):
        first = block.partition("\n")[0].split("\\")[0]
        assert first in text


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc: apt-get install mandoc")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_as_plain_text_has_the_words_of_mandoc(page: str) -> None:
    """But for tables, the cells of which have other places."""
    source = re.sub(r"^\.TS\n.*?^\.TE\n", "", (MAN / page).read_text(), flags=re.M | re.S)
    wide = ["mandoc", "-T", "utf8", "-O", "width=1000"]
    shown = subprocess.run(wide, input=source, capture_output=True, text=True, check=True).stdout
    shown = re.sub(".\b", "", shown).translate(str.maketrans("‘’“”–•", "''\"\"-*"))
    _, *between, _ = shown.strip().splitlines()
    assert plain(source).split() == " ".join(between).replace("set- user", "set-user").split()


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc: apt-get install mandoc")
@pytest.mark.parametrize("width", range(56, 200, 6))
def test_the_place_of_each_command_is_found(width: int) -> None:
    render = ["mandoc", "-T", "utf8", "-O", f"width={width}", str(MAN / "ctx.1")]
    shown = subprocess.run(render, capture_output=True, text=True, check=True).stdout
    lines = re.sub(".\b", "", shown).splitlines()
    for command in all_commands():
        place = re.compile(place_of(command))
        first = next(line for line in lines if place.search(line))
        word = r"( \[| (acp|claude|name|tool)\b|  +[A-Z])"
        assert re.match(rf" {{5}}{command.name}{word}", first), first
        assert "$" not in place.pattern


def test_a_table_as_plain_text() -> None:
    rows = "What\tBound\tAt it\n_\nT{\nlog and\nout\nT}\t1M\tIt stops.\na\tb\tc\n"
    assert plain(f".Dt CTX 1\n.Sh GROWS\nAll:\n.TS\nlw(9) l.\n{rows}.TE\n.Pp\nEnd.\n") == (
        "GROWS\n      All:\n   log and out\n      Bound: 1M. At it: It stops.\n"
        "   a\n      Bound: b. At it: c.\n\n      End.\n"
    )


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Cm log Oo Fl f | -follow Oc Op Ar name ...", "log [-f | --follow] [name ...]"),
        ("Pq Xr ctxfs 5 .", "(ctxfs(5))."),
        ("Fl h , Fl -help", "-h, --help"),
        ("Pa agent/ Ns Ar name", "agent/name"),
        ("Fl -env , -mount No and Xr link 2 No too", "--env, --mount and link(2) too"),
        ("Pq Do a b Dc , or Er EIO", '("a b", or EIO)'),
        ("Pq see Sx TASKS .", "(see TASKS)."),
    ],
)
def test_macros(line: str, shown: str) -> None:
    assert plain(f".Dt CTX 1\n.{line}\n").strip() == shown


def without_man(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(help, "find_program", lambda name: "")


def test_help_without_man_prints_the_text(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_man(monkeypatch)
    status, out, err = run("help", "tour")
    assert (status, err) == (0, "") and "TOUR" in out and "$ mkdir hello.d" in out


def test_help_about_what_is_not_a_topic(root: FakeRoot, run: Run) -> None:
    told = (2, "", 'ctx: unknown command or topic "zzz"; see: ctx help\n')
    assert run("help", "zzz") == run("help", "zzz", "tour") == told


def test_help_about_a_page_that_is_not_here(
    root: FakeRoot, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "shipped", lambda checkout, installed: iter(()))
    assert run("help", "files") == (
        1, "", "ctx: the page ctxfs(5) is not here; it is where ctxfs is installed\n",
    )  # fmt: skip


def test_help_opens_man(root: FakeRoot, spawned: Any, tmp_path: Path) -> None:
    """On a terminal, the page of a command begins at the command."""
    from tests.unit.client.test_output import on_terminal

    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("man", "less"):
        (programs / name).write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    page = str(MAN / "ctx.1")
    shown = on_terminal(spawned, "help", "task", "show", PATH=path)
    assert shown == f"<-P><less '+/^ {{4,8}}task show +([A-Z[]|acp|claude|name|tool)'><-l><{page}>"
    assert on_terminal(spawned, "help", "policy", PATH=path) == f"<-l><{MAN / 'ctxfs-policy.5'}>"
    assert "usage: ctx task show" in on_terminal(spawned, "task", "show", "--help", PATH=path)


def test_man_is_ended_by_a_closed_pipe(root: FakeRoot, spawned: Any, tmp_path: Path) -> None:
    """Python ignores SIGPIPE; a man(1) that did so, too, would tell of a pipe that is closed."""
    man = tmp_path / "man"
    man.write_text("#!/bin/sh\nsed -n 's/^SigIgn:\\s*//p' /proc/self/status\n")
    man.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = spawned("help", "tour", env={**os.environ, "PATH": path})
    ignored = int(process.communicate()[0], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)
