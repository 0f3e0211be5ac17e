"""What bounds the monitors of one owner, where the machine has the controllers."""

from __future__ import annotations

from pathlib import Path

from runtime.kernel.cgroups import CONTROLLERS, Cgroup, Hierarchy


def hierarchy_in(path: Path, *controllers: str) -> Hierarchy:
    leaf = path / "user-1000" / "monitor"
    leaf.mkdir(parents=True)
    for file in ("pids.max", "memory.max"):
        (leaf / file).write_text("max\n")
    made = Hierarchy.__new__(Hierarchy)
    made.root = Cgroup(path)
    made.controllers = tuple(each for each in CONTROLLERS if each in controllers)
    return made


def test_monitors_have_limits_from_their_number(tmp_path: Path) -> None:
    leaf = hierarchy_in(tmp_path, "memory", "pids").monitors(1000, 100)
    few = leaf.number("pids.max"), leaf.number("memory.max")
    assert few[0] is not None
    assert 100 < few[0] < 1000
    assert few[1] is not None
    assert few[1] >= 100 * (64 << 10)


def test_a_machine_without_controllers_has_no_limits_to_set(tmp_path: Path) -> None:
    leaf = hierarchy_in(tmp_path).monitors(1000, 100)
    assert leaf.read("pids.max") == "max\n"
