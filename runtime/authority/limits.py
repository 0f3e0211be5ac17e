"""Resource limits and use of an agent's subtree, in the files of its cgroup (cgroups(7))."""

from __future__ import annotations

from typing import Final

from runtime.errors import UnsupportedError
from runtime.kernel.cgroups import Cgroup, Hierarchy
from runtime.texts.limits import network_of

_CPU_PERIOD: Final = 100_000


def check_limits(hierarchy: Hierarchy, limits: dict[str, str]) -> None:
    """``UnsupportedError`` where the machine lacks the controller of a limit.

    Keys without one are not the kernel's.
    """
    for key, value in limits.items():
        controller, _, rest = key.partition(".")
        if network_of(key) is not None:
            continue
        if rest and value != "max" and controller not in hierarchy.controllers:
            raise UnsupportedError(
                f"{key}: the {controller} controller is not available in cgroup v2 here; "
                "boot with systemd.unified_cgroup_hierarchy=1 (see ctx doctor)"
            )


def apply_limits(hierarchy: Hierarchy, node: Cgroup, limits: dict[str, str]) -> None:
    """Writes ``memory.max``, ``pids.max`` and ``cpu.max`` to a cgroup, if it is there."""
    for key, value in limits.items():
        controller, _, rest = key.partition(".")
        if rest and controller in hierarchy.controllers and node.exists():
            node.write(key, _cpu_max(value) if key == "cpu.max" else value)


def spent(node: Cgroup, *, counted: bool = True) -> dict[str, int]:
    """cpu_usec, and memory_peak where the kernel counts it, in microseconds and bytes. That it
    does not, the caller may know (``counted``)."""
    found = {"cpu_usec": node.keys("cpu.stat").get("usage_usec")}
    if counted:
        found["memory_peak"] = node.number("memory.peak")
    return {key: value for key, value in found.items() if value is not None}


def _cpu_max(value: str) -> str:
    """``cpu.max`` as cgroups take it: a quota and a period in microseconds."""
    return value if " " in value else f"{value} {_CPU_PERIOD}"
