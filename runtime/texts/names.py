"""Names, times, durations and other small texts (ctxfs(5), Names, times and numbers).

Everything is matched as a whole string and in ASCII: ``$`` would accept a
trailing newline, ``int()`` other scripts' digits.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final, Protocol, TypeVar

from runtime.errors import MalformedError

#: characters of a name
NAME_MAX: Final = 64
_NAME: Final = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._+-]{{0,{NAME_MAX - 1}}}")
_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_TIME: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
#: what no time can be written for
_END_OF_TIMES: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_SIZE: Final = re.compile(r"([0-9]{1,15})([KMGT]?)")
_SCREEN: Final = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")
#: columns or rows of a terminal; as in terminal.h
_SIDE_MAX: Final = 1000
#: no component is ".", ".." or empty, none has a control character
_PLAIN_PATH: Final = re.compile(r"/|(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+)+")
#: what a command line is made of: at the end, a quotation or an escape that is none
_COMMAND: Final = re.compile(
    r"""(?P<blank>[ \t\r\n]+)|(?P<plain>(?:[^ \t\r\n'"\\$]|\$(?!'))+)|(?P<single>'[^']*')"""
    r"""|(?P<double>"(?:[^"\\]|\\.)*")|(?P<ansi>\$'(?:[^'\\]|\\.)*')|(?P<escaped>\\.)"""
    r"""|(?P<bad>['"\\$])""",
    re.S,
)
#: what stands for a byte or a character in $'…'
_STANDING: Final = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<byte>[0-9a-fA-F]{1,2})|u(?P<four>[0-9a-fA-F]{1,4})"
    r"|U(?P<eight>[0-9a-fA-F]{1,8})|(?P<letter>.))",
    re.S,
)
_LETTERS: Final = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))
#: of escapes in a quotation, those that are ones
_ESCAPED: Final = re.compile(r'\\(["\\])')
_ENV_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

JSON_DEPTH: Final = 64
_JSON_BLANKS: Final = " \t\n\r"
#: values in one text, which would cost many times its size to make
JSON_VALUES: Final = 1 << 15
#: digits of a number: reading one takes the square of them
JSON_DIGITS: Final = 400
#: what separates words, for every parser: SPACE and TAB, whatever else Unicode calls blank
BLANKS: Final = " \t"


def quote(text: str, limit: int = 80) -> str:
    """The offending text as it may appear in a one-line reason; its own quotes are escaped."""
    shown = text if len(text) <= limit else text[:limit] + "…"
    return '"' + escape(shown).replace('"', '\\"') + '"'


def head(text: str, size: int) -> str:
    """The beginning of a text, of at most so many bytes in UTF-8."""
    return text[:size].encode()[:size].decode(errors="ignore")


def escape(text: str) -> str:
    """Control characters, bidirectional ones too, as visible escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def some_of(names: Iterable[str], count: int, most: int) -> str:
    """As many names as fit into ``most`` bytes of text, and how many of ``count`` are left out."""
    shown: list[str] = []
    for name in map(escape, names):
        if len(", ".join([*shown, name]).encode()) > most:
            break
        shown.append(name)
    more = count - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more and shown else str(more or ""))


def words(line: str) -> list[str]:
    """The words between the blanks of a line."""
    return [word for word in line.replace("\t", " ").split(" ") if word]


class Usage(Protocol):
    """The meaning of a word at the beginning of a line: ``session NAME``, ``abort [RUN]``."""

    @property
    def usage(self) -> str: ...


_U = TypeVar("_U", bound=Usage)
_K = TypeVar("_K")


def parse_usage(line: str, known: Mapping[str, _U], what: str = "verb") -> tuple[_U, list[str]]:
    """The thing that the first word of a line stands for, and the words after it;
    ``MalformedError``."""
    name, *arguments = words(line) or [""]
    found = check_known(name, known, what)
    wanted = found.usage.split(" ")[1:]
    least = sum(not argument.startswith("[") for argument in wanted)
    if not least <= len(arguments) <= len(wanted):
        raise MalformedError(f"{quote(line)}: wrong arguments; use {found.usage}")
    return found, arguments


def check_known(name: str, known: Mapping[str, _K], what: str) -> _K:
    """The thing that is known by a name; ``MalformedError`` that tells the others."""
    found = known.get(name)
    if found is None:
        raise MalformedError(f"unknown {what} {quote(name)}; use {', '.join(known)}")
    return found


def is_name(text: str) -> bool:
    """Whether an agent, task or space can have this name."""
    found = _NAME.fullmatch(text) is not None
    return found and not text.endswith((".sock", ".d")) and text != "current"


def check_name(name: str) -> str:
    """An agent's, task's or space's name; ``MalformedError`` if it is none."""
    if not is_name(name):
        raise MalformedError(
            f"{quote(name)} is not a name; use 1 to 64 of a-z A-Z 0-9 . _ + -, with a letter or "
            'digit first, but not "current", and not .sock or .d at the end'
        )
    return name


def check_agent(name: str) -> str:
    """The name of an agent that there may be: one that was placed here is ``NAME@ALIAS``."""
    own, _, alias = name.partition("@")
    check_name(own)
    if alias:
        check_name(alias)
    return name


def free_number(is_taken: Callable[[int], bool], most: int | None = None) -> int:
    """A number from 1 on that is not taken, found by doubling and halving: of thousands that are
    taken, few are looked at. Gaps that were left below may stay. 0 if that leads above ``most``."""
    free = 1
    while is_taken(free):
        free *= 2
        if most is not None and free > most:
            return 0
    taken = free // 2
    while free - taken > 1:
        middle = (taken + free) // 2
        if is_taken(middle):
            taken = middle
        else:
            free = middle
    return free


def timestamp(when: float | None = None) -> str:
    """RFC 3339 in UTC with milliseconds; now unless ``when`` (epoch seconds) is given."""
    moment = datetime.now(UTC) if when is None else datetime.fromtimestamp(when, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def parse_duration(text: str) -> float:
    """``500ms 30s 10m 2h 1d`` in seconds; ``MalformedError`` otherwise."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise MalformedError(f"{quote(text)} is not a duration such as 500ms, 30s, 10m, 2h or 1d")
    return int(match[1]) * SECONDS[match[2]]


def is_duration(text: str) -> bool:
    return _DURATION.fullmatch(text) is not None


def parse_moment(text: str, now: float) -> float:
    """A duration from now, or an RFC 3339 time, in epoch seconds; ``MalformedError``."""
    try:
        if is_duration(text):
            moment = now + parse_duration(text)
        elif _TIME.fullmatch(text):
            moment = datetime.fromisoformat(text.upper()).timestamp()
        else:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise MalformedError(
            f"{quote(text)} is not a time; use a duration such as 30s, or 2027-01-31T09:00:00Z"
        ) from None
    if moment <= 0:
        raise MalformedError(f"{quote(text)} is before the year 1970")
    if moment >= _END_OF_TIMES:
        raise MalformedError(f"{quote(text)} is after the year 9999")
    return moment


def parse_number(text: str) -> int:
    """ASCII digits; ``MalformedError`` otherwise."""
    if not _NUMBER.fullmatch(text):
        raise MalformedError(f"{quote(text)} is not a number; use digits 0-9")
    return int(text)


def parse_size(text: str) -> int:
    """A number of bytes, or of K, M, G or T of them (powers of 1024)."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise MalformedError(f"{quote(text)} is not a size such as 1048576, 512K, 64M or 2G")
    return int(match[1]) * _BYTES[match[2]]


def parse_screen(text: str) -> tuple[int, int]:
    """Columns and rows of a terminal."""
    match = _SCREEN.fullmatch(text)
    sides = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or max(sides) > _SIDE_MAX:
        raise MalformedError(
            f"{quote(text)} is not a size of a terminal: use COLSxROWS, such as 80x24, "
            f"from 1 to {_SIDE_MAX} each"
        )
    return sides


def check_choice(text: str, choices: tuple[str, ...]) -> str:
    """``text`` if it is one of ``choices``; ``MalformedError`` naming them otherwise."""
    if text not in choices:
        raise MalformedError(f"unknown value {quote(text)}; use {', '.join(choices)}")
    return text


def check_absolute(text: str, what: str = "path") -> str:
    """An absolute path without ``.``, ``..`` or empty components."""
    if not _PLAIN_PATH.fullmatch(text):
        raise MalformedError(
            f'{what} {quote(text)} must begin with "/" and have no ".", ".." or empty component'
        )
    if len(text.encode()) > 4095:
        raise MalformedError(f"{what} {quote(text)} is longer than 4095 bytes")
    return text


def check_socket(text: str, what: str) -> str:
    """An absolute path that fits into the address of a Unix socket (unix(7))."""
    if len(check_absolute(text, what).encode()) > 107:
        said = f"{what} {quote(text)} is longer than 107 bytes, the most for a Unix socket"
        raise MalformedError(said)
    return text


def parse_author(line: str) -> tuple[str, str]:
    """``NAME <EMAIL>``, as git writes who made a commit."""
    name, _, rest = line.partition(" <")
    email = rest.removesuffix(">")
    if len(line) > 256 or not line.isprintable() or line != f"{name} <{email}>":
        name = ""
    if not name.strip() or not email or set("<> ") & set(email) or set("<>") & set(name):
        raise MalformedError(f"{quote(line)} is not NAME <EMAIL>, of at most 256 characters")
    return name, email


def parse_env_line(line: str) -> tuple[str, str]:
    """``KEY=VALUE`` without expansion; ``CTX_*`` belongs to the runtime."""
    key, separator, value = line.partition("=")
    if not separator or not _ENV_KEY.fullmatch(key):
        raise MalformedError(f"{quote(line)} is not KEY=VALUE with a key of A-Z a-z 0-9 _")
    if key.startswith("CTX_"):
        raise MalformedError(f"{quote(key)} is reserved: the runtime sets CTX_*")
    return key, value


def _stood_for(match: re.Match[str]) -> str:
    """The character of an escape in $'…', as bash has it; for a byte above 127 a surrogate."""
    kind, text = match.lastgroup or "", match[match.lastgroup or ""]
    if kind == "letter" and text in _LETTERS:
        return _LETTERS[text]
    if kind != "letter":
        code, is_byte = int(text, 8 if kind == "octal" else 16), kind in ("octal", "byte")
        if is_byte and 0x80 <= code <= 0xFF:
            return chr(0xDC00 + code)
        if 0 < code <= (0x7F if is_byte else 0x10FFFF) and not 0xD800 <= code <= 0xDFFF:
            return chr(code)
    raise MalformedError(
        f"{quote(match[0])} stands for nothing in $'...', where an argument has every byte but "
        "NUL: write \\n, \\t, \\r, \\', \\\\, \\xHH, \\NNN, \\uHHHH or \\UHHHHHHHH"
    )


def split_command(line: str) -> list[str]:
    """Words like those of bash, without any expansion."""
    found: list[str] = []
    word: list[str] = []
    for match in _COMMAND.finditer(line):
        kind = match.lastgroup
        if kind == "blank":
            if word:
                found.append("".join(word))
                word = []
        elif kind == "plain":
            word.append(match[0])
        elif kind == "single":
            word.append(match[0][1:-1])
        elif kind == "double":
            text = match[0][1:-1]
            word.append(_ESCAPED.sub(r"\1", text) if "\\" in text else text)
        elif kind == "ansi":
            word.append(_STANDING.sub(_stood_for, match[0][2:-1]))
        elif kind == "escaped":
            word.append(match[0][1])
        else:
            what = "escaped character" if match[0] == "\\" else "closing quotation"
            raise MalformedError(
                f"{quote(line)} is not a command line: no {what}; "
                "close the quotation, or write \\ before a quote that is meant literally"
            )
    if word:
        found.append("".join(word))
    return found


def _refuse_constant(text: str) -> Any:
    raise MalformedError(f"{text} is not JSON (RFC 8259)")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise MalformedError(f"{quote(text)} is too large a number")
    return value


#: what is wrong, by how Python's words for it begin
JSON_MISTAKES: Final = {
    "Expecting value": "a value is missing here, or a text is not in double quotes",
    "Expecting property name": "a key in double quotes belongs here",
    "Expecting ": "a comma or a colon belongs here, or the end of a list or an object",
    "Illegal trailing comma": "no comma belongs before the end of a list or an object",
    "Extra data": "the text ought to end here",
    "Unterminated string": "the text that begins here has no closing double quote",
    "Invalid control character": "a text cannot have a line break or TAB: write \\n or \\t",
    "Invalid \\": "JSON has no such escape: write \\\\ for a backslash",
    "": "nothing that JSON knows is here",
}
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
#: brackets as steps down and up
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))


def _outside(text: str) -> bytes:
    """A text of JSON without its strings.

    ``UnicodeEncodeError`` for a lone surrogate, ``MalformedError`` for very many strings.

    Enough is left of a text that is not JSON for a parser to fail on it.
    """
    data = text.encode()
    if b'"' not in data:
        return data
    # a run of backslashes is pairs from its left, and perhaps one that is before a quote
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 4 * JSON_VALUES:  # of a key and of a value
        raise MalformedError(f"the JSON has more than {JSON_VALUES} values")
    return b"".join(data.split(b'"')[::2])


def _nesting(outside: bytes) -> tuple[int, int]:
    """(how deep brackets nest, how many are open at the end)."""
    steps = array("b", outside.translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0), sum(steps)


def parse_json(text: str) -> Any:
    """JSON as RFC 8259 has it: bounded depth and number of values, no NaN, no lone surrogates.

    What it costs is bounded before any of it is parsed.
    """
    try:
        if text.count("[") + text.count("{") > JSON_DEPTH or len(text) > JSON_VALUES:
            outside = _outside(text)
            if _nesting(outside[: 2 * JSON_VALUES])[0] > JSON_DEPTH:
                raise MalformedError(f"the JSON is nested deeper than {JSON_DEPTH} levels")
            if sum(map(outside.count, (b"[", b"{", b","))) > JSON_VALUES:
                raise MalformedError(f"the JSON has more than {JSON_VALUES} values")
            if outside.translate(_DIGITS).find(b"0" * JSON_DIGITS) >= 0:
                raise MalformedError(f"the JSON has a number of {JSON_DIGITS} digits")
        value = _DECODER.decode(text.rstrip(_JSON_BLANKS))
        if not text.isascii():
            text.encode()
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedError("the JSON contains a lone surrogate") from None
    except json.JSONDecodeError as error:
        said = next(said for begin, said in JSON_MISTAKES.items() if error.msg.startswith(begin))
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise MalformedError(f"not JSON: {line}column {error.colno}: {said}") from None
    except (ValueError, RecursionError):  # of a short text: these bounds are Python's
        raise MalformedError("the JSON has too long a number, or is nested too deep") from None
    return value


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object; ``MalformedError`` for any other value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise MalformedError(f'{quote(text)} is not a JSON object such as {{"key": "value"}}')
    return value


def is_unfinished_json(text: str) -> bool:
    """Whether brackets are still open: the first of several lines, say."""
    return _nesting(_outside(text))[1] > 0


_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump_json(value: Any) -> str:
    """One line of JSON; text outside ASCII is kept as it is."""
    return _encode(value)


def shown_json(value: Any) -> str:
    """One line of JSON for a terminal, too: no control character is in it, bidirectional ones
    neither."""
    text = dump_json(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def decode(data: bytes, *, final: bool = True) -> str:
    """UTF-8 without NUL; ``MalformedError``. What is not ``final`` may end within a character."""
    if b"\0" in data:
        raise MalformedError("the text contains a NUL byte")
    try:
        return codecs.utf_8_decode(data, "strict", final)[0]
    except UnicodeDecodeError as error:
        shown = quote(data[error.start : error.start + 8].decode("latin-1"))
        raise MalformedError(f"byte {error.start} ({shown}) is not UTF-8") from None
