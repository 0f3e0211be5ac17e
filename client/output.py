"""Standard output and error: exact for pipes and files, escaped for a terminal."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def escape(text: str, keep: str = "") -> str:
    """Return `text` with all that a terminal might obey, except what is in `keep`, spelled out."""
    keep += "\u00a0\u202f\u3000"  # blanks that are "not printable", but harmless
    return "".join(
        char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text
    )


def decode(data: bytes) -> str:
    """Return bytes as text, with what is not UTF-8 spelled out."""
    return data.decode("utf-8", "backslashreplace")


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a descriptor, waiting where it would not."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            time.sleep(0.01)


def as_json(value: object) -> str:
    """Return a value as indented JSON."""
    import json

    return json.dumps(value, indent=2) + "\n"


class Output:
    """One of our descriptors: contents are exact for pipes and files, escaped for a terminal."""

    def __init__(self, fd: int) -> None:
        import codecs

        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def copy(self, data: bytes) -> None:
        """Write contents that somebody else made."""
        if os.isatty(self.fd):
            data = escape(self.decoder.decode(data), keep="\n\t").encode()
        write_all(self.fd, data)

    def text(self, text: str) -> None:
        """Write text of our own."""
        write_all(self.fd, text.encode("utf-8", "backslashreplace"))

    def lines(self, lines: Iterable[str]) -> None:
        """Write each item as one line, with control characters escaped."""
        self.text("".join(escape(line) + "\n" for line in lines))


STDOUT = Output(1)
STDERR = Output(2)


def complain(message: str) -> None:
    """Say one line on stderr."""
    STDERR.lines([f"ctx: {message}"])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned and its empty cells shown as `-`."""
    cells = [list(header)] + [[escape(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    STDOUT.text("\n".join(table(header, rows)) + "\n")


def gist(text: str, width: int = 72) -> str:
    """Return the first line of a text, shortened to `width` characters."""
    line = text.partition("\n")[0]
    short = line[: width - 1].rstrip() if len(line) > width else line
    return short if short == text.rstrip("\n") else f"{short}…"
