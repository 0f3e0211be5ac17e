"""Where the files are that came with ctxfs: manual pages, recipes, the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from client import shipped
from client.shipped import find_shipped

CHECKOUT = Path(__file__).parents[3]


def modules_at(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(shipped, "__file__", str(directory / "client/shipped.py"))
    monkeypatch.setattr("sys.prefix", str(directory / "elsewhere"))


def put(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return str(path)


def test_of_a_checkout_it_is_the_checkouts() -> None:
    assert find_shipped("man/ctx.1", "man/man1/ctx.1") == str(CHECKOUT / "man/ctx.1")


def test_of_what_is_installed_it_is_in_its_prefix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As make install puts it: modules in a virtual environment, and a link in that."""
    prefix = tmp_path / "usr/local"
    modules_at(monkeypatch, prefix / "lib/ctxfs/lib/python3.11/site-packages")
    schema = put(prefix / "share/ctxfs/schema.json")
    page = put(prefix / "share/man/man1/ctx.1.gz")
    link = prefix / "lib/ctxfs/share/ctxfs"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../share/ctxfs")
    assert find_shipped("contrib/schema.json", "ctxfs/schema.json") == schema
    assert find_shipped("man/ctx.1", "man/man1/ctx.1") == ""
    assert find_shipped("man/ctx.1", "man/man1/ctx.1", ("", ".gz")) == page


def test_of_a_virtual_environment_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As pip puts it."""
    modules_at(monkeypatch, tmp_path / "v/lib/python3.11/site-packages")
    put(tmp_path / "other/share/ctxfs/x")
    assert find_shipped("contrib/x", "ctxfs/x") == ""
    there = put(tmp_path / "v/share/ctxfs/x")
    assert find_shipped("contrib/x", "ctxfs/x") == there
