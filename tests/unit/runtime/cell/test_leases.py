"""Leases: how long they last, and what is left of them."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from runtime.cell.leases import Leases
from runtime.kernel import clock


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(tmp_path)


def test_an_end_only_grows(leases: Leases) -> None:
    end = clock.up() + 600
    number = leases.grant(end)
    for later, found in [(end - 1, end), (end + 1, end + 1), (0.0, end + 1), (end, end + 1)]:
        leases.extend(number, later)
        assert leases.end(number) == pytest.approx(found)


def test_a_monitor_finds_nanoseconds_in_a_file_that_nobody_else_reads(leases: Leases) -> None:
    number = leases.grant(clock.up() + 5)
    [end] = struct.unpack("=Q", leases.path(number).read_bytes())
    assert 0 < end - time.clock_gettime_ns(time.CLOCK_BOOTTIME) <= 5_000_000_000
    assert leases.path(number).stat().st_mode & 0o777 == 0o600


def test_what_was_stopped_is_over_for_good(leases: Leases, tmp_path: Path) -> None:
    number = leases.grant(clock.up() + 600)
    with leases.path(number).open("rb") as monitor:
        leases.stop(number)
        leases.stop(number)
        leases.extend(number, clock.up() + 600)
        assert leases.end(number) == 0
        assert monitor.read() == b""
    assert list(tmp_path.iterdir()) == []


def test_what_has_ended_is_not_put_off(leases: Leases) -> None:
    end = clock.up() - 0.001
    number = leases.grant(end)
    leases.extend(number, clock.up() + 600)
    assert leases.end(number) == pytest.approx(end)


def test_numbers_are_never_used_again(leases: Leases, tmp_path: Path) -> None:
    numbers = []
    for _ in range(100):
        numbers.append(leases.grant(clock.up() + 600))
        leases.stop(numbers[-1])
        leases = Leases(tmp_path)
    assert len(set(numbers)) == 100


def test_the_next_daemon_goes_on_with_what_is_not_over(leases: Leases, tmp_path: Path) -> None:
    lasting, over, damaged = (leases.grant(clock.up() + more) for more in (600, -1, 600))
    leases.path(damaged).write_bytes(b"1234567")
    again = Leases(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [str(lasting)]
    assert [again.end(number) > 0 for number in (lasting, over, damaged)] == [True, False, False]
    again.extend(lasting, clock.up() + 700)
    assert leases.end(lasting) > clock.up() + 650
