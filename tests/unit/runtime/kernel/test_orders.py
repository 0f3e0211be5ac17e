"""What the daemon tells its programs, as runtime/native/orders.h reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.kernel import orders
from runtime.kernel.orders import Order


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ((), []),
        (("a", 5, Path("/p")), ["a", "5", "/p"]),
        ((("a", "b"), "c"), ["2", "a", "b", "c"]),
        (((), "c"), ["0", "c"]),
        (((("a",), (), ("b", "c")),), ["3", "1", "a", "0", "2", "b", "c"]),
        (("", " ", "-", "="), ["", " ", "-", "="]),
    ],
)
def test_a_list_has_its_number_in_front(told: tuple[Order, ...], words: list[str]) -> None:
    assert orders.words(*told) == words
    strings = [str(len(words)), *words]
    assert orders.message(*told) == "".join(f"{word}\0" for word in strings).encode()


def test_a_command_within_a_command_is_flat() -> None:
    inner = orders.words("in", "x", ("y",))
    assert orders.words("out", inner) == ["out", "4", "in", "x", "1", "y"]


def test_words_and_lists_are_not_mixed() -> None:
    """The number of such a list would be that of nothing which a program counts."""
    with pytest.raises(ValueError, match="words and lists in one list"):
        orders.words(["a", ["b"]])


@pytest.mark.parametrize("order", ["a\0b", ("a", "b\0"), (("a",), ("\0",)), Path("/a\0")])
def test_no_order_becomes_two(order: Order) -> None:
    for write in (orders.words, orders.message):
        with pytest.raises(ValueError, match="has a NUL"):
            write(order)


def test_bytes_that_are_no_text_are_kept() -> None:
    assert orders.message(b"\xff".decode(errors="surrogateescape")) == b"1\0\xff\0"
