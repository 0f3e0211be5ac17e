"""The manual pages say what the rows say."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from contrib.generate import manual
from runtime.records.config import Config
from runtime.sockets.operations import DAEMON_OPERATIONS, OPERATIONS
from runtime.texts.policy import PERMS

MAN = Path(__file__).parents[3] / "man"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """One of the pages, in a directory that has all of them."""
    for name in manual.PAGES:
        shutil.copy(MAN / name, tmp_path)
    return tmp_path / "ctxfs.5"


def test_the_pages_are_up_to_date() -> None:
    assert manual.main(["--check", str(MAN)]) == 0, "run: make man"


def test_every_operation_of_a_socket_is_on_the_page() -> None:
    _, _, sockets = (MAN / "ctxfs-tools.5").read_text().partition(".Sh SOCKETS\n")
    for name in {*OPERATIONS, *DAEMON_OPERATIONS}:
        assert f"\n.It Ql {name}\n" in sockets


def test_every_permission_is_in_the_manual() -> None:
    _, _, text = (MAN / "ctxfs-policy.5").read_text().partition(".Ss Classes\n")
    for cls, perms in PERMS.items():
        _, _, about = text.partition(f".It Li {cls} :")
        about, _, _ = about.partition(".It Li ")
        assert not [perm for perm in perms if not re.search(rf"\.I[ct] .*\b{perm}\b", about)], cls


def test_every_setting_is_in_the_manual() -> None:
    text, _, _ = (MAN / "ctxfs.yaml.5").read_text().partition(".Sh DECLARED AGENTS\n")
    for field in fields(Config):
        assert f"\n.It Va {field.name} " in text


def test_check_refuses_a_page_that_is_out_of_date(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = page.read_text().replace(".It Ic start\n", ".It Ic begin\n")
    page.write_text(old)
    assert manual.main(["--check", str(page.parent)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert page.read_text() == old


def test_renewing_restores_the_generated_parts_and_nothing_else(page: Path) -> None:
    good = page.read_text()
    page.write_text(good.replace(".It Ic start\n", ".It Ic begin\n"))
    assert manual.main([str(page.parent)]) == 0
    assert page.read_text() == good


def test_a_page_without_a_marker_is_refused(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text(page.read_text().replace('.\\" END verbs\n', ""))
    assert manual.main([str(page.parent)]) == 1
    assert "verbs" in capsys.readouterr().err


def test_a_missing_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.main([str(tmp_path)]) == 1
    assert "ctxfs.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain", "plain"),
        (".Sh", "\\&.Sh"),
        ("'quoted", "\\&'quoted"),
        ("a\\b", "a\\eb"),
        ("a.b", "a.b"),
    ],
)
def test_text_stays_text(text: str, escaped: str) -> None:
    assert manual.escape(text) == escaped
