"""The key that leaves the terminal of an agent, found in what a person types there.

Terminals tell a key in three ways: as a control character, as xterm does with modifyOtherKeys, and
as kitty does, which tells of its release, too. What is pasted has no keys.
"""

from __future__ import annotations

import re

from client.exits import Misuse

LEAVE = 0x1D  # Ctrl-]
ESC = 0x1B
HOLD = 0.03  # seconds for which a sequence that has only begun is kept back
#: a key, or another thing that the terminal tells
SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,4}[@-~]|O[ -~])")
BEGUN = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,4}|O)?"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}"
)
KITTY = re.compile(rb"\x1b\[([0-9]{1,6})(?::[0-9:]*)?(?:;([0-9]{0,4})(?::([0-9]))?)?(?:;[0-9:]*)?u")
XTERM = re.compile(rb"\x1b\[27;([0-9]{1,4});([0-9]{1,6})~")
CHARACTER = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}|.", re.DOTALL
)
PASTE, PASTE_END = b"\x1b[200~", b"\x1b[201~"
ANSWER = re.compile(rb"\x1b\[[03]n")  # to "are you well?"
ANSWER_SIZE = 4
CTRL, LOCKS = 4, 64 | 128  # of modifiers, which are told plus 1
MODIFIER_KEYS = range(57358, 57455)  # of kitty: they are pressed before others
RELEASE = b"3"


def leave_key(text: str) -> int:
    """Return the control character that ^X names."""
    number = ord(text[1].upper()) ^ 0x40 if len(text) == 2 and text[0] == "^" else 0
    if not 0 < number < 0x20 or number == ESC:
        raise Misuse(f'"{text}" is not a key such as ^] or ^A, which is Ctrl and another key')
    return number


def shown(key: int) -> str:
    """Return how a person is told of the key."""
    return f"Ctrl-{chr(key ^ 0x40)}"


class Key:
    """A key that the terminal has told of, as far as that matters here."""

    def __init__(self, token: bytes) -> None:
        found, xterm = KITTY.fullmatch(token), XTERM.fullmatch(token)
        code, modifiers = 0 if token[0] == ESC else token[0], 1
        if found:
            code, modifiers = int(found[1]), int(found[2] or 1)
        elif xterm:
            code, modifiers = int(xterm[2]), int(xterm[1])
        self.code = code
        self.is_key = bool(code)
        self.with_ctrl = max(0, modifiers - 1) & ~LOCKS == CTRL
        self.is_release = bool(found and found[3] == RELEASE)


class Typed:
    """A search through all that is typed, from the first byte to the last."""

    def __init__(self, leave: int = LEAVE) -> None:
        self.leave = leave
        self.wants = ""  # "leave" or "help", once that was typed
        self.answered = 0  # how often the terminal has said that it is well
        self._code = ord(chr(leave ^ 0x40).lower())
        self._plain = re.compile(rb"[^\x1b%s]+" % re.escape(bytes((leave,))))
        self._held = b""
        self._pressed = False  # the key that leaves
        self._pasting = False

    @property
    def holds(self) -> bool:
        """Whether a sequence has begun, or Esc was typed."""
        return bool(self._held)

    def release(self) -> bytes:
        """Return what has begun: nothing more of it came."""
        held, self._held = self._held, b""
        return b"" if self._pressed else held

    def feed(self, data: bytes) -> bytes:
        """Return what of some more bytes is for the program."""
        data, self._held = self._held + data, b""
        passed, at = bytearray(), 0
        while at < len(data) and self.wants != "leave":
            plain = None if self._pressed else self._plain.match(data, at)
            found = plain or SEQUENCE.match(data, at)
            if found is None and BEGUN.fullmatch(data, at):
                self._held = data[at:]
                break
            found = found or CHARACTER.match(data, at)
            assert found is not None  # it matches every byte
            at = found.end()
            if plain or self._passes(found[0]):
                passed += found[0]
        self.answered += len(ANSWER.findall(data, at)) if self.wants == "leave" else 0
        return bytes(passed)

    def _passes(self, token: bytes) -> bool:
        self.answered += bool(ANSWER.fullmatch(token))
        if token in (PASTE, PASTE_END):
            self._pasting = token == PASTE
        key = Key(token)
        if self._pasting or not key.is_key:
            return True
        leaves = token[0] == self.leave or (key.with_ctrl and key.code == self._code)
        if key.is_release or key.code in MODIFIER_KEYS:
            return not (leaves or self._pressed)
        if not self._pressed:
            self._pressed = leaves
            return not leaves
        self._pressed = False
        if not leaves:
            self.wants = "leave" if chr(key.code) in "dD" else "help"
        return leaves
