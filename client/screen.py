"""A filter between the terminal that an agent writes to and a person's screen.

An agent may be hostile, and a terminal obeys: it takes the clipboard, prints, and tells its title
as if that was typed. So this is a parser, as terminals have one, which keeps a sequence that has
not ended yet, and lets through whole sequences that it knows, made anew. What comes is the same
however it was split. It also keeps which modes are set, so that they can be taken back one by one.
"""

from __future__ import annotations

import re

from client.output import escape

TITLE = 80  # printable characters of a title
SEQUENCE = 1024  # bytes of a control sequence
STRING = 64 << 10  # bytes of a string, such as a title or a link
CAN, SUB, ESC, BEL, DEL = 0x18, 0x1A, 0x1B, 0x07, 0x7F
#: text, with control characters that every program uses, and without the others, also in UTF-8;
#: and what is most of a screen: colours, and moves of the cursor. Nothing follows, so it never
#: tries again; it is not possessive ("++"), as Python before 3.11.5 then takes what no part matches
TEXT = re.compile(
    rb"(?:[\x07-\x0f\x20-\x7e]+|\x1b\[[0-9;:]{0,64}m|\x1b\[[0-9;]{0,16}[@-HJ-MPSXZ`adef]"
    rb"|\xc2[\xa0-\xbf]|[\xc3-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})+"
)
#: a character of which bytes are missing
PART = re.compile(
    rb"[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}"
    rb"|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?"
)
STRING_END = re.compile(rb"[\x07\x18\x1a\x1b]")
PARAMETERS = re.compile(rb"[ -?]+")
#: a control sequence: a sign, parameters, more signs, and what it is
CSI = re.compile(r"\[([<=>?]?)([0-9:;]*)([ -/]*)([@-~])")

#: control sequences that pass as they are, by all but their parameters
PLAIN = frozenset((
    *"@ABCDEFGHIJKLMPSTXZ`adefgmrsu", "?J", "?K", "?W", "?c",
    " @", " A", " q", "!p", '"q', "#p", "#q", "#{", "#}",
    "$r", "$t", "$v", "$x", "$z", "${", "'}", "'~", "*x",
))  # fmt: skip
#: what takes back those that last
TAKEN_BACK = {
    "g": "\x1b[?5W", "?c": "\x1b[?0c", '"q': '\x1b[0"q', "*x": "\x1b[0*x", " q": "\x1b[0 q",
    "r": "\x1b7\x1b[r\x1b8",  # it moves the cursor
}  # fmt: skip
REPEAT = "b"  # the last character: terminals take long for some thousand of it
REPEAT_MOST = 1000
#: those that ask for a capability or a state, which the terminal answers as if it was typed; n
#: and t ask for many things
QUESTIONS = frozenset(("c", ">c", "=c", ">q", "?u", "$p", "?$p", "?m", "?S", "?n"))
PLACE_OR_STATE = ("5", "6")  # of n
SIZES = ("14", "15", "16", "18", "19")  # of t
#: escape sequences that pass: also those that say which set of characters is meant
ESCAPES = re.compile(r"[6789=>DEHMNOZcno|}~]|[()*+][0-9A-Z<=>]|#[34568]")
#: private modes that pass, and are set at first; the others are not
SET_AT_FIRST = frozenset((7, 25))
MODES = SET_AT_FIRST | frozenset((
    1, 5, 6, 9, 12, 45, 47, 66, 69, 1000, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1016,
    1047, 1048, 1049, 2004, 2026, 2027, 2031, 2048,
))  # fmt: skip
ALTERNATE = frozenset((47, 1047, 1049))  # another screen, which leaves that of before as it is
#: in these the terminal tells of the mouse, the focus, colours and sizes
TELLING = frozenset((9, 1000, 1002, 1003, 1004, 2031, 2048))
#: in each terminal as its user wants them at first: it keeps that while they are others
AS_WANTED = frozenset((12, 1007, 2027))
ANSI_SET_AT_FIRST = frozenset((34,))
ANSI_MODES = ANSI_SET_AT_FIRST | frozenset((4, 20))
#: operating system commands: questions for colours, progress, links
COLOURS = re.compile(r"(?:4;[0-9]{1,3}|1[0-9])(?:;\?)")
PROGRESS = re.compile(r"9;4(?:;[0-9]{1,3}){1,2}")
LINK = re.compile(r"8;((?:id=[!-9;<-~]{1,250})?);((?:https?://[!-~]{1,2000})?)")
CAPABILITIES = re.compile(r"\+q[0-9A-Fa-f;]{1,1000}")
KEYS_MOST = 16  # how often the way of telling keys can be pushed


class Screen:
    """A filter of all that one viewer shows, from the first byte to the last."""

    def __init__(
        self, name: str, *, raw: bool = False, heard: bool = True, unicode: bool = True
    ) -> None:
        self.name = name
        self.raw = raw
        self.heard = heard  # whether the program gets what the terminal says
        #: whether it is this terminal that answers, where several show the same
        self.asks = heard
        self.unicode = unicode
        #: how many answers to "are you well?" the terminal owes
        self.asked = 0
        #: whether the terminal has, or may have, said something that nobody typed
        self.talked = raw
        self._again = False
        self._obeys = False
        self._out = bytearray()
        self._rest = b""  # of a character
        self._state = self._text
        self._sequence = bytearray()  # what follows ESC
        self._string = bytearray()
        self._kind = ""  # of the string, empty if there is none
        self._modes: dict[int, bool] = {}  # private ones that are not as at first
        self._ansi: dict[int, bool] = {}
        self._keys = {False: 0, True: 0}  # how often pushed, by whether the screen is the alternate
        self._others: dict[str, None] = {}  # what else to undo

    @property
    def alternate(self) -> bool:
        """Whether a program draws on the whole screen."""
        return not ALTERNATE.isdisjoint(self._modes)

    def feed(self, data: bytes, *, again: bool = False) -> bytes:
        """Return what of some more bytes may be shown; of what is shown `again`, neither questions
        nor modes: the terminal would answer twice, and the modes are told before."""
        self._again = again
        self._out = bytearray()
        whole, self._rest = self._rest + data, b""
        at = 0
        while at < len(whole):
            at = self._state(whole, at)
        if self.raw and not again:
            return data
        if not self.unicode:
            return bytes(self._out).decode("utf-8", "replace").encode("ascii", "replace")
        return bytes(self._out)

    def begin(self) -> None:
        """Forget what has not ended: bytes are missing."""
        self._rest = b""
        self._back()

    def obey(self, modes: bytes) -> bytes:
        """Return what sets all modes that are in force, where some may be set already."""
        self.begin()
        self._out = bytearray()
        self._pop_keys()
        popped, self._obeys = bytes(self._out), True
        shown, self._obeys = self.feed(modes), False
        return popped + shown

    # the states: each takes bytes from a place on, and returns how far it came

    def _text(self, data: bytes, at: int) -> int:
        if found := TEXT.match(data, at):
            self._out += found[0]
            return found.end()
        if data[at] == ESC:
            self._sequence.clear()
            self._state = self._escaped
        elif PART.fullmatch(data, at):
            self._rest = data[at:]
            return len(data)
        return at + 1  # without what is no text

    def _back(self) -> None:
        self._state, self._kind = self._text, ""

    def _escaped(self, data: bytes, at: int) -> int:
        byte = data[at]
        found = PARAMETERS.match(data, at) if self._sequence.startswith(b"[") else None
        if found:
            self._sequence += found[0][: SEQUENCE + 1 - len(self._sequence)]
            return found.end()
        if byte == ESC:
            self._sequence.clear()
            self._kind = ""
        elif byte in (CAN, SUB):
            self._back()
        elif byte > DEL:  # no terminal goes on
            self._back()
            return at
        elif byte < 0x20:
            if BEL <= byte <= 0x0F:  # is obeyed at once
                self._out.append(byte)
        elif byte != DEL:
            self._take(byte)
        return at + 1

    def _take(self, byte: int) -> None:
        sequence = self._sequence
        char = chr(byte)
        if not sequence:
            if self._kind and char == "\\":
                self._end_string()
                return
            self._kind = char if char in "]PX^_k" else ""
            if self._kind:
                self._string.clear()
                self._state = self._in_string
                return
        if len(sequence) <= SEQUENCE:
            sequence.append(byte)
        is_control = sequence.startswith(b"[")
        if byte < 0x30 or sequence == b"[":
            return
        self._back()
        if len(sequence) > SEQUENCE:
            return
        text = sequence.decode("ascii")
        if not is_control:
            self._escape(text)
        elif found := CSI.fullmatch(text):
            self._control(*found.groups())

    def _in_string(self, data: bytes, at: int) -> int:
        found = STRING_END.search(data, at)
        end = found.start() if found else len(data)
        self._string += data[at : min(end, at + STRING + 1 - len(self._string))]
        if found is None:
            return end
        byte = data[end]
        if byte == ESC:
            self._sequence.clear()
            self._state = self._escaped
        elif byte == BEL and self._kind == "]":
            self._end_string()
        elif byte != BEL:
            self._back()
        return end + 1

    # what passes

    def _pass(self, text: str) -> None:
        self._out += text.encode()

    def _ask(self, text: str) -> None:
        if self.asks and not self._again:
            self.talked = True
            self._pass(text)

    def _escape(self, text: str) -> None:
        if not ESCAPES.fullmatch(text) or (text in "=>" and self._again):
            return
        if text == "Z":
            self._ask("\x1bZ")
            return
        self._pass(f"\x1b{text}")
        if text == "c":  # a reset
            self._modes.clear()
            self._ansi.clear()
            self._keys = {False: 0, True: 0}
        elif text == "=":
            self._undo("\x1b>")
        elif text[0] in "()*+no|}~":
            self._undo("\x1b(B", "\x0f")
        elif text == "H":
            self._undo("\x1b[?5W")

    def _undo(self, *sequences: str) -> None:
        self._others.update(dict.fromkeys(sequences))

    def _control(self, sign: str, given: str, more: str, last: str) -> None:
        kind, text = sign + more + last, f"\x1b[{sign}{given}{more}{last}"
        if kind in PLAIN:
            self._pass(text)
            if kind in TAKEN_BACK:
                self._undo(TAKEN_BACK[kind])
        elif kind == REPEAT:
            self._pass(f"\x1b[{min(int(given[:9]), REPEAT_MOST) if given.isdigit() else 1}b")
        elif kind in QUESTIONS:
            self._ask(text)
        elif kind in ("n", "t"):
            self._state_or_size(given, kind)
        elif not self._again:
            self._change(kind, given, text)

    def _change(self, kind: str, given: str, text: str) -> None:
        """Change a mode."""
        numbers = [int(each[:9]) for each in given.split(";") if each.isdigit()]
        if kind in ("?h", "?l"):
            for mode in numbers:
                self._set_mode(mode, kind == "?h")
        elif kind in ("h", "l"):
            for mode in ANSI_MODES.intersection(numbers):
                self._pass(f"\x1b[{mode}{kind}")
                self._ansi[mode] = kind == "h"
        elif kind in (">m", ">n"):
            self._pass(text)
            self._undo(f"\x1b[>{numbers[0] if numbers else ''}m")
        elif kind in (">u", "<u", "=u") and self.heard:
            self._tell_keys(kind, given)

    def _state_or_size(self, given: str, kind: str) -> None:
        if kind == "n" and given in PLACE_OR_STATE:
            self._ask(f"\x1b[{given}n")
            self.asked += given == "5" and self.asks and not self._again
        elif kind == "t" and given.partition(";")[0] in SIZES:
            self._ask(f"\x1b[{given}t")

    def _set_mode(self, mode: int, on: bool) -> None:
        if mode not in MODES or (mode in TELLING and not self.heard):
            return
        if mode in ALTERNATE and not (on or self.alternate):
            return  # to leave where one is not would move the cursor
        untouched = mode not in self._modes and mode not in ALTERNATE
        if self._obeys and untouched and on == (mode in SET_AT_FIRST):
            return
        if mode in AS_WANTED and f"\x1b[?{mode}r" not in self._others and not self.raw:
            self._pass(f"\x1b[?{mode}s")
            self._undo(f"\x1b[?{mode}r")
        if mode in ALTERNATE and not on:
            self._pop_keys()
        self._pass(f"\x1b[?{mode}{'h' if on else 'l'}")
        self.talked |= mode in TELLING
        if on == (mode in SET_AT_FIRST):
            for each in ALTERNATE if mode in ALTERNATE else (mode,):
                self._modes.pop(each, None)
        elif mode != 1048:  # it keeps the cursor's place
            self._modes[mode] = on

    def _tell_keys(self, kind: str, given: str) -> None:
        """Change how the terminal tells keys, as kitty does: a stack, of which only what was pushed
        here may be popped, since below it is the user's."""
        there = self._keys[self.alternate]
        if kind == "<u":
            count = min(int(given[:9]) if given.isdigit() else 1, there)
            if count:
                self._pass(f"\x1b[<{count}u")
                self._keys[self.alternate] = there - count
            return
        self.talked = True  # a key is told of once more, when it is let go
        if kind == ">u" or not there:
            if there == KEYS_MOST:
                return
            flags = given if kind == ">u" and given.isdigit() else "0"
            self._pass(f"\x1b[>{flags}u")
            self._keys[self.alternate] = there + 1
        if kind == "=u":
            self._pass(f"\x1b[={given}u")

    def _pop_keys(self) -> None:
        self._tell_keys("<u", str(KEYS_MOST))

    def _end_string(self) -> None:
        kind = self._kind
        self._back()
        if len(self._string) > STRING:
            return
        text = self._string.decode("utf-8", "replace")
        number, _, rest = text.partition(";")
        if kind == "P" and CAPABILITIES.fullmatch(text):
            self._ask(f"\x1bP{text}\x1b\\")
        if kind != "]":
            return
        if number in ("0", "1", "2"):
            if "\x1b[23;0t" not in self._others and not self.raw:
                self._pass("\x1b[22;0t")  # keep the title of before
                self._undo("\x1b[23;0t")
            self._pass(f"\x1b]{number};{self.titled(rest)}\x07")
        elif COLOURS.fullmatch(text):
            self._ask(f"\x1b]{text}\x1b\\")
        elif PROGRESS.fullmatch(text):
            self._pass(f"\x1b]{text}\x1b\\")
            self._undo("\x1b]9;4;0;\x1b\\")
        elif LINK.fullmatch(text):
            self._pass(f"\x1b]{text}\x1b\\")
            self._undo("\x1b]8;;\x1b\\")

    def titled(self, text: str) -> str:
        """Return a title that says whose it is."""
        printable = "".join(filter(str.isprintable, text[: 4 * TITLE]))
        return f"[{escape(self.name)}] {printable[:TITLE]}"

    # afterwards

    def undone(self) -> list[bytes]:
        """Return what takes back all that is set, each for itself: tmux drops what is longer."""
        self._out = bytearray()
        found: list[bytes] = []

        def add() -> None:
            if self._out:
                found.append(bytes(self._out))
                self._out = bytearray()

        if self.raw:
            found.append(b"\x18\x1b\\")  # what has begun ends
        for mode in sorted(self._modes, key=lambda mode: (mode in ALTERNATE, mode)):
            self._set_mode(mode, mode in SET_AT_FIRST)
            add()
        self._pop_keys()
        add()
        for mode, on in sorted(self._ansi.items()):
            if on != (mode in ANSI_SET_AT_FIRST):
                found.append(b"\x1b[%d%c" % (mode, b"lh"[not on]))
        found += [sequence.encode() for sequence in self._others]
        self._ansi.clear()
        self._others.clear()
        return [*found, b"\x0f\x1b[0m"]
