"""How many lines a policy may have, and what becomes of longer ones of earlier versions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter.mounted import Mounted, mounted_in, refused


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path) as made:
        yield made


def lines(count: int) -> str:
    return "".join(f"allow a_t tool:T{n} execute\n" for n in range(count))


def test_at_most_256_lines_are_taken_when_they_are_written(mounted: Mounted) -> None:
    mounted.make("a")
    mounted.put("agent/a.d/policy", lines(256) * 2)
    fh = mounted.open("agent/a.d/policy", os.O_WRONLY | os.O_TRUNC)
    with refused("EDQUOT"):
        mounted.write(fh, lines(257).encode())
    assert "257 lines, doubles not counted; at most 256" in mounted.reason
    mounted.close(fh)
    with refused("EDQUOT"):
        mounted.put("agent/a.d/policy", "allow a_t tool:one-more execute\n", os.O_APPEND)
    assert mounted.get("agent/a.d/policy") == lines(256) * 2


def test_a_longer_one_of_an_earlier_version_can_be_made_shorter(mounted: Mounted) -> None:
    agent = mounted.make("a")
    mounted.agents.journal.update(agent, policy=lines(400))
    assert mounted.agents.authority.allows(agent, "tool", "T399", "execute")
    with refused("EDQUOT"):
        mounted.put("agent/a.d/policy", lines(401))
    mounted.put("agent/a.d/policy", lines(300))
    with refused("EDQUOT"):
        mounted.put("agent/a.d/policy", lines(301))
    assert not mounted.agents.authority.allows(agent, "tool", "T300", "execute")
