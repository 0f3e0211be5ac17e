"""What is open passes to the next daemon on the accounts of those who opened it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.operations import Operations
from runtime.authority.accounts import Resource
from runtime.kernel.handover import Descriptors, read_back, written
from tests.worlds.tree import CONTEXT, USER, Mounted, complete, mounted_in, refused

_MEMORY = 1 << 20


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    with mounted_in(tmp_path, owner_memory_max=_MEMORY) as made:
        yield made


def _execute_again(mounted: Mounted) -> int:
    """Returns how many bytes pass."""
    content = b"".join(written(mounted.ops.opened.save(Descriptors())))
    before = mounted.ops
    for number in list(before.opened.files):
        before.opened.close(number)
    mounted.ops = Operations(mounted.fs)
    mounted.ops.opened.restore(read_back(content))
    return len(content)


def _used(mounted: Mounted) -> int:
    rows = mounted.agents.accounts.standings(USER.uid)
    return next(row.use for row in rows if row.account == Resource.MEMORY)


def _with_messages(mounted: Mounted, count: int, size: int) -> str:
    agent = mounted.make("a", USER)
    mounted.put("agent/a.d/mode", "turn")
    mounted.put("agent/a.d/exec", "true")
    mounted.supervisor.start(agent)
    mounted.agents.messages.send(USER, agent, "first")
    for _ in range(count):
        mounted.agents.messages.send(USER, agent, "x" * size)
    return "agent/a.d/queue"


def test_of_a_text_that_was_begun_no_more_passes_than_its_reader_has_room_for(
    mounted: Mounted,
) -> None:
    with mounted.as_(USER):
        queue = _with_messages(mounted, 8, _MEMORY // 4)
        unread = _used(mounted)
        files = [mounted.open(queue) for _ in range(20)]
        heads = [mounted.read(file, size=10) for file in files]
        assert _execute_again(mounted) < 4 * _MEMORY
        assert _used(mounted) <= _MEMORY
        assert [mounted.read(file, size=10) for file in files] == heads
        for file in files:
            mounted.close(file)
        assert _used(mounted) == unread


def test_who_has_room_reads_on_and_who_has_none_is_told(mounted: Mounted) -> None:
    with mounted.as_(USER):
        queue = _with_messages(mounted, 3, _MEMORY // 8)
        whole = mounted.get(queue)
        one = mounted.open(queue)
        head = mounted.read(one, size=10)
        _execute_again(mounted)
        assert head + mounted.read(one, 10, len(whole)) == whole.encode()

        mounted.close(one)
        for _ in range(8):
            mounted.agents.messages.send(USER, mounted.agent("a"), "x" * (_MEMORY // 8))
        other = mounted.open(queue)
        mounted.read(other, size=10)
        for _ in range(2):
            _execute_again(mounted)
        with refused("EDQUOT"):
            mounted.read(other, _MEMORY)
        assert "beginning" in mounted.reason
        assert mounted.read(other, 0, 10) == head


def test_the_last_text_of_what_is_gone_is_on_an_account(mounted: Mounted) -> None:
    lines = "".join(f"K{number}={'v' * 1000}\n" for number in range(40))
    mounted.make("a", USER)
    with mounted.as_(USER):
        mounted.put("agent/a.d/env", lines)
        files = [mounted.open("agent/a.d/env") for _ in range(40)]
        complete(mounted.ops.rmdir, mounted.inode("agent"), b"a.d", CONTEXT)
        for _ in range(2):
            assert _execute_again(mounted) < 2 * _MEMORY
            assert _MEMORY // 2 < _used(mounted) <= _MEMORY
        assert mounted.read(files[0]).decode() == lines
        for file in files:
            mounted.close(file)
        assert _used(mounted) == 0
