"""Where links in a directory lead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.kernel import links


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("runtime.kernel.links.time.monotonic", lambda: now[0])
    return now


@pytest.mark.skipif(os.geteuid() != 0, reason="only links of uid 0 count")
def test_links_are_followed_once_and_found_again_when_they_change(
    tmp_path: Path, clock: list[float]
) -> None:
    top = tmp_path / "etc"
    (top / "ssl").mkdir(parents=True)
    (top / "resolv.conf").symlink_to("../run/resolve/stub")
    (top / "ssl" / "bundle").symlink_to("/var//lib/ca/./bundle")
    (top / "within").symlink_to("ssl/bundle")
    (top / "others").symlink_to("/others")
    os.chown(top / "others", 4711, 4711, follow_symlinks=False)
    found = [str(tmp_path / "run" / "resolve" / "stub"), "/var/lib/ca/bundle"]
    assert list(links.targets(str(top))) == sorted(found)
    (top / "ssl" / "more").symlink_to("//srv/more")
    assert list(links.targets(str(top))) == sorted(found), "good for a second"
    clock[0] += 1
    assert list(links.targets(str(top))) == sorted([*found, "/srv/more"])


def test_a_directory_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert links.targets(str(tmp_path / "none")) == ()
