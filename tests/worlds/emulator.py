"""A terminal of a test's own that obeys everything that any terminal obeys, answers everything that
any of them answers, and records what went beyond its screen. It shares no code with the filter of
the client (client/screen.py)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

ESC, CAN, SUB, BEL, ENQ, ST = "\x1b", "\x18", "\x1a", "\x07", "\x05", "\x9c"
#: the second half of a sequence of two characters, and the control that means the same
C1: Final = {"[": "\x9b", "]": "\x9d", "P": "\x90", "X": "\x98", "^": "\x9e", "_": "\x9f"}
STRINGS: Final = "\x9d\x90\x98\x9e\x9f" + "k"  # and a title of screen(1)
#: modes that are set at first; and those that tell something as soon as they are set
MODES: Final = {7: True, 25: True}
TELLS: Final = {
    9: "\x1b[M !!", 1000: "\x1b[M !!", 1001: "\x1b[M !!", 1002: "\x1b[<0;1;1M",
    1003: "\x1b[<35;9;9M", 1004: "\x1b[I", 2031: "\x1b[?997;1n", 2048: "\x1b[48;24;80;480;800t",
}  # fmt: skip
ANSWERBACK = "rm -rf /\r"
DA: Final = "\x1b[?62;4;22c"
#: control sequences that are answered, by all but their parameters; {0} is the first one
ANSWERS: Final = {
    "c": DA, ">c": "\x1b[>41;390;0c", "=c": "\x1bP!|00000000\x1b\\",
    ">q": "\x1bP>|test(1)\x1b\\", "$p": "\x1b[{0};2$y", "?$p": "\x1b[?{0};2$y",
    "?m": "\x1b[>{0};0m", "?S": "\x1b[?{0};0;256S", "x": "\x1b[2;1;1;128;128;1;0x",
    "*y": "\x1bP{0}!~ABCD\x1b\\", "$w": "\x1bP1$u1;1;1\x1b\\", "#|": "\x1b[0#}}",
    "#R": "\x1b[0;0#Q", "&u": "\x1bP0!u%5\x1b\\", "'|": "\x1b[1;1;1;1;0&w",
    '"v': '\x1b[24;80;1;1;1"w', "?n": "\x1b[?{0};1n", "+x": "\x1bP+x\x1b\\", "$u": "\x1bP$u\x1b\\",
}  # fmt: skip
BY_NUMBER: Final = {
    "n": {"5": "\x1b[0n", "6": "\x1b[12;40R"},
    "t": {
        "11": "\x1b[1t", "13": "\x1b[3;0;0t", "14": "\x1b[4;480;800t", "15": "\x1b[5;480;800t",
        "16": "\x1b[6;20;10t", "18": "\x1b[8;24;80t", "19": "\x1b[9;24;80t",
        "20": "\x1b]Lrm -rf /\r\x1b\\", "21": "\x1b]lrm -rf /\r\x1b\\",
    },
}  # fmt: skip
OSC_QUERIES: Final = re.compile("(?:(4|5);[0-9]+|1[0-9]|2[12]|50|52;[a-z]*|1337;[^;]*|99;.*);[?]")
MODE_NUMBERS: Final = (
    *range(1, 120), *range(1000, 1062), 1243, *range(2000, 2050), 5522, 7727, 8452, 9001, 77096,
)  # fmt: skip


class Emulator:
    """``modes`` are those that its user has set at first, beside the usual ones."""

    def __init__(self, encoding: str = "utf-8", **modes: bool) -> None:
        self.at_first = {**MODES, **{int(name.strip("_")): on for name, on in modes.items()}}
        #: clipboard, printer, notices, and what else is beyond the screen
        self.beyond: list[str] = []
        self.titles: list[str] = []
        self.asked = 0  # how often something was to be said
        self._title, self._kept = "mine", list[str]()
        self._saved: dict[int, bool] = {}
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
        self._state: Callable[[str], None] = self._ground
        self._sequence = self._string = self._kind = ""
        self._answers = ""
        self._reset()

    def _reset(self) -> None:
        self.modes = dict(self.at_first)
        self.others: dict[str, object] = {}
        self.keys: dict[bool, list[str]] = {False: [], True: []}

    def state(self) -> dict[str, object]:
        """What a program has left of it."""
        changed = {mode: on for mode, on in self.modes.items() if on != self._first(mode)}
        others = {name: there for name, there in self.others.items() if there}
        keys = {screen: [*stack] for screen, stack in self.keys.items()}
        others["within"] = "" if self._state == self._ground else self._sequence or self._kind
        return {"modes": changed, "title": self._title, "keys": keys, **others}

    def _first(self, mode: int) -> bool:
        return self.at_first.get(mode, False)

    def feed(self, data: bytes) -> bytes:
        """What it says to that, as if its user had typed it."""
        self._answers = ""
        for char in self._decoder.decode(data):
            # a byte that is none of a character may be a control of 8 bits
            self._take(chr(ord(char) - 0xDC00) if "\udc80" <= char < "\udca0" else char)
        self.asked += self._answers.count("\x1b")
        return self._answers.encode()

    def _take(self, char: str) -> None:
        if char in (CAN, SUB):
            self._state = self._ground
        elif char == ESC:
            self._sequence, self._state = "", self._escaped
        elif "\x80" <= char <= "\x9f" and char != ST:
            self._control(char)
        else:
            self._state(char)

    # the states

    def _ground(self, char: str) -> None:
        if char == ENQ:
            self._answers += ANSWERBACK
        elif char in "\x0e\x0f":
            self.others["shift"] = char == "\x0e"

    def _escaped(self, char: str) -> None:
        if char < " ":
            self._ground(char)
            return
        self._sequence += char
        if char >= "0":
            self._state = self._ground
            if self._sequence in C1:
                self._control(C1[char])
            elif self._sequence == "k":
                self._begin_string("k")
            elif self._sequence == "\\":
                self._end_string()
            else:
                self._escape(self._sequence)

    def _control(self, char: str) -> None:
        self._state = self._ground
        if char == "\x9b":
            self._sequence, self._state = "", self._in_sequence
        elif char in STRINGS:
            self._begin_string(char)
        elif char == "\x9a":
            self._answers += DA
        elif char == "\x88":
            self.others["tabs"] = True

    def _in_sequence(self, char: str) -> None:
        if char < " ":
            self._ground(char)
            return
        self._sequence += char
        if "@" <= char <= "~":
            self._state = self._ground
            if found := re.fullmatch("([<-?]?)([0-9:;]*)([ -/]*)(.)", self._sequence):
                sign, given, between, last = found.groups()
                self._obey(sign + between + last, given)

    def _begin_string(self, kind: str) -> None:
        self._kind, self._string, self._state = kind, "", self._in_string

    def _in_string(self, char: str) -> None:
        if char in (ST, BEL):
            self._end_string()
        else:
            self._string += char

    def _end_string(self) -> None:
        kind, text, self._kind, self._string = self._kind, self._string, "", ""
        self._state = self._ground
        if kind == "\x9d":
            self._command(text)
        elif kind == "\x90" and text.startswith(("$q", "+q")):
            self._answers += f"\x1bP1{text[0]}r{text[2:]}\x1b\\"
        elif kind:
            self.beyond.append(f"{kind!r} {text[:40]}")
            self._answers += "\x1b_Gi=1;OK\x1b\\" if text.startswith("G") else ""

    # what it does

    def _escape(self, text: str) -> None:
        if text == "c":
            self._reset()
        elif text == "Z":
            self._answers += DA
        elif text in "=>":
            self.others["keypad"] = text == "="
        elif text == "H":
            self.others["tabs"] = True
        elif text[0] == "(":
            self.others["characters"] = text[1:] != "B"
        elif text in "no":
            self.others["shift"] = True
        elif text[0] in "%" or text in (" F", " G"):
            self.beyond.append(f"ESC {text}")  # the controls of 8 bits, and another encoding

    def _obey(self, kind: str, given: str) -> None:
        first, numbers = given.partition(";")[0], [int(n) for n in re.findall("[0-9]+", given)]
        if kind in ANSWERS:
            self._answers += ANSWERS[kind].format(first)
            self._answers += "\x1b[?1;2c" if kind == "?n" else ""
        elif first in BY_NUMBER.get(kind, ()):
            self._answers += BY_NUMBER[kind][first]
        elif kind == "t":
            self._window(first)
        elif kind in ("i", "?i", "$}", '"p', ">p", ">t", ",~"):
            self.beyond.append(f"CSI {kind} {given}")
        elif kind in ("?h", "?l", "?s", "?r"):
            for mode in numbers:
                self._change(kind[1], mode)
        elif kind in ("h", "l"):
            for mode in numbers:
                self.others[f"mode {mode}"] = (kind == "h") != (mode == 34)
        elif kind[-1] == "u" and kind[0] in "<=>?":
            self._tell_keys(kind[0], first)
        elif kind == "!p":
            self.modes.update({1: False, 6: False, 25: True})
            for name in ("keypad", "mode 4", "margins", "style of m", "characters", "shift"):
                self.others.pop(name, None)
        elif kind in (">m", ">n"):
            for name in [name for name in self.others if name.startswith("keys ")]:
                if not numbers or name == f"keys {numbers[0]}":
                    del self.others[name]
            if numbers:
                self.others[f"keys {numbers[0]}"] = numbers[1:] if kind == ">m" else "off"
        elif kind in ("m", " q", '"q', "*x", "?c"):
            self.others[f"style of {kind}"] = any(numbers)
        elif kind == "r":
            self.others["margins"] = given
        elif kind in ("g", "?W"):
            self.others["tabs"] = kind == "g"

    def _change(self, how: str, mode: int) -> None:
        there = self.modes.get(mode, self._first(mode))
        if how == "s":
            self._saved[mode] = there
        elif how == "r":
            self.modes[mode] = self._saved.get(mode, there)
        elif mode in (47, 1047, 1049):
            self.modes[1049] = how == "h"
        elif mode != 1048:
            self.modes[mode] = how == "h"
            self._answers += TELLS.get(mode, "") if how == "h" else ""

    def _tell_keys(self, kind: str, first: str) -> None:
        stack = self.keys[self.modes.get(1049, False)]
        if kind == "?":
            self._answers += f"\x1b[?{stack[-1] if stack else 0}u"
        elif kind == ">":
            stack.append(first or "0")
            self._answers += "\x1b[97;1:3u" if int(first or 0) & 2 else ""  # a key is let go
        elif kind == "<":
            del stack[max(0, len(stack) - int(first or 1)) :]
        elif stack:
            stack[-1] = first
        else:
            self.others["keys"] = first

    def _window(self, first: str) -> None:
        if first == "22":
            self._kept.append(self._title)
        elif first == "23":
            self._title = self._kept.pop() if self._kept else self._title
        else:
            self.beyond.append(f"window {first}")

    def _command(self, text: str) -> None:
        number, _, rest = text.partition(";")
        if number in ("0", "1", "2", "l", "L"):
            self._title = rest
            self.titles.append(rest)
        elif OSC_QUERIES.fullmatch(text):
            self._answers += f"\x1b]{text[:-1]}rgb:0000/0000/0000\x1b\\"
        elif re.fullmatch("9;4(;[0-9]+)*;?", text):
            self.others["progress"] = not text.startswith("9;4;0")
        elif number == "8" and re.fullmatch("[^;]*;(https?:.*)?", rest):
            self.others["link"] = rest.partition(";")[2]
        else:
            self.beyond.append(f"OSC {text[:40]}")


_COMMANDS: Final = (
    "0;a", "1;a", "2;a\r", "l a", "L a", "I a", "4;1;?", "4;1;red", "5;0;?", "7;file:///",
    "8;;http://x", "8;;file:///x", "9;text", "9;4;1;50", "10;?", "11;?", "12;?;?", "19;?", "11;red",
    "21;?", "22;hand", "50;?", "52;c;?", "52;c;aGk=", "52;p;?", "66;s=2;a", "99;i=1:p=?;", "99;;a",
    "104", "110", "133;A", "633;P", "777;notify;a;b", "1337;ReportCellSize", "1337;Copy=:aGk=",
    "5113;ac=send", "5522;type=read", "P0ff0000", "R",
    "$qm", "+q544e", "q#0~", "+p41", "tmux;\x1b\x1b]52;c;aGk=\x07", "Ga=q;",  # not of OSC
)  # fmt: skip


def _all() -> Iterator[str]:
    """One of each sequence that does more than draw."""
    for sign, between in product(("", "?", ">", "=", "<"), ("", *" !\"#$'*+&,")):
        for code, given in product(range(0x40, 0x7F), ("", "5", "21", "4;1")):
            yield f"\x1b[{sign}{given}{between}{chr(code)}"
    for number in (6, *range(11, 25)):
        yield from (f"\x1b[{number}n", f"\x1b[{number}t")
    for sign, mode, last in product(("", "?"), MODE_NUMBERS, "hl"):
        yield f"\x1b[{sign}{mode}{last}"
    for sign, flags in product(">=", range(32)):
        yield f"\x1b[{sign}{flags}u"
    for between, code in product(("", *"(#% -"), range(0x30, 0x7F)):
        if between or chr(code) not in "[]PX^_k\\":
            yield f"\x1b{between}{chr(code)}"
    for kind, text, end in product("]PX^_k", _COMMANDS, ("\x07", "\x1b\\")):
        yield f"\x1b{kind}{text}{end}"
    yield from map(chr, (*range(0x20), 0x7F, *range(0x80, 0xA0)))
    yield from ("\x9b5i", "\x9b6n", "\x9d52;c;?\x07", "\x90$qm\x9c", "\x9a")


#: and what is no UTF-8, where a terminal may see the beginning of a sequence
HOSTILE: Final = (
    *(text.encode() for text in _all()), *(bytes((code,)) + b"5i" for code in range(0x80, 0x100)),
)  # fmt: skip
