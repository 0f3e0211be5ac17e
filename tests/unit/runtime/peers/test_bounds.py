"""Limits of ancestors, as a bound of what is placed elsewhere."""

from __future__ import annotations

from math import inf

import pytest

from runtime.peers.admission import _amount


@pytest.mark.parametrize(
    ("value", "amount"),
    [("max", inf), ("max 100000", inf), ("50000", 0.5), ("100000 200000", 0.5), ("1 0", 1e-5)],
)
def test_whatever_may_be_written_as_a_cpu_limit_is_an_amount(
    value: str, amount: float
) -> None:
    assert _amount("cpu.max", value) == amount
