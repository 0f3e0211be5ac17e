"""Commands that create, change, show and remove agents; creating objects with their files."""

from __future__ import annotations

import _signal  # signal itself takes a millisecond to import
import errno
import os

from client.author import author_line
from client.control import all_worked, for_each
from client.declaring import NAME, NAMES, PARENT, VALUES, Arguments, command, declare, operand
from client.exits import Failure, Misuse
from client.files import Opened, read_stdin, value_of
from client.output import STDOUT, write_all
from client.planes import path_of
from client.root import Root, agent, below
from client.types import Sequence

#: of a control file
Value = bytes | Sequence["Line"]


TASK_FILES = ("handoff.md", "input.jsonl")


class Line:
    """A line of a control file, and where it is from: FILE:NUMBER of a recipe, or an option."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where


def assignments(words: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return the files and values of FILE=VALUE arguments."""
    pairs = []
    for word in words:
        file, equals, value = word.partition("=")
        if not equals or not file:
            raise Misuse(f'"{word}" is not FILE=VALUE')
        pairs.append((file, value_of(value)))
    return pairs


def value_pairs(words: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return the files and values of FILE VALUE, FILE - or FILE=VALUE arguments."""
    if len(words) != 2 or "=" in words[0]:
        return assignments(words)
    file, text = words
    return [(file, (read_stdin() or b"\n") if text == "-" else value_of(text))]


def write_lines(root: Root, path: str, lines: Sequence[Line]) -> None:
    """Write a control file line by line; a refusal says where the refused line is from."""
    where = ""

    def write(path: str) -> None:
        nonlocal where
        with Opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
            for line in lines:
                where = line.where
                write_all(fd, os.fsencode(line.text + "\n"))
            where = lines[0].where.rpartition(":")[0] or lines[0].where  # all of it, at close

    try:
        root.call(path, write)
    except Failure as failure:
        raise Failure(f"{where}: {failure}", failure.status, failure.number) from None


class Removing:
    """Removes what was just created, if what is done with it then fails."""

    def __init__(self, root: Root, owner: str) -> None:
        self.root = root
        self.owner = owner

    def __enter__(self) -> None:
        """It is there."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for_each([self.owner], self.root.remove)


def begin(root: Root, owner: str) -> Removing:
    """Create an object for what is done with it then. Ctrl-C waits until it is known whether there
    is something to remove."""
    made = Removing(root, owner)
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))
    try:
        root.call(owner, os.mkdir)
        with made:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    return made


def create(root: Root, owner: str, files: Sequence[tuple[str, Value]]) -> None:
    """Create an agent, or a task, work item or wait of an agent, and write its files.

    If a file is refused, remove the object again.
    """
    check_paths(owner, files)
    with begin(root, owner):
        fill(root, owner, files)


def create_numbered(root: Root, stem: str, files: Sequence[tuple[str, Value]]) -> str:
    """Create an object under the first free one of the paths stem-1, stem-2, ... and return it."""
    number = 1
    while True:
        owner = f"{stem}-{number}"
        try:
            create(root, owner, files)
            return owner
        except Failure as failure:
            if failure.number != errno.EEXIST or not root.present(owner):
                raise
        number += 1


def create_own(root: Root, owner: str, files: Sequence[tuple[str, Value]]) -> int:
    """Create an agent that goes with this process, or when the returned descriptor is closed."""
    from client.sockets import open_window

    check_paths(owner, files)
    with begin(root, owner):
        window = open_window(root, owner)
        fill(root, owner, files)
    return window


def check_paths(owner: str, files: Sequence[tuple[str, Value]]) -> None:
    """Fail if a file is not one of its owner."""
    for file, _ in files:
        below(owner, file)


def fill(root: Root, owner: str, files: Sequence[tuple[str, Value]]) -> None:
    """Write the files of what was just created.

    Those with the task come first, because only the creator may write the task of a child.
    """
    for file, value in sorted(files, key=lambda pair: pair[0] not in TASK_FILES):
        if isinstance(value, bytes):
            root.write(below(owner, file), value)
        else:
            write_lines(root, below(owner, file), value)


def parent_line(parent: str | None) -> list[tuple[str, bytes]]:
    """Return the file that makes an agent a child of `parent`; nothing without a parent."""
    return [("parent", value_of(f"agent:{parent}"))] if parent else []


@command("new", NAME, PARENT, operand("files", "[FILE=VALUE...]", "control files to write"))
def do_new(root: Root, args: Arguments) -> None:
    """Create an agent.

    If a value is refused, removes the agent again.
    """
    files = parent_line(args.parent) + assignments(args.files)
    create(root, agent(args.name), [*files, *author_line(files)])


def do_set(root: Root, args: Arguments) -> None:
    """Write control files of an agent or of a work item."""
    for file, value in value_pairs(args.values):
        root.write(path_of(root, args, args.name, file), value)


@command("get", NAME, operand("file", "FILE", "such as status"))
def do_get(root: Root, args: Arguments) -> None:
    """Show a file of an agent."""
    STDOUT.copy(root.read(agent(args.name, args.file)))


@command("rm", NAMES)
def do_rm(root: Root, args: Arguments) -> int:
    """Remove new or dead agents."""
    return all_worked([path_of(root, args, name) for name in args.names], root.remove)


SET_NOTES = "FILE - writes standard input unchanged."
declare(do_set, "set", f"Write control files.\n\n{SET_NOTES}", NAME, VALUES)
