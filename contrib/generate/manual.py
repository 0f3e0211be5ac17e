"""The tables of the man pages, written from the rows.

``python -m contrib.generate.manual man`` renews the parts of the pages in that directory that lie
between marker comments::

    .\\" BEGIN agent files
    .\\" END agent files

What is outside of them is written by hand and kept.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from contrib.generate import renewing
from ctxfs import declared
from ctxfs.errnos import name_of
from ctxfs.files import agent, ask, home, root, session, shared, task, tool, waiting, work
from ctxfs.files.verbs import VERBS, Verb
from ctxfs.tools.registry import TOOLS
from ctxfs.tools.schemas import Schema
from ctxfs.tools.tool import Concerns
from ctxfs.tree.layouts import Layout
from ctxfs.tree.rows import Directory, Document, File, Gathered, Inlet, Kind, Row, Shown, Staged
from runtime.authority.guard import WITHIN_FAMILY, AnyGuard, said, times
from runtime.caller import INSIDERS
from runtime.sockets.operations import (
    CONNECTING,
    CONNECTING_DAEMON,
    CONNECTING_PRIVATE,
    DAEMON_OPERATIONS,
    OPERATIONS,
    Operation,
)
from runtime.texts.names import dump_json

_WIDTH: Final = 96
_SUFFIXES: Final = {
    Kind.FILE: "",
    Kind.DIRECTORY: "/",
    Kind.LINK: " Pq link",
    Kind.SOCKET: " Pq socket",
}


def described(layout: Layout[Any]) -> Iterator[Row[Any]]:
    """The rows that the manual lists: all but those that only give a tree its shape."""
    return (row for row in layout.rows if row.doc)


def escape(text: str) -> str:
    """Text that is nothing but text to mdoc(7), at the beginning of a line too."""
    text = text.replace("\\", "\\e")
    return "\\&" + text if text.startswith((".", "'")) else text


def _sentences(text: str) -> Iterator[str]:
    """One or more sentences, each begun on a line of its own."""
    for sentence in text.replace(". ", ".\n").split("\n"):
        ended = sentence if sentence.endswith((".", ":")) else sentence + "."
        for line in textwrap.wrap(ended, _WIDTH, break_on_hyphens=False):
            yield escape(line)


def _path(row: Row[Any]) -> str:
    if row.path is not None:
        return f"{row.path(None)}/{row.name}"  # of what the manual lists it is the same for all
    return f"{row.within}/{row.name}" if row.within else row.name


def _decided(how: str, guard: AnyGuard) -> Iterator[str]:
    """The decisions of a guard: who may, when, and what is refused whoever asks."""
    yield f"{how} by {said(guard.who)}, {times(guard.when)}."
    if guard.delegated:
        yield f"Of a private child by {said(guard.who & WITHIN_FAMILY)} only."
    reasons = [f"{reason.text} ({name_of(reason.error())})" for reason in guard.unless]
    if reasons:
        yield f"Refused if {', or if '.join(reasons)}."


def _guards(row: Row[Any]) -> Iterator[str]:
    """The lines on who may change a file, or what is in a directory."""
    make = row.make if isinstance(row, Directory) else None
    if make is not None:
        yield from _decided("mkdir(2)", make.guard)
    elif row.guard.who:
        yield from _decided("Written", row.guard)
    if isinstance(row, Directory) and row.remove is not None:
        yield from _decided("rmdir(2)", row.remove.guard)


def _facts(row: Row[Any]) -> Iterator[str]:
    """Default, readers and writers, as far as they say something."""
    if isinstance(row, File) and row.default:
        yield f"Default: {row.default}."
    elif row.guard.who and isinstance(row, Staged | Document):
        yield "Default: empty."
    if not row.public and row.read != INSIDERS:
        yield f"Read by {said(row.read)}."
        if isinstance(row, Inlet):
            yield "Empty to them and to who may write it."
    elif isinstance(row, Inlet):
        yield "Read as empty."
    if row.public:
        yield "Public."
    yield from _guards(row)


def _list(items: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    yield ".Bl -tag -width Ds"
    for head, lines in items:
        yield f".It {head}"
        yield from lines
    yield ".El"


def _told(doc: str, facts: Iterable[str]) -> list[str]:
    return [line for text in (doc, *facts) for line in _sentences(text)]


def _files(
    layout: Layout[Any], facts: Callable[[Row[Any]], Iterator[str]] = _facts
) -> Callable[[], Iterator[str]]:
    return lambda: _list(
        (f"Pa {_path(row)}{_SUFFIXES[row.kind]}", _told(row.doc, facts(row)))
        for row in described(layout)
    )


def _plain_files(layout: Layout[Any]) -> Callable[[], Iterator[str]]:
    """The files of objects that belong to no agent: they have no default, and modes tell the
    rest."""
    return _files(layout, _guards)


def _verbs(verbs: Mapping[str, Verb[Any]]) -> Callable[[], Iterator[str]]:
    return lambda: _list(
        (f"Ic {verb.usage}", _told(verb.doc, _decided("Said", verb.guard)))
        for verb in verbs.values()
    )


def _operations(
    operations: Mapping[str, Operation], *connecting: tuple[str, AnyGuard]
) -> Callable[[], Iterator[str]]:
    """The table of a socket: who may use it, and what they may ask for there."""

    def section() -> Iterator[str]:
        for what, guard in connecting:
            yield from _sentences(f"{what} is used by {said(guard.who)}.")
        yield from _list(
            (f"Cm {each.name}", _told(each.doc, _decided("Asked for", each.guard)))
            for each in operations.values()
        )

    return section


def _tools() -> Iterator[str]:
    """Each tool with the fields of its input; what is wanted comes first, then what may be."""

    def items() -> Iterator[tuple[str, list[str]]]:
        for row in TOOLS:
            lines = [*_sentences(row.description), *_sentences(f"Family {row.family}.")]
            fields = [
                (f"Li {name}", list(_field(field, wanted=name in row.schema["required"])))
                for name, field in row.schema["properties"].items()
                if name != "agent_id" or row.concerns is Concerns.OTHERS
            ]
            example = escape(dump_json(row.example)).replace("-", "\\-")
            lines += ["Example:", ".Bd -literal -compact", example, ".Ed"]
            yield f"Ic {row.name}", [*lines, *(_list(fields) if fields else ())]

    return _list(items())


def _field(schema: Schema, *, wanted: bool) -> Iterator[str]:
    yield from _sentences(schema["description"])
    if "enum" in schema:
        yield from _sentences(f"One of {', '.join(schema['enum'])}.")
    else:
        yield from _sentences(f"A value of type {_type(schema)}.")
    if not wanted:
        yield "Optional."


def _type(schema: Schema) -> str:
    types = schema["type"]
    return types if isinstance(types, str) else " or ".join(types)


_FORMS: Final = {
    "word": "one string",
    "number": "the number, or the name",
    "numbers": "a list of numbers, or of names",
    "lines": "a list with a string for each line",
    "pairs": "a map with a key for each line",
    "json": "a map",
    "json_lines": "a list with a map for each line",
    "text": "a string, of several lines after |",
}


def _keys() -> Iterator[str]:
    """The keys of a file of agents.d."""
    for name, shape in declared.SHAPES.items():
        row = declared.ROWS[name]
        yield f".It Va {name}"
        if name == "parent":
            yield from _sentences("The name of its parent; without, it is a root agent")
            continue
        yield from _sentences(_capital(row.doc))
        yield from _sentences(f"In YAML: {_FORMS[shape.form]}")
        if row.default:
            yield f"Default: {row.default}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _made_when_read() -> Iterator[str]:
    """The files that stat(2) says are empty."""
    layouts: dict[str, Layout[Any]] = {
        "of the root": root.LAYOUT,
        "of an agent": agent.LAYOUT,
        "of a session": session.LAYOUT,
        "of a space": shared.LAYOUT,
    }
    for number, (whose, layout) in enumerate(layouts.items(), 1):
        *names, last = (
            _path(row)
            for row in described(layout)
            if isinstance(row, Gathered) or (isinstance(row, Shown) and row.generated)
        )
        yield f".Pa {' , '.join(names)}"
        yield "and"
        yield f".Pa {last}"
        yield whose + (";" if number < len(layouts) else ".")


#: what is generated in each page
PAGES: Final[dict[str, dict[str, Callable[[], Iterator[str]]]]] = {
    "ctxfs.5": {
        "generated when read": _made_when_read,
        "root files": _plain_files(root.LAYOUT),
        "home files": _plain_files(home.LAYOUT),
        "space files": _plain_files(shared.LAYOUT),
        "agent files": _files(agent.LAYOUT),
        "verbs": _verbs(VERBS),
        "session files": _files(session.LAYOUT),
        "channel files": _plain_files(session.CHANNEL),
    },
    "ctxfs-tasks.5": {
        "task files": _files(task.LAYOUT),
        "task verbs": _verbs(task.VERBS),
        "work files": _files(work.LAYOUT),
        "waiting files": _files(waiting.LAYOUT),
        "ask files": _files(ask.LAYOUT),
    },
    "ctxfs-tools.5": {
        "tool files": _plain_files(tool.LAYOUT),
        "tools": _tools,
        "operations": _operations(
            OPERATIONS,
            ("The socket of a public agent", CONNECTING),
            ("That of a private agent", CONNECTING_PRIVATE),
        ),
        "daemon operations": _operations(DAEMON_OPERATIONS, ("The socket", CONNECTING_DAEMON)),
    },
    "ctxfs.yaml.5": {"keys": _keys},
}


def renew(page: str, sections: Mapping[str, Callable[[], Iterator[str]]]) -> str:
    """The page with every generated part as the rows have it now."""
    for name, write in sections.items():
        begin, end = f'.\\" BEGIN {name}\n', f'.\\" END {name}\n'
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            markers = f"{begin.strip()}, {end.strip()}"
            raise renewing.RenewingError(f"the page has no place for {name}: {markers}")
        page = head + begin + "".join(f"{line}\n" for line in write()) + end + tail
    return page


def _renewed(directory: Path) -> Iterator[tuple[Path, str]]:
    for name, sections in PAGES.items():
        path = directory / name
        yield path, renew(path.read_text(encoding="utf-8"), sections)


def main(argv: list[str] | None = None) -> int:
    what = "Write the tables of the man pages from the rows."
    where = "the directory of the pages, such as man"
    return renewing.run("manual", what, where, _renewed, argv, target="man")


if __name__ == "__main__":
    sys.exit(main())
