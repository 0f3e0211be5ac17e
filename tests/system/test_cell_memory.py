"""What agents write into the memory of their cells: bounded, counted, and told."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.worlds.daemon import daemon_of, read, wait_dead, wait_until, write

MEBIBYTE = 1 << 20
#: fills what it can, tells how much that was, and waits
FILL = """#!/usr/bin/python3
import os, sys, time
whole = 0
for directory in ("/", "/dev", "/dev/shm", "/run", "/tmp", "/var/tmp", os.environ["HOME"]):
    with open(f"{directory}/{os.environ['CTX_AGENT']}", "wb", buffering=0) as file:
        try:
            while True:
                whole += file.write(bytes(1 << 16))
        except OSError as error:
            assert error.errno == 28
print(whole, flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fill")
    path.chmod(0o755)
    for parent in path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    (path / "fill").write_text(FILL)
    (path / "fill").chmod(0o755)
    return path / "fill"


def usage(agent: Path) -> dict[str, int]:
    pairs = (line.split("=") for line in read(agent, "usage").splitlines())
    return {key: int(value) for key, value in pairs}


def test_all_of_a_cell_has_one_bound_and_is_on_its_owners_account(fill: Path) -> None:
    """Until the cell is gone; a child has memory of its own."""
    with daemon_of(config="tmp_max: 16M\nowner_tmp_max: 35M\nagent_user: nobody\n") as daemon:
        mount = f"{fill.parent} /fill ro\n"
        boss = daemon.run("boss", "/fill/fill", mount=mount, policy="allow boss_t agent:* create\n")
        kid = daemon.run("kid", "/fill/fill", parent="agent:boss")
        for agent in (boss, kid):
            wait_until(partial(read, agent, "out"), "it has filled its cell")
            assert 15 * MEBIBYTE < int(read(agent, "out")) <= 16 * MEBIBYTE
        assert 15 * MEBIBYTE < usage(kid)["memory_tmp"] <= 16 * MEBIBYTE
        of_both = usage(boss)
        assert 30 * MEBIBYTE < of_both["memory_tmp"] <= 32 * MEBIBYTE
        assert of_both["memory_current"] > of_both["memory_tmp"]
        lines = daemon.ctx("quota").stdout.splitlines()
        (tmp,) = [line.split() for line in lines if " tmp " in line]
        assert tmp[2:6] == ["32MiB", "35MiB", "3.5MiB", "boss"]
        attempt = boss / "task" / "attempt"
        attempt.mkdir()
        write(attempt / "cmd", "ctx spawn more -- true")
        write(attempt / "ctl", "start")
        (attempt / "wait").read_text()
        assert "owner_tmp_max" in read(attempt, "output"), "agents start no more"
        write(kid / "ctl", "kill")
        wait_dead(kid)
        assert usage(boss)["memory_tmp"] <= 16 * MEBIBYTE
