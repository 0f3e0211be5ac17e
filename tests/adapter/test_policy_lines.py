"""How many lines a policy may have, and what becomes of longer ones of earlier versions."""

from __future__ import annotations

import os

import pytest

from runtime.texts import policy
from tests.worlds.tree import Mounted, refused


def lines(count: int) -> str:
    return "".join(f"allow a_t tool:T{n} execute\n" for n in range(count))


def test_at_most_256_lines_are_taken_when_they_are_written(mounted: Mounted) -> None:
    mounted.make("a")
    mounted.put("agent/a.d/policy", lines(256) * 2)
    fh = mounted.open("agent/a.d/policy", os.O_WRONLY | os.O_TRUNC)
    with refused("EDQUOT"):
        mounted.write(fh, lines(257).encode())
    assert "257 different lines; at most 256" in mounted.reason
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


def test_each_line_is_read_once_as_it_is_written_and_once_with_the_whole(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.make("a")
    read: list[str] = []
    parse_line = policy._parse_line

    def counted(line: str, label: str, may_delegate: bool) -> tuple[str, str, str, list[str]]:
        read.append(line)
        return parse_line(line, label, may_delegate)

    mounted.agents.authority.own_policy(mounted.agent("a"))
    monkeypatch.setattr(policy, "_parse_line", counted)
    fh, offset = mounted.open("agent/a.d/policy", os.O_WRONLY | os.O_TRUNC), 0
    for line in lines(100).splitlines(keepends=True):
        offset += mounted.write(fh, line.encode(), offset)
    assert read == lines(100).splitlines()
    mounted.flush(fh)
    assert len(read) == 200
    mounted.close(fh)


def test_a_line_that_is_written_over_is_read_again(mounted: Mounted) -> None:
    mounted.make("a")
    fh = mounted.open("agent/a.d/policy", os.O_WRONLY | os.O_TRUNC)
    mounted.write(fh, lines(3).encode())
    with refused("EINVAL"):
        mounted.write(fh, b"refuse", 0)
    assert 'EINVAL agent/a.d/policy: "refuse' in mounted.reason
    mounted.close(fh)


def test_lines_are_numbered_over_several_writes(mounted: Mounted) -> None:
    mounted.make("a")
    fh = mounted.open("agent/a.d/policy", os.O_WRONLY | os.O_TRUNC)
    mounted.write(fh, lines(3).encode())
    with refused("EINVAL"):
        mounted.write(fh, b"allow\n", len(lines(3)))
    assert 'line 4: "allow"' in mounted.reason
    mounted.close(fh)
