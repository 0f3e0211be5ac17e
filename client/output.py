"""Standard output and error, for people at a terminal and for programs behind a pipe.

What agents wrote goes unchanged to pipes and files. On a terminal, and in every line that this
program makes itself, control characters are escaped: `escape` is the only place that says how.
"""

from __future__ import annotations

import os
import time

from client.types import Any, Callable, Item, Iterable, Iterator, Sequence

#: a piece of a line, perhaps with a word of `STYLES`
Part = str | tuple[str, str]

COLOR_WHEN = ("auto", "always", "never")
#: in which color a word is shown, as parameters of SGR; the words say the same without it
STYLES = {
    # of agents
    "starting": "36", "ready": "32", "idle": "32", "busy": "1;32", "paused": "33",
    "stopping": "35", "dead": "2",
    # of ends
    "done": "32", "completed": "32", "processed": "32", "fired": "32", "error": "31",
    "failed": "31", "cancelled": "33", "aborted": "33", "interrupted": "31", "expired": "33",
    # of tasks, work items, waits and asks
    "queued": "36", "running": "1;32", "cancelling": "35", "open": "36", "active": "1;32",
    "blocked": "33", "armed": "36", "answered": "32", "withdrawn": "33",
    # of findings and answers
    "ok": "32", "warn": "33", "weak": "33", "FAIL": "1;31", "yes": "32", "no": "31",
    # of parts of lines
    "heading": "1", "name": "1", "faint": "2",
    # of names in front of lines, told apart by turns
    "name-0": "36", "name-1": "33", "name-2": "32", "name-3": "35", "name-4": "34", "name-5": "31",
}  # fmt: skip
#: the headings of columns with such words
STYLED = ("STATUS", "OUTCOME")
#: what stands for other characters on a terminal that has no Unicode
ASCII = str.maketrans({
    "├": "|", "└": "`", "─": "-", "│": "|", "…": "~", "●": "*", "○": "o",
    # of ctx timeline
    "█": "#", "▓": "%", "▒": "=", "░": ",", "╌": ".", "·": ":", "✓": "+", "✗": "!", "■": "x",
    "►": ">", "×": "x",
})  # fmt: skip
NARROWEST = 6  # columns of a table are not cut to less


def escape(text: str, keep: str = "") -> str:
    """Return `text` with all terminal control characters escaped, except those in `keep`."""
    if text.isprintable():
        return text
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


def some(items: Iterable[Item], at_once: int = 256) -> Iterator[list[Item]]:
    """Yield items some at a time, to print together; there may be more than the memory holds."""
    from itertools import islice

    left = iter(items)
    while batch := list(islice(left, at_once)):
        yield batch


def as_json(value: object) -> str:
    """Return a value as indented JSON."""
    import json

    return json.dumps(value, indent=2) + "\n"


def age(seconds: float) -> str:
    """Return a duration in its largest whole unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def size(count: int) -> str:
    """Return a number of bytes in its largest binary unit, with a decimal if it is small."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.1f}{unit}" if unit != "B" and number < 10 else f"{number:.0f}{unit}"


def tokens(count: int) -> str:
    """Return a number of tokens in at most five characters, in thousands, millions and more."""
    number, unit = float(count), ""
    for larger in ("k", "M", "G", "T"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.1f}{unit}" if unit and number < 9.95 else f"{number:.0f}{unit}"


def has_unicode() -> bool:
    """Return whether the locale names UTF-8, or nothing names a locale."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next(filter(None, names), "").lower()
    return not locale or "utf-8" in locale or "utf8" in locale


class Output:
    """A descriptor: contents are unchanged to pipes and files, escaped on a terminal."""

    def __init__(self, fd: int) -> None:
        import codecs

        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.color = "auto"  # one of COLOR_WHEN

    def is_colored(self) -> bool:
        """Return whether words are shown in colors."""
        if self.color != "auto":
            return self.color == "always"
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb")
        return not plain and os.isatty(self.fd)

    def width(self) -> int:
        """Return the columns of the terminal, 0 if this is none or it does not say."""
        try:
            return os.get_terminal_size(self.fd).columns
        except OSError:
            return 0

    def copy(self, data: bytes) -> None:
        """Write the contents of files and messages."""
        if os.isatty(self.fd):
            self.text(escape(self.decoder.decode(data), keep="\n\t"))
        else:
            write_all(self.fd, data)

    def text(self, text: str) -> None:
        """Write text of this program, in which everything else was escaped."""
        if not text.isascii() and os.isatty(self.fd) and not has_unicode():
            write_all(self.fd, text.translate(ASCII).encode("ascii", "backslashreplace"))
        else:
            write_all(self.fd, text.encode("utf-8", "backslashreplace"))

    def lines(self, lines: Iterable[str | Sequence[Part]]) -> None:
        """Write each item as one line, with control characters escaped.

        Parts of a line are shown in the colors of their words.
        """
        colored = self.is_colored()
        self.text("".join(shown_line(line, colored) + "\n" for line in lines))


def shown_line(line: str | Sequence[Part], colored: bool) -> str:
    """Return a line as it is shown."""
    if isinstance(line, str):
        return escape(line)
    pieces = ((part, "") if isinstance(part, str) else part for part in line)
    return "".join(
        paint(escape(text), style) if colored and text else escape(text) for text, style in pieces
    )


def paint(text: str, style: str) -> str:
    """Return a text in the color of a word; unchanged if the word has none."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style in STYLES else text


STDOUT = Output(1)
STDERR = Output(2)


def complain(message: str) -> None:
    """Print a line on standard error, if somebody can read it there."""
    try:
        STDERR.lines([f"ctx: {message}"])
    except OSError:
        return


# tables


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


def places(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def cut(text: str, width: int) -> str:
    """Return a text that takes at most so many columns of a terminal."""
    if places(text) <= width:
        return text
    taken, kept = 0, ""
    for char in text:
        taken += places(char)
        if taken >= width:
            break
        kept += char
    return kept + "…"


def fitting(widths: Sequence[int], width: int) -> list[int]:
    """Return the widths of the columns of a table that has to fit into a width.

    The last column, which has the longest texts, gives way first, then the widest ones.
    """
    fit = list(widths)
    excess = sum(fit) + 2 * (len(fit) - 1) - width
    taken = min(max(excess, 0), max(fit[-1] - 3 * NARROWEST, 0))
    fit[-1] -= taken
    excess -= taken
    while excess > 0 and max(fit) > NARROWEST:
        fit[fit.index(max(fit))] -= 1
        excess -= 1
    return fit


def screen_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int, colored: bool
) -> list[str]:
    """Return the lines of a table for a terminal: cut to a width if it is not 0, and in color."""
    columns = [shown_column(column)[0] for column in zip(header, *rows, strict=True)]
    widths = [max(map(places, column)) for column in columns]
    widths = fitting(widths, width) if width else widths
    lines = []
    for number, cells in enumerate(zip(*columns, strict=True)):
        shown, left = "", width or sum(widths) + 2 * len(widths)
        for heading, cell, room in zip(header, cells, widths, strict=True):
            if left <= 0:
                break
            text = cut(cell, min(room, left))
            blanks = " " * (room - places(text) + 2)
            left -= room + 2
            style = "heading" if number == 0 else cell if heading in STYLED else ""
            shown += (paint(text, style) if colored else text) + blanks
        lines.append(shown.rstrip())
    return lines


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; on a terminal, cut it to its width."""
    width, colored = STDOUT.width(), STDOUT.is_colored()
    plain = not (width or colored)  # which may be very long, and is made in a fifth of the time
    lines = table(header, rows) if plain else screen_table(header, rows, width, colored)
    STDOUT.text("\n".join(lines) + "\n")


def first_of(row: dict[str, Any], keys: str) -> str:
    """Return the first line of the first of some values that is not empty, for a table."""
    return gist(next((str(row[key]) for key in keys.split() if row[key]), ""))


def show_rows(
    rows: Sequence[dict[str, Any]],
    columns: dict[str, str],
    cell: Callable[[dict[str, Any], str], str] = first_of,
    raw: bool = False,
) -> None:
    """Print rows as a table, or `raw` ones as JSON.

    `columns` has what a cell is made of, by heading.
    """
    if raw:
        STDOUT.text(as_json(rows))
    else:
        show_table([*columns], ([cell(row, of) for of in columns.values()] for row in rows))


def headed(*keys: str) -> dict[str, str]:
    """Return columns whose headings are the keys of what is in them."""
    return {key.upper(): key for key in keys}


def show(value: object, lines: Iterable[str | Sequence[Part]], raw: bool) -> None:
    """Print a value as JSON if it is wanted `raw`, else lines about it."""
    if raw:
        STDOUT.text(as_json(value))
    else:
        STDOUT.lines(lines)


def gist(text: str, width: int = 72) -> str:
    """Return the first line of a text, shortened to `width` characters."""
    line = text.partition("\n")[0]
    short = line[: width - 1].rstrip() if len(line) > width else line
    return short if short == text.rstrip("\n") else f"{short}…"
