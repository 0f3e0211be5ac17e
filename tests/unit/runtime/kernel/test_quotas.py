"""Which project an owner has. What the kernel makes of it, tests/vm shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import StartupError
from runtime.kernel.quotas import Quotas, are_enforced
from runtime.records.config import Config, load_config


def test_an_owner_keeps_its_project(tmp_path: Path) -> None:
    first = Quotas(tmp_path, 500, 2)
    assert [first.project(owner) for owner in (1000, 0, 1000, 1001)] == [500, 501, 500, None]
    again = Quotas(tmp_path, 500, 3)
    assert [again.project(owner) for owner in (0, 1001, 1000)] == [501, 502, 500]


def test_another_range_is_somebody_elses_business(tmp_path: Path) -> None:
    """What an earlier setting gave is not used any more."""
    assert Quotas(tmp_path, 500, 2).project(1000) == 500
    other = Quotas(tmp_path, 600, 2)
    assert other.project(1000) is None
    assert other.project(1001) == 600


def test_a_filesystem_without_them_bounds_nothing() -> None:
    assert not are_enforced(Path("/proc"))


def test_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("disk_projects: [100000, 1000]\n")
    assert load_config(file, required=True).disk_projects == (100000, 1000)
    assert Config().disk_projects is None
    for wrong in ("5", "[0, 5]", "[5, 0]", "[1, 2, 3]", "[4294967295, 1]", "[a, 1]"):
        file.write_text(f"disk_projects: {wrong}\n")
        with pytest.raises(StartupError, match="disk_projects"):
            load_config(file, required=True)
