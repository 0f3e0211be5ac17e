"""The key that leaves a terminal, in what is typed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.exits import Misuse
from client.keys import Typed, leave_key, shown

#: the key in the three ways in which terminals tell it; with the locks on, repeated, and with what
#: else a keyboard has there
KEYS = (
    b"\x1d", b"\x1b[93;5u", b"\x1b[27;5;93~", b"\x1b[93;133u", b"\x1b[93;69:1u", b"\x1b[93;5:2u",
    b"\x1b[93:125;5u", b"\x1b[93::57;5:1u",
)  # fmt: skip
RELEASES = (b"\x1b[93;5:3u", b"\x1b[57442;5:3u", b"\x1b[93;1:3u")


@pytest.mark.parametrize("key", KEYS)
def test_the_key_and_d_leave(key: bytes) -> None:
    for second in (b"d", b"D", b"\x1b[100u", b"\x1b[100;1:1u", b"\x1b[27;5;100~"):
        typed = Typed()
        assert typed.feed(b"before" + key + b"".join(RELEASES) + second + b"after") == b"before"
        assert typed.wants == "leave"


@pytest.mark.parametrize("key", KEYS)
def test_the_key_twice_types_it(key: bytes) -> None:
    typed = Typed()
    assert typed.feed(b"a" + key + b"\x1b[93;5:3u" + key + b"d") == b"a" + key + b"d"
    assert not typed.wants


def test_another_key_asks_for_help() -> None:
    for other in (b"?", b"x", b"\x1b[63;2u", "é".encode(), b"\x1b[47:63;2u"):
        typed = Typed()
        assert typed.feed(b"\x1d" + other + b"on") == b"on"
        assert typed.wants == "help"


def test_what_is_no_key_does_not_answer() -> None:
    typed = Typed()
    told = b"\x1b[<0;10;20M\x1b[I\x1b[?1;2c\x1b[57442;5u"
    assert typed.feed(b"\x1d" + told) == told.removesuffix(b"\x1b[57442;5u")
    assert typed.feed(b"d") == b"" and typed.wants == "leave"


def test_a_release_is_no_key() -> None:
    typed = Typed()
    assert typed.feed(b"\x1b[93;5:3ud\x1b[97;1:3u") == b"d\x1b[97;1:3u"
    assert not typed.wants


def test_what_is_pasted_has_no_keys() -> None:
    typed = Typed()
    text = b"\x1b[200~a\x1dd\x1b[93;5ud\x1b[201~"
    assert (typed.feed(text), typed.wants) == (text, "")
    assert (typed.feed(b"\x1dd"), typed.wants) == (b"", "leave")


def test_another_key_leaves() -> None:
    for key in (b"\x01", b"\x1b[97;5u", b"\x1b[27;5;97~"):
        typed = Typed(leave_key("^A"))
        assert typed.feed(b"\x1dd" + key + b"d") == b"\x1dd" and typed.wants == "leave"
    assert [shown(leave_key(text)) for text in ("^]", "^a", "^X", "^_")] == [
        "Ctrl-]", "Ctrl-A", "Ctrl-X", "Ctrl-_"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "x", "^", "^[", "^@", "^xx", "ctrl-x", "^1", "^é"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(Misuse, match="is not a key such as"):
        leave_key(text)


def test_escape_is_kept_for_a_moment_only() -> None:
    typed = Typed()
    assert (typed.feed(b"a\x1b"), typed.holds) == (b"a", True)
    assert (typed.release(), typed.holds) == (b"\x1b", False)
    assert typed.feed(b"\x1b[9") == b"" and typed.feed(b"3;5u") == b""
    assert typed.feed(b"d") == b"" and typed.wants == "leave"


def test_answers_are_counted() -> None:
    typed = Typed()
    for byte in b"\x1b[0n\x1b[3n\x1b[24;80R\x1b[0n":
        typed.feed(bytes((byte,)))
    assert typed.answered == 3


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [*KEYS, *RELEASES, b"d", b"\x1b[200~", b"\x1b[201~", b"\x1b", b"\x1b["]
            ),
            st.binary(max_size=5),
        ),
        max_size=10,
    ),
    st.randoms(use_true_random=False),
)
def test_however_it_is_split_it_is_the_same(pieces: list[bytes], chance: random.Random) -> None:
    data = b"".join(pieces).replace(b"\xff", b"")
    # a character of which bytes are missing is taken byte by byte, after the key only
    data = bytes(byte for byte in data if byte < 0x80)
    whole, parts = Typed(), Typed()
    expected = whole.feed(data)
    came, at = b"", 0
    while at < len(data):
        step = chance.randint(1, 5)
        came += parts.feed(data[at : at + step])
        at += step
    assert (came + parts.release(), parts.wants) == (expected + whole.release(), whole.wants)
