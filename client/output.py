"""Standard output and error: unchanged to pipes and files, escaped on a terminal."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def escape(text: str, keep: str = "") -> str:
    """Return `text` with all terminal control characters escaped, except those in `keep`."""
    keep += "\u00a0\u202f\u3000"  # harmless blanks that isprintable() rejects
    return "".join(
        char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text
    )


def decode(data: bytes) -> str:
    """Return bytes as text, with invalid UTF-8 escaped."""
    return data.decode("utf-8", "backslashreplace")


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a descriptor, also to a non-blocking one."""
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
    """A descriptor: contents are unchanged to pipes and files, escaped on a terminal."""

    def __init__(self, fd: int) -> None:
        import codecs

        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def copy(self, data: bytes) -> None:
        """Write the contents of files and messages."""
        if os.isatty(self.fd):
            data = escape(self.decoder.decode(data), keep="\n\t").encode()
        write_all(self.fd, data)

    def text(self, text: str) -> None:
        """Write text of this program."""
        write_all(self.fd, text.encode("utf-8", "backslashreplace"))

    def lines(self, lines: Iterable[str]) -> None:
        """Write each item as one line, with control characters escaped."""
        self.text("".join(escape(line) + "\n" for line in lines))


STDOUT = Output(1)
STDERR = Output(2)


def complain(message: str) -> None:
    """Print a line on standard error."""
    STDERR.lines([f"ctx: {message}"])


def shown_column(column: Sequence[str]) -> tuple[Sequence[str], int]:
    """Return the cells of a column of a table as they are shown, and its width."""
    values = set(column)  # of many cells few are different
    if "" in values or not "".join(values).isprintable():
        shown = {value: escape(value) or "-" for value in values}
        column, values = [shown[cell] for cell in column], set(shown.values())
    return column, max(map(len, values))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with aligned columns and `-` for empty cells."""
    columns, widths = zip(*map(shown_column, zip(header, *rows, strict=True)), strict=True)
    form = "  ".join([*(f"%-{width}s" for width in widths[:-1]), "%s"])
    return [(form % cells).rstrip() for cells in zip(*columns, strict=True)]


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    STDOUT.text("\n".join(table(header, rows)) + "\n")


def gist(text: str, width: int = 72) -> str:
    """Return the first line of a text, shortened to `width` characters."""
    line = text.partition("\n")[0]
    short = line[: width - 1].rstrip() if len(line) > width else line
    return short if short == text.rstrip("\n") else f"{short}…"
