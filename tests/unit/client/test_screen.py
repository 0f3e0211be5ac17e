"""The filter between what an agent writes and a person's terminal."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.screen import ALTERNATE, MODES, SET_AT_FIRST, STRING, Screen
from tests.worlds.emulator import HOSTILE, Emulator

ST, BEL = "\x1b\\", "\x07"


def shown(text: str | bytes, **options: bool) -> str:
    data = text.encode() if isinstance(text, str) else text
    return Screen("coder", **options).feed(data).decode()


#: passes unchanged
HARMLESS = (
    "plain text\r\n\ttabs\b\v\f", "ümläut € 漢字 🙂", "\x1b[1;38:2:255:0:10;48;5;17mcolour\x1b[0m",
    "\x1b[H\x1b[2J\x1b[10;20H\x1b[3A\x1b[K\x1b[5L\x1b[2M\x1b[4@\x1b[2P\x1b[3X\x1b[1S\x1b[2T",
    "\x1b7\x1b8\x1bM\x1bD\x1bE\x1b(0lqk\x1b(B\x0e\x0f\x1b#8", "\x1b[3;20r", "\x1b[?1049h\x1b[?25l",
    "\x1b[?2004h", "\x1b[?1000h", "\x1b[?1006h", "\x1b[?2026h\x1b[?2026l", "\x1b[4h", "\x1b[20l",
    "\x1b=\x1b>", "\x1b[2 q", "\x1b[!p", "\x1bc", "\x1b[>4;2m", "\x1b[>7u\x1b[<1u", "\x1b[5b",
    # questions for capabilities, the state, sizes, and colours
    "\x1b[c\x1b[>c\x1b[=c\x1b[>q\x1b[5n\x1b[6n\x1b[?6n\x1b[?u\x1b[?2026$p\x1bZ\x1b[14t\x1b[18t",
    f"\x1b]10;?{ST}\x1b]11;?{ST}\x1b]4;12;?{ST}\x1bP+q544e;636f{ST}",
    # progress and links
    f"\x1b]9;4;1;30{ST}", f"\x1b]8;id=a;https://example.org/x?y=1{ST}link\x1b]8;;{ST}",
)  # fmt: skip
#: does not come through, and leaves nothing behind
HARMFUL = (
    f"\x1b]52;c;aGk={BEL}", f"\x1b]52;c;?{ST}", f"\x1b]9;hello{BEL}", f"\x1b]777;notify;a;b{BEL}",
    f"\x1b]1337;File=:aGk={BEL}", f"\x1b]7;file://host/dir{ST}", f"\x1b]8;;file:///etc/passwd{ST}",
    f"\x1b]8;;javascript:x{ST}", f"\x1b]4;1;red{ST}", f"\x1b]10;red{ST}", f"\x1b]50;font{ST}",
    f"\x1bP$qm{ST}", f"\x1bPq#0~{ST}", f"\x1bP+p41{ST}", f"\x1b_Ga=T;aGk={ST}", f"\x1b^private{ST}",
    f"\x1bXstring{ST}", f"\x1bktitle{ST}", f"\x1bPtmux;text{ST}",
    "\x1b[i", "\x1b[5i", "\x1b[?5i", "\x1b[4;1i", "\x1b[20t", "\x1b[21t", "\x1b[8;10;10t",
    "\x1b[2t", "\x1b[3;0;0t", "\x1b[22;0t", "\x1b[1;1;1;1;1;1*y", "\x1b[62;0\"p",
    "\x1b[?2l", "\x1b[?1001h", "\x1b[2h", "\x1b G", "\x1b%@", "\x1b%G", "\x1b[>2t",
    "\x1b[$}", "\x1b[>1p", "\x1b[1;2'z",
    "\x1b[<5u", "\x05", "\x11\x13\x00\x7f", "\x1b[?1049l",
    # C1 controls, in UTF-8 and as bytes, and what is no UTF-8
    "\x9b5i", "\x9d52;c;aGk=\x07", "\x90q\x9c", "\x85",
)  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_what_programs_need_passes(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize("text", HARMFUL)
def test_what_reaches_beyond_the_screen_does_not(text: str) -> None:
    left = {"\x9b5i": "5i", "\x9d52;c;aGk=\x07": "52;c;aGk=\x07", "\x90q\x9c": "q"}.get(text, "")
    assert shown(f"a{text}b") == f"a{left}b"
    assert shown(text, raw=True) == text


PYTHON = Path("/usr/bin/python3")  # which runs the client in cells, and may be another version
FEED = """
import json, sys
from client.screen import Screen
came = [Screen("coder").feed(text.encode()).decode() for text in json.load(sys.stdin)]
json.dump(came, sys.stdout)
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the Python of the machine")
def test_the_python_of_the_machine_lets_through_no_more() -> None:
    texts = [f"a{text}b{text}" for text in HARMLESS + HARMFUL]
    house = Path(__file__).resolve().parents[3]
    came = subprocess.check_output([PYTHON, "-c", FEED], input=json.dumps(texts), text=True,
                                   cwd=house, env={})  # fmt: skip
    assert json.loads(came) == [shown(text) for text in texts]


def test_bytes_that_are_no_characters_are_left_out() -> None:
    assert shown(b"a\x9b5ib\xc3(\xe2\x82x\xff\xc0\x9b\xe0\x80\x9b\xed\xa0\x80\xf5z") == "a5ib(xz"
    screen = Screen("coder", unicode=False)
    assert screen.feed("aś€\x1b[1m\r\n".encode()) == b"a??\x1b[1m\r\n"


def test_a_sequence_ends_where_a_terminal_ends_it() -> None:
    # a control character in a sequence is obeyed at once, and the sequence goes on
    assert shown("\x1b[5\ni") == "\n"
    assert shown("\x1b[3\n1m") == "\n\x1b[31m"
    assert shown("\x1b[5\x18i \x1b[5\x1ai \x1b[5\x1b[1m") == "i i \x1b[1m"
    assert shown("\x1b[5\x7fi") == ""
    assert shown("\x1b]52;c;a\x1b[1mb") == "\x1b[1mb"
    assert shown("\x1b]52;c;a\x18b") == "b"
    assert shown("\x1bPtmux;\x1b\x1b]52;c;aGk=\x07\x1b\\x") == "x"
    assert shown("\x1b[5€") == "€"
    assert shown("\x1b[[A") == "A"  # Linux says so of a key of its own
    assert shown("\x1b[1?25hx\x1b[ 5ix") == "xx"


def test_titles_say_whose_they_are() -> None:
    assert shown("\x1b]0;hi\x07\x1b]2;ho\x1b\\") == (
        "\x1b[22;0t\x1b]0;[coder] hi\x07\x1b]2;[coder] ho\x07"
    )
    assert shown("\x1b]2;a\nb\u202ec\x01\x9bd\x07").endswith("\x1b]2;[coder] abcd\x07")
    long = shown(f"\x1b]2;{'é' * 1000}\x07")
    assert long.endswith(f"]2;[coder] {'é' * 80}\x07")
    assert shown("\x1b]2\x07") == "\x1b[22;0t\x1b]2;[coder] \x07"


def test_what_is_too_long_is_left_out() -> None:
    link = f"\x1b]8;;https://x/{'a' * STRING}\x1b\\"
    assert shown(f"a{link}b") == "ab"
    assert shown(f"a\x1b]52;c;{'a' * 3 * STRING}\x07b") == "ab"
    assert shown(f"a\x1b[{'1;' * 1000}mb") == "ab"
    screen = Screen("coder")
    for _ in range(100):
        screen.feed(b"\x1b]" * 1 + b"x" * 65536)
        screen.feed(b"\x1b[" + b"1;" * 30000)
    assert max(len(screen._string), len(screen._sequence)) <= STRING + 1


def test_what_is_shown_again_asks_nothing_and_sets_nothing() -> None:
    questions = HARMLESS[-4] + HARMLESS[-3]
    screen = Screen("coder")
    said = f"a{questions}\x1b[?1000h\x1b[>7u\x1b[4h\x1b=b".encode()
    assert screen.feed(said, again=True) == b"ab"
    assert (screen.asked, screen.talked, screen.undone()) == (0, False, [b"\x0f\x1b[0m"])
    assert shown(questions, heard=False) == ""
    screen.asks = False  # another terminal answers
    assert screen.feed(questions.encode()) == b""


def test_where_nobody_hears_the_terminal_it_tells_nothing() -> None:
    telling = "\x1b[?1000;1003;1004;2031;2048h\x1b[>3u\x1b[=3u"
    assert shown(f"\x1b[?2004h{telling}", heard=False) == "\x1b[?2004h"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_one_that_obeys_and_answers_everything_is_left_as_it_was(encoding: str) -> None:
    """Each sequence comes byte by byte; some do not end."""
    for data in (*HOSTILE, *(sequence[:-1] for sequence in HOSTILE[::7])):
        emulator = Emulator(encoding, _12=True, _1007=True, _2027=True)
        screen = Screen("coder", unicode=encoding == "utf-8")
        before, said = emulator.state(), b""
        for byte in data:
            said += emulator.feed(screen.feed(bytes((byte,))))
        for part in screen.undone():
            said += emulator.feed(part)
        assert emulator.state() == before, data
        assert emulator.beyond == [], data
        assert all(title.startswith("[coder] ") for title in emulator.titles), data
        assert screen.talked or not said, data


def test_modes_are_taken_back_one_by_one() -> None:
    screen = Screen("coder")
    screen.feed(
        b"\x1b[>5u\x1b[?1049h\x1b[>1u\x1b[=3u\x1b[?25;7l\x1b[?1000;1006;2004h\x1b[>4;2m\x1b=\x1b[4h"
        b"\x1b[5 q\x1b[3;9r\x1b(0\x1b]2;x\x07\x1b]9;4;1;50\x07\x1b]8;;https://x\x07"
    )
    undone = screen.undone()
    assert undone == [
        b"\x1b[?7h", b"\x1b[?25h", b"\x1b[?1000l", b"\x1b[?1006l", b"\x1b[?2004l",
        b"\x1b[<1u\x1b[?1049l", b"\x1b[<1u", b"\x1b[4l", b"\x1b[>4m", b"\x1b>", b"\x1b[0 q",
        b"\x1b7\x1b[r\x1b8", b"\x1b(B", b"\x0f", b"\x1b[23;0t", b"\x1b]9;4;0;\x1b\\",
        b"\x1b]8;;\x1b\\", b"\x0f\x1b[0m",
    ]  # fmt: skip
    assert all(len(sequence) <= 64 for sequence in undone)
    assert screen.undone() == [b"\x0f\x1b[0m"]


def test_only_what_was_pushed_is_popped() -> None:
    screen = Screen("coder")
    assert screen.feed(b"\x1b[<9u\x1b[=1u\x1b[>2u\x1b[<9u\x1b[<u") == (
        b"\x1b[>0u\x1b[=1u\x1b[>2u\x1b[<2u"
    )
    assert screen.feed(b"\x1b[>1u" * 100).count(b"u") == 16
    assert screen.undone()[0] == b"\x1b[<16u"


def test_modes_that_are_told_again_are_set_once() -> None:
    screen = Screen("coder")
    modes = b"\x1b[?1049h\x1b[?1000l\x1b[>7u"
    assert screen.obey(modes) == b"\x1b[?1049h\x1b[>7u"
    screen.feed(b"\x1b]52;c;lost")
    assert screen.obey(modes) == b"\x1b[<1u\x1b[?1049h\x1b[>7u"
    assert screen.obey(b"\x1b[?1047l\x1b[?1007l\x1b[?1049h") == (
        b"\x1b[<1u\x1b[?1047l\x1b[?1049h"
    )  # fmt: skip
    assert screen.undone() == [b"\x1b[?1049l", b"\x0f\x1b[0m"]


def test_modes_that_users_set_themselves_are_kept_meanwhile() -> None:
    assert shown("\x1b[?1007h\x1b[?1007l") == "\x1b[?1007s\x1b[?1007h\x1b[?1007l"
    screen = Screen("coder")
    screen.feed(b"\x1b[?1007;12h")
    assert screen.undone()[-3:] == [b"\x1b[?1007r", b"\x1b[?12r", b"\x0f\x1b[0m"]


def test_a_character_is_not_repeated_for_long() -> None:
    assert shown("a\x1b[999999999b\x1b[b\x1b[0b") == "a\x1b[1000b\x1b[1b\x1b[0b"


def test_a_program_that_asks_whether_one_is_well_is_counted() -> None:
    screen = Screen("coder", raw=True)
    screen.feed(b"\x1b[5n\x1b[6n\x1b[c\x1b[5n")
    assert screen.asked == 2
    screen = Screen("coder")
    assert screen.feed(b"\x1b[5n\x1b[05n\x1b[5;5n\x1b[5n") == b"\x1b[5n\x1b[5n"
    assert screen.asked == 2 and screen.talked


PIECES = st.one_of(
    st.sampled_from([text.encode() for text in HARMLESS + HARMFUL]),
    st.sampled_from([b"\x1b", b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b\\", b"\x07", b"\xc2", b"\x9b"]),
    st.binary(max_size=8),
    st.text(alphabet="\x1b[]P?;0123456789hlmuitcn\x07\\\x18", max_size=12).map(str.encode),
)


@given(st.lists(PIECES, max_size=12), st.randoms(use_true_random=False))
def test_however_it_is_split_it_is_the_same(pieces: list[bytes], chance: random.Random) -> None:
    data = b"".join(pieces)
    whole, parts = Screen("coder"), Screen("coder")
    expected = whole.feed(data)
    came, at = b"", 0
    while at < len(data):
        step = chance.randint(1, 7)
        came += parts.feed(data[at : at + step])
        at += step
    assert came == expected
    assert (parts.undone(), parts.asked, parts.talked) == (
        whole.undone(), whole.asked, whole.talked
    )  # fmt: skip
    check(expected)


@pytest.mark.parametrize("text", HARMLESS + HARMFUL)
def test_each_sequence_split_at_each_byte(text: str) -> None:
    data = f"a{text}b".encode()
    for at in range(len(data)):
        screen = Screen("coder")
        assert screen.feed(data[:at]) + screen.feed(data[at:]) == Screen("coder").feed(data)


def check(data: bytes) -> None:
    """What a terminal is given has whole sequences only, of kinds that are harmless, and passes a
    second time unchanged but for titles and what is counted."""
    text = data.decode()  # it is UTF-8
    assert not [char for char in text if "\x80" <= char < "\xa0"]
    screen = Screen("coder")
    screen.feed(data)
    assert not screen._rest and screen._state == screen._text
    for begun in ("\x1b]52", "\x1b]1337", "\x1b_", "\x1b^", "\x1bX", "\x1bk", "\x1bPq", "\x1b%"):
        assert begun not in text


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    check(Screen("coder").feed(data))


def test_the_terminal_is_as_it_was_after_all_modes() -> None:
    screen = Screen("coder")
    for mode in MODES:
        screen.feed(b"\x1b[?%d%c" % (mode, b"lh"[mode not in SET_AT_FIRST]))
    undone = b"".join(screen.undone()).decode()
    for mode in MODES - ALTERNATE - {1048}:
        assert f"\x1b[?{mode}{'h' if mode in SET_AT_FIRST else 'l'}" in undone
    assert not screen.alternate and re.search(r"\x1b\[\?(47|1047|1049)l", undone)


def test_a_screen_full_of_colours_is_fast_enough() -> None:
    """The figure is loose: a pattern that tries again and again would take minutes."""
    import time

    data = b"\x1b[38;5;12mtext \xe2\x94\x82\x1b[0m\x1b[10;20H" * 50_000
    began = time.process_time()
    screen = Screen("coder")
    for at in range(0, len(data), 8191):
        screen.feed(data[at : at + 8191])
    assert time.process_time() - began < 10
