"""The rights of what agents run are those that setpriv(1) leaves, whatever the daemon was given."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernel.cgroups import Cgroup
from tests.worlds.daemon import (
    AGENT_UID,
    TIMEOUT,
    Daemon,
    read,
    running,
    wait_status,
    wait_until,
    write,
)

PYTHON = "/usr/bin/python3"
GROUPS = (7001, 7002)
#: what is compared: (name, value) lines, with the securebits that /proc does not show
SHOW = (
    "import ctypes\n"
    "for line in open('/proc/self/status'):\n"
    "    if line.split(':')[0] in ('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff',\n"
    "                              'CapBnd', 'CapAmb', 'NoNewPrivs'):\n"
    "        print(' '.join(line.split()))\n"
    "print('Securebits:', ctypes.CDLL(None).prctl(27))\n"
)
#: rights that a manager of services may hand on to a daemon
RICH = (
    *("setpriv", "--groups", "7,8,9", "--inh-caps=+net_admin,+sys_admin"),
    *("--ambient-caps=+net_admin,+sys_admin", "--securebits=+no_setuid_fixup"),
)


class RichDaemon(Daemon):
    executed = True

    def command(self, *more: str) -> list[str]:
        return [*RICH, *super().command(*more)]


@pytest.fixture(scope="module")
def rich() -> Iterator[Daemon]:
    if os.geteuid():
        pytest.skip("gives rights to a daemon of root")
    with running(RichDaemon()) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def script(rich: Daemon) -> Path:
    path = rich.base / "show" / "show.py"
    path.parent.mkdir()
    path.parent.chmod(0o755)
    path.write_text(SHOW)
    path.chmod(0o644)
    return path


def left_by_setpriv(groups: tuple[int, ...]) -> str:
    """What the program says that setpriv starts with an agent's ids, and no right."""
    ids = [f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}"]
    ids.append(f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups")
    drop = ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    words = ["setpriv", *ids, *drop, PYTHON, "-IS", "-c", SHOW]
    return subprocess.check_output(words, text=True, timeout=TIMEOUT, cwd="/")


def seen_within(status: str) -> str:
    """The same, read in a cell, where no group but its gid has a number."""
    return re.sub(r"\b(7001|7002)\b", "65534", status)


def test_the_daemon_of_these_tests_has_what_agents_must_not_get(rich: Daemon) -> None:
    status = Path(f"/proc/{rich.pid}/status").read_text()
    facts = dict(line.split(":\t") for line in status.splitlines())
    assert facts["Groups"].split() == ["7", "8", "9"]
    for name in ("CapInh", "CapAmb", "CapEff"):
        assert int(facts[name], 16), name


@pytest.mark.parametrize("groups", [(), GROUPS])
def test_a_root_agent_and_its_tasks(rich: Daemon, script: Path, groups: tuple[int, ...]) -> None:
    name = f"agent{len(groups)}"
    files = {"mount": f"{script.parent} /show ro", "mode": "turn"}
    if groups:
        files["groups"] = " ".join(map(str, groups))
    command = f"{PYTHON} -IS /show/show.py"
    once = rich.finish(f"{name}-once", command, **{**files, "mode": "once"})
    expected = left_by_setpriv(groups)
    assert read(once, "out") == seen_within(expected)
    turn = rich.run(name, command, **files)
    wait_status(turn, "idle")
    assert held_cell(turn) == expected
    (turn / "task" / "t").mkdir()
    write(turn / "task" / "t" / "cmd", command)
    write(turn / "task" / "t" / "ctl", "start")
    wait_until(lambda: "Securebits" in read(turn / "task" / "t", "output"), "the task has spoken")
    assert read(turn / "task" / "t", "output") == seen_within(expected)
    write(turn / "inbox", "begin")
    # the end of the task is a message as well, and may have its run by now
    wait_until(lambda: "Securebits" in read(turn, "out"), "a run has ended")
    assert read(turn, "out").startswith(seen_within(expected))


@pytest.mark.parametrize("life", ["owned", "detached"])
def test_a_child(rich: Daemon, script: Path, life: str) -> None:
    parent = rich.run(f"boss-{life}", "sleep 1000", mount=f"{script.parent} /show ro",
                      groups=" ".join(map(str, GROUPS)))
    wait_status(parent, "busy")
    child = rich.finish(f"child-{life}", f"{PYTHON} -IS /show/show.py",
                        parent=f"agent:boss-{life}", life=life, mount="/show /again ro")
    assert read(child, "out") == seen_within(left_by_setpriv(GROUPS))


def held_cell(agent: Path) -> str:
    """The rights of the PID 1 of a cell; its securebits, which nobody can ask for, as a
    program's."""
    leaf = Cgroup(Path(read(agent, "cgroup").strip())).child("cell")
    status = Path(f"/proc/{max(leaf.processes())}/status").read_text()
    wanted = [line.split(":")[0] for line in left_by_setpriv(()).splitlines()]
    lines = [" ".join(line.split()) for line in status.splitlines() if line.split(":")[0] in wanted]
    return "\n".join([*lines, "Securebits: 0", ""])
