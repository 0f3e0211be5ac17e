"""Which modes of a terminal are in force after what a program wrote (modes.h)."""

from __future__ import annotations

import pytest

from tests.fuzz.terminals import step, terminal


def modes_after(*parts: str) -> str:
    return terminal().ask(b"".join(step("o", part.encode()) for part in parts)).decode()


@pytest.mark.parametrize(
    ("written", "modes"),
    [
        ("plain text\r\n", ""),
        ("\033[?2004h", "\033[?2004h"),
        ("\033[?2004h\033[?2004l", ""),
        ("\033[?1000;1006h\033[?25l", "\033[?25l\033[?1000h\033[?1006h"),
        ("\033[?1049h\033[>7u", "\033[?1049h\033[>7u"),
        ("\033[>1u\033[?1049h\033[>7u\033[?1049l", "\033[>1u"),
        ("\033[>1u\033[>3u\033[<u", "\033[>1u"),
        ("\033[=5u\033[=2;2u\033[=4;3u", "\033[>3u"),
        ("".join(f"\033[>{n}u" for n in range(1, 11)),
         "".join(f"\033[>{n}u" for n in range(3, 11))),
        ("\033[<99u", ""),
        ("\033=\033[4h\033[3 q\033[>4;2m", "\033[4h\033=\033[3 q\033[>4;2m"),
        ("\033=\033[4h\033[3 q\033[>4;2m\033[>4m\033>\033[4l\033[0 q", ""),
        ("\033[?2004h\033[?1049h\033[>7u\033c", ""),
        ("\033[?1h\033[?25l\033=\033[!p", ""),
        # questions, and what only looks like a mode
        ("\033[6n\033[c\033[>q\033[?u\033[?2004$p\033[14t", ""),
        ("\033]0;\033[?2004h\033\\", "\033[?2004h"),
        ("\033]0;[?2004h\007", ""),
        ("\033P[?2004h\007[?1000h\033\\", ""),
        ("\033[?20\x1804h", ""),
        ("\033[?20\r\n04h", "\033[?2004h"),
        ("\033[?20\033[?1004h", "\033[?1004h"),
        ("\033[?" + "1;" * 200 + "2004h", ""),
        ("\033[?99999999999999999999h\033[?2004h", "\033[?2004h"),
        ("\033[?2026h\033[?1048h", ""),
        ("\033(0\033#8\033%G", ""),
    ],
)  # fmt: skip
def test_modes_that_are_in_force_are_told(written: str, modes: str) -> None:
    """The program is asked for the same byte by byte as well (terminal.c)."""
    assert modes_after(written) == modes
    for at in range(len(written)):
        assert modes_after(written[:at], written[at:]) == modes
