"""The file of registrations: before anything is said of one, and beside the loop."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import trio

from runtime.errors import NoSpaceError, QuotaError
from runtime.peers.registrations import Registrations


def _known(state: Path) -> set[str]:
    return set(json.loads((state / "peers.json").read_text())["leads"])


def test_many_at_once_are_written_together_and_not_by_the_loop(tmp_path: Path) -> None:
    kept, writers, real = Registrations(tmp_path), [], os.fsync

    def sync(fd: int) -> None:
        writers.append(threading.current_thread())
        real(fd)

    async def say(number: int) -> None:
        known, _ = kept.lead(number, "", "one")
        kept.drop(known)
        known, _ = kept.lead(number, "", "one")
        await kept.written()
        assert known in _known(tmp_path), "nothing is said of it before"

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(say, number)

    with mock.patch("os.fsync", sync):
        trio.run(main)
    assert len(writers) <= 3 and threading.main_thread() not in writers
    assert len(_known(tmp_path)) == 50


def test_of_one_uid_there_are_so_many(tmp_path: Path) -> None:
    kept = Registrations(tmp_path)
    known = {kept.lead(7, "", "one")[0] for _ in range(64)}
    assert len(known) == 64
    with pytest.raises(QuotaError, match="64"):
        kept.lead(7, "", "one")
    assert kept.lead(7, min(known), "one")[0] == min(known), "those that there are stay"
    given, lead = kept.lead(8, min(known), "one")
    assert given not in known and lead.uid == 8, "the bits of another uid are of no use"


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    kept = Registrations(tmp_path)

    async def main() -> None:
        kept.note_host("n2", 0, "bits")
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left")), \
                pytest.raises(NoSpaceError, match="No space"):
            await kept.written()
        await kept.written()
        assert Registrations(tmp_path).host("n2", 0) == "bits"

    trio.run(main)
